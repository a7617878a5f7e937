"""Compaction: neighbouring batches become one, sorted and consolidated, with times advanced to since.

| module              | what it has                                                                 |
|---------------------|-----------------------------------------------------------------------------|
| `local`             | a compaction by one process, in bounded memory                              |
| `shared_compaction` | a compaction by many processes; one of them claims and applies              |

Imports `parts`, `shard`, `state`.
"""
