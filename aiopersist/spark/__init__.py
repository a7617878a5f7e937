"""Spark jobs on shards: `connect(spark, location)` for the driver, `format("aiopersist")` for DataFrames.

| module     | what it has                                                                    |
|------------|--------------------------------------------------------------------------------|
| `place`    | where shards lie, as a value that may be seen                                  |
| `columns`  | updates and contents as the flat columns of a DataFrame; pure                  |
| `rows`     | the way back, and the schema of a new shard; pure                              |
| `maps`     | maps as sorted lists; pure                                                     |
| `bridge`   | one event loop per process, which owns the clients                             |
| `tasks`    | what runs in workers                                                           |
| `sessions` | what is asked of a Spark session                                               |
| `write`    | from staged batches to one append                                              |
| `client`   | the engine: DataFrames and compactions, from the driver                        |
| `options`  | the options of `format("aiopersist")`                                          |
| `source`   | batch reads and writes for it                                                  |
"""

from aiopersist.spark.client import SparkClient, connect, register

__all__ = ["SparkClient", "connect", "register"]
