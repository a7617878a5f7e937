"""Tables: at most one value per key, on a shard with a wall clock; and transactions over them.

| module            | contents                                                                     |
|-------------------|------------------------------------------------------------------------------|
| `schema`          | keys and values as texts, as Python values and as columns                    |
| `ranges`          | conditions on entries; ranges of keys                                        |
| `view/`           | the contents in memory, which follow the shard                               |
| `commit/`         | operations, and the commit that waiting operations share                     |
| `pace`            | a bound on the conversions in one turn of the event loop                     |
| `open`            | the open tables of a client                                                  |
| `bulk/`           | puts of any number of entries                                                |
| `feed`            | the changes in order, and subscriptions to them                              |
| `reads`, `table`  | the public calls: reads; changes                                             |
| `handle`          | the calls of the rest of the library on a handle                             |
| `transaction/`    | transactions, and their attempts                                             |

Each imports only modules above it. A put goes from `table` to `commit/group.py`, which plans it on views and
appends by `write`.

Imports `data`, `parts`, `read`, `shard`, `state`, `storage`, `subscription`, `write`.
"""
