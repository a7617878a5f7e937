"""`format("aiopersist")` in a session.

A registration must contain some environment variables already, with any values. The queries of a session
share a map of the variables for the Python workers of a source. A streaming read that starts sets its own
there. If a new variable makes the map grow while Spark serializes a task of another query, the task becomes
unreadable, and that query fails.
"""

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SET_BY_RUNNERS = (
    "SPARK_LOCAL_DIRS",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_PYTHON_RUNTIME",
)
"""The variables that Spark's runner of a streaming source sets for its worker."""


def register(spark: "SparkSession") -> None:
    """Register `format("aiopersist")` with `spark`. If Spark finds `pyspark_aiopersist` itself, only sessions
    with several streams need this: see the header."""
    from aiopersist.spark.source import AiopersistSource

    environment = _worker_environment(spark)
    missing = [name for name in SET_BY_RUNNERS if name not in environment]
    environment.update(dict.fromkeys(missing, ""))
    try:
        spark.dataSource.register(AiopersistSource)
    finally:
        for name in missing:  # the registration has a copy
            del environment[name]


def _worker_environment(spark: "SparkSession") -> dict[str, str]:
    """The map that a registration copies; empty in a session of Spark Connect, which cannot change it."""
    try:
        return cast(dict[str, str], spark.sparkContext.environment)
    except Exception:
        return {}
