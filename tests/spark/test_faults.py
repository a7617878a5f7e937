"""Goal: after faults of single tasks and hooks, no update is lost or doubled, and the leftovers of failed
attempts are reclaimed. Workers are real, and die for real."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.spark import connect, register
from aiopersist.spark.sessions import for_each_partition
from aiopersist.state.writing import ExpireWriter
from tests.spark.faults import FORMAT, audit, die, dying_tasks, faulty, first_time, raising_once
from tests.spark.plain_client import at
from tests.support.internals import shards_of

SMALL = ap.Settings(inline_writes_single_max_bytes=0, blob_target_size=4000, row_group_bytes=2000)
COLUMNS = "id long, name string, x double"
CELLS = {"x": 2, "name": 1}

Row = tuple[int, str, float]


def some_rows(n: int, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    return [(i, f"{rng.getrandbits(120):030x}", rng.random()) for i in range(n)]


@pytest.fixture
def small(spark: Any, place: str) -> Iterator[Any]:
    """The engine with parts so small that each task uploads several before it is done."""
    with connect(spark, place, settings=SMALL) as client:
        yield client


@pytest.fixture
def faulty_format(spark: Any) -> Iterator[Any]:
    """Makes hooks of the format fail; undone at the end."""
    yield lambda **hooks: spark.dataSource.register(
        faulty({name.replace("__", "."): hook for name, hook in hooks.items()})
    )
    register(spark)


def frame(spark: Any, rows: list[Row], partitions: int = 2) -> Any:
    return spark.createDataFrame(rows, COLUMNS).repartition(partitions)


def test_a_worker_that_dies_after_its_upload(
    spark: Any, small: Any, place: str, name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Goal: the second attempt counts, once; the parts of the first are orphans, and the sweep's."""
    rows, marker = some_rows(600), tmp_path / "died"
    monkeypatch.setattr("aiopersist.spark.client.tasks", dying_tasks("stage", marker))
    assert small.write_df(frame(spark, rows), name, keys=["id"]) == 0
    assert marker.exists()
    assert sorted(map(tuple, small.snapshot_df(name).collect())) == rows
    small.close()
    assert audit(place, name, rows) > 0


async def end_writers(client: Any, shard: str) -> None:
    """As a process that is awake ends those whose leases have run out."""
    found = await shards_of(client).existing(shard)
    for writer in found.state.writers:
        await commit(found.register, ExpireWriter(writer), Slot())


def test_a_driver_that_stood_still(spark: Any, small: Any, place: str, name: str, monkeypatch: Any) -> None:
    """Goal: a write whose writer another process has ended meanwhile is made again, under another one, and
    lands once."""
    rows, begun = some_rows(50), []

    def interrupted(df: Any, work: Any) -> Any:
        staged = for_each_partition(df, work)
        begun.append(len(staged))
        if len(begun) == 1:
            at(place, end_writers, name)
        return staged

    monkeypatch.setattr("aiopersist.spark.client.for_each_partition", interrupted)
    assert small.write_df(frame(spark, rows), name, keys=["id"]) == 0
    assert len(begun) == 2
    assert sorted(map(tuple, small.snapshot_df(name).collect())) == rows
    small.close()
    audit(place, name, rows)


