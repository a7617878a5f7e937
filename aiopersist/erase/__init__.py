"""Erases rows of tables from the stores: from the contents, and from all history.

| module      | what it has                                                                    |
|-------------|--------------------------------------------------------------------------------|
| `rows`      | the rows to erase: by key, or by a condition                                   |
| `search`    | a search for these rows in all data that the stores have of a shard            |
| `erasure`   | the steps: delete, give up history, compact, collect, search again             |

Imports `iceberg`, `table`, `maintenance`, `gc`, `read`, `shard`, `state`, `storage` and `data`.
"""
