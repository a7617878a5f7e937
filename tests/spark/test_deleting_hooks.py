"""Goal: a deletion deletes what it should, whatever happens between its steps: hooks are called as in
`test_hooks.py`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aiopersist as ap
from tests.spark.plain_client import at
from tests.spark.schemas import PLAIN
from tests.spark.test_hooks import (
    _in_one_process,  # noqa: F401  # a fixture
    append,
    columns,
    contents,
    forget,
    sent,
    some,
    source,
    writers,
)

KEY = ["key"]


def keys(*found: str | None) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_arrays([pa.array(found, pa.string())], KEY)


def deleting(place: str, name: str, hook: str = "writer", **options: str) -> Any:
    from aiopersist.spark.sessions import struct_type

    given = options | ({"txn_app_id": "app"} if hook == "streamWriter" else {})
    schema = struct_type(pa.schema([("key", pa.string())]))
    return getattr(source(place, name, apply="delete", **given), hook)(schema, False)


def deletes(place: str, name: str, given: Iterable[pa.RecordBatch]) -> None:
    committer = deleting(place, name)
    committer.commit([sent(committer).write(given)])


def changes(place: str, name: str, start: int) -> Counter[tuple[Any, ...]]:
    async def work(client: ap.Client) -> Counter[tuple[Any, ...]]:
        async with client.workers.shared_read(name, start=start) as read:
            (piece,) = await read.pieces(1)
            rows = [row async for batch in client.workers.read_piece(piece) for row in batch.to_pylist()]
        return Counter({(row["key"], row["val"], row["time"]): row["diff"] for row in rows})

    return at(place, work)


def test_all_rows_of_the_keys_go(place: str, name: str) -> None:
    """Goal: however many, and whatever their vals; a key that comes twice, or is not there, does no harm; the
    keys themselves are never rows."""
    append(place, name, [("a", 1), ("a", 1), ("a", 2), ("b", 1), ("c", 1)], 0, 1)
    deletes(place, name, keys("a", "c", "a", "z"))
    assert changes(place, name, 1) == Counter({("a", 1, 1): -2, ("a", 2, 1): -1, ("c", 1, 1): -1})
    assert contents(place, name) == Counter([("b", 1)])
    assert not writers(place, name)
    deletes(place, name, keys())
    assert contents(place, name) == Counter([("b", 1)])


def test_what_others_write_before_the_commit_goes_too(place: str, name: str) -> None:
    """Goal: after the keys were staged; what comes after the commit stays, also when a batch is repeated."""
    append(place, name, [("a", 1), ("b", 1)], 0, 1)
    message = sent(deleting(place, name, "streamWriter")).write(keys("a"))
    append(place, name, [("a", 2), ("c", 1)], 1, 2)
    committer = deleting(place, name, "streamWriter")
    committer.commit([message], 0)
    assert contents(place, name) == Counter([("b", 1), ("c", 1)])
    append(place, name, [("a", 3)], 3, 4)
    again = sent(deleting(place, name, "streamWriter")).write(keys("a"))
    committer.commit([again], 0)
    assert contents(place, name) == Counter([("a", 3), ("b", 1), ("c", 1)])
    assert not writers(place, name)


def test_another_writer_between_the_look_and_the_append(
    place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the job looks again, at what came since alone, and deletes that, too."""
    from aiopersist.spark import hooks

    append(place, name, [("a", 1), ("b", 1)], 0, 1)
    real, looks = hooks._run_here, []

    def run(work: Any, jobs: Any) -> Any:
        done = real(work, jobs)
        looks.append(sum(one.rows for one in done))
        if len(looks) < 3:
            append(place, name, [("a", 10 * len(looks))], len(looks), len(looks) + 1)
        return done

    monkeypatch.setattr(hooks, "_run_here", run)
    deletes(place, name, keys("a"))
    assert looks == [1, 1, 1]
    assert contents(place, name) == Counter([("b", 1)])
    assert changes(place, name, 3) == Counter({("a", 1, 3): -1, ("a", 10, 3): -1, ("a", 20, 3): -1})


