"""Goal: hooks of streams and of batch writes, called as Spark calls them, in one process: their work
beside others, and their leftovers."""

import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.spark.conftest import need_spark
from tests.spark.plain_client import Row, at
from tests.spark.schemas import PLAIN

COLUMNS = ("key", "val")


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    need_spark()
    from aiopersist.spark.bridge import bridge

    monkeypatch.setattr(bridge(), "is_worker", False)  # as it is again when the test is over


def columns(*more: str) -> Any:
    from aiopersist.spark.sessions import struct_type

    fields = [("key", pa.string()), *((name, pa.int64()) for name in ("val", *more))]
    return struct_type(pa.schema(fields))


def some(*rows: tuple[Any, ...], names: tuple[str, ...] = COLUMNS) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict(dict(zip(names, zip(*rows, strict=True), strict=True)))


def source(place: str, name: str, **options: str) -> Any:
    from aiopersist.spark.source import AiopersistSource

    return AiopersistSource({"path": name, "location": place, **options})


def sent(writer: Any) -> Any:
    """To a task."""
    return pickle.loads(pickle.dumps(writer))


def append(place: str, name: str, rows: list[tuple[str, int]], lower: int, upper: int) -> None:
    async def work(client: ap.Client) -> None:
        async with client.writer(name, PLAIN) as writer:
            updates = [(key, val, lower, 1) for key, val in rows]
            await writer.compare_and_append(updates, lower, upper)

    at(place, work)


def forget(place: str, name: str, since: int) -> None:
    """All history before."""

    async def work(client: ap.Client) -> None:
        async with client.critical_since(name, "c") as held:
            await held.compare_and_downgrade_since(0, 0, since)
        await client.admin.force_compaction(name)

    at(place, work)


def contents(place: str, name: str) -> Counter[Row]:
    async def work(client: ap.Client) -> Counter[Row]:
        async with client.reader(name) as reader, reader.snapshot() as snapshot:
            return Counter({(key, val): diff for key, val, diff in await snapshot.rows()})

    return at(place, work)


def writers(place: str, name: str) -> list[Any]:
    return list(at(place, lambda client: client.admin.inspect(name)).writers.values())


def names(place: str) -> set[str]:
    return set(at(place, lambda client: client.list_shards()))


# --- streaming writes ---------------------------------------------------------------------------------


def test_a_batch_has_one_writer(place: str, name: str) -> None:
    """Goal: it is registered when the batch is planned, with the lease that was asked for, and ends with the
    commit, or the abort; then nothing that was staged under it is written, and it is said what to do."""
    given = {"keys": "key", "lease_s": "7200", "txn_app_id": "app"}
    append(place, name, [("x", 0)], 0, 1)
    planned = source(place, name, **given).streamWriter(columns(), False)
    assert not writers(place, name)
    tasks = [sent(planned) for _ in range(2)]
    (writer,) = writers(place, name)
    assert writer.lease_s == 7200
    messages = [task.write(some(("a", 1))) for task in tasks]
    committer = source(place, name, **given).streamWriter(columns(), False)
    committer.abort([None, messages[0]], 0)
    assert not writers(place, name)
    late = tasks[0].write(some(("b", 2)))  # a task that begins only now
    for told in (messages, [late]):
        with pytest.raises(ap.BatchExpired) as found:
            committer.commit(told, 0)
        assert "lease_s" in found.value.__notes__[-1]
    assert contents(place, name) == Counter([("x", 0)])
    again = sent(source(place, name, **given).streamWriter(columns(), False))
    committer.commit([again.write(some(("a", 1)))], 0)
    assert contents(place, name) == Counter([("x", 0), ("a", 1)])
    committer.abort([None], 0)
    assert not writers(place, name)


