"""`format("aiopersist")` in a session.

All queries of a session share one object of the JVM per registered source, and in it the map of environment
variables for Python workers. A streaming read that starts puts the variables of its worker there. A variable
that is new to the map makes it grow. If Spark serializes a task of another query at that moment, the task
cannot be read again (an error in the JVM), and its query fails. So a registration brings these
variables along. Their values do not matter: each runner sets its own before it starts a worker.
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
"""What Spark's runner of a streaming source puts into the environment of its worker."""


def register(spark: "SparkSession") -> None:
    """Make `format("aiopersist")` known to `spark`. Where Spark finds `pyspark_aiopersist` itself, only
    sessions that run several streams need it: see the header."""
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
    """What a registration takes over. A Connect session has none that its client could change."""
    try:
        return cast(dict[str, str], spark.sparkContext.environment)
    except Exception:
        return {}
