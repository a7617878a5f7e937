"""Goal: Spark deletes rows by their keys, or by a condition, in one commit: all of them, and no others."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aiopersist as ap
from aiopersist.spark import connect
from tests.spark.engine_kit import USAGE, appended
from tests.spark.faults import audit, contents_now, dying_tasks
from tests.spark.format_kit import writing
from tests.spark.plain_client import at, counted, rows_of, steady_writer, upper
from tests.spark.schemas import PLAIN
from tests.spark.streams_kit import append, stream
from tests.spark.test_streams_writing import forget_commit, sink

ONLY_KEY = "key string"
SMALL = ap.Settings(inline_writes_single_max_bytes=0, blob_target_size=4000, row_group_bytes=2000)


def keys(spark: Any, *found: Any) -> Any:
    return spark.createDataFrame([(key,) for key in found], ONLY_KEY)


# --- by keys ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_rows_of_a_key_go(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: however many, and whatever their vals; a key that comes twice, or is not there, does no harm."""
    there = [("a", 1, 0, 2), ("a", None, 0, 1), ("b", 1, 0, -1), ("c", 1, 0, 1)]
    appended(place, name, PLAIN, (there, 0, 1))
    assert sc.write_df(keys(spark, "a", "a", "b", "z").repartition(2), name, mode="delete") == 1
    want = Counter([("a", 1, 1, -2), ("a", None, 1, -1), ("b", 1, 1, 1)])
    assert counted(sc.changes_df(name, 1)) == want
    assert rows_of(sc.snapshot_df(name)) == [("c", 1)]
    assert sc.write_df(keys(spark), name, mode="delete") == 2
    assert rows_of(sc.snapshot_df(name)) == [("c", 1)]