def test_a_batch_that_is_aborted_leaves_no_shard_that_it_made(place: str, name: str) -> None:
    """Goal: nothing is made until a batch is planned; after the abort the next attempt makes it anew."""
    given = {"keys": "key", "txn_app_id": "app"}
    planned = source(place, name, **given).streamWriter(columns(), False)
    assert not names(place)
    message = sent(planned).write(some(("a", 1)))
    assert names(place) == {name}
    committer = source(place, name, **given).streamWriter(columns(), False)
    committer.abort([None, message], 0)
    assert not names(place)
    with pytest.raises(ap.ShardFinalized):  # a committer that was thought dead
        committer.commit([message], 0)
    again = sent(source(place, name, **given).streamWriter(columns(), False))
    committer.commit([again.write(some(("a", 1)))], 0)
    committer.abort([None, message], 0)  # whatever is aborted later
    assert contents(place, name) == Counter([("a", 1)])


def test_what_cannot_be_planned_is_told_by_tasks(place: str, name: str) -> None:
    """Goal: once, and as what it is; nothing is made."""
    planned = source(place, name, txn_app_id="app").streamWriter(columns(), False)
    message = sent(planned).write(some(("a", 1)))
    committer = source(place, name, txn_app_id="app").streamWriter(columns(), False)
    with pytest.raises(ap.InvalidUsage, match="in keys="):
        committer.commit([message], 0)
    committer.abort([message], 0)
    assert not names(place)


def test_a_column_of_times_beside_another_writer(place: str, name: str) -> None:
    """Goal: another append between planning and commit makes it fail, also if the times are still beyond the
    upper."""
    append(place, name, [("x", 0)], 0, 1)
    given = {"time": "t", "txn_app_id": "app"}
    timed = (*COLUMNS, "t")
    planned = source(place, name, **given).streamWriter(columns("t"), False)
    message = sent(planned).write(some(("a", 1, 7), names=timed))
    append(place, name, [("y", 0)], 1, 2)
    committer = source(place, name, **given).streamWriter(columns("t"), False)
    with pytest.raises(ap.UpperMismatch):
        committer.commit([message], 0)
    again = sent(source(place, name, **given).streamWriter(columns("t"), False))
    committer.commit([again.write(some(("a", 1, 7), names=timed))], 0)
    assert contents(place, name) == Counter([("x", 0), ("y", 0), ("a", 1)])


@pytest.mark.parametrize("hook", ["writer", "streamWriter"])
@pytest.mark.parametrize("anew", [False, True], ids=["dropped", "made anew"])
def test_a_shard_that_is_dropped_meanwhile(place: str, name: str, hook: str, anew: bool) -> None:
    """Goal: it stays dropped, and another that has its name gets nothing."""
    append(place, name, [("x", 0)], 0, 1)
    given = {"keys": "key"} | ({"txn_app_id": "app"} if hook == "streamWriter" else {})
    made = getattr(source(place, name, **given), hook)
    committer = made(columns(), False)
    message = sent(committer).write(some(("a", 1)))
    at(place, lambda client: client.admin.drop(name))
    if anew:
        append(place, name, [("new", 0)], 0, 1)
    batch = () if hook == "writer" else (0,)
    with pytest.raises(ap.ShardFinalized):
        committer.commit([message], *batch)
    committer.abort([message], *batch)
    assert names(place) == ({name} if anew else set())
    if anew:
        assert contents(place, name) == Counter([("new", 0)])


class Old(BaseModel):
    n: int | None


class New(Old):
    note: str | None = None


@pytest.mark.parametrize("mode", ["upsert", "overwrite"])
def test_a_schema_that_gets_a_field_meanwhile(place: str, name: str, mode: str) -> None:
    """Goal: between staging and commit: rows that have the field are retracted with it."""

    async def fill(client: ap.Client) -> None:
        async with client.writer(name, ap.Schema(str, Old)) as writer:
            await writer.compare_and_append([("a", Old(n=1), 0, 1)], 0, 1)

    async def evolve(client: ap.Client) -> None:
        await client.compare_and_evolve_schema(name, (await client.schema(name))[0], ap.Schema(str, New))
        async with client.writer(name, ap.Schema(str, New)) as writer:
            await writer.compare_and_append([("b", New(n=2, note="x"), 1, 1)], 1, 2)

    async def rows(client: ap.Client) -> list[tuple[str, New, int]]:
        async with client.reader(name, ap.Schema(str, New)) as reader, reader.snapshot() as snapshot:
            return list(await snapshot.rows())

    from aiopersist.spark.sessions import struct_type

    at(place, fill)
    given = {"apply": "upsert"} if mode == "upsert" else {}
    schema = struct_type(pa.schema([("key", pa.string()), ("n", pa.int64())]))
    committer = source(place, name, **given).writer(schema, mode == "overwrite")
    message = sent(committer).write(some(("b", 5), ("c", 6), names=("key", "n")))
    at(place, evolve)
    committer.commit([message])
    kept = [("a", New(n=1), 1)] if mode == "upsert" else []
    assert at(place, rows) == [*kept, ("b", New(n=5), 1), ("c", New(n=6), 1)]
    assert not writers(place, name)


