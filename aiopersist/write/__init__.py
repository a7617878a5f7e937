"""Writing to a shard: appends, staged batches, and their outcomes.

| module                          | what it has                                                   |
|---------------------------------|---------------------------------------------------------------|
| `handle`, `open`, `session`     | the write handle, and what its calls share                    |
| `append`, `append_many`, `combine`, `checks` | appends to one shard, to several, of many callers |
| `small`                         | the short way of a small append                               |
| `batch`, `staged`, `builder`, `assemble` | staged batches, and their state of use               |
| `outcome`                       | the outcome of an append whose caller was not told            |
| `remote`, `transmit`            | batches that other processes build                            |

Imports `parts`, `shard`, `state`, `data`, `measure`.
"""
