"""Reading a shard: snapshots, listens, and the holds that keep history for them.

| module                        | what it has                                                     |
|-------------------------------|-----------------------------------------------------------------|
| `handle`, `open`              | the read handle, and its opening                                |
| `snapshot`, `stream`, `query` | the contents at one time                                        |
| `listen`, `cursor`, `puller`, `interval` | what happens next                                    |
| `since`                       | a hold that never expires                                       |
| `leased`, `shared_read`, `range`| reads that several processes share                              |

Imports `parts`, `shard`, `data`.
"""
