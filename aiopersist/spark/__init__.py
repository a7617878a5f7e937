"""Spark jobs on shards. So far their pure core: what Spark sees of a schema, and how a read is divided.

| module    | what it has                                                                 |
|-----------|-----------------------------------------------------------------------------|
| `columns` | updates and contents as the flat columns of a DataFrame; pure               |
| `ranges`  | key ranges of about equal size, from statistics; pure                       |
"""
