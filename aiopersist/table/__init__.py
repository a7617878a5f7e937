"""Tables: at most one value per key, on a shard with a wall clock; and transactions over them.

| module                | what it has                                                              |
|-----------------------|--------------------------------------------------------------------------|
| `schema`              | keys and values as texts, as Python values and as columns                |
| `view`                | the contents by key, which follow the shard                              |
| `held`, `bounds`, `lookup` | what a view has in memory, how much that may be; keys looked up     |
| `operation`, `plan`   | what operations read and write, and what a commit makes of them; pure    |
| `participant`, `group` | the shards of a commit; the queue, and the one commit of all that wait   |
| `put_many`, `bulk`, `replacing`, `overwrite` | puts of any number of entries, also in place of all |
| `consistent_read`, `speculation`, `ranges` | reads at one moment; what is undecided; ranges of keys |
| `transaction`, `frozen`, `transact` | the body of a transaction, also beside writers that never pause; |
|                       | its attempts                                                             |
| `filters`, `feed`, `subscribe` | conditions on keys; the changes of a table in order; consumers of these |
| `open`, `table`, `handle` | the tables of a client; the public calls; what the rest asks of a handle |

A call goes from `table` to `group`, which applies it to views by `plan` and appends by `write`.

Imports `data`, `parts`, `read`, `shard`, `state`, `storage`, `subscription`, `write`.
"""
