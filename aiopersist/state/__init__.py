"""The state of a shard as a frozen value, and all its transitions as pure commands.

A command is `(state, context) -> Commit | Keep`. `shard/commit.py` calls it and writes its changes as the
next version; nothing else writes versions. No I/O, no clock, no randomness.

| module                          | what it has                                                     |
|---------------------------------|-----------------------------------------------------------------|
| `model`, `record`, `ids`, `keys`| the values, and their JSON                                      |
| `command`                       | what a command is                                               |
| `writing`, `remembering`, `spending`, `reading`, `subscriptions` | the commands                   |
| `compaction`, `retention`, `lifecycle` | more of them                                             |
| `spine`                         | which neighbouring batches become one                           |
| `diff`, `seal`                  | diffs; the checksums of versions                                |
| `rollup_file`                   | rollups                                                         |
| `names`, `trail`                | the blobs that a state names, and that successive versions name |
| `position`                      | how far a subscription is, and its record                       |
| `once`                          | the ids of `once=` that a shard remembers                       |
| `invariants`                    | predicates true of every state, checked before each write       |
| `streams`, `streams_invariants` | what an `Indexed` keeps in a shard's state                      |
"""
