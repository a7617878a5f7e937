"""Goal: Spark reads a table as any shard, and what it writes keeps the rule of a table: one val per key."""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

import aiopersist as ap
from tests.spark.engine_kit import USAGE
from tests.spark.format_kit import reading, writing
from tests.spark.plain_client import at, counted, rows_of, upper
from tests.spark.streams_kit import append, drained, stream
from tests.spark.test_streams_writing import forget_commit, sink

pytestmark = pytest.mark.slow


def filled(place: str) -> None:
    async def work(client: ap.Client) -> None:
        await client.table("t", str, int).put_many({"a": 1, "b": 2, "c": 3})

    at(place, work)


def contents(place: str) -> dict[str, int]:
    """By the table; each key comes once in the shard."""

    async def work(client: ap.Client) -> dict[str, int]:
        table = client.table("t", str, int)
        async with client.reader("t") as reader, reader.snapshot() as snapshot:
            rows = await snapshot.rows()
        found = dict([entry async for entry in table.items()])
        assert rows == [(key, val, 1) for key, val in sorted(found.items())]
        assert await table.get_many(found) == found
        return found

    return at(place, work)


def frame(spark: Any, *rows: tuple[str, int]) -> Any:
    return spark.createDataFrame(list(rows), "key string, val long")


def test_a_table_is_read_and_compacted(sc: Any, spark: Any, place: str) -> None:
    filled(place)
    sc.write_df(frame(spark, ("b", 20)), "t", mode="upsert")
    assert rows_of(sc.snapshot_df("t")) == [("a", 1), ("b", 20), ("c", 3)]
    sc.compact("t")
    assert contents(place) == {"a": 1, "b": 20, "c": 3}


def test_an_upsert_keeps_one_val_per_key(sc: Any, spark: Any, place: str) -> None:
    filled(place)
    sc.write_df(frame(spark, ("b", 20), ("d", 40)), "t", mode="upsert")
    assert contents(place) == {"a": 1, "b": 20, "c": 3, "d": 40}


def test_an_overwrite_leaves_its_rows(sc: Any, spark: Any, place: str) -> None:
    filled(place)
    sc.write_df(frame(spark, ("b", 20)), "t", mode="overwrite")
    assert contents(place) == {"b": 20}


def test_a_new_table_is_filled(sc: Any, spark: Any, place: str) -> None:
    """Goal: as one that has contents; a key twice is found there, too."""

    async def create(client: ap.Client) -> None:
        await client.table("t", str, int)

    at(place, create)
    with pytest.raises(ap.InvalidUpdate, match="more than once"):
        sc.write_df(frame(spark, ("b", 20), ("b", 21)), "t", mode="overwrite")
    sc.write_df(frame(spark, ("b", 20), ("a", 1)), "t", mode="overwrite")
    assert contents(place) == {"a": 1, "b": 20}


@pytest.mark.parametrize("mode", ["upsert", "overwrite"])
def test_a_key_twice_is_refused(sc: Any, spark: Any, place: str, mode: str) -> None:
    """Goal: nothing is written."""
    filled(place)
    with pytest.raises(ap.InvalidUpdate, match="more than once"):
        sc.write_df(frame(spark, ("b", 20), ("b", 21)), "t", mode=mode)
    assert contents(place) == {"a": 1, "b": 2, "c": 3}


def test_a_deletion_leaves_the_other_keys(sc: Any, spark: Any, place: str) -> None:
    """Goal: by keys and by a condition; the table's own users see it as one change."""
    filled(place)
    before = upper(place, "t")
    time = sc.write_df(frame(spark, ("b", 0), ("x", 0)).select("key"), "t", mode="delete")
    assert contents(place) == {"a": 1, "c": 3}
    sc.delete_where("t", pc.field("val") > 2)
    assert contents(place) == {"a": 1}

    async def change(client: ap.Client) -> list[Any]:
        table = client.table("t", str, int)
        async with table.changes(as_of=before.elements[0] - 1) as feed:
            steps = [await anext(feed), await anext(feed)]
            return [found for step in steps if not step.contents for found in step.changes]

    assert ap.Change("b", 2, None, time) in at(place, change)


