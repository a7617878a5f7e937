"""Goal: every call that changes an `Indexed` does all of what it says or nothing, takes its seqno in its
turn, shares commits with those that arrive beside it, and refuses what it must, by name and frontier."""

import asyncio
import itertools
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist import indexed
from aiopersist.indexed import Fenced, Indexed, Refused, Stopped, Stream, UnknownStream
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.schemas import TIME_MAX

PRODUCT = ap.Antichain((0, 1), (1, 0))


async def two(ix: Indexed) -> tuple[Stream[str, int], Stream[str, int]]:
    return await ix.register("a", str, int), await ix.register("b", str, int)


def at(*times: int, key: str = "k") -> list[tuple[str, int, int, int]]:
    """An update at each of these times."""
    return [(key, time, time, 1) for time in times]


async def read(ix: Indexed, stream: Stream[Any, Any]) -> list[Any]:
    async with await ix.snapshot(stream) as snapshot:
        return sorted(tuple(row) for row in await snapshot.rows())


async def last_seqno(ix: Indexed, stream: Stream[Any, Any]) -> int:
    async with await ix.snapshot(stream) as snapshot:
        return snapshot.seqno


def commits(client: ap.Client) -> int:
    return client.metrics["consensus.compare_and_set"].count


async def events_of(listener: Any) -> list[Any]:
    """What it tells until nothing more comes for a moment, or it ends."""
    told: list[Any] = []
    try:
        while True:
            async with asyncio.timeout(0.15):
                item = await anext(listener)
            told.append(item.updates.rows() if isinstance(item, indexed.Records) else item.time)
    except (TimeoutError, StopAsyncIteration):
        return told


class Faulty(NamedTuple):
    client: ap.Client
    faults: Faults
    url: str


