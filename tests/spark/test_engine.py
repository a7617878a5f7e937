"""Goal: from the driver, DataFrames of a shard are what a plain list of updates says, at every time, whatever
was written how; each write is one commit or none; errors are the library's own; and a driver that is asyncio
itself is never blocked."""

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import pyarrow.compute as pc
import pytest
from fastapi import FastAPI

import aiopersist as ap
from aiopersist.spark import SparkClient, connect
from aiopersist.testing.model import Model
from tests.spark.beside import Row, at, counted, upper
from tests.spark.schemas import PLAIN
from tests.spark.trouble import until

TINY: dict[str, Any] = {
    "inline_writes_single_max_bytes": 0,
    "blob_target_size": 4000,
    "row_group_bytes": 500,
}


def readers(place: str, name: str) -> int:
    return len(at(place, lambda client: client.inspect(name)).readers)


def appended(place: str, name: str, schema: Any, *appends: Any, since: Any = None) -> None:
    """Appends of `(updates, lower, upper)`; then since is moved, for good."""

    async def work(client: ap.Client) -> None:
        async with client.writer(name, schema) as writer:
            for updates, lower, upper in appends:
                await writer.compare_and_append(updates, lower, upper)
        if since is not None:
            async with client.critical_since(name, "c") as held:
                await held.compare_and_downgrade_since(0, 0, since)

    at(place, work)


# --- contents and changes --------------------------------------------------------------------------


class Table:
    """What the rows of a shard are, by definition: times and diffs of `(id, name, x)`, of which `id` is the
    key."""

    def __init__(self) -> None:
        self.model = Model()

    @property
    def upper(self) -> int:
        return int(self.model.upper[0])

    def contents(self, as_of: int) -> Counter[Row]:
        return Counter({(key, *val): diff for key, val, diff in self.model.contents(as_of)})

    def changes(self, start: int, end: int) -> Counter[Row]:
        found = self.model.changes(lower=[start], upper=[end])
        return Counter({(key, *val, at, diff): 1 for (key, val, at), diff in found.items()})

    def write(self, rows: list[Row], mode: str) -> None:
        """Rows `(id, name, x, diff)` at the upper."""
        now = self.upper
        updates = [(row[0], row[1:3], now, row[3]) for row in rows]
        ids = {row[0] for row in rows}
        if mode != "append" and now:
            updates += [
                (key, val, now, -diff)
                for key, val, diff in self.model.contents(now - 1)
                if mode == "overwrite" or key in ids
            ]
        self.model.append(updates, [now], [now + 1])


@pytest.mark.timeout(200)
def test_a_history_of_writes_is_what_the_model_says(spark: Any, place: str, name: str) -> None:
    """Goal: appends, upserts and overwrites, with diffs and without, in parts and inline, compacted or not:
    at every time the contents and the changes are those of the model."""
    rng, table = random.Random(7), Table()
    columns = "id long, name string, x double"

    def row(n: int) -> Row:
        return n, rng.choice(["a", "b", None]), rng.choice([0.5, float("inf"), None])

    with connect(spark, place, settings=ap.Settings(**TINY), maintenance=False) as sc:
        modes = ["append", "append", "upsert", "diffs", "overwrite", "upsert", "upsert"]
        for step, mode in enumerate(modes):
            if mode == "upsert":
                rows = [(*row(n), 1) for n in rng.sample(range(90), 40)]
            elif mode == "diffs":
                old = list(table.contents(table.upper - 1).items())
                rows = [(*r, -n) for r, n in rng.sample(old, 20)] + [(*row(200 + n), 3) for n in range(5)]
            else:
                rows = [(*row(rng.randrange(60)), 1) for _ in range(80)]
            extra: dict[str, Any] = {"diff": "d"} if mode == "diffs" else {"mode": mode}
            given = [r if mode == "diffs" else r[:3] for r in rows]
            df = spark.createDataFrame(given, columns + (", d int" if mode == "diffs" else ""))
            wrote = sc.write_df(df.repartition(3), name, keys=["id"], **extra)
            assert wrote == step == table.upper
            table.write(rows, "append" if mode == "diffs" else mode)

        last = table.upper - 1
        for as_of in (0, 2, 3, 4, last):
            assert counted(sc.snapshot_df(name, as_of, parallelism=4)) == table.contents(as_of)
        sums = {(*r, n): 1 for r, n in table.contents(last).items()}
        assert counted(sc.snapshot_df(name, expand=False)) == sums
        assert counted(sc.changes_df(name, 0)) == table.changes(0, table.upper)
        assert counted(sc.changes_df(name, 2, 5)) == table.changes(2, 5)
        assert counted(sc.changes_df(name, 3, 3)) == Counter()

        few = sc.snapshot_df(name, columns=["x", "id"], where=pc.field("key", "id") < 20)
        assert few.columns == ["x", "id"]
        wanted = [(r[2], r[0]) for r in table.contents(last).elements() if r[0] < 20]
        assert counted(few) == Counter(wanted)
        assert sc.snapshot_df(name, columns=[]).count() == table.contents(last).total()

        before = at(place, lambda client: client.fsck(name))
        assert before.ok, before.problems
        assert sc.compact(name, parallelism=3) is True
        assert sc.compact(name) is False
        assert counted(sc.snapshot_df(name)) == table.contents(last)
        assert counted(sc.changes_df(name, 0)) == table.changes(0, table.upper)  # since has not moved
        after = at(place, lambda client: client.fsck(name))
        assert after.ok, after.problems
        assert sum(b.parts > 0 for b in at(place, lambda client: client.inspect(name)).batches) == 1


