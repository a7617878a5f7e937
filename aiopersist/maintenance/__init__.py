"""Maintenance: compaction and collection in the background, on demand, and in rounds over a location.

| module                       | what it has                                                        |
|------------------------------|--------------------------------------------------------------------|
| `due`                        | what a state asks for; pure                                        |
| `shard`, `registration`      | one shard's maintenance as single steps, under one registration    |
| `background`, `backoff`      | when they run in a client, and how they wait after a failure       |
| `rounds`                     | all shards of a location, one round after the other                |
| `on_demand`                  | what a user asks for                                               |
| `inspect`, `fsck`            | a shard from within; whether all its data is intact                |

Imports `compact`, `gc`, `parts`, `shard`.
"""
