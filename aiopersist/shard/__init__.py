"""Shards as durable versions: the state of a shard is a log, and one loop makes commands part of it.

A command of `state/` goes through `commit` into the consensus store; `register` is the newest state that this
process knows, and `follow` brings news of what others committed. Nothing here reads or writes the bytes of
updates: those are `parts/`.

| module                 | what it has                                                                |
|------------------------|----------------------------------------------------------------------------|
| `commit`, `attempt`    | the one compare-and-set loop; where a lost answer is settled               |
| `register`, `log`      | the state in memory, and how it is read: a rollup, then diffs              |
| `follow`               | news of other processes' commits, for all shards of a client at once       |
| `hold`, `registration`, `lease` | readers and writers that are alive, by heartbeats                 |
| `catalog`              | names of shards                                                            |
| `shard`, `shards`, `stack` | one shard, all of a client, and what they work with                    |
| `evolve`               | the change of a shard's schema                                             |

Imports `state`, `storage`, and of `data` the schema.
"""