@pytest.fixture
async def faulty() -> AsyncIterator[Faulty]:
    """A client whose store fails when told to, and that gives up soon."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    blob = FaultyBlob(ap.open_blob(url), faults)
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    options = ap.Settings(retry_timeout_s=0.02, watch_timeout_s=0.1)
    async with ap.open(url), ap.open(blob=blob, consensus=consensus, settings=options) as client:
        yield Faulty(client, faults, url)
        faults.heal()


# --- register, load, description ---------------------------------------------------------------------


async def test_a_new_stream_begins_at_zero_and_empty(client: ap.Client) -> None:
    async with client.indexed("ix", background=False) as ix:
        stream = await ix.register("a", str, int)
        assert stream.name == "a"
        found = await ix.description("a")
        assert found == ap.Description(ap.Antichain(0), ap.Antichain(0), ap.Antichain(0))
        async with await ix.snapshot(stream) as snapshot:
            frontiers = (snapshot.since, snapshot.seal)
            assert (snapshot.seqno, *frontiers) == (0, ap.Antichain(0), ap.Antichain(0))
            assert await snapshot.rows() == []


async def test_registering_again_loads_without_a_commit_or_a_seqno(mem: ap.Client, ix: Indexed) -> None:
    stream = await ix.register("a", str, int)
    await ix.write([(stream, at(3))])
    await ix.seal([stream], 2)
    before = commits(mem)
    again, loaded = await ix.register("a", str, int), await ix.load("a", str, int)
    assert commits(mem) == before
    assert loaded is not None
    for handle in (again, loaded):
        assert await read(ix, handle) == [("k", 3, 3, 1)]
        assert (await ix.description("a")).upper == ap.Antichain(2)
    assert await ix.write([(again, at(4)), (loaded, at(5))]) == 3


async def test_streams_outlive_their_instance(client: ap.Client, location: Any) -> None:
    async with client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        await ix.write([(a, at(7, 1)), (b, at(5))])
        await ix.seal([a], 3)
        await ix.allow_compaction([(a, 2)])
        await ix.destroy("b")
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as other,
        other.indexed("ix", background=False) as ix,
    ):
        loaded = await ix.load("a", str, int)
        assert loaded is not None
        assert await read(ix, loaded) == [("k", 1, 2, 1), ("k", 7, 7, 1)]
        assert await ix.description("a") == ap.Description(0, 3, 2)
        assert await ix.destroy("b") is False
        with pytest.raises(UnknownStream):
            await ix.register("b", str, int)
        assert await ix.write([(loaded, at(3))]) == 4


async def test_loading_an_unknown_name_creates_nothing(mem: ap.Client, ix: Indexed) -> None:
    before = commits(mem)
    assert await ix.load("a", str, int) is None
    assert commits(mem) == before
    with pytest.raises(UnknownStream, match="'a'"):
        await ix.description("a")
    assert ix.counters()["streams"] == 0


OTHER_CODECS = [(bytes, int), (str, float), (str, int | None), (str | None, int), (int, str)]


@pytest.mark.parametrize("call", ["register", "load"])
@pytest.mark.parametrize("codecs", OTHER_CODECS, ids=str)
async def test_other_codecs_are_a_mismatch_that_shows_both(ix: Indexed, call: str, codecs: Any) -> None:
    await ix.register("a", str, int)
    with pytest.raises(ap.CodecMismatch) as caught:
        await getattr(ix, call)("a", *codecs)
    assert caught.value.requested.same_as(ap.Schema(*codecs))
    assert caught.value.actual.same_as(ap.Schema(str, int))


@pytest.mark.parametrize("call", ["register", "load"])
@pytest.mark.parametrize("codecs", [(str, int), (bytes, float)], ids=str)
async def test_a_destroyed_name_is_unknown_whatever_the_codecs(ix: Indexed, call: str, codecs: Any) -> None:
    await ix.register("a", str, int)
    await ix.destroy("a")
    with pytest.raises(UnknownStream, match="'a'"):
        await getattr(ix, call)("a", *codecs)


@pytest.mark.parametrize("call", ["register", "load", "destroy", "description", "inspect"])
@pytest.mark.parametrize("name", ["", "x" * 513, None, 5, b"a"], ids=repr)
async def test_names_that_cannot_be_are_refused(ix: Indexed, call: str, name: Any) -> None:
    arguments = (name, str, int) if call in ("register", "load") else (name,)
    with pytest.raises(ap.InvalidUsage) as caught:
        await getattr(ix, call)(*arguments)
    assert caught.value.kind is ap.UsageKind.INVALID_NAME


async def test_what_cannot_be_stored_is_a_type_error(ix: Indexed) -> None:
    with pytest.raises(TypeError):
        await ix.register("a", object, int)
    assert await ix.load("a", str, int) is None


async def test_tasks_that_register_one_name_agree(mem: ap.Client, ix: Indexed) -> None:
    """The first one decides the codecs; it is one commit."""
    before = commits(mem)
    codecs = [int, int, float, int, float]
    found = await asyncio.gather(*[ix.register("a", str, val) for val in codecs], return_exceptions=True)
    assert [isinstance(f, ap.CodecMismatch) for f in found] == [val is float for val in codecs]
    assert commits(mem) - before == 1
    assert ix.counters()["streams"] == 1


async def test_two_indexed_and_a_shard_of_one_name_are_three_things(mem: ap.Client, ix: Indexed) -> None:
    await mem.writer("ix", ap.Schema(str, int))
    async with mem.indexed("other", background=False) as other:
        mine, theirs = await ix.register("a", str, int), await other.register("a", str, int)
        await ix.write([(mine, at(1))])
        assert await read(other, theirs) == []
        assert await other.write([(theirs, at(2))]) == 1
    assert list(await mem.list_shards()) == ["ix"]
    assert await read(ix, mine) == [("k", 1, 1, 1)]


@pytest.mark.parametrize("name", ["", None, 7, "x" * 513], ids=repr)
async def test_an_indexed_has_a_name_like_a_shard(mem: ap.Client, name: Any) -> None:
    with pytest.raises(ap.InvalidUsage) as caught:
        await mem.indexed(name)
    assert caught.value.kind is ap.UsageKind.INVALID_NAME


async def test_description_is_of_what_is_durable(ix: Indexed) -> None:
    a, _ = await two(ix)
    await ix.seal([a], 9)
    await ix.allow_compaction([(a, 12)])
    found = await ix.description("a")
    assert (found.lower, found.upper, found.since) == (ap.Antichain(0), ap.Antichain(9), ap.Antichain(12))


# --- destroy -----------------------------------------------------------------------------------------


async def test_destroying_is_true_once(ix: Indexed) -> None:
    await two(ix)
    assert await ix.destroy("a") is True
    assert await ix.destroy("a") is False
    with pytest.raises(UnknownStream, match="'never'"):
        await ix.destroy("never")
    found = await asyncio.gather(*[ix.destroy("b") for _ in range(5)])
    assert sorted(found) == [False] * 4 + [True]


async def test_destroying_takes_no_seqno(ix: Indexed) -> None:
    a, b = await two(ix)
    assert await ix.write([(a, at(1)), (b, at(1))]) == 1
    await ix.destroy("a")
    await ix.destroy("a")
    await ix.register("c", str, int)
    assert await ix.write([(b, at(2))]) == 2


class Destroyed(NamedTuple):
    id: str
    call: Callable[[Indexed, Any], Awaitable[Any]]
    refused: bool = False


ON_DESTROYED = [
    Destroyed("write", lambda ix, s: ix.write([(s, at(5))]), True),
    Destroyed("write nothing", lambda ix, s: ix.write([(s, [])]), True),
    Destroyed("seal", lambda ix, s: ix.seal([s], 5), True),
    Destroyed("allow_compaction", lambda ix, s: ix.allow_compaction([(s, 5)]), True),
    Destroyed("description", lambda ix, s: ix.description(s.name)),
    Destroyed("snapshot", lambda ix, s: ix.snapshot(s)),
    Destroyed("listen", lambda ix, s: ix.listen(s)),
    Destroyed("inspect", lambda ix, s: ix.inspect(s)),
]


@pytest.mark.parametrize("case", ON_DESTROYED, ids=lambda case: case.id)
async def test_calls_on_a_destroyed_stream(ix: Indexed, case: Destroyed) -> None:
    """They fail as on one that was never registered."""
    a, b = await two(ix)
    await ix.destroy("a")
    if not case.refused:
        with pytest.raises(UnknownStream, match="'a'"):
            await case.call(ix, a)
        return
    with pytest.raises(Refused) as caught:
        await case.call(ix, a)
    error = caught.value
    assert (error.seqno, error.stream, error.time, error.frontier) == (1, "a", None, None)
    assert await ix.write([(b, at(1))]) == 2


async def test_a_handle_of_another_indexed_is_an_unknown_stream(mem: ap.Client, ix: Indexed) -> None:
    async with mem.indexed("other", background=False) as other:
        stranger = await other.register("stranger", str, int)
    with pytest.raises(Refused) as caught:
        await ix.write([(stranger, at(1))])
    assert (caught.value.stream, caught.value.time, caught.value.frontier) == ("stranger", None, None)
    with pytest.raises(UnknownStream):
        await ix.snapshot(stranger)
    with pytest.raises(UnknownStream):
        await ix.listen(stranger)


async def test_what_is_called_before_a_destroy_is_in_and_what_comes_after_is_refused(ix: Indexed) -> None:
    a, b = await two(ix)
    _, listener = await ix.listen(a)
    found = await asyncio.gather(
        ix.write([(a, at(1)), (b, at(1))]),
        ix.destroy("a"),
        ix.write([(a, at(2)), (b, at(2))]),
        ix.write([(b, at(3))]),
        return_exceptions=True,
    )
    assert [found[0], found[1], found[3]] == [1, True, 3]
    assert isinstance(found[2], Refused) and (found[2].seqno, found[2].stream) == (2, "a")
    assert await read(ix, b) == [("k", 1, 1, 1), ("k", 3, 3, 1)]
    async with asyncio.timeout(5):
        told = [item async for item in listener]
    assert [item.updates.rows() for item in told] == [at(1)]


async def test_the_blobs_of_a_destroyed_stream_are_reclaimed_but_those_of_a_snapshot_stay() -> None:
    options = ap.Settings(inline_writes_single_max_bytes=0, rollup_every=2, blob_cache_bytes=0)
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url, settings=options) as client, client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        for t in range(3):
            await ix.write([(a, at(t)), (b, at(t))])
        snapshot = await ix.snapshot(a)
        await ix.destroy("a")
        for _ in range(6):
            await ix.seal([b], 0)
            await ix.step()
        assert sorted(await snapshot.rows()) == at(0, 1, 2)
        assert await parts_below(url) == 6
        await snapshot.aclose()
        for _ in range(8):
            await ix.seal([b], 0)
            await ix.step()
        assert await parts_below(url) == 3
        assert await read(ix, b) == at(0, 1, 2)


async def parts_below(url: str) -> int:
    return len([key async for key, _ in ap.open_blob(url).list("") if key.endswith(".parquet")])


# --- write -------------------------------------------------------------------------------------------


async def test_times_not_sealed_come_in_any_order(client: ap.Client) -> None:
    async with client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        await ix.seal([a], 10)
        times = [500, 10, 11, 10, TIME_MAX, 400]
        assert await ix.write([(a, at(*times)), (b, at(3, 0)), (a, at(12))]) == 2
        assert await read(ix, a) == sorted(at(*times, 12))
        assert await read(ix, b) == at(0, 3)


class Offence(NamedTuple):
    id: str
    entries: list[tuple[str, list[int]]]
    """A write: streams and times. `a` is sealed at 10, `b` at 20, `gone` is destroyed."""
    stream: str
    time: int | None
    frontier: int | None


OFFENCES = [
    Offence("before the seal", [("a", [9])], "a", 9, 10),
    Offence("beside good ones", [("a", [10, 11, 4, 12])], "a", 4, 10),
    Offence("the first time, not the least", [("a", [11, 9, 3, 5])], "a", 9, 10),
    Offence("the first stream", [("a", [10]), ("b", [20, 19]), ("a", [1])], "b", 19, 20),
    Offence("the same stream again", [("a", [10]), ("a", [9, 8])], "a", 9, 10),
    Offence("a time before a stream", [("a", [9]), ("gone", [50])], "a", 9, 10),
    Offence("a stream before a time", [("gone", [50]), ("a", [9])], "gone", None, None),
    Offence("a stream without updates", [("a", [10]), ("gone", []), ("b", [3])], "gone", None, None),
    Offence("many", [("a", [*range(10, 3000), 7, 2])], "a", 7, 10),
]


@pytest.mark.parametrize("case", OFFENCES, ids=lambda case: case.id)
async def test_a_write_is_refused_as_a_whole_by_its_first_offence(ix: Indexed, case: Offence) -> None:
    a, b = await two(ix)
    streams = {"a": a, "b": b, "gone": await ix.register("gone", str, int)}
    await ix.destroy("gone")
    await ix.seal([a], 10)
    await ix.seal([b], 20)
    with pytest.raises(Refused) as caught:
        await ix.write([(streams[name], at(*times)) for name, times in case.entries])
    error = caught.value
    frontier = None if case.frontier is None else ap.Antichain(case.frontier)
    assert (error.seqno, error.stream, error.time, error.frontier) == (3, case.stream, case.time, frontier)
    assert await read(ix, a) == await read(ix, b) == []
    assert (await ix.inspect(a)).unsealed == (await ix.inspect(b)).unsealed == []
    assert await ix.write([(a, at(10)), (b, at(20))]) == 4


async def test_the_first_offence_is_found_over_all_parts_of_a_large_write() -> None:
    """Goal: a bad time is seen wherever it is: in the first part, in the last, in one already uploaded."""
    options = ap.Settings(inline_writes_single_max_bytes=0, blob_target_size=200, row_group_bytes=80)
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url, settings=options) as client, client.indexed("ix", background=False) as ix:
        a = await ix.register("a", str, int)
        await ix.seal([a], 10)
        for bad in (0, 1, 57, 99):
            times = [20 + n if n not in (bad, 98) else 9 - (n == 98) for n in range(100)]
            with pytest.raises(Refused) as caught:
                await ix.write([(a, at(*times))])
            assert caught.value.time == times[min(bad, 98)]
        assert await read(ix, a) == []
        async with asyncio.timeout(10):
            while await parts_below(url):
                await asyncio.sleep(0.01)


async def test_empty_writes_take_a_seqno_and_nothing_else(ix: Indexed) -> None:
    a, b = await two(ix)
    assert await ix.write([]) == 1
    assert await ix.write([(a, [])]) == 2
    assert await ix.write([(a, []), (b, at(1)), (a, [])]) == 3
    assert (await ix.inspect(a)).unsealed == []
    assert (await ix.inspect(b)).unsealed == [(0, 3, 1, 1)]
    assert ix.counters()["unsealed_blobs"] == 0


async def given_later(rows: list[Any]) -> AsyncIterator[Any]:
    for row in rows:
        await asyncio.sleep(0)
        yield row


def given_one_by_one(rows: list[Any]) -> Iterator[Any]:
    yield from rows


def as_table(rows: list[Any]) -> pa.Table:
    columns = list(zip(*rows, strict=True))
    types = [pa.string(), pa.int64(), pa.int64(), pa.int64()]
    names = ["key", "val", "time", "diff"]
    return pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names)


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": given_one_by_one,
    "async generator": given_later,
    "table": as_table,
    "reader": lambda rows: as_table(rows).to_reader(),
    "batch": lambda rows: as_table(rows).to_batches()[0],
    "polars": lambda rows: pl.DataFrame(as_table(rows)),
    "async tables": lambda rows: given_later([as_table(rows[:2]), as_table(rows[2:])]),
    "updates": lambda rows: [ap.Update(*row) for row in rows],
}


@pytest.mark.parametrize("form", FORMS)
async def test_updates_come_in_every_form(ix: Indexed, form: str) -> None:
    rows = [("b", 1, 9, 1), ("a", 2, 3, -1), ("b", 1, 9, 1), ("c", 5, 0, 4)]
    a, b = await two(ix)
    _, events = await ix.listen(a)
    assert await ix.write([(a, FORMS[form](rows)), (b, at(1))]) == 1
    assert await events_of(events) == [rows]
    with pytest.raises(Refused):
        await ix.seal([a], 5)
        await ix.write([(b, at(1)), (a, FORMS[form](rows))])
    assert await read(ix, b) == at(1)


class Bad(NamedTuple):
    id: str
    call: Callable[[Indexed, Any, Any], Awaitable[Any]]
    error: type[Exception] = ap.InvalidUsage


WRONG = ap.InvalidUpdate
BAD = [
    Bad("write: a wrong type", lambda ix, a, b: ix.write([(b, at(1)), (a, [(5, 1, 1, 1)])]), WRONG),
    Bad("write: a negative time", lambda ix, a, b: ix.write([(b, at(1)), (a, at(-1))]), WRONG),
    Bad("write: too late a time", lambda ix, a, b: ix.write([(a, at(2**63))]), WRONG),
    Bad("write: a product time", lambda ix, a, b: ix.write([(a, [("k", 1, (1, 2), 1)])]), WRONG),
    Bad("write: a null diff", lambda ix, a, b: ix.write([(a, [("k", 1, 1, None)])]), WRONG),
    Bad("write: a large diff", lambda ix, a, b: ix.write([(a, [("k", 1, 1, 2**63)])]), WRONG),
    Bad("write: a short row", lambda ix, a, b: ix.write([(b, at(1)), (a, [("k", 1, 1)])]), WRONG),
    Bad(
        "write: bad in the middle",
        lambda ix, a, b: ix.write([(b, at(1)), (a, [*at(*range(2000)), ("k", "v", 1, 1)])]),
        WRONG,
    ),
    Bad("write: no columns", lambda ix, a, b: ix.write([(a, pa.table({"key": ["k"]}))]), WRONG),
    Bad("write: a stream, not pairs", lambda ix, a, b: ix.write(a)),
    Bad("write: a pair, not a list", lambda ix, a, b: ix.write((a, at(1)))),
    Bad("write: a name", lambda ix, a, b: ix.write([("a", at(1))])),
    Bad("write: None", lambda ix, a, b: ix.write(None)),
    Bad("write: a triple", lambda ix, a, b: ix.write([(a, at(1), 5)])),
    Bad("seal: a stream, not a list", lambda ix, a, b: ix.seal(a, 5)),
    Bad("seal: a name", lambda ix, a, b: ix.seal(["a"], 5)),
    Bad("seal: one name as a list", lambda ix, a, b: ix.seal("a", 5)),
    Bad("seal: negative", lambda ix, a, b: ix.seal([a, b], -1)),
    Bad("seal: too late", lambda ix, a, b: ix.seal([a], 2**63)),
    Bad("seal: a bool", lambda ix, a, b: ix.seal([a], True)),
    Bad("seal: a float", lambda ix, a, b: ix.seal([a], 5.0)),
    Bad("seal: None", lambda ix, a, b: ix.seal([a], None)),
    Bad("seal: a product time", lambda ix, a, b: ix.seal([a], (1, 2))),
    Bad("seal: empty", lambda ix, a, b: ix.seal([a], ap.Antichain())),
    Bad("compaction: empty", lambda ix, a, b: ix.allow_compaction([(b, 3), (a, ap.Antichain())])),
    Bad("compaction: two elements", lambda ix, a, b: ix.allow_compaction([(a, PRODUCT)])),
    Bad("compaction: negative", lambda ix, a, b: ix.allow_compaction([(a, -1)])),
    Bad("compaction: too late", lambda ix, a, b: ix.allow_compaction([(a, 2**63)])),
    Bad("compaction: a bool", lambda ix, a, b: ix.allow_compaction([(a, True)])),
    Bad("compaction: text", lambda ix, a, b: ix.allow_compaction([(a, "3")])),
    Bad("compaction: None", lambda ix, a, b: ix.allow_compaction([(a, None)])),
    Bad("compaction: no pairs", lambda ix, a, b: ix.allow_compaction([a])),
    Bad("compaction: a name", lambda ix, a, b: ix.allow_compaction([("a", 3)])),
    Bad("snapshot: a name", lambda ix, a, b: ix.snapshot("a")),
    Bad("listen: a name", lambda ix, a, b: ix.listen("a")),
    Bad("compact: not a request", lambda ix, a, b: ix.compact(a)),
    Bad("apply: not a response", lambda ix, a, b: ix.apply("a", None)),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.id)
async def test_bad_arguments_change_nothing_and_take_no_seqno(mem: ap.Client, ix: Indexed, case: Bad) -> None:
    a, b = await two(ix)
    before = commits(mem)
    with pytest.raises(case.error):
        await case.call(ix, a, b)
    assert commits(mem) == before
    assert await read(ix, a) == await read(ix, b) == []
    assert [(await ix.description(n)).since for n in "ab"] == [ap.Antichain(0)] * 2
    assert await ix.write([(a, at(0)), (b, at(0))]) == 1


async def test_an_input_that_raises_is_a_write_that_was_never_called(ix: Indexed) -> None:
    a, b = await two(ix)

    def broken() -> Iterator[Any]:
        yield ("k", 1, 1, 1)
        raise ZeroDivisionError

    async def broken_later() -> AsyncIterator[Any]:
        yield ("k", 1, 1, 1)
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    for given in (broken, broken_later):
        with pytest.raises(ZeroDivisionError):
            await ix.write([(b, at(1)), (a, given())])
    assert await read(ix, a) == await read(ix, b) == []
    assert await ix.write([(a, at(1))]) == 1


async def test_bad_updates_among_writes_that_share_a_commit_fail_alone(ix: Indexed) -> None:
    a, b = await two(ix)
    found = await asyncio.gather(
        ix.write([(a, at(1))]),
        ix.write([(a, at(2)), (b, [("k", None, 1, 1)])]),
        ix.write([(b, at(3))]),
        return_exceptions=True,
    )
    assert (found[0], found[2]) == (1, 2)
    assert isinstance(found[1], ap.InvalidUpdate)
    assert (await read(ix, a), await read(ix, b)) == (at(1), at(3))


async def test_a_handle_of_other_codecs_cannot_write(mem: ap.Client, ix: Indexed) -> None:
    """As it has the name of a stream elsewhere: nothing of the write is there, and no seqno is taken."""
    a, b = await two(ix)
    async with mem.indexed("other", background=False) as other:
        wrong = await other.register("a", str, float)
    found = await asyncio.gather(
        ix.write([(b, at(1))]),
        ix.write([(b, at(2)), (wrong, [("k", 0.5, 1, 1)])]),
        ix.write([(a, at(3))]),
        return_exceptions=True,
    )
    assert (found[0], found[2]) == (1, 2)
    assert isinstance(found[1], ap.CodecMismatch)
    assert (await read(ix, a), await read(ix, b)) == (at(3), at(1))


@pytest.mark.parametrize("name", ["ä/ö", "a" * 512, "__class__", "1", " ", "a\n"], ids=repr)
async def test_any_text_is_a_name(client: ap.Client, name: str) -> None:
    async with client.indexed("ix", background=False) as ix:
        stream = await ix.register(name, str, int)
        assert await ix.write([(stream, at(1))]) == 1
    async with client.indexed("ix", background=False) as ix:
        loaded = await ix.load(name, str, int)
        assert loaded is not None and loaded.name == name
        assert await read(ix, loaded) == at(1)


async def test_a_name_that_is_no_text_leaves_all_else_alone(ix: Indexed) -> None:
    a, _ = await two(ix)
    found = await asyncio.gather(
        ix.write([(a, at(1))]), ix.register("\ud800", str, int), return_exceptions=True
    )
    assert found[0] == 1
    assert isinstance(found[1], ap.InvalidUsage)


# --- seal, allow_compaction --------------------------------------------------------------------------


async def test_sealing_moves_several_streams_or_none(ix: Indexed) -> None:
    a, b = await two(ix)
    assert await ix.seal([a, b], 4) == 1
    assert await ix.seal([b, b], 9) == 2
    with pytest.raises(Refused) as caught:
        await ix.seal([a, b], 8)
    error = caught.value
    assert (error.seqno, error.stream, error.time, error.frontier) == (3, "b", 8, ap.Antichain(9))
    assert [(await ix.description(n)).upper for n in "ab"] == [ap.Antichain(4), ap.Antichain(9)]
    assert await ix.seal([a, b], 9) == 4
    assert await ix.seal([a, b], 9) == 5
    assert await ix.seal([], 1) == 6
    assert await ix.seal([a], TIME_MAX) == 7
    assert [(await ix.description(n)).upper for n in "ab"] == [ap.Antichain(TIME_MAX), ap.Antichain(9)]


async def test_sealing_names_the_first_stream_that_refuses(ix: Indexed) -> None:
    a, b = await two(ix)
    gone = await ix.register("gone", str, int)
    await ix.destroy("gone")
    await ix.seal([a], 4)
    for streams, wanted in (([b, gone, a], ("gone", None)), ([b, a, gone], ("a", 4))):
        with pytest.raises(Refused) as caught:
            await ix.seal(streams, 3)
        frontier = caught.value.frontier
        assert (caught.value.stream, frontier and frontier.time) == wanted
        assert caught.value.time == (None if wanted[0] == "gone" else 3)
    assert (await ix.description("b")).upper == ap.Antichain(0)


async def test_a_write_at_the_seal_is_in_and_one_below_is_not(ix: Indexed) -> None:
    a, _ = await two(ix)
    await ix.seal([a], 5)
    assert await ix.write([(a, at(5))]) == 2
    with pytest.raises(Refused, match=r"'a'.*\{5\}.*4"):
        await ix.write([(a, at(4))])


async def test_since_goes_on_for_several_streams_or_none(ix: Indexed) -> None:
    """Goal: it may repeat and pass the seal, not go back; named twice, it is held against the first."""
    a, b = await two(ix)
    assert await ix.allow_compaction([(a, 4), (b, ap.Antichain(100))]) == 1
    assert await ix.allow_compaction([(a, 4), (a, 6), (a, 6)]) == 2
    with pytest.raises(Refused) as caught:
        await ix.allow_compaction([(b, 200), (a, 9), (a, 8)])
    error = caught.value
    assert (error.seqno, error.stream, error.time, error.frontier) == (3, "a", 8, ap.Antichain(9))
    assert [(await ix.description(n)).since for n in "ab"] == [ap.Antichain(6), ap.Antichain(100)]
    with pytest.raises(Refused) as caught:
        await ix.allow_compaction([(b, 99), (a, 2)])
    assert (caught.value.stream, caught.value.frontier) == ("b", ap.Antichain(100))
    assert await ix.allow_compaction([]) == 5
    assert (await ix.description("a")).upper == ap.Antichain(0)


# --- seqnos ------------------------------------------------------------------------------------------


async def test_each_command_takes_the_next_seqno_and_nothing_else_does(mem: ap.Client, ix: Indexed) -> None:
    a, b = await two(ix)
    assert await ix.write([(a, at(1, 5))]) == 1
    assert await ix.seal([a], 3) == 2
    await ix.register("c", str, int)
    await ix.step()
    await ix.description("a")
    assert await ix.allow_compaction([(a, 1)]) == 3
    snapshot, listener = await ix.listen(a)
    await listener.aclose()
    await snapshot.aclose()
    with pytest.raises(Refused) as caught:
        await ix.write([(a, at(2))])
    assert caught.value.seqno == 4
    assert await last_seqno(ix, a) == 4
    assert await last_seqno(ix, b) == 4
    async with mem.indexed("ix", readonly=True) as reader:
        loaded = await reader.load("a", str, int)
        assert loaded is not None
        assert await last_seqno(reader, loaded) == 4
    assert await ix.write([(b, at(2))]) == 5


async def test_a_refused_seqno_is_durable(client: ap.Client) -> None:
    """The last thing that happens is a refusal: the next instance goes on after it."""
    async with client.indexed("ix", background=False) as ix:
        a, _ = await two(ix)
        await ix.seal([a], 3)
        with pytest.raises(Refused):
            await ix.write([(a, at(2))])
    async with client.indexed("ix", background=False) as ix:
        assert await ix.seal([a], 3) == 3


async def test_batches_cover_the_seqnos_between_commits(ix: Indexed) -> None:
    """Goal: each stream's batches are consecutive, from its own upper to the last command of the commit."""
    a, b = await two(ix)
    assert await ix.write([(a, at(4, 2))]) == 1
    assert (await ix.inspect(a)).unsealed == [(0, 1, 2, 4)]
    await ix.write([(b, at(7))])
    await ix.seal([a], 1)
    await asyncio.gather(
        ix.write([(b, at(9))]),
        ix.write([(a, at(5))]),
        ix.write([(a, at(3))]),
        ix.seal([a], 2),
        ix.write([(b, at(1)), (a, at(0))]),
        return_exceptions=True,
    )
    assert (await ix.inspect(a)).unsealed == [(0, 1, 2, 4), (1, 8, 3, 5)]
    assert (await ix.inspect(b)).unsealed == [(0, 2, 7, 7), (2, 8, 9, 9)]


