"""Goal: under Spark Connect the engine and `format("aiopersist")`, registered by `connect`, do the same."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.spark.conftest import need_spark

PROGRAM = """
import sys
from pyspark.sql import SparkSession
from aiopersist.spark import connect

place = sys.argv[1]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert ".connect." in type(spark).__module__
rows = [(n, f"name {n % 7}", n / 2) for n in range(300)]
df = spark.createDataFrame(rows, "id long, name string, x double").repartition(3)
with connect(spark, place) as sc:
    assert sc.write_df(df, "orders", keys=["id"]) == 0
    assert sorted(map(tuple, sc.snapshot_df("orders").collect())) == rows
    more = spark.createDataFrame([(1, "new", 0.0), (300, "more", 1.0)], df.schema)
    assert sc.write_df(more, "orders", mode="upsert") == 1
    changes = {(row.id, row._diff) for row in sc.changes_df("orders", 1).collect()}
    assert changes == {(1, -1), (1, 1), (300, 1)}
    assert sc.compact("orders")
    read = spark.read.format("aiopersist").option("location", place).load("orders")
    assert read.count() == 301
    more.write.format("aiopersist").option("location", place).mode("overwrite").save("orders")
    assert sc.snapshot_df("orders").count() == 2

    def each(batch, number):  # in another process
        from aiopersist.spark import connect

        with connect(batch.sparkSession, place) as mine:
            mine.write_df(batch, "each", keys=["id"], txn=("each", number))

    stream = spark.readStream.format("aiopersist").option("location", place).load("orders")
    sink = stream.writeStream.format("aiopersist").options(location=place, keys="id", path="sink")
    for name, writer in (("each", stream.writeStream.foreachBatch(each)), ("sink", sink)):
        writer = writer.option("checkpointLocation", f"{place}-{name}").trigger(availableNow=True)
        assert writer.start().awaitTermination(200)
        assert sc.snapshot_df(name).count() == 2
spark.stop()
print("done")
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_everything_under_connect(place: str) -> None:
    need_spark()
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("pyspark[connect] is not here")
    env = os.environ | {"PYSPARK_PYTHON": sys.executable}
    ran = subprocess.run([sys.executable, "-c", PROGRAM, place], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1].endswith("done")
