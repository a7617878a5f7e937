"""Writing; see `test_streams.py`."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.spark.plain_client import Row, at, upper
from tests.spark.streams_kit import (
    Batches,
    _registered,  # noqa: F401  # a fixture
    append,
    drained,
    history,
    move_since,
    rows,
    stream,
    updates,
)

pytestmark = pytest.mark.timeout(300)


def sink(df: Any, place: str, name: str, checkpoint: Path, mode: str = "append", **options: Any) -> None:
    """A run that takes what is available now, into a shard."""
    writer = df.writeStream.format("aiopersist").outputMode(mode).option("location", place)
    writer = writer.options(**options).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start(name)
    try:
        assert query.awaitTermination(100)
    finally:
        query.stop()


def forget_commit(checkpoint: Path) -> None:
    """As if the driver had died just after the sink's commit: Spark runs the last batch again."""
    commits = sorted(
        (p for p in (checkpoint / "commits").iterdir() if p.name.isdecimal()), key=lambda p: int(p.name)
    )
    commits[-1].unlink()
    (checkpoint / "commits" / f".{commits[-1].name}.crc").unlink(missing_ok=True)


def test_from_shard_to_shard_once(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: batch by batch at library-chosen times; a batch that is run again writes nothing; two queries
    write one shard."""
    append(place, name, history(4), 0)
    move_since(place, name, 0)
    df = stream(spark, place, name, startingTime=0, maxRowsPerTrigger=6)
    plain = df.select("key", "val")
    for checkpoint in ("c", "d"):
        sink(plain, place, f"{name}-to", tmp_path / checkpoint, keys="key")
    want = Counter({(f"k{t}-{i}", t): 2 for t in range(4) for i in range(3)})
    found = updates(place, f"{name}-to")
    assert Counter({(k, v): 0 for k, v, _ in found}) == Counter(dict.fromkeys(want, 0))
    sums: Counter[Row] = Counter()
    for (key, val, _), diff in found.items():
        sums[key, val] += diff
    assert sums == want
    assert upper(place, f"{name}-to") == ap.Antichain(4)  # two batches of each query
    assert not at(place, lambda client: client.admin.inspect(f"{name}-to")).writers
    append(place, f"{name}-to", [[]], 4, finish=True)
    forget_commit(tmp_path / "c")
    sink(plain, place, f"{name}-to", tmp_path / "c", keys="key")  # though nothing new can be written there
    assert updates(place, f"{name}-to") == found


@pytest.mark.long
def test_output_modes(spark: Any, sc: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: counts by key, as overwrites in complete mode, and as upserts in update mode, which Spark has for
    foreachBatch only: the shard has the newest at every time, through a restart."""
    from pyspark.errors import PySparkException

    times = [[("a", 1, 1), ("b", 1, 1)], [("a", 2, 1)], [("c", 1, 1), ("a", 3, 1)]]
    append(place, name, times, 0)
    move_since(place, name, 0)
    df = stream(spark, place, name, startingTime=0, maxRowsPerTrigger=1)
    counts = df.groupBy("key").count().withColumnRenamed("count", "val")

    def upsert(df: Any, number: int) -> None:
        sc.write_df(df, f"{name}-u", keys=["key"], mode="upsert", txn=("u", number))

    def upserted() -> None:
        writer = counts.writeStream.foreachBatch(upsert).outputMode("update")
        query = writer.option("checkpointLocation", str(tmp_path / "u")).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(100)
        finally:
            query.stop()

    upserted()
    sink(counts, place, f"{name}-c", tmp_path / "c", "complete", keys="key")
    want = Counter(
        {("a", 1, 0): 1, ("b", 1, 0): 1, ("a", 1, 1): -1, ("a", 2, 1): 1, ("a", 2, 2): -1, ("a", 3, 2): 1}
    )
    want["c", 1, 2] = 1
    assert updates(place, f"{name}-u") == want
    assert updates(place, f"{name}-c") == want
    append(place, name, [[("b", 2, 1)]], 3)
    want["b", 2, 3], want["b", 1, 3] = 1, -1
    for _ in range(2):
        upserted()
        assert updates(place, f"{name}-u") == want
        forget_commit(tmp_path / "u")
    with pytest.raises(PySparkException, match="Update mode"):
        sink(counts, place, f"{name}-x", tmp_path / "x", "update", keys="key", apply="upsert")


def test_a_query_without_a_named_hold_moves_nothing(
    spark: Any, place: str, name: str, tmp_path: Path
) -> None:
    """Goal: reads forget no history: since moves only by a call or a policy."""
    append(place, name, history(4), 0)
    df = stream(spark, place, name, startingTime=0, maxRowsPerTrigger=3)
    drained(df, tmp_path / "c")
    assert at(place, lambda client: client.admin.inspect(name)).since == ap.Antichain(0)


@pytest.mark.long
def test_times_and_diffs_are_kept(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: with columns of times and diffs the copy is the original, batch by batch."""
    times = [[("a", 1, 2)], [("a", 1, -1), ("b", 1, 1)], [], [("c", 1, 1)]]
    append(place, name, times, 0)
    move_since(place, name, 0)
    df = stream(spark, place, name, startingTime=0, maxRowsPerTrigger=2)
    for _ in range(2):
        sink(df, place, f"{name}-t", tmp_path / "t", time="_time", diff="_diff", keys="key")
        assert updates(place, f"{name}-t") == updates(place, name)
        assert upper(place, f"{name}-t") == ap.Antichain(4)
        forget_commit(tmp_path / "t")


@pytest.mark.long
def test_for_each_batch_by_the_engine(spark: Any, sc: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: `write_df` with `txn=(name, batch id)` within foreachBatch writes each batch once."""
    append(place, name, history(3), 0)
    seen: list[int] = []

    def write(df: Any, number: int) -> None:
        seen.append(number)
        sc.write_df(df.select("key", "val"), f"{name}-e", keys=["key"], txn=("each", number))

    def run() -> None:
        df = stream(spark, place, name, startingTime=0, maxRowsPerTrigger=3)
        writer = df.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "e"))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(100)
        finally:
            query.stop()

    run()
    found = updates(place, f"{name}-e")
    assert found == Counter({(f"k{t}-{i}", t, t): 1 for t in range(3) for i in range(3)})
    forget_commit(tmp_path / "e")
    run()
    assert seen == [0, 1, 2, 2]
    assert updates(place, f"{name}-e") == found


@pytest.mark.long
def test_a_running_query_follows(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: with a processing time, rows arrive while it runs, in the order of times, at the rate asked."""
    append(place, name, history(6), 0)
    df = stream(spark, place, name, startingTime=0, maxRowsPerTrigger=3)
    found = Batches()
    writer = df.writeStream.foreachBatch(found).option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(processingTime="200 milliseconds").start()
    try:
        append(place, name, history(8)[6:], 6)
        deadline = time.monotonic() + 90
        while found.all.total() < 24 and time.monotonic() < deadline:
            assert query.exception() is None
            time.sleep(0.2)
    finally:
        query.stop()
    assert found.all == rows(history(8))
    assert found.times == [{t} for t in range(8)]


@pytest.mark.long
def test_finished_sinks_and_bad_options_fail(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    append(place, name, history(1), 0, finish=True)
    df = spark.readStream.format("rate").load().selectExpr("string(value) as key", "value as val")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "UpperMismatch|finished"),
        ({"as_of": 1}, "unknown option"),
        ({"apply": "x"}, "none of insert"),
    ]
    for n, (options, said) in enumerate(wrong):
        with pytest.raises(PySparkException, match=said):
            sink(df, place, name, tmp_path / f"c{n}", **options)
