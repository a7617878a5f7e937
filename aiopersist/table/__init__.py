"""Tables: at most one value per key, on a shard with a wall clock; and transactions over them.

| module           | what it has                                                                   |
|------------------|-------------------------------------------------------------------------------|
| `schema`         | keys and values as texts, as Python values and as columns                     |
| `ranges`         | conditions on entries; ranges of keys                                         |
| `view/`          | the contents in memory, which follow the shard                                |
| `commit/`        | operations, and the one commit of all that wait                               |
| `pace`, `open`   | how much one turn of the loop converts; the open tables of a client           |
| `bulk/`          | puts of any number of entries                                                 |
| `feed`           | the changes in order, and subscriptions to them                               |
| `table`, `handle` | the public calls; what the rest of the library asks of a handle              |
| `transaction/`   | transactions, and their attempts                                              |

Each imports only modules that stand above it. A put goes from `table` to `commit/group.py`, which plans it on
views and appends by `write`.

Imports `data`, `parts`, `read`, `shard`, `state`, `storage`, `subscription`, `write`.
"""