# --- group commit ------------------------------------------------------------------------------------


async def test_calls_that_arrive_together_are_one_compare_and_set(client: ap.Client) -> None:
    async with client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        before = commits(client)
        calls: list[Awaitable[int]] = []
        for n in range(60):
            calls += [ix.write([(a, at(n + 1)), (b, at(n))]), ix.seal([a], n), ix.allow_compaction([(b, n)])]
        assert await asyncio.gather(*calls) == list(range(1, 181))
        assert commits(client) - before == 1
        assert len((await ix.inspect(a)).unsealed) == len((await ix.inspect(b)).unsealed) == 1
        assert (await ix.inspect(b)).unsealed == [(0, 180, 0, 59)]


async def test_callers_that_come_one_after_the_other_share_commits_under_load() -> None:
    """While one commit is on its way the next group gathers: two round trips, not twenty."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    async with ap.open(blob=ap.open_blob(url), consensus=consensus) as client:
        async with client.indexed("ix", background=False) as ix:
            a, _ = await two(ix)
            faults.latency_s = (0.1, 0.1)
            before = commits(client)
            calls = []
            for n in range(20):
                calls.append(asyncio.ensure_future(ix.write([(a, at(n))])))
                await asyncio.sleep(0.002)
            assert await asyncio.gather(*calls) == list(range(1, 21))
            assert commits(client) - before <= 3
            faults.latency_s = (0.0, 0.0)


async def test_commands_are_applied_in_the_order_of_the_calls(ix: Indexed) -> None:
    a, b = await two(ix)
    found = await asyncio.gather(
        ix.write([(a, at(4))]),
        ix.seal([a], 5),
        ix.write([(a, at(4)), (b, at(1))]),
        ix.write([(a, at(5))]),
        ix.seal([a], 6),
        ix.seal([a], 5),
        ix.allow_compaction([(a, 3)]),
        ix.allow_compaction([(a, 2)]),
        ix.write([(b, at(8))]),
        return_exceptions=True,
    )
    refused = {n: (e.seqno, e.time, e.frontier) for n, e in enumerate(found) if isinstance(e, Refused)}
    assert refused == {2: (3, 4, ap.Antichain(5)), 5: (6, 5, ap.Antichain(6)), 7: (8, 2, ap.Antichain(3))}
    assert [f for f in found if isinstance(f, int)] == [1, 2, 4, 5, 7, 9]
    assert await read(ix, a) == [("k", 4, 4, 1), ("k", 5, 5, 1)]
    assert await read(ix, b) == at(8)


async def test_a_slow_write_keeps_its_place(ix: Indexed) -> None:
    """Goal: neither encoding on threads nor slow iterators reorder: what was called first is sealed last."""
    a, b = await two(ix)
    _, events = await ix.listen(a)

    async def slow() -> AsyncIterator[Any]:
        for row in at(1, 2, 3, key="slow"):
            await asyncio.sleep(0.02)
            yield row

    large = at(*[4] * 30_000, key="large")
    found = await asyncio.gather(
        ix.write([(a, slow())]),
        ix.write([(a, large)]),
        ix.write([(b, at(1)), (a, at(5))]),
        ix.seal([a], 9),
        ix.write([(a, at(8))]),
        return_exceptions=True,
    )
    assert found[:4] == [1, 2, 3, 4]
    assert isinstance(found[4], Refused)
    told = await events_of(events)
    rows = [row for item in told if isinstance(item, list) for row in item]
    assert [key for key, _ in itertools.groupby(row[0] for row in rows)] == ["slow", "large", "k"]
    assert len(rows) == 30_004
    assert told[-1] == 9


async def test_a_refused_call_returns_only_after_the_commit_of_its_group() -> None:
    """Goal: whoever is told its seqno finds it durable: the answer waits for the store."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    async with ap.open(blob=ap.open_blob(url), consensus=consensus) as client, ap.open(url) as other:
        ix = await client.indexed("ix", background=False)
        a, _ = await two(ix)
        await ix.seal([a], 5)
        faults.latency_s = (0.1, 0.1)
        call = asyncio.ensure_future(ix.write([(a, at(4))]))
        await asyncio.sleep(0.05)
        assert not call.done()
        with pytest.raises(Refused):
            await call
        faults.latency_s = (0.0, 0.0)
        async with other.indexed("ix", readonly=True) as reader:
            assert await last_seqno(reader, a) == 2


