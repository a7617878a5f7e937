"""Garbage collection: deletes data that no reader can reach, in an order that is safe against crashes.

It reads versions and rollups, and never the contents of parts.

| module               | what it has                                                                  |
|----------------------|------------------------------------------------------------------------------|
| `rollup`             | the full state as a blob, so that earlier versions can be deleted            |
| `collect`            | deletes blobs and versions below every reader's hold                         |
| `drop`, `tombstones` | the end of a shard, and the removal of its tombstone                         |
| `sweep`              | deletes blobs that no state names, for example those of crashed writers      |

Imports `shard`, `state` and `storage`.
"""
