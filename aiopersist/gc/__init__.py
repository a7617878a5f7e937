"""Garbage collection: what nobody can reach any more is deleted, in an order that a crash cannot harm.

It works on versions and on names of blobs, never on what the blobs hold.

| module     | what it has                                                                            |
|------------|----------------------------------------------------------------------------------------|
| `rollup`   | the full state as a blob, so that versions before it may go                            |
| `collect`  | blobs and versions below every reader's hold                                           |
| `drop`, `graves` | the end of a shard, and of what is left of it                                    |
| `sweep`    | blobs that no state names: what crashed writers left                                   |

Imports `shard`, `state` and `storage`.
"""