async def test_nobody_sees_what_is_not_durable(faulty: Faulty) -> None:
    """Goal: neither a snapshot nor a listener of the very instance; a snapshot waits for the commit."""
    async with faulty.client.indexed("ix", background=False) as ix:
        a, _ = await two(ix)
        _, events = await ix.listen(a)
        faulty.faults.fail_next("compare_and_set", Outcome.REFUSED, times=100)
        write = asyncio.ensure_future(ix.write([(a, at(4))]))
        await asyncio.sleep(0)
        with pytest.raises(ap.StorageUnavailable):
            await ix.snapshot(a)
        with pytest.raises(ap.StorageUnavailable):
            await write
        faulty.faults.heal()
        async with await ix.snapshot(a) as snapshot:
            assert (snapshot.seqno, await snapshot.rows()) == (0, [])
        assert await events_of(events) == []
        assert (await ix.inspect(a)).unsealed == []
        assert await ix.write([(a, at(6))]) == 1
        assert await events_of(events) == [at(6)]


async def test_a_failed_commit_fails_all_its_callers_and_gives_its_seqnos_out_again(faulty: Faulty) -> None:
    async with faulty.client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        await ix.seal([a], 5)
        faulty.faults.fail_next("compare_and_set", Outcome.REFUSED, times=100)
        found = await asyncio.gather(
            ix.write([(a, at(6)), (b, at(1))]),
            ix.write([(a, at(4))]),  # refused, if there were a commit
            ix.seal([b], 7),
            ix.allow_compaction([(b, 7)]),
            return_exceptions=True,
        )
        assert [type(f) for f in found] == [ap.StorageUnavailable] * 4
        assert ix.counters()["failed_commands"] == 4
        faulty.faults.heal()
        assert await ix.description("b") == ap.Description(0, 0, 0)
        assert await ix.write([(b, at(0))]) == 2
    async with ap.open(faulty.url) as other, other.indexed("ix", readonly=True) as reader:
        assert (await read(reader, a), await read(reader, b)) == ([], at(0))
        assert await last_seqno(reader, a) == 2


