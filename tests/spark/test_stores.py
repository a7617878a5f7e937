"""Goal: on S3 and Postgres, and on a bucket alone, which the workers reach by URLs without secrets, all works
as on files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import StoreUrls
from tests.spark.conftest import CONFIG, need_spark
from tests.spark.faults import audit
from tests.support.location import both_in_a_bucket

ROWS = [(n, f"name {n % 11}") for n in range(3000)]
PROGRAM = f"""
import sys
from aiopersist.spark import connect
from pyspark.sql import SparkSession
from tests.spark.test_stores import ROWS

builder = SparkSession.builder.master("local[2]")
for name, value in {CONFIG!r}.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
urls = dict(zip(("blob", "consensus"), sys.argv[1:3]))
with connect(spark, **urls) as sc:
    first = spark.createDataFrame(ROWS[:2000], "id long, name string").repartition(2)
    assert sc.write_df(first, "from", keys=["id"]) == 0
    second = spark.createDataFrame(ROWS[2000:], "id long, name string")
    second.write.format("aiopersist").mode("append").options(**urls).save("from")
    source = spark.readStream.format("aiopersist").options(**urls, max_rows_per_trigger=1500).load("from")
    sink = source.writeStream.format("aiopersist").options(**urls, keys="id")
    sink = sink.option("checkpointLocation", sys.argv[3]).trigger(availableNow=True)
    sink.start("to").awaitTermination()
    assert sc.compact("from")
    for shard in ("from", "to"):
        assert sorted(map(tuple, sc.snapshot_df(shard).collect())) == ROWS
        read = spark.read.format("aiopersist").options(**urls).load(shard)
        assert sorted(map(tuple, read.collect())) == ROWS
spark.stop()
"""


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("alone", [False, True], ids=["s3 and postgres", "a bucket alone"])
def test_on_servers(best_s3_url: str, postgres_url: str, tmp_path: Path, alone: bool) -> None:
    """Goal: a write by the engine, one by the format, a stream from shard to shard, a compaction; then the
    same rows by engine and format. Workers know of credentials and settings by the environment."""
    need_spark()
    env = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "AIOPERSIST_INLINE_WRITES_SINGLE_MAX_BYTES": "0",
    }
    urls = StoreUrls(*(both_in_a_bucket(best_s3_url) if alone else (best_s3_url, postgres_url)))
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *urls, str(tmp_path / "c")],
        env=env,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    for shard in ("from", "to"):
        audit(urls._asdict(), shard, ROWS)
