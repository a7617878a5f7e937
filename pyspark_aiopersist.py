"""Makes `format("aiopersist")` known to every Spark session: Spark imports all modules named `pyspark_*`.

One such module that raises at import disables all data sources, so this one never raises.
"""

try:
    from aiopersist.spark.source import AiopersistSource as DefaultSource
except Exception:  # no pyspark here, or another version: then nobody asks for the source
    pass
else:
    __all__ = ["DefaultSource"]