OTHER_CALLS: dict[str, Callable[[Indexed, Any], Awaitable[Any]]] = {
    "register": lambda ix, a: ix.register("new", str, int),
    "load": lambda ix, a: ix.load("a", str, int),
    "destroy": lambda ix, a: ix.destroy("a"),
    "description": lambda ix, a: ix.description("a"),
    "snapshot": lambda ix, a: ix.snapshot(a),
    "listen": lambda ix, a: ix.listen(a),
    "inspect": lambda ix, a: ix.inspect(a),
    "step": lambda ix, a: ix.step(),
    "apply": lambda ix, a: ix.apply("a", RuntimeError()),
}


@pytest.mark.parametrize("moment", ["together", "meanwhile"])
@pytest.mark.parametrize("call", OTHER_CALLS)
async def test_other_calls_get_the_error_of_what_was_pending_and_do_nothing(
    faulty: Faulty, call: str, moment: str
) -> None:
    """Goal: they first commit what is pending: what was called before them."""
    async with faulty.client.indexed("ix", background=False) as ix:
        a, _ = await two(ix)
        faulty.faults.fail_next("compare_and_set", Outcome.REFUSED)
        faulty.faults.latency_s = (0.03, 0.03)  # the commit is under way, and fails after its deadline
        write = asyncio.ensure_future(ix.write([(a, at(4))]))
        await asyncio.sleep(0 if moment == "together" else 0.02)
        outcome = (await asyncio.gather(OTHER_CALLS[call](ix, a), return_exceptions=True))[0]
        with pytest.raises(ap.StorageUnavailable):
            await write
        faulty.faults.heal()
        faulty.faults.latency_s = (0.0, 0.0)
        assert isinstance(outcome, ap.StorageUnavailable), outcome
        assert ix.counters()["streams"] == 2
        assert ix.counters()["unexpected_responses"] == 0
        assert await ix.write([(a, at(5))]) == 1


