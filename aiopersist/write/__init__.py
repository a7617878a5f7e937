"""Writing to a shard: appends, staged batches, and their outcomes.

| module                          | what it has                                                   |
|---------------------------------|---------------------------------------------------------------|
| `handle`, `open`, `session`     | the write handle, and the state that its calls share          |
| `pending`, `batches`, `checks`  | one append, from the call to its outcome                      |
| `append`, `append_many`, `combine` | appends to one shard, to several, by many callers          |
| `batch`, `staged`, `builder`, `assemble` | staged batches, and who may use them                 |
| `remote`, `transmit`            | batches that other processes build                            |

Imports `parts`, `shard`, `state`, `data`, `measure`.
"""
