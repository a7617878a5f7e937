"""Writing, errors; see `test_engine.py`."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

import aiopersist as ap
from aiopersist.spark import SparkClient, connect
from tests.spark.engine_kit import USAGE, appended
from tests.spark.plain_client import Row, at, counted, steady_writer, upper
from tests.spark.schemas import PLAIN

REFUSED: list[tuple[str, Callable[[Any, Any], Any], Any, Any]] = [
    ("unknown shard", lambda sc, df: sc.snapshot_df("nope"), ap.UnknownShard, None),
    ("changes of unknown", lambda sc, df: sc.changes_df("nope", 0), ap.UnknownShard, None),
    ("compact unknown", lambda sc, df: sc.compact("nope"), ap.UnknownShard, None),
    ("no keys for a new one", lambda sc, df: sc.write_df(df, "nope"), ap.InvalidUsage, USAGE.INVALID_COLUMN),
    (
        "unknown keys",
        lambda sc, df: sc.write_df(df, "nope", keys=["q"]),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
    ),
    ("keys twice", lambda sc, df: sc.write_df(df, "nope", keys=["key", "Key"]), ap.InvalidUsage, None),
    ("before since", lambda sc, df: sc.snapshot_df("s", 1), ap.SinceViolation, None),
    ("changes at since", lambda sc, df: sc.changes_df("s", 2), ap.SinceViolation, None),
    ("changes from the start", lambda sc, df: sc.changes_df("s", 0), ap.SinceViolation, None),
    ("not complete", lambda sc, df: sc.snapshot_df("s", 5, wait=False), ap.NotReadable, None),
    ("changes not complete", lambda sc, df: sc.changes_df("s", 3, 6, wait=False), ap.NotReadable, None),
    ("end before start", lambda sc, df: sc.changes_df("s", 4, 3), ap.InvalidUsage, USAGE.INVALID_BOUNDS),
    ("a time below 0", lambda sc, df: sc.snapshot_df("s", -1), ap.InvalidUsage, USAGE.INVALID_TIME),
    ("a tuple for an int", lambda sc, df: sc.snapshot_df("s", (1, 2)), ap.InvalidUsage, USAGE.INVALID_TIME),
    (
        "unknown column",
        lambda sc, df: sc.snapshot_df("s", columns=["q"]),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
    ),
    (
        "where of an unknown field",
        lambda sc, df: sc.snapshot_df("s", where=pc.field("q") > 1),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
    ),
    (
        "where of another type",
        lambda sc, df: sc.snapshot_df("s", where=pc.field("val") > "a"),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
    ),
    (
        "where of what is to come",  # it waits for nothing
        lambda sc, df: sc.changes_df("s", 3, 9, where="val > 1"),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
    ),
    ("other keys", lambda sc, df: sc.write_df(df, "s", keys=["val"]), ap.InvalidUsage, USAGE.INVALID_COLUMN),
    ("unknown mode", lambda sc, df: sc.write_df(df, "s", mode="merge"), ap.InvalidUsage, None),
    ("upsert with time", lambda sc, df: sc.write_df(df, "s", mode="upsert", time=9), ap.InvalidUsage, None),
    ("time column", lambda sc, df: sc.write_df(df, "s", time="q"), ap.InvalidUsage, USAGE.INVALID_COLUMN),
    ("diff column", lambda sc, df: sc.write_df(df, "s", diff="key"), ap.InvalidUsage, USAGE.INVALID_COLUMN),
    ("txn", lambda sc, df: sc.write_df(df, "s", txn=("a", -1)), ap.InvalidUsage, USAGE.INVALID_TXN),
    ("column too many", lambda sc, df: sc.write_df(df.selectExpr("*", "1 x"), "s"), ap.InvalidUsage, None),
    (
        "column missing",
        lambda sc, df: sc.write_df(df.select("val"), "s"),
        ap.InvalidUsage,
        USAGE.INVALID_COLUMN,
    ),
    ("another type", lambda sc, df: sc.write_df(df.selectExpr("val key", "val"), "s"), ap.InvalidUsage, None),
    ("finished", lambda sc, df: sc.write_df(df, "end"), ap.UpperMismatch, None),
]


@pytest.fixture(scope="module")
def refusing(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, SparkClient, Any]]:
    """A shard `s` of upper 5 and since 2, and a finished one."""
    place = str(tmp_path_factory.mktemp("refusing") / "shards")
    rows = [("k", n, n, 1) for n in range(5)]
    appended(place, "s", PLAIN, (rows, 0, 5), since=2)
    appended(place, "end", PLAIN, (rows, 0, ap.Antichain()))
    with connect(spark, place) as sc:
        yield place, sc, spark.createDataFrame([("a", 1)], "key string, val long")


# --- writing ------------------------------------------------------------------------------------------


def touched(path: Path) -> bool:
    """Whether it is there, within a minute."""
    for _ in range(6000):
        if path.exists():
            return True
        time.sleep(0.01)
    return False


def test_times_of_rows(spark: Any, sc: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: a column of times, or one time, is kept; a write that is not at or beyond the upper, or meets
    another writer, writes nothing."""
    rows = [("a", 1, 3), ("b", 2, 7), ("a", 1, 7)]
    df = spark.createDataFrame(rows, "key string, val long, t long")
    assert sc.write_df(df, name, keys=["key"], time="T") == 7
    assert upper(place, name) == ap.Antichain(8)
    assert counted(sc.changes_df(name, 0)) == Counter({(*row, 1): 1 for row in rows})
    with pytest.raises(ap.InvalidUsage) as found:
        sc.write_df(df, name, time="t")
    assert found.value.kind == ap.UsageKind.UPDATE_NOT_BEYOND_LOWER
    one = spark.createDataFrame([("c", 3)], "key string, val long")
    with pytest.raises(ap.InvalidUsage):
        sc.write_df(one, name, time=7)
    assert upper(place, name) == ap.Antichain(8)
    assert sc.write_df(one, name, time=20) == 20
    assert sc.write_df(one, name) == 21
    assert counted(sc.snapshot_df(name, 19)) == Counter({("a", 1): 2, ("b", 2): 1})

    planned, overtaken = tmp_path / "planned", tmp_path / "overtaken"

    def overtake() -> None:
        assert touched(planned)
        appended(place, name, PLAIN, ([], 22, 40))
        overtaken.touch()

    def slow(batches: Any) -> Any:
        planned.touch()
        assert touched(overtaken)
        yield from batches

    other = threading.Thread(target=overtake)
    other.start()
    with pytest.raises(ap.UpperMismatch):
        sc.write_df(one.mapInArrow(slow, one.schema), name, time=30)
    other.join()
    assert upper(place, name) == ap.Antichain(40)
    assert counted(sc.changes_df(name, 22)) == Counter()