async def test_a_transient_failure_is_repeated_and_nobody_notices(faulty: Faulty) -> None:
    options = ap.Settings(retry_timeout_s=5)
    async with (
        ap.open(
            blob=ap.open_blob(faulty.url),
            consensus=FaultyConsensus(ap.open_consensus(faulty.url), faulty.faults),
            settings=options,
        ) as client,
        client.indexed("ix", background=False) as ix,
    ):
        a, _ = await two(ix)
        _, events = await ix.listen(a)
        for outcome in (Outcome.REFUSED, Outcome.LOST, Outcome.DROPPED):
            faulty.faults.fail_next("compare_and_set", outcome, times=2)
            await ix.write([(a, at(4))])
        assert await read(ix, a) == at(4, 4, 4)
        assert await events_of(events) == [at(4)] * 3
        assert await ix.seal([a], 2) == 4


async def test_a_write_whose_outcome_was_unknown_is_read_once_it_is_settled(faulty: Faulty) -> None:
    """Goal: nothing goes on until it is settled: what is durable is in the next snapshot, and is told."""
    async with faulty.client.indexed("ix", background=False) as ix, ap.open(faulty.url) as other:
        a, _ = await two(ix)
        _, events = await ix.listen(a)
        faulty.faults.fail_next("compare_and_set", Outcome.LOST)
        faulty.faults.fail_next("scan", Outcome.REFUSED, times=100)
        with pytest.raises(ap.Indeterminate):
            await ix.write([(a, at(4))])
        faulty.faults.heal()
        async with other.indexed("ix", readonly=True) as reader:
            assert await read(reader, a) == at(4)  # it happened
        assert await last_seqno(ix, a) == 1
        assert await read(ix, a) == at(4)
        assert await events_of(events) == [at(4)]
        assert await ix.seal([a], 3) == 2


async def test_a_cancelled_call_is_applied_as_a_whole_or_not_at_all(ix: Indexed) -> None:
    a, b = await two(ix)
    snapshots = []
    for delay in [0.0] * 4 + [0.0005, 0.001, 0.002, 0.004] * 3:
        task = asyncio.ensure_future(ix.write([(a, at(1)), (b, at(1))]))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        snapshots.append((len(await read(ix, a)), len(await read(ix, b))))
    assert all(left == right for left, right in snapshots), snapshots
    await ix.write([(a, at(2))])
    assert await last_seqno(ix, a) == len(await read(ix, a))


async def test_a_cancelled_input_does_not_hold_up_what_was_called_after_it(ix: Indexed) -> None:
    a, _ = await two(ix)

    async def never() -> AsyncIterator[Any]:
        yield at(1)[0]
        await asyncio.Event().wait()

    stuck = asyncio.ensure_future(ix.write([(a, never())]))
    after = asyncio.ensure_future(ix.write([(a, at(7))]))
    await asyncio.sleep(0.02)
    assert not after.done()  # commands are in the order of the calls
    stuck.cancel()
    async with asyncio.timeout(2):
        assert await after == 1
    assert await read(ix, a) == at(7)


# --- readonly ----------------------------------------------------------------------------------------


async def test_an_unknown_name_cannot_be_opened_readonly(client: ap.Client) -> None:
    with pytest.raises(UnknownStream, match="'never'"):
        await client.indexed("never", readonly=True)
    await client.writer("shard", ap.Schema(str, int))
    with pytest.raises(UnknownStream):
        await client.indexed("shard", readonly=True)


READONLY: dict[str, Callable[[Indexed, Any], Awaitable[Any]]] = {
    "register": lambda ix, a: ix.register("a", str, int),
    "register new": lambda ix, a: ix.register("new", str, int),
    "destroy": lambda ix, a: ix.destroy("a"),
    "write": lambda ix, a: ix.write([(a, at(9))]),
    "write nothing": lambda ix, a: ix.write([]),
    "seal": lambda ix, a: ix.seal([a], 9),
    "allow_compaction": lambda ix, a: ix.allow_compaction([(a, 9)]),
    "step": lambda ix, a: ix.step(),
    "apply": lambda ix, a: ix.apply("a", RuntimeError()),
}


@pytest.mark.parametrize("call", READONLY)
async def test_readers_cannot_change_anything(mem: ap.Client, ix: Indexed, call: str) -> None:
    a, _ = await two(ix)
    await ix.write([(a, at(1))])
    async with mem.indexed("ix", readonly=True) as reader:
        with pytest.raises(ap.InvalidUsage):
            await READONLY[call](reader, a)
        assert await read(reader, a) == at(1)
    assert await ix.write([(a, at(2))]) == 2


async def test_readers_see_at_once_what_any_writer_has_made_durable(client: ap.Client, location: Any) -> None:
    """Goal: load, description and snapshot of a reader are linearizable, streams that are new included."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as other,
        client.indexed("ix", background=False) as ix,
        other.indexed("ix", readonly=True) as reader,
    ):
        assert await reader.load("a", str, int) is None
        a, b = await two(ix)
        assert (await reader.load("a", str, int)) is not None
        for t in range(5):
            await ix.write([(a, at(t)), (b, at(t))])
            assert await read(reader, a) == at(*range(t + 1))
            await ix.seal([b], t)
            assert (await reader.description("b")).upper == ap.Antichain(t)
        with pytest.raises(ap.CodecMismatch):
            await reader.load("a", str, float)
        await ix.destroy("b")
        for call in (reader.description("b"), reader.load("b", str, int), reader.snapshot(b)):
            with pytest.raises(UnknownStream):
                await call


async def test_a_reader_does_not_join_a_look_that_began_before_its_call() -> None:
    """Goal: what was durable before a call is in its answer, also while an older look at the head is slow."""
    url = f"mem://{uuid.uuid4().hex}"

    class SlowAnswers(FaultyConsensus):
        delay_s = 0.0

        async def head(self, key: str) -> Any:
            found = await super().head(key)
            await asyncio.sleep(self.delay_s)
            return found

    consensus = SlowAnswers(ap.open_consensus(url), Faults())
    async with ap.open(url) as client, ap.open(blob=ap.open_blob(url), consensus=consensus) as slow:
        async with (
            client.indexed("ix", background=False) as ix,
        ):
            a, _ = await two(ix)
            reader = await slow.indexed("ix", readonly=True)
            for t in range(4):
                consensus.delay_s = 0.05
                early = asyncio.ensure_future(read(reader, a))
                await asyncio.sleep(0.02)
                await ix.write([(a, at(t))])
                assert await read(reader, a) == at(*range(t + 1))
                assert await early in (at(*range(t)), at(*range(t + 1)))
            consensus.delay_s = 0.0
            await reader.aclose()


async def test_many_readers_beside_the_writer_are_no_fencing(client: ap.Client, location: Any) -> None:
    """They register in the very state that the writer changes: it tries again."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as other,
        client.indexed("ix", background=False) as ix,
    ):
        a, _ = await two(ix)

        async def come_and_go() -> int:
            async with other.indexed("ix", readonly=True) as reader:
                return len(await read(reader, a))

        async def write() -> None:
            for t in range(12):
                await ix.write([(a, at(t))])

        found, _ = await asyncio.gather(asyncio.gather(*[come_and_go() for _ in range(8)]), write())
        assert all(0 <= n <= 12 for n in found)
        assert await read(ix, a) == at(*range(12))


