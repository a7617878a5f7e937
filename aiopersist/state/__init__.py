"""The state of a shard as a frozen value, and all its transitions as pure commands.

A command is `(state, context) -> Commit | Keep`. `shard/commit.py` calls it and writes its changes as the
next version; nothing else writes versions. No I/O, no clock, no randomness.

| module                           | what it has                                                           |
|----------------------------------|-----------------------------------------------------------------------|
| `model`, `record`, `ids`, `keys` | the values, and their JSON                                            |
| `command`                        | the contract of commands                                              |
| `writing`, `remembering`, `consuming`, `reading`, `subscriptions` | commands of handles                  |
| `compaction`, `retention`, `lifecycle`, `copying` | commands of maintenance and of the whole shard       |
| `tagging`                        | commands of tags                                                      |
| `spine`                          | which neighbouring batches become one                                 |
| `diff`, `seal`                   | diffs; the checksums of versions                                      |
| `rollup_file`                    | rollups                                                               |
| `names`, `trail`, `drops`        | the blobs that a state names, that versions name, that versions drop  |
| `position`                       | the position of a subscription, and its record                        |
| `once`                           | the ids of `once=` that a shard remembers                             |
| `invariants`                     | predicates that hold for every state, checked before each write       |
| `streams`, `streams_invariants`  | the streams of an `Indexed`                                           |
"""
