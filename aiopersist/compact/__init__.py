"""Compaction: neighbouring batches become one, sorted and consolidated, with times advanced to since.

| module              | what it has                                                                 |
|---------------------|-----------------------------------------------------------------------------|
| `local`             | one process compacts, in bounded memory                                     |
| `shared_compaction` | one process claims and applies, any number of processes do the work         |

Imports `parts`, `shard`, `state`.
"""