# --- fencing -----------------------------------------------------------------------------------------


async def test_an_earlier_instance_is_fenced_by_its_first_commit(client: ap.Client, location: Any) -> None:
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        early = await client.indexed("ix", background=False)
        a, b = await two(early)
        await early.write([(a, at(1))])
        _, events = await early.listen(a)
        late = await other.indexed("ix", background=False)
        await late.write([(a, at(2))])
        assert await read(early, a) == at(1)  # a consistent past state
        assert await early.load("b", str, int) is not None
        found = await asyncio.gather(
            early.write([(a, at(3))]), early.seal([b], 5), early.write([(a, at(1))]), return_exceptions=True
        )
        assert [type(f) for f in found] == [Fenced] * 3
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: early.register("a", str, int),
            lambda: early.load("a", str, int),
            lambda: early.destroy("a"),
            lambda: early.write([]),
            lambda: early.seal([a], 9),
            lambda: early.allow_compaction([(a, 9)]),
            lambda: early.description("a"),
            lambda: early.snapshot(a),
            lambda: early.listen(a),
            lambda: early.step(),
            lambda: early.apply("a", RuntimeError()),
            lambda: early.inspect(a),
            lambda: anext(events),
        ]
        for call in calls:
            with pytest.raises(Fenced):
                await call()
        assert await late.write([(a, at(3))]) == 3
        await early.stop()
        assert await read(late, a) == at(1, 2, 3)
        assert await late.seal([a], 1) == 4
        await late.stop()


FIRST: dict[str, Callable[[Indexed, Any], Awaitable[Any]]] = {
    "register": lambda ix, a: ix.register("new", str, int),
    "destroy": lambda ix, a: ix.destroy("a"),
    "write": lambda ix, a: ix.write([(a, at(9))]),
    "refused write": lambda ix, a: ix.write([(a, at(0))]),
    "empty write": lambda ix, a: ix.write([]),
    "seal": lambda ix, a: ix.seal([a], 9),
    "allow_compaction": lambda ix, a: ix.allow_compaction([(a, 9)]),
    "step": lambda ix, a: ix.step(),
}


@pytest.mark.parametrize("call", FIRST)
async def test_whatever_would_change_something_first_is_fenced(mem: ap.Client, call: str) -> None:
    early = await mem.indexed("ix", background=False)
    a, _ = await two(early)
    await early.write([(a, at(1, 4))])
    await early.seal([a], 3)  # there is something to drain
    late = await mem.indexed("ix", background=False)
    with pytest.raises(Fenced):
        await FIRST[call](early, a)
    with pytest.raises(Fenced):
        await early.description("a")
    assert await late.description("a") == ap.Description(0, 3, 0)
    assert await late.write([(a, at(3))]) == 3
    assert await late.load("new", str, int) is None
    await early.stop()
    await late.stop()


async def test_of_many_that_open_at_once_exactly_the_last_one_can_change_anything(mem: ap.Client) -> None:
    opened = await asyncio.gather(*[mem.indexed("ix", background=False) for _ in range(6)])
    found = await asyncio.gather(*[ix.register("a", str, int) for ix in opened], return_exceptions=True)
    assert sorted(type(f).__name__ for f in found) == ["Fenced"] * 5 + ["Stream"]
    await asyncio.gather(*[ix.stop() for ix in opened])


async def test_taking_over_during_writes_loses_none_that_returned(mem: ap.Client) -> None:
    """Goal: across take-overs each write that returned is there once, each that was fenced not at all."""
    ix = await mem.indexed("ix", background=False)
    a, _ = await two(ix)
    done: list[int] = []
    fenced: list[int] = []
    numbers = itertools.count()

    async def write_until_fenced(ix: Indexed) -> None:
        while True:
            number = next(numbers)
            try:
                await ix.write([(a, at(number))])
            except Fenced:
                fenced.append(number)
                return
            done.append(number)

    writing = [asyncio.ensure_future(write_until_fenced(ix)) for _ in range(4)]
    instances = [ix]
    for _ in range(4):
        await asyncio.sleep(0.02)
        instances.append(await mem.indexed("ix", background=False))
        await asyncio.gather(*writing)
        writing = [asyncio.ensure_future(write_until_fenced(instances[-1])) for _ in range(4)]
    async with mem.indexed("ix", background=False) as last:
        await asyncio.gather(*writing)
        assert [row[2] for row in await read(last, a)] == sorted(done)
        assert await last.write([(a, at(TIME_MAX))]) == len(done) + 1
    assert len(fenced) == 20
    for instance in instances:
        await instance.stop()


# --- stop --------------------------------------------------------------------------------------------


async def test_stopping_commits_what_is_pending(client: ap.Client) -> None:
    ix = await client.indexed("ix", background=False)
    a, b = await two(ix)
    writes = [asyncio.ensure_future(ix.write([(a, at(n)), (b, at(n))])) for n in range(10)]
    seal = asyncio.ensure_future(ix.seal([b], 4))
    await asyncio.sleep(0)
    await ix.stop()
    assert await asyncio.gather(*writes, seal) == list(range(1, 12))
    async with client.indexed("ix", background=False) as ix:
        assert await read(ix, a) == at(*range(10))
        assert (await ix.description("b")).upper == ap.Antichain(4)


async def test_after_the_end_every_call_is_stopped(mem: ap.Client) -> None:
    ix = await mem.indexed("ix", background=False)
    a, _ = await two(ix)
    await ix.write([(a, at(1))])
    snapshot, listener = await ix.listen(a)
    waiting = asyncio.ensure_future(anext(listener, None))
    await asyncio.sleep(0.01)
    await ix.stop()
    assert await waiting is None
    assert await anext(listener, None) is None
    await ix.stop()
    await ix.aclose()
    calls = {**READONLY, **OTHER_CALLS, "compact": lambda ix, a: ix.compact(a)}
    for call in calls.values():
        with pytest.raises(Stopped):
            await call(ix, a)
    with pytest.raises(Stopped):
        ix.counters()
    with pytest.raises(ap.InvalidUsage):
        await snapshot.rows()
    await snapshot.aclose()
    await listener.aclose()


