"""Shards as durable versions: the state of a shard is a log, and one loop commits commands to it.

A command of `state/` goes through `commit` into the consensus store. `register` is the newest state that this
process knows, and `follow` brings news of the commits of other processes. Nothing here reads or writes the
bytes of updates: `parts/` does.

| module                 | what it has                                                                |
|------------------------|----------------------------------------------------------------------------|
| `commit`, `attempt`    | the one compare-and-set loop; where a lost answer is settled               |
| `fairness`             | lets those commit who lose race after race                                 |
| `register`, `log`      | the state in memory, and how it is read: a rollup, then diffs              |
| `follow`, `polling`    | news of other processes' commits, for all shards of a client at once; in time |
| `hold`, `registration`, `lease` | readers and writers, kept alive by heartbeats                     |
| `catalog`              | names of shards                                                            |
| `shard`, `shards`, `stack` | one shard; all shards of a client; the stores and limits they use      |
| `clock`, `instant`     | the consensus store's clock; datetimes in the place of times               |
| `evolve`               | the change of a shard's schema                                             |
| `turns`                | reads for clients that may be many, and slow                               |

Imports `state`, `storage`, `measure`, and of `data` the schema.
"""