def test_product_times(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: a snapshot at any product time; what needs int times says so, and nothing is written."""
    model, schema = Model([(0, 0)]), ap.Schema(str, int, time=2)
    updates = [("a", 1, (0, 0), 1), ("a", 1, (1, 0), 1), ("b", 2, (0, 2), 2), ("a", 1, (3, 1), -1)]
    model.append(updates, [(0, 0)], [(4, 4)])
    appended(place, name, schema, (updates, (0, 0), (4, 4)))
    for as_of in ((0, 0), (0, 3), (1, 0), (3, 3)):
        wanted = [row[:2] for row in model.contents(as_of) for _ in range(row[2])]
        assert counted(sc.snapshot_df(name, as_of)) == Counter(wanted)
    df = spark.createDataFrame([("c", 3)], "key string, val long")
    for call in (
        lambda: sc.snapshot_df(name),
        lambda: sc.snapshot_df(name, 3),
        lambda: sc.changes_df(name, 0),
        lambda: sc.write_df(df, name),
    ):
        with pytest.raises(ap.InvalidUsage) as found:
            call()
        assert found.value.kind in (ap.UsageKind.INVALID_TIME, ap.UsageKind.INVALID_COLUMN)
    assert upper(place, name) == ap.Antichain((4, 4))
    assert sc.compact(name) is True or sc.compact(name) is False
    assert counted(sc.snapshot_df(name, (3, 3))) == Counter({("a", 1): 1, ("b", 2): 2})


def test_a_hot_key_is_shared_out(spark: Any, place: str, name: str) -> None:
    """Goal: most rows have one key, and yet no task reads most of them; small settings reach the workers."""
    with connect(spark, place, settings=ap.Settings(**TINY)) as sc:
        rows = [("hot", n) for n in range(6000)] + [(f"cold {n}", n) for n in range(300)]
        df = spark.createDataFrame(rows, "key string, val long")
        sc.write_df(df.repartition(2), name, keys=["key"])
        parts = sum(b.parts for b in at(place, lambda client: client.inspect(name)).batches)
        assert parts > 10  # by the settings of this client, in the workers
        found = sc.snapshot_df(name, parallelism=8)
        assert 4 <= found.rdd.getNumPartitions() <= 16
        shares = found.rdd.mapPartitions(lambda part: [list(map(tuple, part))]).collect()
        assert sorted(row for share in shares for row in share) == sorted(rows)
        assert max(len(share) for share in shares) < len(rows) / 3


def test_settings_of_the_environment(
    spark: Any, place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOPERSIST_LOCATION", place)
    with connect(spark) as sc:
        assert place not in repr(sc)
        appended(place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
        with pytest.raises(ap.UnknownShard):
            sc.snapshot_df("other")


# --- writing ---------------------------------------------------------------------------------------


def test_times_of_rows(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: a column of times, or one time, is kept; what is not at or beyond the upper, or meets another
    writer, writes nothing."""
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

    other = threading.Thread(target=lambda: appended(place, name, PLAIN, ([], 22, 40)))

    def slow(batches: Any) -> Any:
        time.sleep(1.5)
        yield from batches

    other_starts = threading.Timer(0.7, other.start)
    other_starts.start()
    with pytest.raises(ap.UpperMismatch):
        sc.write_df(one.mapInArrow(slow, one.schema), name, time=30)
    other_starts.join()
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

    async def append(client: ap.Client) -> None:
        async with client.writer(name, PLAIN) as writer:
            for n in range(8):
                await writer.write([(f"k{n}", 1000 + n), (f"k{n + 30}", 2000 + n)])
                await asyncio.sleep(0.1)

    other = threading.Thread(target=lambda: at(place, append))
    other.start()
    new = [(f"k{n}", -n) for n in range(20)] + [("new", 0)]
    wrote = sc.write_df(
        spark.createDataFrame(new, "key string, val long").repartition(2), name, mode="upsert"
    )
    other.join()
    assert wrote > 1, "nobody came between"
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
        sc.snapshot_df("empty")  # at once: nobody may ever write it
    assert sc.changes_df("empty", 0).count() == 0
    assert sc.compact("empty") is False
    appended(place, "unit", ap.Schema(None, None), ([(None, None, 0, 3)], 0, 1))
    assert sc.snapshot_df("unit").count() == 3
    assert counted(sc.snapshot_df("unit", expand=False)) == Counter([(3,)])


# --- errors ----------------------------------------------------------------------------------------

USAGE = ap.UsageKind
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


# --- the end ---------------------------------------------------------------------------------------


def test_release_and_close(spark: Any, place: str, name: str) -> None:
    """Goal: leases end with what needs them; what is closed says so, and closing twice is nothing."""
    appended(place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
    sc = connect(spark, place)
    df = sc.snapshot_df(name)
    sc.changes_df(name, 0)
    assert readers(place, name) == 2
    assert df.count() == 1
    sc.release()
    assert readers(place, name) == 0
    kept, let_go = sc.snapshot_df(name), sc.snapshot_df(name)
    sc.release(let_go)
    assert readers(place, name) == 1
    assert kept.count() == 1
    for not_held in (let_go, kept.where("val = 1")):
        with pytest.raises(ap.InvalidUsage, match="released before"):
            sc.release(kept, not_held)
    assert readers(place, name) == 1
    sc.close()
    sc.close()
    assert readers(place, name) == 0
    for call in (lambda: sc.snapshot_df(name), lambda: sc.write_df(df, name), lambda: sc.compact(name)):
        with pytest.raises(ap.InvalidUsage) as found:
            call()
        assert found.value.kind == USAGE.CLOSED
    with connect(spark, place) as again:
        assert again.snapshot_df(name).count() == 1


def test_a_read_that_is_opened_while_it_closes(spark: Any, place: str, name: str) -> None:
    """Goal: it ends with an error, and leaves no lease, though others keep the place open."""
    appended(place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
    with connect(spark, place), ThreadPoolExecutor() as threads:
        mine = connect(spark, place)
        waiting = threads.submit(mine.snapshot_df, name, 1)
        until(lambda: readers(place, name) == 1, "the lease of who waits")
        mine.close()
        appended(place, name, PLAIN, ([], 1, 2))
        with pytest.raises(ap.InvalidUsage) as found:
            waiting.result(60)
        assert found.value.kind == USAGE.CLOSED
        assert readers(place, name) == 0


def test_one_closing_is_nothing_to_another(spark: Any, place: str, name: str) -> None:
    appended(place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
    with connect(spark, place) as mine:
        mine.snapshot_df(name)
        with connect(spark, place) as other:
            other.snapshot_df(name)
        assert readers(place, name) == 1


# --- asyncio ---------------------------------------------------------------------------------------


@pytest.mark.blocks_loop  # threads that import for the first time hold the interpreter
async def test_a_backend_that_drives_spark(spark: Any, place: str, name: str) -> None:
    """Goal: requests are answered by jobs, several at once."""
    app = FastAPI()
    async with await asyncio.to_thread(connect, spark, place) as sc:

        @app.post("/rows/{n}")
        async def rows(n: int) -> int:
            df = await asyncio.to_thread(
                spark.createDataFrame, [(f"k{n}", i) for i in range(n)], "key string, val long"
            )
            return await sc.awrite_df(df, name, keys=["key"], txn=("http", n))

        @app.get("/count")
        async def count() -> dict[str, int]:
            contents, changes = await asyncio.gather(sc.asnapshot_df(name), sc.achanges_df(name, 0))
            return {
                "contents": await asyncio.to_thread(contents.count),
                "changes": await asyncio.to_thread(changes.count),
            }

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert [(await http.post(f"/rows/{n}")).json() for n in (3, 4, 4)] == [0, 1, 1]
            assert (await http.get("/count")).json() == {"contents": 7, "changes": 7}
        assert await sc.acompact(name) is True
        with pytest.raises(ap.UnknownShard):
            await sc.asnapshot_df("other")


def sleeping(batches: Any) -> Any:
    for batch in batches:
        time.sleep(12)
        yield batch


async def active(spark: Any) -> list[int]:
    return list(await asyncio.to_thread(lambda: spark.sparkContext.statusTracker().getActiveJobsIds()))


async def until_idle(spark: Any) -> None:
    """Spark ends the tasks of a job that was cancelled at its own pace."""
    async with asyncio.timeout(20):
        while await active(spark):
            await asyncio.sleep(0.05)


@pytest.mark.blocks_loop
async def test_jobs_leave_the_threads_of_the_loop_to_others(spark: Any, place: str, name: str) -> None:
    """Goal: while more jobs wait than the loop has threads, other work still gets one."""
    async with await asyncio.to_thread(connect, spark, place) as sc:
        await asyncio.to_thread(appended, place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
        waiting = [asyncio.create_task(sc.asnapshot_df(name, 9)) for _ in range((os.cpu_count() or 1) + 5)]
        await asyncio.sleep(0.5)
        async with asyncio.timeout(20):
            await asyncio.to_thread(appended, place, name, PLAIN, ([], 1, 10))
            for df in await asyncio.gather(*waiting):
                assert df is not None


@pytest.mark.blocks_loop
async def test_a_client_that_is_closed_in_a_cancelled_scope(spark: Any, place: str, name: str) -> None:
    """Goal: its leases end all the same, also where others keep the place open."""
    await asyncio.to_thread(appended, place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
    async with await asyncio.to_thread(connect, spark, place):
        sc = await asyncio.to_thread(connect, spark, place)
        for _ in range(3):
            await sc.asnapshot_df(name)
        assert await asyncio.to_thread(readers, place, name) == 3
        with anyio.CancelScope() as scope:
            scope.cancel()
            await sc.aclose()
        async with asyncio.timeout(20):
            while await asyncio.to_thread(readers, place, name):
                await asyncio.sleep(0.05)


async def in_scope(scope: anyio.CancelScope, call: Any) -> None:
    with scope:
        await call
    assert scope.cancelled_caught


@pytest.mark.blocks_loop
@pytest.mark.parametrize("how", ["scope", pytest.param("task, again and again", marks=pytest.mark.long)])
async def test_a_cancelled_write_ends_its_job(spark: Any, place: str, name: str, how: str) -> None:
    """Goal: within seconds no task of it runs; nothing is written; the next write is as ever. A scope of
    anyio, as FastAPI has, cancels whatever its task waits for."""
    df = await asyncio.to_thread(spark.createDataFrame, [("a", 1)], "key string, val long")
    async with await asyncio.to_thread(connect, spark, place) as sc:
        assert await sc.awrite_df(df, name, keys=["key"]) == 0
        slow = await asyncio.to_thread(df.mapInArrow, sleeping, df.schema)
        scope = anyio.CancelScope()
        task = asyncio.create_task(in_scope(scope, sc.awrite_df(slow, name, txn=("a", 1))))
        async with asyncio.timeout(20):
            while not await active(spark):
                assert not task.done()
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        if how == "scope":
            scope.cancel()
        else:
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0.001)
        done, _ = await asyncio.wait([task], timeout=5)
        assert done
        assert task.cancelled() is (how != "scope")
        await until_idle(spark)
        async with ap.open(place, maintenance=False) as client:
            assert (await client.inspect(name)).upper == ap.Antichain(1)
            assert await client.txn_number(name, "a") is None
        assert await sc.awrite_df(df, name, txn=("a", 1)) == 1


@pytest.mark.blocks_loop
async def test_a_cancelled_read_that_waits_ends(spark: Any, place: str, name: str) -> None:
    """Goal: `asnapshot_df` of a time to come is waited for no longer than its caller waits."""
    async with ap.open(place) as client, client.writer(name, PLAIN) as writer:
        await writer.compare_and_append([], 0, 1)
        async with await asyncio.to_thread(connect, spark, place) as sc:
            task = asyncio.create_task(sc.asnapshot_df(name, 5))
            await asyncio.sleep(0.5)
            task.cancel()
            try:
                done, _ = await asyncio.wait([task], timeout=4)
            finally:
                await writer.compare_and_append([], 1, 6)  # so that it ends in any case
            await asyncio.wait([task], timeout=10)
            assert done
