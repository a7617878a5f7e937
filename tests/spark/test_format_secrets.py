"""Secrets, and discovery; see `test_format.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.servers import PostgresServer

SCRIPT = """
import json, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]")
for name, value in json.loads(sys.argv[1]).items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
where = {"blob": "env:TEST_BLOB", "consensus": "env:TEST_CONSENSUS"}
df = spark.createDataFrame([("a", 1), ("b", 2)], "key string, val long")
df.write.format("aiopersist").mode("append").options(keys="key", **where).save("s")
read = spark.read.format("aiopersist").options(**where).load("s")
read.explain(True)
print(sorted(map(tuple, read.collect())))
print(read.rdd.toDebugString().decode())
try:
    spark.read.format("aiopersist").options(blob="env:TEST_BLOB", consensus="env:TEST_GONE").load("s")
except Exception as e:
    print("refused:", e)
from aiopersist.spark import connect

with connect(spark, blob="env:TEST_BLOB", consensus="env:TEST_CONSENSUS") as sc:
    print(repr(sc), sc.write_df(df, "s"), sc.snapshot_df("s").count())
    sc.snapshot_df("s").explain(True)
changes = spark.readStream.format("aiopersist").options(hold_name="copy", **where).load("s")
sink = changes.writeStream.format("aiopersist").options(keys="key", checkpointLocation="checkpoint", **where)
query = sink.trigger(availableNow=True).start("copy")
query.awaitTermination()
query.explain(True)
print("progress:", query.recentProgress)
print("copied:", spark.read.format("aiopersist").options(**where).load("copy").count())
spark.stop()
"""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_secrets_are_never_seen(spark: Any, tmp_path: Path, postgres_server: PostgresServer) -> None:
    """Goal: in a session that nothing was registered in, with places by name: no secret in plans, output,
    logs of all levels, the event log, or the checkpoint of a stream."""
    from tests.spark.conftest import CONFIG

    url = postgres_server.url("t_secrets")
    scheme, rest = url.split("://", 1)
    user, host = rest.split("@", 1) if "@" in rest else ("postgres", rest)
    secret = f"{scheme}://{user.split(':')[0]}:hunter2@{host}"
    events = tmp_path / "events"
    events.mkdir()
    config = {
        **CONFIG,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(events),
        "spark.log.level": "INFO",
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(Path(ap.__file__).parents[1]), *sys.path]),
        "TEST_BLOB": f"file://{tmp_path}/blob",
        "TEST_CONSENSUS": secret,
    }
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(config)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[('a', 1), ('b', 2)]" in done.stdout
    assert "refused:" in done.stdout and "TEST_GONE" in done.stdout
    assert "copied: 4" in done.stdout
    logs, checkpoint = (
        "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
        for folder in (events, tmp_path / "checkpoint")
    )
    assert "aiopersist" in logs
    assert "numOutputRows" in done.stdout and "shard" in checkpoint
    for text in (done.stdout, done.stderr, logs, checkpoint):
        assert "hunter2" not in text