def test_the_format_writes_by_keys(sc: Any, spark: Any, place: str) -> None:
    filled(place)
    writing(frame(spark, ("b", 20)), place, apply="upsert").save("t")
    assert contents(place) == {"a": 1, "b": 20, "c": 3}
    writing(frame(spark, ("a", 0)).select("key"), place, apply="delete").save("t")
    assert contents(place) == {"b": 20, "c": 3}
    writing(frame(spark, ("b", 30)), place, "overwrite").save("t")
    assert contents(place) == {"b": 30}


@pytest.mark.parametrize("mode", ["upsert", "overwrite"])
def test_a_val_that_python_has_not(sc: Any, spark: Any, place: str, mode: str) -> None:
    """Goal: a subscription of the table could never go on behind it."""

    async def create(client: ap.Client) -> None:
        await client.table("t", str, datetime).put("a", datetime(2026, 1, 1, tzinfo=UTC))

    at(place, create)
    rows = spark.sql("select 'b' as key, timestamp_micros(4611686018427387904) as val")
    with pytest.raises(ap.InvalidUpdate, match=r"column 'val'.*none that Python can represent"):
        sc.write_df(rows, "t", mode=mode)
    assert [row["key"] for row in sc.snapshot_df("t").collect()] == ["a"]
    sc.write_df(rows, "plain", keys=["key"])
    assert sc.snapshot_df("plain").count() == 1


def test_floats_that_are_one_key(sc: Any, spark: Any, place: str) -> None:
    """Goal: as the table itself takes them: -0.0 is 0.0, and all NaN are one."""

    async def create(client: ap.Client) -> None:
        await client.table("t", float, int).put_many({0.0: 1, float("nan"): 2, 1.0: 3})

    at(place, create)
    columns = "key double, val long"
    for key in (0.0, float("nan")):
        twice = spark.createDataFrame([(key, 1), (-key, 2)], columns)
        with pytest.raises(ap.InvalidUpdate, match="more than once"):
            sc.write_df(twice, "t", mode="upsert")
    sc.write_df(spark.createDataFrame([(-0.0, 10), (-float("nan"), 20)], columns), "t", mode="upsert")
    assert sorted(row["val"] for row in sc.snapshot_df("t").collect()) == [3, 10, 20]
    sc.write_df(spark.createDataFrame([(-0.0,), (float("nan"),)], "key double"), "t", mode="delete")
    assert rows_of(sc.snapshot_df("t")) == [(1.0, 3)]


# --- ways past the rule -------------------------------------------------------------------------------


def by_sql(spark: Any, place: str) -> None:
    spark.sql(f"create temporary view t_sql using aiopersist options (path 't', location '{place}')")
    try:
        spark.sql("insert into t_sql values ('b', 20)")
    finally:
        spark.catalog.dropTempView("t_sql")


APPENDS: dict[str, Callable[[Any, str], Any]] = {
    "format": lambda spark, place: writing(frame(spark, ("b", 20)), place).save("t"),
    "format, insert": lambda spark, place: writing(frame(spark, ("b", 20)), place, apply="insert").save("t"),
    "format, a time": lambda spark, place: writing(frame(spark, ("b", 20)), place, time=str(2**60)).save("t"),
    "format, keys": lambda spark, place: writing(frame(spark, ("b", 20)), place, keys="key").save("t"),
    "SQL": by_sql,
}


@pytest.mark.parametrize("way", APPENDS)
def test_an_append_of_the_format_is_refused(sc: Any, spark: Any, place: str, way: str) -> None:
    """Goal: whichever way it takes."""
    from pyspark.errors import PySparkException

    filled(place)
    before = upper(place, "t")
    with pytest.raises(PySparkException, match=r"NOT_A_TABLE.*upsert"):
        APPENDS[way](spark, place)
    assert upper(place, "t") == before
    assert contents(place) == {"a": 1, "b": 2, "c": 3}


def test_an_append_is_refused(sc: Any, spark: Any, place: str) -> None:
    """Goal: it would give a key two vals."""
    filled(place)
    for given in ({}, {"time": 2**60}, {"diff": "val"}, {"schema": ap.Schema(str, int), "keys": ["key"]}):
        with pytest.raises(ap.InvalidUsage) as caught:
            sc.write_df(frame(spark, ("b", 20)), "t", **given)
        assert caught.value.kind is USAGE.NOT_A_TABLE
    assert contents(place) == {"a": 1, "b": 2, "c": 3}


# --- streams ------------------------------------------------------------------------------------------


