"""Goal: a streaming query reads every change once, in batches that end between times, and writes each of its
batches once, across restarts; what cannot be resumed says so, and skips nothing."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.spark.beside import Row, at, upper
from tests.spark.schemas import PLAIN
from tests.spark.trouble import until

pytestmark = pytest.mark.timeout(150)


def append(place: str, name: str, times: list[list[Row]], start: int, *, finish: bool = False) -> None:
    """One append per time, of `(key, val, diff)`."""

    async def work(client: ap.Client) -> None:
        async with client.writer(name, PLAIN) as writer:
            for t, rows in enumerate(times, start):
                last = finish and t == start + len(times) - 1
                updates = [(key, val, t, diff) for key, val, diff in rows]
                await writer.compare_and_append(updates, t, ap.Antichain() if last else t + 1)

    at(place, work)


def updates(place: str, name: str) -> Counter[Row]:
    """All that is in the shard, by time."""

    async def work(client: ap.Client) -> Counter[Row]:
        found: Counter[Row] = Counter()
        async with client.shared_read(name, start=0) as read:
            for piece in await read.pieces(1):
                async for batch in client.read_piece(piece):
                    for row in batch.to_pylist():
                        found[row["key"], row["val"], row["time"]] += row["diff"]
        return Counter({row: n for row, n in found.items() if n})

    return at(place, work)


def history(n: int, width: int = 3) -> list[list[Row]]:
    return [[(f"k{t}-{i}", t, 1) for i in range(width)] for t in range(n)]


def rows(times: list[list[Row]], start: int = 0) -> Counter[Row]:
    """As a stream with `_time` and `_diff` shows them."""
    return Counter((key, val, t, diff) for t, part in enumerate(times, start) for key, val, diff in part)


class Batches:
    """What `foreachBatch` was given, batch by batch."""

    def __init__(self) -> None:
        self.found: list[tuple[int, Counter[Row]]] = []

    def __call__(self, df: Any, number: int) -> None:
        self.found.append((number, Counter(map(tuple, df.collect()))))

    @property
    def all(self) -> Counter[Row]:
        return sum((rows for _, rows in self.found), Counter())

    @property
    def times(self) -> list[set[int]]:
        return [{row[2] for row in rows} for _, rows in self.found if rows]


def stream(spark: Any, place: str, name: str, **options: Any) -> Any:
    return spark.readStream.format("aiopersist").option("location", place).options(**options).load(name)


def drained(df: Any, checkpoint: Path) -> Batches:
    """The batches of a run that takes what is available now."""
    found = Batches()
    writer = df.writeStream.foreachBatch(found).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(100)
    finally:
        query.stop()
    return found


@pytest.fixture(autouse=True)
def _registered(spark: Any) -> Iterator[None]:
    from aiopersist.spark import register

    register(spark)
    yield
    for query in spark.streams.active:
        query.stop()


# --- reading ---------------------------------------------------------------------------------------

STARTS: dict[str, tuple[dict[str, Any], Counter[Row], list[set[int]]]] = {
    "snapshot": ({"startingTime": "snapshot"}, rows(history(4)), [{3}]),
    "earliest": ({"startingTime": "earliest"}, rows(history(4)), [{0, 1, 2, 3}]),
    "a time": ({"startingTime": 2}, rows(history(4)[2:], 2), [{2, 3}]),
    "rows": ({"startingTime": 0, "max_rows_per_trigger": 7}, rows(history(4)), [{0, 1}, {2, 3}]),
    "few rows": ({"startingTime": 0, "maxRowsPerTrigger": 1}, rows(history(4)), [{0}, {1}, {2}, {3}]),
    "few bytes": ({"startingTime": 0, "max_bytes_per_trigger": 1}, rows(history(4)), [{0}, {1}, {2}, {3}]),
    "latest": ({"startingTime": "latest"}, Counter(), []),
}


@pytest.mark.parametrize(
    ("options", "wanted", "cuts"),
    [
        pytest.param(
            *case,
            id=n,
            marks=[] if n == "snapshot" else [pytest.mark.long],
        )
        for n, case in STARTS.items()
    ],
)
def test_available_now(
    spark: Any,
    place: str,
    name: str,
    tmp_path: Path,
    options: Any,
    wanted: Counter[Row],
    cuts: list[set[int]],
) -> None:
    """Goal: all that is there when the run begins, once, cut only between times; and a second run over the
    same checkpoint takes what came since."""
    append(place, name, history(4), 0)
    df = stream(spark, place, name, **options)
    found = drained(df, tmp_path / "c")
    if options["startingTime"] == "snapshot":  # contents, at the time that they are as of
        wanted = Counter((key, val, 3, 1) for key, val, _, _ in wanted)
    assert found.all == wanted
    assert found.times == cuts
    append(place, name, [[("late", 1, 1), ("k0-0", 0, -1)], []], 4)
    again = drained(df, tmp_path / "c")
    assert again.all == Counter([("late", 1, 4, 1), ("k0-0", 0, 4, -1)])
    assert drained(df, tmp_path / "c").all == Counter()


def test_a_large_append_is_cut_between_times(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: one append of many times is shared out over batches; none of its times is."""
    updates_ = [(f"k{n}", n, n // 5, 1) for n in range(100)]  # 5 at each of 20 times

    async def fill(client: ap.Client) -> None:
        async with client.writer(name, PLAIN) as writer:
            await writer.compare_and_append(updates_, 0, 20)

    at(place, fill)
    found = drained(stream(spark, place, name, startingTime=0, maxRowsPerTrigger=30), tmp_path / "c")
    assert found.all == Counter(updates_)
    assert 3 <= len(found.times) <= 6
    assert sum(map(len, found.times)) == 20, "a time is in two batches"


@pytest.mark.long
def test_a_finished_shard(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    append(place, name, history(2), 0, finish=True)
    df = stream(spark, place, name, startingTime=0)
    assert drained(df, tmp_path / "c").all == rows(history(2))
    assert drained(df, tmp_path / "c").all == Counter()


@pytest.mark.long
def test_an_empty_shard_and_expanded_rows(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: nothing, then the snapshot as rows without times, repeated, then new rows."""
    append(place, name, [], 0)
    df = stream(spark, place, name)
    assert df.columns == ["key", "val"]
    assert drained(df, tmp_path / "c").all == Counter()
    append(place, name, [[("a", 1, 2)], [("a", 1, -1)]], 0)
    assert drained(df, tmp_path / "c").all == Counter([("a", 1)])
    append(place, name, [[("b", 1, 2)]], 2)
    assert drained(df, tmp_path / "c").all == Counter([("b", 1), ("b", 1)])


def move_since(place: str, name: str, since: int) -> None:
    async def work(client: ap.Client) -> None:
        async with client.critical_since(name, "c") as held:
            await held.compare_and_downgrade_since(0, 0, since)
        await client.force_compaction(name)

    at(place, work)


async def leases(client: ap.Client, name: str) -> list[str]:
    """After a commit, which ends what is overdue."""
    async with client.writer(name, PLAIN):
        pass
    return list((await client.inspect(name)).readers)


def test_a_restart_with_a_named_hold(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: while the query is away others may compact: what it has not read is kept; once its lease has
    expired and since moved on, a restart fails, says what to do, and gives nothing."""
    append(place, name, history(3), 0)
    move_since(place, name, 0)
    df = stream(spark, place, name, startingTime=0, hold_name="nightly", lease_s=3600)
    assert drained(df, tmp_path / "c").all == rows(history(3))
    append(place, name, [[("x", 1, 1)], [("x", 1, -1)]], 3)
    move_since(place, name, 5)
    since = at(place, lambda client: client.inspect(name)).since.time
    assert isinstance(since, int) and since <= 2, "the hold keeps what a restart needs"
    assert drained(df, tmp_path / "c").all == Counter([("x", 1, 3, 1), ("x", 1, 4, -1)])

    async def expire(client: ap.Client) -> None:
        async with client.reader(name, hold_name="nightly") as reader:
            await reader.release()

    append(place, name, [[("y", 1, 1)], [("y", 2, 1)]], 5)
    at(place, expire)
    move_since(place, name, 7)
    assert at(place, lambda client: client.inspect(name)).since == ap.Antichain(7)
    refused(df, tmp_path / "c")


@pytest.mark.long
def test_a_hold_that_expires(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    """Goal: the same when nobody ends the hold, and the query was away for longer than its lease."""
    append(place, name, history(3), 0)
    move_since(place, name, 0)
    df = stream(spark, place, name, startingTime=0, hold_name="nightly", lease_s=3)
    assert drained(df, tmp_path / "c").all == rows(history(3))
    append(place, name, [[("x", 1, 1)], [("x", 1, -1)]], 3)
    until(lambda: "name:nightly" not in at(place, lambda client: leases(client, name)), "the end of the hold")
    move_since(place, name, 5)
    refused(df, tmp_path / "c")
    fresh = stream(spark, place, name)
    assert not drained(fresh, tmp_path / "new").all  # since is at the upper: nothing is readable yet
    append(place, name, [[]], 5)
    assert drained(fresh, tmp_path / "new").all == Counter((key, val) for key, val, _, _ in rows(history(3)))


def refused(df: Any, checkpoint: Path) -> None:
    """A restart whose history is gone."""
    from pyspark.errors import StreamingQueryException

    with pytest.raises(StreamingQueryException) as found:
        drained(df, checkpoint)
    for said in ("SinceViolation", "hold_name", "new checkpoint"):
        assert said in str(found.value)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": ({"as_of": 1}, "unknown option 'asof'"),
    "no start": ({"startingTime": "now"}, "neither a time nor one of"),
    "two limits": ({"max_rows_per_trigger": 1, "max_bytes_per_trigger": 1}, "not both"),
    "no limit": ({"max_rows_per_trigger": 0}, "at least 1"),
    "expand": ({"startingTime": 0, "expand": "x"}, "neither true nor false"),
}


@pytest.mark.long
@pytest.mark.parametrize(("options", "said"), BAD.values(), ids=BAD)
def test_streams_that_cannot_be(
    spark: Any, place: str, name: str, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    from pyspark.errors import PySparkException

    append(place, name, history(1), 0)
    with pytest.raises(PySparkException, match=said):
        drained(stream(spark, place, name, **options), tmp_path / "c")


def test_product_times_are_refused(spark: Any, place: str, name: str, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    at(place, lambda client: client.writer(name, ap.Schema(str, int, time=2)).__aenter__())
    with pytest.raises(PySparkException, match="product times"):
        drained(stream(spark, place, name), tmp_path / "c")


# --- writing ---------------------------------------------------------------------------------------


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
    assert not at(place, lambda client: client.inspect(f"{name}-to")).writers
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
    """Goal: reading is no reason for history to go: since moves only where somebody moves it."""
    append(place, name, history(4), 0)
    df = stream(spark, place, name, startingTime=0, maxRowsPerTrigger=3)
    drained(df, tmp_path / "c")
    assert at(place, lambda client: client.inspect(name)).since == ap.Antichain(0)


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
        ({"apply": "x"}, "neither insert"),
    ]
    for n, (options, said) in enumerate(wrong):
        with pytest.raises(PySparkException, match=said):
            sink(df, place, name, tmp_path / f"c{n}", **options)
