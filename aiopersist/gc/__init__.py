"""Garbage collection: deletes data that no reader can reach any more, in an order that a crash cannot harm.

It works on versions and on keys of blobs, never on what the blobs hold.

| module               | what it has                                                                  |
|----------------------|------------------------------------------------------------------------------|
| `rollup`             | the full state as a blob, so that versions before it may go                  |
| `collect`            | deletes blobs and versions below every reader's hold                         |
| `drop`, `tombstones` | the end of a shard, and what is left of it                                   |
| `sweep`              | deletes blobs that no state names: what crashed writers left                 |

Imports `shard`, `state` and `storage`.
"""
