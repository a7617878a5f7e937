"""Spark jobs on shards: `connect(spark, location)` for the driver, `format("aiopersist")` for DataFrames.

A job is one coroutine of the bridge's loop. Blocking calls of Spark run on the thread that waits for it.

| module         | contents                                                            |
|----------------|---------------------------------------------------------------------|
| `location`     | a location as a value that Spark may show                           |
| `columns`      | from updates and contents to the flat columns of a DataFrame; pure  |
| `rows`         | from a DataFrame to updates, and to the schema of a new shard; pure |
| `maps`         | maps as sorted lists; pure                                          |
| `bridge`       | the portal of a process, which owns its clients                     |
| `tasks`        | the code that runs in workers                                       |
| `sessions`     | uses of a Spark session                                             |
| `plan`         | the checks of a write, a new shard, the one writer                  |
| `replace`      | retractions of the rows that a write replaces                       |
| `write`        | from staged batches to one append                                   |
| `registration` | `format("aiopersist")` in a session                                 |
| `client`       | the engine: DataFrames and compactions, from the driver             |
| `options`      | the options of `format("aiopersist")`                               |
| `hooks`        | shared parts of its batch and streaming hooks                       |
| `source`       | its batch reads and writes                                          |
| `streams`      | its streaming reads and writes                                      |
"""

from aiopersist.spark.client import SparkClient, connect
from aiopersist.spark.registration import register

__all__ = ["SparkClient", "connect", "register"]
