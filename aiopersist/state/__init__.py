"""The state of a shard as a frozen value, and every transition of it as a pure command.

A command is `(state, context) -> Commit | Keep`. `shard/commit.py` calls it, writes the diff between the two
states as the next version, and nobody else writes. No I/O, no clock, no randomness.

| module                          | what it has                                                     |
|---------------------------------|-----------------------------------------------------------------|
| `model`, `record`, `ids`, `keys`| the values, and their JSON                                      |
| `command`                       | what a command is                                               |
| `writing`, `reading`, `compaction`, `retention`, `lifecycle` | the commands                       |
| `spine`                         | which neighbouring batches become one                           |
| `diff`, `names`                 | diffs and rollups; what versions name, without building them    |
| `invariants`                    | what holds of every state, checked before each write            |
| `streams`, `streams_invariants` | what an `Indexed` keeps in a shard's state                      |

Imports `frontier` and `errors`.
"""
