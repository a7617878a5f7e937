"""Publishes shards as Iceberg tables, which other engines read: parts are the data files.

| module                              | what it has                                                        |
|-------------------------------------|--------------------------------------------------------------------|
| `publish`                           | the steps of a publication, and its end                            |
| `pins`                              | what keeps the blobs of a published version                        |
| `table_folder`                      | the files of a publication, and which of them are superseded       |
| `published`                         | the published tables, for catalogs                                 |
| `write`                             | the files of one snapshot                                          |
| `positions`, `surplus`              | which rows of the parts are deleted, and which are missing         |
| `types`, `bounds`                   | types, and statistics, in Iceberg's form                           |
| `metadata`, `manifests`, `files`    | the contents of the three kinds of files                           |
| `avro`                              | the format of manifests                                            |

Imports `maintenance`, `read`, `parts`, `shard`, `state`, `storage` and `data`.
"""