# --- streaming reads ----------------------------------------------------------------------------------


def stream(place: str, name: str, **options: str) -> Any:
    found = source(place, name, **options)
    return found.streamReader(found.schema())


def read(reader: Any, start: Any, end: Any) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for part in reader.partitions(start, end):
        for batch in reader.read(part):
            found.update(tuple(row.values()) for row in batch.to_pylist())
    return found


def latest(reader: Any, start: Any) -> Any:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    return reader.latestOffset(start, ReadAllAvailable())


def test_a_shard_that_was_made_anew_is_another(place: str, name: str) -> None:
    """Goal: a query that is restarted at its checkpoint fails: what it has read is no part of the new one."""
    append(place, name, [("old", 0)], 0, 6)
    reader = stream(place, name, startingTime="0")
    start = reader.initialOffset()
    end = latest(reader, start)
    assert read(reader, start, end) == Counter([("old", 0, 0, 1)])
    at(place, lambda client: client.admin.drop(name))
    append(place, name, [("new", 0)], 0, 9)
    again = stream(place, name, startingTime="0")
    for act in (lambda: latest(again, end), lambda: read(again, end, {**end, "time": 9})):
        with pytest.raises(ap.ShardFinalized, match="another"):
            act()
    assert read(again, again.initialOffset(), latest(again, again.initialOffset())) == Counter(
        [("new", 0, 0, 1)]
    )


@pytest.mark.parametrize("start", ["snapshot", "latest"])
def test_a_query_that_begins_where_nothing_is_readable_yet(place: str, name: str, start: str) -> None:
    """Goal: since has come up to the upper: it waits for what can be read, and goes on from there."""
    append(place, name, [("a", 1)], 0, 4)
    forget(place, name, 4)
    given = {} if start == "snapshot" else {"startingTime": start}
    reader = stream(place, name, **given)
    begin = reader.initialOffset()
    assert latest(reader, begin) == begin
    append(place, name, [("b", 2)], 4, 5)
    first = latest(reader, begin)
    assert first["time"] == 5
    wanted = Counter([("a", 1), ("b", 2)]) if start == "snapshot" else Counter()
    assert read(reader, begin, first) == wanted
    append(place, name, [("c", 3)], 5, 6)
    second = latest(reader, first)
    rows = {row[:2] for row in read(reader, first, second)}
    assert rows == {("c", 3)}
    reader.stop()


def test_what_is_available_now(place: str, name: str) -> None:
    """Goal: a query that takes what is there ends where the shard ended when it began, in one step or in
    many, whatever comes meanwhile."""
    from pyspark.sql.streaming.datasource import ReadMaxRows

    for time in range(3):
        append(place, name, [("a", time)], time, time + 1)
    reader = stream(place, name, startingTime="0")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    append(place, name, [("late", 3)], 3, 4)
    assert latest(reader, start)["time"] == 3
    steps = [start]
    for _ in range(4):
        steps.append(reader.latestOffset(steps[-1], ReadMaxRows(1)))
    assert [step["time"] for step in steps] == [0, 1, 2, 3, 3]
    assert latest(stream(place, name, startingTime="0"), start)["time"] == 4


@pytest.mark.parametrize("wrong", ["[1, x]", "[1, -1]", "[true, 1]", '["1"]', "[1", "x", "-1"])
def test_times_that_are_none(wrong: str) -> None:
    from aiopersist.spark.options import Options

    assert Options({"asOf": " [1, 0]"}).time("asof") == (1, 0)
    with pytest.raises(ap.InvalidUsage, match="as_of"):
        Options({"as_of": wrong}).time("asof")
