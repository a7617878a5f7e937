"""Compaction: neighbouring batches become one, sorted and consolidated, with times advanced to since.

| module   | what it has                                                              |
|----------|--------------------------------------------------------------------------|
| `local`  | one process does it, in bounded memory                                   |
| `shared_compaction` | one process claims and applies it, any number of others do the work      |

Imports `parts` and `shard`.
"""
