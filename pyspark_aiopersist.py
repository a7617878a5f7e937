"""Found by Spark, which looks for modules named `pyspark_*`: makes `format("aiopersist")` known everywhere.

One such module that cannot be imported would disable all data sources, so this one never raises.
"""

try:
    from aiopersist.spark.source import AiopersistSource as DefaultSource
except Exception:  # no pyspark here, or another one: nobody asks for the source then
    pass
else:
    __all__ = ["DefaultSource"]
