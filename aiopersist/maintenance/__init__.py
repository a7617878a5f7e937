"""Maintenance: compaction and collection in the background, on demand, and in rounds over a location.

| module                       | what it has                                                        |
|------------------------------|--------------------------------------------------------------------|
| `due`                        | the maintenance that a state needs; pure                           |
| `shard`, `registration`      | one shard's maintenance as single steps, under one registration    |
| `background`, `backoff`      | when the steps run in a client, and how they back off              |
| `upkeep`                     | when a client imports this package                                 |
| `rounds`                     | all shards of a location, in rounds                                |
| `on_demand`                  | retention policies, and collections on demand                      |
| `inspect`, `overview`        | a view of a shard's state; a line for each shard of a location     |
| `holds`                      | the holders of history and versions, and the end of a hold         |
| `tags`                       | contents that stay, whatever becomes of the history                |
| `fsck`                       | a check that all data of a shard or an `Indexed` is intact         |

Imports `compact`, `gc`, `parts`, `read`, `shard`, `state`, `storage`, `subscription`, `data`.
"""