@pytest.mark.long
def test_rows_that_fail_midway(spark: Any, small: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: an attempt whose input fails after some of it was uploaded leaves nothing that is read."""
    rows, marker = some_rows(600), tmp_path / "raised"
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    try:
        df = frame(spark, rows).mapInArrow(raising_once(marker, 3), COLUMNS)
        assert small.write_df(df, name, keys=["id"]) == 0
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert marker.exists()
    small.close()
    audit(place, name, rows)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["upsert", "overwrite"])
def test_retractions_that_are_done_twice(
    spark: Any, small: Any, place: str, name: str, tmp_path: Path, monkeypatch: Any, mode: str
) -> None:
    """Goal: a worker dies after it has uploaded retractions: each replaced row is retracted once."""
    old, marker = some_rows(600), tmp_path / "died"
    new = [(i + 300, n, x) for i, n, x in some_rows(600, seed=1)]
    small.write_df(frame(spark, old), name, keys=["id"])
    monkeypatch.setattr("aiopersist.spark.replace.tasks", dying_tasks("retract", marker))
    assert small.write_df(frame(spark, new), name, mode=mode) == 1
    assert marker.exists()
    kept = old[:300] if mode == "upsert" else []
    assert sorted(map(tuple, small.snapshot_df(name).collect())) == kept + new
    assert sorted(map(tuple, small.snapshot_df(name, 0).collect())) == old
    small.close()
    assert audit(place, name, kept + new) > 0


@pytest.mark.long
def test_a_compaction_whose_worker_dies(
    spark: Any, small: Any, place: str, name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Goal: what the second attempt wrote is applied, and reads before and after agree."""
    rows, marker = some_rows(600), tmp_path / "died"
    for n in range(3):
        small.write_df(frame(spark, rows[n * 200 : n * 200 + 200], 1), name, keys=["id"])
    before = small.snapshot_df(name)
    monkeypatch.setattr("aiopersist.spark.client.tasks", dying_tasks("compact", marker))
    assert small.compact(name)
    assert marker.exists()
    monkeypatch.undo()
    assert not small.compact(name)
    for df in (before, small.snapshot_df(name)):
        assert sorted(map(tuple, df.collect())) == rows
    small.close()
    assert audit(place, name, rows) > 0


@pytest.mark.long
def test_a_reader_that_dies_midway(
    spark: Any, small: Any, place: str, name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Goal: rows that a dead attempt has yielded are not there twice."""
    rows, marker = some_rows(600), tmp_path / "died"
    small.write_df(frame(spark, rows), name, keys=["id"])
    monkeypatch.setattr("aiopersist.spark.client.tasks", dying_tasks("read", marker))
    assert sorted(map(tuple, small.snapshot_df(name, parallelism=2).collect())) == rows
    assert marker.exists()
    monkeypatch.undo()
    raised = tmp_path / "raised"
    df = small.snapshot_df(name).mapInArrow(raising_once(raised, 0), COLUMNS)
    assert sorted(map(tuple, df.collect())) == rows
    assert raised.exists()


@pytest.mark.long
def test_the_format_with_a_worker_that_dies(
    spark: Any, place: str, name: str, tmp_path: Path, faulty_format: Any
) -> None:
    """Goal: the same for the hooks of the format: a write, then a read."""
    rows = some_rows(3000)
    wrote, read = str(tmp_path / "wrote"), str(tmp_path / "read")

    def write(real: Any, *_: Any) -> Any:
        message = real()
        if first_time(wrote):
            die()
        return message

    def midway(real: Any, *_: Any) -> Any:
        for batch in real():
            yield batch
            if first_time(read):
                die()

    faulty_format(writer__write=write, reader__read=midway)
    df = frame(spark, rows)
    df.write.format(FORMAT).mode("append").option("location", place).option("keys", "id").save(name)
    assert Path(wrote).exists()
    found = spark.read.format(FORMAT).option("location", place).load(name)
    assert sorted(map(tuple, found.collect())) == rows
    assert Path(read).exists()
    assert audit(place, name, rows) > 0


@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        ("insert", "after"),
        pytest.param("insert", "before", marks=pytest.mark.long),
        pytest.param("upsert", "before", marks=pytest.mark.long),
        pytest.param("upsert", "after", marks=pytest.mark.long),
    ],
)
def test_a_committer_that_dies(
    spark: Any, place: str, name: str, tmp_path: Path, faulty_format: Any, mode: str, moment: str
) -> None:
    """Goal: the hook dies before its append, or after it and before it could say so. Spark fails the write
    and calls abort; the same transaction again leaves it there exactly once."""
    old, new = some_rows(2000), some_rows(2000, seed=1)
    marker = str(tmp_path / "died")

    def commit(real: Any, *_: Any) -> Any:
        if moment == "after":
            real()
        if first_time(marker):
            die()
        return real()

    def save(rows: list[Row], version: int) -> None:
        written = frame(spark, rows).write.format(FORMAT).mode("append").option("location", place)
        told = {"keys": "id", "apply": mode, "txnAppId": "app", "txnVersion": version}
        written.options(**told).save(name)

    save(old, 1)
    faulty_format(writer__commit=commit)
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    with pytest.raises((PySparkException, Py4JError)):
        save(new, 2)
    assert Path(marker).exists()
    register(spark)
    expected = old + new if mode == "insert" else new
    there = expected if moment == "after" else old
    assert audit(place, name, there) > 0 or moment == "after"
    save(new, 2)
    save(new, 2)
    audit(place, name, expected)
