"""Goal: Spark with Iceberg shows what the library reads, by the metadata file and by the folder, and cannot
collect what is ours. Iceberg does not run on the Spark of the extra, so `tox -e iceberg` has one of its own;
that Spark fetches Iceberg's jar from Maven Central, unless `AIOPERSIST_TEST_ICEBERG_JAR` names it."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.iceberg.kit import SETTINGS, Rows, contents, counted
from tests.iceberg.test_types import LIST_OF_STRUCTS, SUPPORTED, written

pytestmark = [
    pytest.mark.long,
    pytest.mark.blocks_loop,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # sockets of Spark
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SPARK, ICEBERG = "4.1", "1.11.0"
JAR = os.environ.get("AIOPERSIST_TEST_ICEBERG_JAR")
PACKAGE = f"org.apache.iceberg:iceberg-spark-runtime-{SPARK}_2.13:{ICEBERG}"


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    pyspark = pytest.importorskip("pyspark")
    if not pyspark.__version__.startswith(f"{SPARK}."):
        pytest.skip(f"Iceberg {ICEBERG} runs on Spark {SPARK}, not {pyspark.__version__}: tox -e iceberg")
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    jar = ("spark.jars", JAR) if JAR else ("spark.jars.packages", PACKAGE)
    options = {
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.shuffle.partitions": "2",
    }
    for name, value in [jar, *options.items()]:
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


def by_spark(spark: Any, metadata: str) -> Rows:
    return rows_of(spark.read.format("iceberg").load(metadata))


def rows_of(frame: Any) -> Rows:
    """The rows of a frame. (Its `toArrow` fails for some nested fields.)"""
    rows = [row.asDict(recursive=True) for row in frame.collect()]
    return counted((row["key"], row["val"], 1) for row in rows)


def without_zones(rows: Rows) -> Rows:
    """Instants as Spark shows them to Python: in UTC, without a zone."""
    return Counter({_without_zone(row): count for row, count in rows.items()})


def _without_zone(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_zone, value))
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


@pytest.mark.parametrize("name", [*SUPPORTED, "list of structs"])
async def test_a_type(tmp_path: Path, spark: Any, name: str) -> None:
    t, values = SUPPORTED.get(name, (LIST_OF_STRUCTS, [[None, {"a": 1, "b": None}], []]))
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await written(client, t, values)
        for as_of in (0, 1, 2):
            published = await client.publish("t", as_of=as_of)
            expected = without_zones(await contents(client, as_of=as_of))
            assert by_spark(spark, published.metadata) == expected


async def test_random_updates(tmp_path: Path, spark: Any) -> None:
    seed = random.Random(5)
    schema: Any = ap.Schema(str, float | None)
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        present: list[tuple[str, Any]] = []
        async with client.writer("t", schema) as writer:
            for time in range(12):
                rows = [
                    (f"k{seed.randrange(40)}", seed.choice([0.0, 1.5, None, float("inf")])) for _ in range(30)
                ]
                gone = [present.pop(seed.randrange(len(present))) for _ in range(len(present) // 3)]
                updates = [(k, v, time, 1) for k, v in rows] + [(k, v, time, -1) for k, v in gone]
                await writer.compare_and_append(updates, time, time + 1)
                present += rows
                if time % 4 == 3:
                    await client.admin.retain("t", 3)
                    await client.admin.force_compaction("t")
                for as_of in {time, max(time - 2, 0)}:
                    published = await client.publish("t", as_of=as_of)
                    assert by_spark(spark, published.metadata) == await contents(client, as_of=as_of)


async def test_a_catalog_of_the_folder(tmp_path: Path, spark: Any) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        table = client.table("t", key=str, val=int)
        await table.put_many({"a": 1, "b": 2})
        first = await client.publish(table)
        await table.put("a", 3)
        second = await client.publish(table)
        expected = await contents(client)
    conf = {"": "org.apache.iceberg.spark.SparkCatalog", ".type": "hadoop"}
    for name, value in (conf | {".warehouse": f"file://{tmp_path}/blob/iceberg"}).items():
        spark.conf.set(f"spark.sql.catalog.lake{name}", value)
    assert rows_of(spark.table("lake.t")) == expected
    old = spark.sql(f"SELECT * FROM lake.t VERSION AS OF {first.snapshot_id} ORDER BY key").collect()
    assert [tuple(row) for row in old] == [("a", 1), ("b", 2)]
    for statement in (
        "CALL lake.system.expire_snapshots(table => 't', older_than => TIMESTAMP '2100-01-01 00:00:00')",
        "CALL lake.system.remove_orphan_files(table => 't')",
        "DROP TABLE lake.t PURGE",
    ):
        with pytest.raises(Exception, match="GC is disabled"):
            spark.sql(statement).collect()
    since = {"start-snapshot-id": str(first.snapshot_id), "end-snapshot-id": str(second.snapshot_id)}
    with pytest.raises(Exception, match="is not a parent ancestor"):
        spark.read.format("iceberg").options(**since).load(second.metadata).count()