def test_a_stream_that_appends_is_refused(sc: Any, spark: Any, place: str, tmp_path: Path) -> None:
    """Goal: the query fails and says why; nothing is written, by a restart neither."""
    from pyspark.errors import PySparkException

    filled(place)
    before = upper(place, "t")
    append(place, "from", [[("b", 20, 1)]], 0)
    df = stream(spark, place, "from", startingTime=0).select("key", "val")
    for _ in range(2):
        with pytest.raises(PySparkException, match=r"NOT_A_TABLE.*apply"):
            sink(df, place, "t", tmp_path / "c")
    assert upper(place, "t") == before
    assert contents(place) == {"a": 1, "b": 2, "c": 3}


def test_a_stream_of_upserts(sc: Any, spark: Any, place: str, tmp_path: Path) -> None:
    """Goal: each batch replaces the vals of its keys, once; one with a key twice fails whole."""
    from pyspark.errors import PySparkException

    filled(place)
    append(place, "from", [[("b", 20, 1)], [("b", 21, 1), ("d", 4, 1)]], 0)
    df = stream(spark, place, "from", startingTime=0, maxRowsPerTrigger=1).select("key", "val")
    sink(df, place, "t", tmp_path / "c", apply="upsert")
    assert contents(place) == {"a": 1, "b": 21, "c": 3, "d": 4}
    sc.write_df(frame(spark, ("d", 5)), "t", mode="upsert")
    forget_commit(tmp_path / "c")
    sink(df, place, "t", tmp_path / "c", apply="upsert")
    assert contents(place) == {"a": 1, "b": 21, "c": 3, "d": 5}
    append(place, "from", [[("a", 7, 1), ("a", 8, 1)]], 2)
    with pytest.raises(PySparkException, match="more than once"):
        sink(df, place, "t", tmp_path / "c", apply="upsert")
    assert contents(place) == {"a": 1, "b": 21, "c": 3, "d": 5}


def test_a_stream_of_whole_results(sc: Any, spark: Any, place: str, tmp_path: Path) -> None:
    """Goal: output mode complete is an overwrite."""
    filled(place)
    append(place, "from", [[("a", 1, 1), ("b", 1, 1)], [("a", 2, 1)]], 0)
    df = stream(spark, place, "from", startingTime=0, maxRowsPerTrigger=1)
    counts = df.groupBy("key").count().withColumnRenamed("count", "val")
    sink(counts, place, "t", tmp_path / "c", "complete")
    assert contents(place) == {"a": 2, "b": 1}


# --- instants -----------------------------------------------------------------------------------------


def test_instants(sc: Any, spark: Any, place: str, tmp_path: Path) -> None:
    """Goal: contents and changes of a table at instants, by calls, by options, and from where a stream
    begins; an instant at which nothing had been written yet is closed for good."""

    def now() -> datetime:
        return datetime.now(UTC)

    filled(place)
    first = now()
    sc.write_df(frame(spark, ("b", 20)), "t", mode="upsert")
    second = now()
    sc.write_df(frame(spark, ("a", 0)).select("key"), "t", mode="delete")
    third = now()
    old, new = Counter([("a", 1), ("b", 2), ("c", 3)]), Counter([("b", 20), ("c", 3)])
    assert counted(sc.snapshot_df("t", first)) == old
    assert counted(sc.snapshot_df("t", third)) == new
    assert counted(reading(spark, place, asOf=first.isoformat()).load("t")) == old
    assert counted(reading(spark, place, as_of=third.isoformat()).load("t")) == new

    def plain(df: Any) -> Counter[Any]:
        assert df.columns == ["key", "val", "_time", "_diff"]
        return counted(df.select("key", "val", "_diff"))

    upsert, deletion = Counter([("b", 2, -1), ("b", 20, 1)]), Counter([("a", 1, -1)])
    assert plain(sc.changes_df("t", first, second)) == upsert
    assert plain(sc.changes_df("t", first)) == upsert + deletion
    ranged = {"startingTime": second.isoformat(), "endingTime": third.isoformat()}
    assert plain(reading(spark, place, **ranged).load("t")) == deletion
    batches = drained(stream(spark, place, "t", startingTime=first.isoformat()), tmp_path / "c")
    found: Counter[Any] = Counter()
    for row, often in batches.all.items():
        found[(row[0], row[1], row[3])] += often
    assert found == upsert + deletion
    snapshot = drained(stream(spark, place, "t"), tmp_path / "d")
    assert snapshot.all == new
