"""Shards as durable versions: the state of a shard is a log, and one loop commits commands to it.

A command of `state/` goes through `commit` into the consensus store. `register` has the newest state that
this process knows, and `follow` brings news of the commits of other processes. Nothing here reads or writes
the bytes of updates; `parts/` does.

| module                 | what it has                                                                |
|------------------------|----------------------------------------------------------------------------|
| `commit`, `attempt`    | the only compare-and-set loop; one attempt of it, and its outcome          |
| `fairness`             | turns for clients that lose race after race                                |
| `register`, `log`      | the state in memory; reading it from a rollup and diffs                    |
| `follow`, `polling`    | news of other processes' commits, for all shards of a client at once       |
| `hold`, `registration`, `lease` | readers and writers, kept alive by heartbeats                     |
| `catalog`, `resting`   | names of shards; keys that are no longer in use                            |
| `shard`, `shards`, `stack` | one shard; all shards of a client; the stores and limits they use      |
| `clock`, `instant`     | the consensus store's clock; datetimes in the place of times               |
| `evolve`               | changes of a shard's schema                                                |
| `queue`                | the queue of a group commit                                                |
| `turns`, `twin`        | reads for many slow clients; reads for threads that block                  |

Imports `state`, `storage`, `measure`, `data`.
"""
