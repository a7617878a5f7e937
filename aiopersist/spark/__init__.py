"""Spark jobs on shards: `connect(spark, location)` for the driver, `format("aiopersist")` for DataFrames.

A job is one coroutine of the bridge's loop; Spark's blocking work runs on the thread that waits for it.

| module         | what it has                                                    |
|----------------|----------------------------------------------------------------|
| `location`     | a location as a value that Spark may show                      |
| `columns`      | from updates and contents to the flat columns of a DataFrame; pure |
| `rows`         | from a DataFrame to updates, and to the schema of a new shard; pure |
| `maps`         | maps as sorted lists; pure                                     |
| `bridge`       | one event loop per process, which owns the clients             |
| `tasks`        | what runs in workers                                           |
| `sessions`     | the uses of a Spark session                                    |
| `plan`         | the checks of a write, a new shard, the one writer             |
| `replace`      | the retractions of what a write replaces                       |
| `write`        | from staged batches to one append                              |
| `registration` | `format("aiopersist")` in a session                            |
| `client`       | the engine: DataFrames and compactions, from the driver        |
| `options`      | the options of `format("aiopersist")`                          |
| `hooks`        | what its batch and streaming hooks share                       |
| `source`       | its batch reads and writes                                     |
| `streams`      | its streaming reads and writes                                 |
"""

from aiopersist.spark.client import SparkClient, connect
from aiopersist.spark.registration import register

__all__ = ["SparkClient", "connect", "register"]