@pytest.mark.parametrize("mode", ["append", "upsert", "overwrite"])
def test_a_txn_is_written_once(spark: Any, sc: Any, place: str, name: str, mode: str) -> None:
    df = spark.createDataFrame([("a", 1), ("b", 2)], "key string, val long")
    other = spark.createDataFrame([("a", 9)], "key string, val long")
    assert sc.write_df(df, name, keys=["key"], mode=mode, txn=("job", 5)) == 0
    for number in (5, 4):
        assert sc.write_df(other, name, mode=mode, txn=("job", number)) == 0
    assert upper(place, name) == ap.Antichain(1)
    assert at(place, lambda client: client.txn_number(name, "job")) == 5
    assert sc.write_df(other, name, mode=mode, txn=("job", 6)) == 1
    wanted = {
        "append": {("a", 1), ("b", 2), ("a", 9)},
        "upsert": {("a", 9), ("b", 2)},
        "overwrite": {("a", 9)},
    }
    assert set(counted(sc.snapshot_df(name))) == wanted[mode]


def test_a_txn_with_times_is_written_once(spark: Any, sc: Any, place: str, name: str) -> None:
    df = spark.createDataFrame([("a", 1, 3)], "key string, val long, t long")
    for _ in range(2):
        assert sc.write_df(df, name, keys=["key"], time="t", txn=("job", 1)) == 3
    assert counted(sc.changes_df(name, 0)) == Counter([("a", 1, 3, 1)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"mode": "upsert"}, marks=pytest.mark.long),
        pytest.param({"time": 0}, marks=pytest.mark.long),
    ],
    ids=["append", "upsert", "time"],
)
def test_a_repeat_on_a_finished_shard(
    spark: Any, sc: Any, place: str, name: str, options: dict[str, Any]
) -> None:
    """Goal: a job that is repeated after its shard was finished learns that it was done; another is
    refused."""
    df = spark.createDataFrame([("a", 1)], "key string, val long")
    assert sc.write_df(df, name, keys=["key"], txn=("job", 1), **options) == 0
    appended(place, name, PLAIN, ([], 1, ap.Antichain()))
    assert sc.write_df(df, name, txn=("job", 1), **options) >= 0
    with pytest.raises(ap.UpperMismatch):
        sc.write_df(df, name, txn=("job", 2), **options)
    assert counted(sc.snapshot_df(name)) == Counter([("a", 1)])


