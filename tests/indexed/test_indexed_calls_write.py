"""Write, seal, allow_compaction, seqnos; see `test_indexed_calls.py`."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, Refused
from tests.indexed.indexed_calls_kit import at, commits, last_seqno, parts_below, read, two
from tests.indexed.indexed_reading_kit import take_all
from tests.support.schemas import INT_MAX

PRODUCT = ap.Antichain((0, 1), (1, 0))


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


# --- write --------------------------------------------------------------------------------------------


async def test_times_not_sealed_come_in_any_order(client: ap.Client) -> None:
    async with client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        await ix.seal([a], 10)
        times = [500, 10, 11, 10, INT_MAX, 400]
        assert await ix.write([(a, at(*times)), (b, at(3, 0)), (a, at(12))]) == 2
        assert await read(ix, a) == sorted(at(*times, 12))
        assert await read(ix, b) == at(0, 3)


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
        async with asyncio.timeout(50):
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


@pytest.mark.parametrize("form", FORMS)
async def test_updates_come_in_every_form(ix: Indexed, form: str) -> None:
    rows = [("b", 1, 9, 1), ("a", 2, 3, -1), ("b", 1, 9, 1), ("c", 5, 0, 4)]
    a, b = await two(ix)
    _, events = await ix.listen(a)
    assert await ix.write([(a, FORMS[form](rows)), (b, at(1))]) == 1
    assert await take_all(events, 1) == [rows]
    with pytest.raises(Refused):
        await ix.seal([a], 5)
        await ix.write([(b, at(1)), (a, FORMS[form](rows))])
    assert await read(ix, b) == at(1)


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


# --- seal, allow_compaction ---------------------------------------------------------------------------


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
    assert await ix.seal([a], INT_MAX) == 7
    assert [(await ix.description(n)).upper for n in "ab"] == [ap.Antichain(INT_MAX), ap.Antichain(9)]


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
    with pytest.raises(Refused, match=r"4 is before \{5\} of stream 'a'"):
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


# --- seqnos -------------------------------------------------------------------------------------------


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
