"""Copies of shards, in the same location or another one: backups, and their restoration.

| module    | what it has                                                                  |
|-----------|------------------------------------------------------------------------------|
| `plan`    | the batches to copy, and in which appends; pure                              |
| `copy`    | the call, and its result                                                     |
| `copier`  | the steps of a copy                                                          |
| `reading` | a pinned state of a shard                                                    |
| `target`  | the copy, and the appends to it                                              |
| `compare` | a comparison of a shard with its copy                                        |

Imports `read`, `write`, `parts`, `shard`, `state`, `storage`, `data`.
"""

from aiopersist.backup.copy import Copied

__all__ = ["Copied"]
