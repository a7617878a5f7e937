"""Reading a shard: snapshots, listens, and the holds that keep history for them.

| module                        | what it has                                                     |
|-------------------------------|-----------------------------------------------------------------|
| `handle`, `open`, `session`   | the read handle, and the state that its calls share             |
| `snapshot`, `stream`, `query`, `tagged` | the contents at one time                              |
| `scan`, `predicate`           | the same for engines whose threads block: polars, DuckDB        |
| `listen`, `cursor`, `puller`, `interval`, `bound` | all later updates, as they come            |
| `feed`, `cut`, `places`       | updates in steps: perhaps the contents first, then the updates  |
| `since`                       | a hold that never expires                                       |
| `leased`, `shared_read`, `range` | reads that several processes share                           |

Imports `parts`, `shard`, `state`, `data`.
"""