def test_history_that_is_gone_between_the_looks(
    place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: then the job begins again; a row that went meanwhile is not taken away twice."""
    from aiopersist.spark import hooks

    append(place, name, [("a", 1), ("a", 2), ("b", 1)], 0, 1)
    real, looks = hooks._run_here, []

    def run(work: Any, jobs: Any) -> Any:
        done = real(work, jobs)
        looks.append(sum(one.rows for one in done))
        if len(looks) == 1:
            deletes(place, name, keys("a"))
            append(place, name, [("a", 3)], 2, 3)
        if len(looks) == 3:  # the second is that of the deletion within the first
            append(place, name, [("a", 4)], 3, 4)
            forget(place, name, 3)
        return done

    monkeypatch.setattr(hooks, "_run_here", run)
    deletes(place, name, keys("a"))
    assert looks == [2, 2, 3, 2]
    assert contents(place, name) == Counter([("b", 1)])


def test_nothing_that_was_staged_is_left(place: str, name: str) -> None:
    """Goal: the keys, which no state names, are deleted with the commit, not by a sweep."""
    append(place, name, [(f"k{n:06}", n) for n in range(20_000)], 0, 1)  # too large for the state
    deletes(place, name, keys(*[f"k{n:06}" for n in range(19_999)]))
    assert contents(place, name) == Counter({("k019999", 19999): 1})
    swept = at(place, lambda client: client.admin.sweep_leaked_blobs())
    assert not swept.keys


def test_a_condition(place: str, name: str) -> None:
    """Goal: rows for which it is null stay."""
    from aiopersist.spark.bridge import bridge
    from aiopersist.spark.hooks import _run_here
    from aiopersist.spark.location import SparkLocation
    from aiopersist.spark.plan import DELETE, WriteSpec, plan_open_write
    from aiopersist.spark.write import WriteJob

    async def fill(client: ap.Client) -> None:
        async with client.writer(name, PLAIN) as writer:
            await writer.write([("a", 1), ("b", 2), ("c", None), ("d", 4)])

    at(place, fill)
    location = SparkLocation.of(place, None, None)
    client = bridge().client(location)
    spec = WriteSpec(name, DELETE, where=(pc.field("key") > "a") & (pc.field("val") < 4))
    plan = bridge().run(partial(plan_open_write, client, pa.schema([]), spec))
    assert bridge().run(WriteJob(client, location, plan, _run_here, 2).commit, []) == 1
    assert contents(place, name) == Counter([("a", 1), ("c", None), ("d", 4)])


# --- tables -------------------------------------------------------------------------------------------


def table_of(place: str, name: str) -> dict[str, int]:
    async def work(client: ap.Client) -> dict[str, int]:
        return dict([entry async for entry in client.table(name, str, int).items()])

    return at(place, work)


def fill_table(place: str, name: str, **entries: int) -> None:
    async def work(client: ap.Client) -> None:
        await client.table(name, str, int).put_many(entries)

    at(place, work)


def test_a_table_loses_the_keys(place: str, name: str) -> None:
    """Goal: also those that got another val after the keys were staged."""
    fill_table(place, name, a=1, b=2)
    committer = deleting(place, name)
    message = sent(committer).write(keys("a", "z"))
    fill_table(place, name, a=3, c=4)
    committer.commit([message])
    assert table_of(place, name) == {"b": 2, "c": 4}


@pytest.mark.parametrize("hook", ["writer", "streamWriter"])
def test_a_table_takes_no_append(place: str, name: str, hook: str) -> None:
    """Goal: as soon as it can be said: a batch at its planning, a stream at the commit of its first batch."""
    fill_table(place, name, a=1)
    given = {"txn_app_id": "app"} if hook == "streamWriter" else {}

    def write() -> None:
        committer = getattr(source(place, name, **given), hook)(columns(), False)
        assert hook == "streamWriter"
        committer.commit([sent(committer).write(some(("a", 2)))], 0)

    with pytest.raises(ap.InvalidUsage, match="apply") as found:
        write()
    assert found.value.kind is ap.UsageKind.NOT_A_TABLE
    assert table_of(place, name) == {"a": 1}
    assert not writers(place, name) or hook == "writer"


@pytest.mark.parametrize("hook", ["writer", "streamWriter"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["upsert", "overwrite"])
def test_a_table_takes_a_key_once(place: str, name: str, hook: str, overwrite: bool) -> None:
    """Goal: over all tasks of a batch; refused as a whole."""
    fill_table(place, name, a=1, b=2)
    given = {} if overwrite else {"apply": "upsert"}
    given |= {"txn_app_id": "app"} if hook == "streamWriter" else {}
    batch = (0,) if hook == "streamWriter" else ()

    def write(*tasks: Iterable[pa.RecordBatch]) -> None:
        committer = getattr(source(place, name, **given), hook)(columns(), overwrite)
        sent_ = [sent(committer) for _ in tasks]
        committer.commit([task.write(rows) for task, rows in zip(sent_, tasks, strict=True)], *batch)

    with pytest.raises(ap.InvalidUpdate, match="'c' more than once"):
        write(some(("a", 9), ("c", 1)), some(("c", 2)))
    assert table_of(place, name) == {"a": 1, "b": 2}
    write(some(("a", 9)), some(("c", 2)))
    assert table_of(place, name) == ({"a": 9, "c": 2} if overwrite else {"a": 9, "b": 2, "c": 2})


# --- errors -------------------------------------------------------------------------------------------


def test_null_is_no_key(place: str, name: str) -> None:
    """Goal: the row at fault is named; nothing is deleted."""
    append(place, name, [("a", 1)], 0, 1)
    with pytest.raises(ap.InvalidUpdate, match="null") as found:
        deletes(place, name, keys("a", None))
    assert found.value.row == 1
    assert contents(place, name) == Counter([("a", 1)])


def test_a_shard_that_is_not_there_is_not_made(place: str, name: str) -> None:
    with pytest.raises(ap.UnknownShard):
        deleting(place, name, keys="key")
    with pytest.raises(ap.UnknownShard):
        committer = deleting(place, name, "streamWriter", keys="key")
        committer.commit([sent(committer).write(keys("a"))], 0)
    assert not at(place, lambda client: client.list_shards())


def test_columns_of_the_val_are_refused(place: str, name: str) -> None:
    """Goal: a row would be deleted whatever its val is."""
    append(place, name, [("a", 1)], 0, 1)
    with pytest.raises(ap.InvalidUsage, match="'val': a deletion takes") as found:
        source(place, name, apply="delete").writer(columns(), False)
    assert found.value.kind is ap.UsageKind.INVALID_COLUMN
