"""Erasing rows of tables from the stores: not only from the contents, also from what the history has of them.

| module      | what it has                                                                    |
|-------------|--------------------------------------------------------------------------------|
| `wanted`    | which rows are to be gone: by key, or by a condition                           |
| `search`    | all that the stores have of a shard, read anew, and what of it has such rows   |
| `erasure`   | the steps: delete, give up history, compact, collect, and look whether it is gone |

Imports `table`, `maintenance`, `gc`, `read`, `shard`, `state`, `storage` and `data`.
"""
