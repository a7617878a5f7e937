"""Maintenance: compaction and collection in the background, on demand, and in rounds over a location.

| module                       | what it has                                                        |
|------------------------------|--------------------------------------------------------------------|
| `due`                        | the maintenance that a state asks for; pure                        |
| `shard`, `registration`      | one shard's maintenance as single steps, under one registration    |
| `background`, `backoff`      | when the steps run in a client, and how they back off              |
| `rounds`                     | all shards of a location, one round after the other                |
| `on_demand`                  | retention policies, and collections that a user asks for           |
| `inspect`, `overview`        | a view of a shard's state; a line for each shard of a location     |
| `fsck`                       | a check that all data of a shard or an `Indexed` is intact         |

Imports `compact`, `gc`, `parts`, `shard`, `state`, `storage`, `subscription`, `data`.
"""