@pytest.mark.slow
def test_a_txn_deletes_once(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: a repeat does not delete what came after."""
    appended(place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
    assert sc.write_df(keys(spark, "a"), name, mode="delete", txn=("job", 1)) == 1
    appended(place, name, PLAIN, ([("a", 2, 2, 1)], 2, 3))
    sc.write_df(keys(spark, "a"), name, mode="delete", txn=("job", 1))
    sc.delete_where(name, pc.field("key") == "a", txn=("job", 1))
    assert rows_of(sc.snapshot_df(name)) == [("a", 2)]
    sc.delete_where(name, pc.field("key") == "a", txn=("job", 2))
    assert rows_of(sc.snapshot_df(name)) == []
    assert at(place, lambda client: client.txn_number(name, "job")) == 2


@pytest.mark.slow
def test_many_keys_of_many_parts(spark: Any, place: str, name: str) -> None:
    """Goal: each task finds the keys of its range; what the job has staged is deleted at its end."""
    rows = [(f"k{n:05}", n) for n in range(3000)]
    with connect(spark, place, settings=SMALL) as sc:
        frame = spark.createDataFrame(rows, "key string, val long")
        sc.write_df(frame.repartition(3), name, keys=["key"])
        gone = frame.where("val % 3 = 0").select("key").repartition(3)
        sc.write_df(gone, name, mode="delete", parallelism=4)
        kept = [row for row in rows if row[1] % 3]
        assert rows_of(sc.snapshot_df(name)) == kept
        assert sc.delete_where(name, pc.field("val") >= 1500, parallelism=4) == 2
    assert audit(place, name, [row for row in kept if row[1] < 1500]) == 0


KEY = pa.struct(
    [
        pa.field("x", pa.float64()),
        pa.field("id", pa.binary(16), nullable=False),
        pa.field("d", pa.decimal128(9, 2), nullable=False),
        pa.field("t", pa.timestamp("us", "UTC"), nullable=False),
    ]
)
VAL = pa.struct(
    [
        pa.field("tags", pa.list_(pa.field("element", pa.string(), nullable=False)), nullable=False),
        pa.field("inner", pa.struct([pa.field("n", pa.int8(), nullable=False)]), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("x", pa.float64()),
    ]
)


@pytest.mark.slow
def test_keys_of_several_fields(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: nulls, NaN and zeros are found by what they are; vals that may not be null are not asked for."""
    schema = ap.Schema(pa.field("key", KEY, nullable=False), pa.field("val", VAL, nullable=False))
    one = {"id": UUID(int=7).bytes, "d": 1, "t": 0}
    val = {"tags": ["a"], "inner": {"n": 1}, "name": "n", "x": None}
    updates = [({**one, "x": x}, val, 0, 1) for x in (None, float("nan"), 0.0, 1.5)]
    table = pa.table(
        [pa.array([u[n] for u in updates], t) for n, t in enumerate((KEY, VAL, pa.int64(), pa.int64()))],
        schema=schema.arrow_schema,
    )
    appended(place, name, schema, (table, 0, 1))
    found = sc.snapshot_df(name).selectExpr("key_x", "id", "d", "t")
    gone = found.where("key_x is null or isnan(key_x)").union(
        found.where("key_x = 0").selectExpr("-key_x", "id", "d", "t")
    )
    assert sc.write_df(gone, name, mode="delete", keys=["key_x", "id", "d", "t"]) == 1
    assert [row["key_x"] for row in sc.snapshot_df(name).collect()] == [1.5]


@pytest.mark.slow
def test_writers_beside_a_deletion(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: what others append between the look-up and the commit goes, too: none of the keys is left at the
    time of the deletion, and all else is as it was just before."""
    first = [(f"k{n}", n) for n in range(50)]
    sc.write_df(spark.createDataFrame(first, "key string, val long"), name, keys=["key"])
    gone = {f"k{n}" for n in range(20)}
    df = keys(spark, *gone).repartition(2)
    with steady_writer(place, name, PLAIN):
        wrote = sc.write_df(df, name, mode="delete")
    before, after = (counted(sc.snapshot_df(name, t)) for t in (wrote - 1, wrote))
    assert after == Counter({row: n for row, n in before.items() if row[0] not in gone})


@pytest.mark.slow
def test_a_worker_that_dies(spark: Any, place: str, name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Goal: after it has uploaded retractions: each row goes once."""
    rows, marker = [(f"k{n:05}", n) for n in range(600)], tmp_path / "died"
    with connect(spark, place, settings=SMALL) as sc:
        frame = spark.createDataFrame(rows, "key string, val long")
        sc.write_df(frame, name, keys=["key"])
        monkeypatch.setattr("aiopersist.spark.replace.tasks", dying_tasks("retract", marker))
        assert sc.write_df(frame.where("val < 300").select("key"), name, mode="delete") == 1
        assert marker.exists()
    assert audit(place, name, rows[300:]) > 0


# --- by a condition -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_condition(spark: Any, place: str, name: str) -> None:
    """Goal: it is about keys and vals, and the rows for which it is null stay; the coroutines do the same."""
    async with connect(spark, place) as sc:
        rows = [("a", 1), ("b", 2), ("c", None), ("d", 4)]
        frame = await asyncio.to_thread(spark.createDataFrame, rows, "key string, val long")
        await sc.awrite_df(frame, name, keys=["key"])
        assert await sc.adelete_where(name, (pc.field("key") > "a") & (pc.field("val") < 4)) == 1
        df = await sc.asnapshot_df(name)
        assert await asyncio.to_thread(rows_of, df.fillna(0)) == [("a", 1), ("c", 0), ("d", 4)]
        gone = await asyncio.to_thread(keys, spark, "c")
        assert await sc.awrite_df(gone, name, mode="delete") == 2
        df = await sc.asnapshot_df(name)
        assert await asyncio.to_thread(rows_of, df) == [("a", 1), ("d", 4)]


# --- format and streams -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_format_deletes(spark: Any, sc: Any, place: str, name: str) -> None:
    appended(place, name, PLAIN, ([("a", 1, 0, 1), ("b", 2, 0, 1)], 0, 1))
    for _ in range(2):
        writing(keys(spark, "a"), place, apply="delete", txnAppId="job", txnVersion=3).save(name)
    assert rows_of(sc.snapshot_df(name)) == [("b", 2)]
    assert upper(place, name) == ap.Antichain(2)


@pytest.mark.slow
def test_a_stream_of_keys_deletes_once(spark: Any, sc: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: each batch one commit; a batch that is run again deletes nothing that came after it."""
    append(place, "gone", [[("a", 0, 1)], [("b", 0, 1), ("b", 1, 1)]], 0)
    rows = [(key, 1, 0, 1) for key in "abc"]
    appended(place, name, PLAIN, (rows, 0, 1))
    df = stream(spark, place, "gone", startingTime=0, maxRowsPerTrigger=1).select("key")
    sink(df, place, name, tmp_path / "c", apply="delete")
    assert rows_of(sc.snapshot_df(name)) == [("c", 1)]
    assert upper(place, name) == ap.Antichain(3)
    appended(place, name, PLAIN, ([("b", 5, 3, 1)], 3, 4))
    forget_commit(tmp_path / "c")
    sink(df, place, name, tmp_path / "c", apply="delete")
    assert rows_of(sc.snapshot_df(name)) == [("b", 5), ("c", 1)]


# --- errors -------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Any, Any], Any], type[ap.Error], Any, str]] = {
    "a column of the val": (
        lambda sc, df: sc.write_df(df, "s", mode="delete"),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
        "'val': a deletion takes only the columns of the key: key",
    ),
    "no column of the key": (
        lambda sc, df: sc.write_df(df.select(), "s", mode="delete"),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
        "'key' is missing",
    ),
    "another type": (
        lambda sc, df: sc.write_df(df.selectExpr("val key"), "s", mode="delete"),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
        "'key' is int64",
    ),
    "null": (
        lambda sc, df: sc.write_df(df.selectExpr("nullif(key, 'a') key"), "s", mode="delete"),
        ap.InvalidUpdate,
        None,
        "null",
    ),
    "other keys": (
        lambda sc, df: sc.write_df(df.select("key"), "s", mode="delete", keys=["val"]),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
        "the key of the shard",
    ),
    "a time": (
        lambda sc, df: sc.write_df(df.select("key"), "s", mode="delete", time=9),
        ap.InvalidUsage,
        USAGE.INVALID_MODE,
        "neither time nor diff",
    ),
    "an unknown shard": (
        lambda sc, df: sc.write_df(df.select("key"), "nope", mode="delete", keys=["key"]),
        ap.UnknownShard,
        None,
        "nope",
    ),
    "a finished shard": (
        lambda sc, df: sc.write_df(df.select("key"), "end", mode="delete"),
        ap.UpperMismatch,
        None,
        "",
    ),
    "no condition": (
        lambda sc, df: sc.delete_where("s", None),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
        "missing",
    ),
    "SQL": (
        lambda sc, df: sc.delete_where("s", "val > 1"),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
        "expression",
    ),
    "an unknown field": (
        lambda sc, df: sc.delete_where("s", pc.field("q") > 1),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
        "q",
    ),
    "a condition of an unknown shard": (
        lambda sc, df: sc.delete_where("nope", pc.field("val") > 1),
        ap.UnknownShard,
        None,
        "nope",
    ),
    "a condition, a finished shard": (
        lambda sc, df: sc.delete_where("end", pc.field("val") > 1),
        ap.UpperMismatch,
        None,
        "",
    ),
}


@pytest.fixture(scope="module")
def refusing(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Any]]:
    place = str(tmp_path_factory.mktemp("refusing") / "shards")
    appended(place, "s", PLAIN, ([("a", 1, 0, 1)], 0, 1))
    appended(place, "end", PLAIN, ([("a", 1, 0, 1)], 0, ap.Antichain()))
    with connect(spark, place) as sc:
        yield place, sc, spark.createDataFrame([("a", 1)], "key string, val long")


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_deleted(refusing: Any, case: str) -> None:
    """Goal: the library's own errors; nothing is made, written or lost."""
    (place, sc, df), (call, error, kind, said) = refusing, REFUSED[case]
    with pytest.raises(error, match=said or None) as found:
        call(sc, df)
    assert kind is None or (isinstance(found.value, ap.InvalidUsage) and found.value.kind == kind)
    assert upper(place, "s") == ap.Antichain(1)
    assert contents_now(place, "s") == Counter([("a", 1)])
    assert set(at(place, lambda client: client.list_shards())) == {"s", "end"}


@pytest.mark.slow
def test_an_overwrite_deletes_by_no_keys(spark: Any, sc: Any, place: str) -> None:
    from pyspark.errors import PySparkException

    appended(place, "s", PLAIN, ([("a", 1, 0, 1)], 0, 1))
    with pytest.raises(PySparkException, match="use mode append"):
        writing(keys(spark, "a"), place, "overwrite", apply="delete").save("s")
    assert upper(place, "s") == ap.Antichain(1)
