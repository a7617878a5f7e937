"""The ground of all packages. Of shards it has only ids, of stores and columns nothing.

| module                   | what it has                                                                 |
|--------------------------|-----------------------------------------------------------------------------|
| `errors`                 | all errors, and what a caller should do about each                          |
| `frontier`               | times, frontiers, descriptions                                              |
| `settings`               | all limits, with units and reasons                                          |
| `runtime`                | the only access to clocks, randomness, ids and sleep                        |
| `resource`, `supervisor` | the life of handles, and of tasks                                           |
| `failures`, `ending`     | pauses of background work after failures; the end of tasks                  |
| `threads`, `progress`    | worker threads; progress of long work                                       |
| `portal`                 | an event loop on a thread, for callers that block                           |
| `user_functions`         | calls of functions of users                                                 |
"""