def test_an_upsert_into_nothing_beyond_which_since_is(spark: Any, sc: Any, place: str, name: str) -> None:
    appended(place, name, PLAIN, since=3)
    df = spark.createDataFrame([("a", 9)], "key string, val long")
    assert sc.write_df(df, name, mode="upsert") == 4
    assert counted(sc.snapshot_df(name)) == Counter([("a", 9)])


@pytest.mark.parametrize("mode", ["upsert", "overwrite"])
def test_replacing_where_all_history_is_gone(spark: Any, sc: Any, place: str, name: str, mode: str) -> None:
    """Goal: since has come up to the upper, as on a shard that keeps an hour and was at rest for longer: what
    is there is not readable, which a read says, and it is replaced all the same."""
    rows = [("a", 1, 0, 1), ("b", 2, 1, 1)]
    appended(place, name, PLAIN, (rows, 0, 2), since=2)
    with pytest.raises(ap.SinceViolation):
        sc.snapshot_df(name)
    df = spark.createDataFrame([("a", 9)], "key string, val long")
    assert sc.write_df(df, name, mode=mode) == 3
    kept = [("b", 2)] if mode == "upsert" else []
    assert counted(sc.snapshot_df(name)) == Counter([("a", 9), *kept])


def test_writers_beside_an_upsert(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: what others append between the look-up and the commit is replaced as well: at the time of the
    upsert its keys have its rows and no others, and all else is as it was just before."""
    first = [(f"k{n}", n) for n in range(50)]
    sc.write_df(spark.createDataFrame(first, "key string, val long"), name, keys=["key"])
    new = [(f"k{n}", -n) for n in range(20)] + [("new", 0)]
    df = spark.createDataFrame(new, "key string, val long").repartition(2)
    with steady_writer(place, name, PLAIN):
        wrote = sc.write_df(df, name, mode="upsert")
    assert wrote > 1, "no other writer came between"
    before, after = (counted(sc.snapshot_df(name, t)) for t in (wrote - 1, wrote))
    keys = {row[0] for row in new}
    assert after == Counter({row: n for row, n in before.items() if row[0] not in keys}) + Counter(new)


def test_an_upsert_of_a_key_twice_is_refused_on_an_empty_shard_too(
    spark: Any, sc: Any, place: str, name: str
) -> None:
    df = spark.createDataFrame([("a", 1), ("a", 2)], "key string, val long")
    with pytest.raises(ap.InvalidUpdate, match="more than once"):
        sc.write_df(df, name, keys=["key"], mode="upsert")
    assert not at(place, lambda client: client.list_shards())


@pytest.mark.long
@pytest.mark.parametrize("rows", [[("a", 3), ("a", 4)], [("z", 1), ("z", 1)]], ids=["there", "new"])
def test_an_upsert_of_a_key_twice_is_refused(
    spark: Any, sc: Any, place: str, name: str, rows: list[Row]
) -> None:
    df = spark.createDataFrame([("a", 1), ("b", 2)], "key string, val long")
    sc.write_df(df, name, keys=["key"])
    with pytest.raises(Exception, match="more than once"):
        sc.write_df(spark.createDataFrame(rows, "key string, val long"), name, mode="upsert")
    assert upper(place, name) == ap.Antichain(1)


def test_nothing_is_something_that_can_be_written_and_read(
    spark: Any, sc: Any, place: str, name: str
) -> None:
    """Goal: empty frames make a shard and a time; an empty shard has no contents yet, and no changes."""
    nothing = spark.createDataFrame([], "key string, val long")
    assert sc.write_df(nothing, name, keys=["key"]) == 0
    assert sc.snapshot_df(name).columns == ["key", "val"]
    assert counted(sc.snapshot_df(name)) == Counter()
    assert sc.write_df(nothing, name, mode="overwrite") == 1
    assert sc.write_df(nothing, name, mode="upsert", txn=("a", 1)) == 2
    assert sc.write_df(nothing, name, time=9) == 2  # no row, no time
    appended(place, "empty", PLAIN)
    with pytest.raises(ap.NotReadable):
        sc.snapshot_df("empty")  # at once: it may never be written
    assert sc.changes_df("empty", 0).count() == 0
    assert sc.compact("empty") is False
    appended(place, "unit", ap.Schema(None, None), ([(None, None, 0, 3)], 0, 1))
    assert sc.snapshot_df("unit").count() == 3
    assert counted(sc.snapshot_df("unit", expand=False)) == Counter([(3,)])


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "error", "kind"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_cannot_be_is_refused_at_once(
    refusing: Any, call: Callable[[Any, Any], Any], error: type[ap.Error], kind: Any
) -> None:
    """Goal: the library's own errors, on the driver, before anything runs: nothing is made or written."""
    place, sc, df = refusing
    with pytest.raises(error) as found:
        call(sc, df)
    if kind is not None:
        assert isinstance(found.value, ap.InvalidUsage)
        assert found.value.kind == kind
    assert upper(place, "s") == ap.Antichain(5)
    assert set(at(place, lambda client: client.list_shards())) == {"s", "end"}


def test_finished_and_compacted_shards_are_read(refusing: Any) -> None:
    _, sc, _ = refusing
    rows = [("k", n) for n in range(5)]
    assert sorted(counted(sc.snapshot_df("end"))) == rows
    assert counted(sc.changes_df("end", 2)) == Counter({("k", n, n, 1): 1 for n in range(2, 5)})
    assert counted(sc.changes_df("s", 3)) == Counter({("k", n, n, 1): 1 for n in range(3, 5)})
    assert sorted(counted(sc.snapshot_df("s", 2))) == rows[:3]


@pytest.mark.parametrize(
    "url",
    [
        "postgres://me:hunter2@127.0.0.1:1/db",
        "postgres://127.0.0.1:1/db?password=hunter2",
        "postgres://127.0.0.1:1/db?passw%6Frd=hunter2",
        "postgres://me:12?hunter2@127.0.0.1:1/db",
        "postgres://me:12/hunter2@127.0.0.1:1/db",
    ],
)
def test_a_url_with_a_secret_is_refused(spark: Any, tmp_path: Path, url: str) -> None:
    with pytest.raises(ap.InvalidLocation) as found:
        connect(spark, blob=f"file://{tmp_path}", consensus=url)
    assert "hunter2" not in str(found.value)


@pytest.mark.parametrize(
    "location",
    [
        "mem://x",
        "env:AIOPERSIST_TEST_UNSET",
        "gopher://x",
        ap.Location(ap.open_blob("mem://x"), ap.open_consensus("mem://x")),
    ],
    ids=["memory", "unset", "scheme", "instances"],
)
def test_locations_that_cannot_travel_are_refused(spark: Any, location: Any) -> None:
    with pytest.raises(ap.InvalidLocation):
        connect(spark, location)


def test_a_location_by_name(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: the secret is in no error, no repr, no log."""
    url = "postgres://me:hunter2@127.0.0.1:1/db"
    monkeypatch.setenv("AIOPERSIST_TEST_SECRET", url)
    settings = ap.Settings(open_timeout_s=0.3)
    with pytest.raises(ap.StorageUnavailable) as found:
        connect(spark, blob=f"file://{tmp_path}", consensus="env:AIOPERSIST_TEST_SECRET", settings=settings)
    seen: BaseException | None = found.value
    while seen is not None:
        assert "hunter2" not in repr(seen) + str(seen)
        seen = seen.__cause__ or seen.__context__
    assert "hunter2" not in caplog.text
