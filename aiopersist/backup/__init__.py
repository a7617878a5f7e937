"""Copies of shards, in the same location or another one: backups, and their way back.

| module    | what it has                                                                  |
|-----------|------------------------------------------------------------------------------|
| `plan`    | which batches are copied, in which appends; pure                             |
| `copy`    | the call, and what it returns                                                |
| `copier`  | the steps of a copy                                                          |
| `reading` | a state of a shard that stays while it is read                               |
| `target`  | the shard that becomes the copy, and the appends to it                       |
| `compare` | the contents of a shard and of its copy, compared                            |

Imports `read`, `write`, `parts`, `shard`, `state`, `storage`, `data`.
"""

from aiopersist.backup.copy import Copied

__all__ = ["Copied"]
