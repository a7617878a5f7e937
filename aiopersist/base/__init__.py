"""The ground that every package stands on. Nothing here knows shards, stores or columns.

| module                   | what it has                                                                 |
|--------------------------|-----------------------------------------------------------------------------|
| `errors`                 | every error, and what a caller should do about it                           |
| `frontier`               | times, frontiers, descriptions                                              |
| `settings`               | every limit, with its unit and its reason                                   |
| `runtime`                | the only access to clocks, randomness, ids and sleep                        |
| `resource`, `supervisor` | the life of every handle, and of every task                                 |
| `failures`, `ending`     | how background work backs off; how tasks end                                |
| `threads`, `progress`    | worker threads; how far long work has come                                  |
| `user_functions`         | calls of functions that a user gives                                        |
"""
