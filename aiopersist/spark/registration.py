"""`format("aiopersist")` in a session.

All queries of a session share one JVM object per registered source, with a map of environment variables for
Python workers. A starting streaming read puts variables of its worker there. A new variable makes the map
grow. If Spark serializes a task of another query at that moment, the task becomes unreadable, and that query
fails. So a registration adds these variables in advance. Their values do not matter: each runner sets its
own.
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
        for name in missing:
            del environment[name]


def _worker_environment(spark: "SparkSession") -> dict[str, str]:
    """The map that a registration copies; empty in a Connect session, whose client cannot change it."""
    try:
        return cast(dict[str, str], spark.sparkContext.environment)
    except Exception:
        return {}
