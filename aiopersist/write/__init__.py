"""Writing to a shard: appends and staged batches, and what came of them.

| module                          | what it has                                                   |
|---------------------------------|---------------------------------------------------------------|
| `handle`, `open`, `session`     | the write handle, and what its calls share                    |
| `append`, `append_many`, `combine`, `checks` | appends to one shard, to several, of many callers |
| `batch`, `builder`, `assemble`  | staged batches                                                |
| `doubt`                         | what came of an append whose caller was not told              |
| `remote`, `transmit`            | batches that are built in other processes                     |

Imports `parts`, `shard`, `data`.
"""
