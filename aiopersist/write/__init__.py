"""Writing to a shard: appends, staged batches, and their outcomes.

| module                          | what it has                                                   |
|---------------------------------|---------------------------------------------------------------|
| `handle`, `open`, `session`     | the write handle, and what its calls share                    |
| `pending`, `batches`, `checks`  | what is appended, until its outcome is told                   |
| `append`, `append_many`, `combine` | appends to one shard, to several, of many callers          |
| `batch`, `staged`, `builder`, `assemble` | staged batches, and their state of use               |
| `remote`, `transmit`            | batches that other processes build                            |

Imports `parts`, `shard`, `state`, `data`, `measure`.
"""