async def test_stopped_is_an_invalid_usage_of_kind_closed(mem: ap.Client) -> None:
    async with mem.indexed("ix") as ix:
        pass
    with pytest.raises(ap.InvalidUsage) as caught:
        await ix.description("a")
    assert isinstance(caught.value, Stopped)
    assert caught.value.kind is ap.UsageKind.CLOSED


async def test_stopping_with_a_store_that_is_gone_tells_the_callers_and_releases(faulty: Faulty) -> None:
    ix = await faulty.client.indexed("ix", background=False)
    a, _ = await two(ix)
    _, listener = await ix.listen(a)
    faulty.faults.rates = {Outcome.REFUSED: 1.0}
    writes = [asyncio.ensure_future(ix.write([(a, at(n))])) for n in range(3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await ix.stop()
    found = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(f) for f in found] == [ap.StorageUnavailable] * 3
    assert await anext(listener, None) is None
    with pytest.raises(Stopped):
        await ix.description("a")
    faulty.faults.heal()
    async with faulty.client.indexed("ix", background=False) as again:
        assert await read(again, a) == []


async def test_stopping_does_not_wait_long_for_an_input_that_never_ends(
    mem: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: its caller gets an error that says that it is stopped, not one of the library's insides."""
    monkeypatch.setattr("aiopersist.indexed.indexed.RELEASE_DEADLINE_S", 0.2)
    ix = await mem.indexed("ix", background=False)
    a, _ = await two(ix)

    async def never() -> AsyncIterator[Any]:
        yield at(1)[0]
        await asyncio.Event().wait()

    stuck = asyncio.ensure_future(ix.write([(a, never())]))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(12):
        await ix.stop()
        (found,) = await asyncio.gather(stuck, return_exceptions=True)
    assert isinstance(found, ap.Error), repr(found)
    async with mem.indexed("ix", background=False) as again:
        assert await read(again, a) == []


async def test_closing_the_client_stops_it() -> None:
    async with ap.open("mem://") as client:
        ix = await client.indexed("ix")
        a, _ = await two(ix)
        _, listener = await ix.listen(a)
        waiting = asyncio.ensure_future(anext(listener, None))
        await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        (found,) = await asyncio.gather(waiting, return_exceptions=True)
    assert found is None or isinstance(found, ap.InvalidUsage)
    with pytest.raises(ap.InvalidUsage):
        await ix.write([(a, at(1))])


async def test_an_instance_that_was_stopped_leaves_the_next_one_alone(mem: ap.Client) -> None:
    first = await mem.indexed("ix", background=False)
    second = await mem.indexed("ix", background=False)
    await first.stop()
    a, _ = await two(second)
    assert await second.write([(a, at(1))]) == 1
    await second.stop()


async def test_the_body_of_with_raises_what_it_raises(mem: ap.Client) -> None:
    with pytest.raises(ZeroDivisionError):
        async with mem.indexed("ix") as ix:
            a, _ = await two(ix)
            await ix.write([(a, at(1))])
            raise ZeroDivisionError
    async with mem.indexed("ix") as ix:
        assert await read(ix, a) == at(1)


# --- what a commit costs, and counters ---------------------------------------------------------------


async def test_what_a_commit_writes_is_proportional_to_the_change() -> None:
    """Goal: the hundredth stream, and the thousandth batch, cost what the first did."""
    url = f"mem://{uuid.uuid4().hex}"
    sizes: list[int] = []

    class Weighed(FaultyConsensus):
        async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
            sizes.append(len(data))
            return await super().compare_and_set(key, expected, data)

    consensus = Weighed(ap.open_consensus(url), Faults())
    async with ap.open(blob=ap.open_blob(url), consensus=consensus) as client:
        async with client.indexed("ix", background=False) as ix:
            first = await ix.register("s0", str, int)
            await ix.write([(first, at(1))])
            small = sizes[-1]
            await asyncio.gather(*[ix.register(f"s{n}", str, int) for n in range(1, 200)])
            for _ in range(50):
                await ix.write([(first, at(1))])
            await ix.write([(first, at(1))])
            assert math.isclose(sizes[-1], small, rel_tol=0.1)


async def test_counters_say_what_was_done(ix: Indexed) -> None:
    a, b = await two(ix)
    found = ix.counters()
    assert found["streams"] == 2
    assert set(found) == {
        "streams", "unsealed_blobs", "unsealed_bytes", "trace_blobs", "trace_bytes", "writes", "records",
        "bytes", "failed_commands", "failed_steps", "compactions", "compaction_seconds", "compaction_bytes",
        "skipped_compactions", "failed_compactions", "unexpected_responses",
    }  # fmt: skip
    await ix.write([(a, at(1, 2, 3)), (b, at(4))])
    await ix.write([])
    await ix.seal([a], 2)
    with pytest.raises(Refused):
        await ix.write([(a, at(1))])
    found = ix.counters()
    assert (found["writes"], found["records"], found["failed_commands"]) == (2, 4, 1)
    assert found["bytes"] > 0 and found["unsealed_bytes"] > 0 and found["trace_bytes"] == 0
    await ix.destroy("b")
    assert ix.counters()["streams"] == 1


async def test_blobs_of_refused_and_bad_writes_are_deleted() -> None:
    options = ap.Settings(inline_writes_single_max_bytes=0, blob_target_size=200, row_group_bytes=80)
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url, settings=options) as client, client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        await ix.seal([a], 10)
        with pytest.raises(Refused):
            await ix.write([(b, at(*range(50))), (a, at(*range(50)))])
        with pytest.raises(ap.InvalidUpdate):
            await ix.write([(b, at(*range(50))), (a, [*at(*range(10, 50)), ("k", None, 50, 1)])])
        async with asyncio.timeout(10):
            while await parts_below(url):
                await asyncio.sleep(0.01)
        await ix.write([(b, at(*range(50)))])
        assert await parts_below(url) == ix.counters()["unsealed_blobs"] > 1


async def test_streams_of_every_kind_of_value(client: ap.Client) -> None:
    """Each stream has its own codecs, and they are written together."""
    async with client.indexed("ix", background=False) as ix:
        texts = await ix.register("texts", str, None)
        numbers = await ix.register("numbers", int, float)
        optionals = await ix.register("optionals", int | None, list[str])
        await ix.write(
            [
                (texts, [("ä", None, 1, 1)]),
                (numbers, [(-5, 0.5, 2, 3)]),
                (optionals, [(None, ["x", "y"], 3, -1)]),
            ]
        )
        await ix.seal([texts, numbers, optionals], 10)
        await ix.step()
        assert await read(ix, texts) == [("ä", None, 1, 1)]
        assert await read(ix, numbers) == [(-5, 0.5, 2, 3)]
        assert await read(ix, optionals) == [(None, ["x", "y"], 3, -1)]


async def test_the_background_drains_and_compacts_by_itself() -> None:
    options = ap.Settings(indexed_step_s=0.01)
    async with ap.open("mem://", settings=options) as client, client.indexed("ix") as ix:
        a, _ = await two(ix)
        for t in range(6):
            await ix.write([(a, at(t))])
            await ix.seal([a], t + 1)
            await asyncio.sleep(0.02)
        await ix.allow_compaction([(a, 6)])
        async with asyncio.timeout(10):
            while len((view := await ix.inspect(a)).trace) > 3 or view.unsealed or view.in_flight:
                await asyncio.sleep(0.01)
        assert ix.counters()["compactions"] > 0
        assert sorted(await read(ix, a)) == [("k", t, 6, 1) for t in range(6)]


def test_settings_have_what_the_specification_names() -> None:
    assert ap.Settings().listen_queue_max > 0
    assert timedelta(seconds=ap.Settings().indexed_step_s) > timedelta(0)
