"""Compaction; see `test_indexed_reading.py`."""

import asyncio
import uuid
from typing import NamedTuple

import pydantic
import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, UnknownStream
from tests.indexed.indexed_reading_kit import (
    NO_CACHE,
    TINY,
    at,
    check_view,
    drained,
    read,
    settle_down,
    stream_of,
    summed,
)
from tests.support.schemas import Row


class Merge(NamedTuple):
    id: str
    batches: list[list[Row]]
    trace: list[tuple[int, int]]
    """Level and updates of each batch, once it is at rest."""


MERGES = [
    Merge("distinct", [at(1), at(2)], [(1, 2)]),
    Merge("the same row: sums, no more than a parent", [at(1), at(1)], [(0, 1)]),
    Merge("as many as the larger parent", [at(1, 2), at(1)], [(0, 2)]),
    Merge("one more than the larger parent", [at(1, 2), at(3)], [(1, 3)]),
    Merge("cancel", [at(1, 2), at(1, 2, diff=-1)], [(0, 0)]),
    Merge("three: the oldest pair", [at(1), at(2), at(3)], [(1, 2), (0, 1)]),
    Merge("four", [at(1), at(2), at(3), at(4)], [(2, 4)]),
    Merge("three that sum", [at(1), at(1), at(1)], [(0, 1)]),
    Merge("an empty one", [[*at(1), *at(1, diff=-1)], at(3)], [(0, 1)]),
    Merge("two empty ones", [[*at(1), *at(1, diff=-1)]] * 2, [(0, 0)]),
]


async def test_a_pair_is_merged_once_since_has_passed_the_younger(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await drained(ix, a, [at(1, 2, key="x"), at(3, key="y")])
    await ix.allow_compaction([(a, 19)])
    assert await ix.step() == []
    await ix.allow_compaction([(a, 20)])
    (request,) = await ix.step()
    assert (request.stream, request.updates) == ("a", 3)
    assert (await ix.inspect(a)).in_flight
    assert await ix.step() == []  # one in flight
    await ix.allow_compaction([(a, 25)])
    response = await ix.compact(request)
    assert (await ix.inspect(a)).trace == [(0, 10, 0, 0, 2), (10, 20, 0, 0, 1)]
    await ix.apply("a", response)
    view = await ix.inspect(a)
    assert view.trace == [(0, 20, 20, 1, 3)]  # the since of the request
    assert not view.in_flight
    counters = ix.counters()
    assert (counters["compactions"], counters["unexpected_responses"]) == (1, 0)
    assert counters["compaction_seconds"] > 0 and counters["compaction_bytes"] > 0
    async with await ix.snapshot(a) as snapshot:
        assert {u.time for u in await snapshot.trace_rows()} == {20}
        assert {u.time for u in await snapshot.rows()} == {25}


@pytest.mark.parametrize("case", MERGES, ids=lambda case: case.id)
async def test_a_merge_rises_only_if_it_holds_more_than_each_parent(either: Indexed, case: Merge) -> None:
    ix = either
    a = await stream_of(ix)
    await drained(ix, a, case.batches)
    await ix.allow_compaction([(a, 10 * len(case.batches))])
    await settle_down(ix)
    view = await ix.inspect(a)
    assert [(level, updates) for _, _, _, level, updates in view.trace] == case.trace
    check_view(view)
    written = [row for rows in case.batches for row in rows]
    merged = {(k, v): d for (k, v, _), d in summed((k, v, 0, d) for k, v, _, d in written).items()}
    assert {(k, v): d for (k, v, _), d in summed(await read(ix, a)).items()} == merged


async def test_of_several_pairs_the_oldest_is_asked_for(ix: Indexed) -> None:
    a = await stream_of(ix)
    await drained(ix, a, [at(n) for n in range(5)])
    await ix.allow_compaction([(a, 50)])
    order = []
    while requests := await ix.step():
        (request,) = requests
        await ix.apply("a", await ix.compact(request))
        order.append([batch[:2] for batch in (await ix.inspect(a)).trace])
    assert order[0] == [(0, 20), (20, 30), (30, 40), (40, 50)]
    assert order[1] == [(0, 20), (20, 40), (40, 50)]
    assert order[2] == [(0, 40), (40, 50)]
    assert len(order) == 3


async def test_the_trace_stays_a_falling_sequence_of_few_batches(ix: Indexed) -> None:
    a = await stream_of(ix)
    for t in range(64):
        await ix.write([(a, at(t))])
        await ix.seal([a], t + 1)
        await ix.allow_compaction([(a, t + 1)])
        await settle_down(ix)
        view = await ix.inspect(a)
        check_view(view)
        levels = [batch[3] for batch in view.trace]
        assert levels == sorted(set(levels), reverse=True)
        assert sum(batch[4] for batch in view.trace) == t + 1
    assert [batch[3] for batch in (await ix.inspect(a)).trace] == [6]
    assert ix.counters()["compactions"] == 63


async def test_an_error_is_dropped_and_asked_for_again(ix: Indexed) -> None:
    a = await stream_of(ix)
    await drained(ix, a, [at(1), at(2)])
    await ix.allow_compaction([(a, 20)])
    for failures in range(3):
        (request,) = await ix.step()
        await ix.apply("a", ap.StorageUnavailable("full"))
        assert not (await ix.inspect(a)).in_flight
        assert ix.counters()["failed_compactions"] == failures + 1
    (request,) = await ix.step()
    await ix.apply(a.name, await ix.compact(request))
    assert (await ix.inspect(a)).trace == [(0, 20, 20, 1, 2)]


async def test_responses_that_nobody_waits_for_change_nothing_and_are_counted(either: Indexed) -> None:
    ix = either
    a, b, c = [await stream_of(ix, name) for name in "abc"]
    for stream in (a, b, c):
        await drained(ix, stream, [at(1), at(2), at(3), at(4)])
    await ix.allow_compaction([(a, 20), (b, 20), (c, 20)])
    requests = {request.stream: request for request in await ix.step()}
    assert set(requests) == {"a", "b", "c"}
    responses = {name: await ix.compact(request) for name, request in requests.items()}
    before = [(await ix.inspect(s)).trace for s in (a, b, c)]
    await ix.apply("a", responses["b"])  # of another stream
    await ix.apply("b", responses["a"])
    assert ix.counters()["unexpected_responses"] == 2
    assert [(await ix.inspect(s)).trace for s in (a, b, c)] == before
    assert (await ix.inspect(a)).in_flight and (await ix.inspect(b)).in_flight
    responses = {name: await ix.compact(request) for name, request in requests.items()}
    await ix.apply("a", responses["a"])
    await ix.apply("a", responses["a"])  # once more
    assert ix.counters()["unexpected_responses"] == 3
    await ix.apply("b", RuntimeError())
    await ix.apply("b", responses["b"])  # after its error
    await ix.apply("b", RuntimeError())
    assert ix.counters()["unexpected_responses"] == 5
    await ix.step()  # asks for b again: another request
    await ix.apply("b", responses["b"])
    assert ix.counters()["unexpected_responses"] == 6
    assert (await ix.inspect(b)).in_flight
    await ix.destroy("c")
    await ix.apply("c", responses["c"])
    await ix.apply("c", RuntimeError())
    assert ix.counters()["unexpected_responses"] == 8
    assert ix.counters()["compactions"] == 1
    with pytest.raises(UnknownStream):
        await ix.compact(requests["c"])
    assert len((await ix.inspect(a)).trace) == 3
    assert (await ix.inspect(b)).trace == before[1]
    for stream in (a, b):
        assert len(await read(ix, stream)) == 4


async def test_a_response_that_was_handed_to_another_stream_first_loses_no_data() -> None:
    """Goal: "changes nothing" holds for what comes after it, too: never delete what may be referenced."""
    async with ap.open("mem://", settings=ap.Settings(**TINY, **NO_CACHE)) as client:
        async with client.indexed("ix", background=False) as ix:
            a, b = await stream_of(ix), await stream_of(ix, "b")
            for stream in (a, b):
                await drained(ix, stream, [at(1), at(2)])
            await ix.allow_compaction([(a, 20), (b, 20)])
            requests = {request.stream: request for request in await ix.step()}
            response = await ix.compact(requests["a"])
            await ix.apply("b", response)
            await ix.apply("a", response)
            await asyncio.sleep(0.05)
            assert len(await read(ix, a)) == 2
            assert len(await read(ix, b)) == 2


async def test_the_same_response_handed_in_twice_at_once_is_applied_once(ix: Indexed) -> None:
    a = await stream_of(ix)
    await drained(ix, a, [at(1), at(2)])
    await ix.allow_compaction([(a, 20)])
    (request,) = await ix.step()
    response = await ix.compact(request)
    await asyncio.gather(*[ix.apply("a", response) for _ in range(4)], ix.step())
    counters = ix.counters()
    assert (counters["compactions"], counters["unexpected_responses"]) == (1, 3)
    assert len(await read(ix, a)) == 2


async def test_a_new_owner_starts_without_a_flight(mem: ap.Client) -> None:
    """Goal: what an earlier instance asked for is unknown to the next one, and changes nothing there."""
    async with mem.indexed("ix", background=False) as early:
        a = await stream_of(early)
        await drained(early, a, [at(1), at(2)])
        await early.allow_compaction([(a, 20)])
        (request,) = await early.step()
        response = await early.compact(request)
        async with mem.indexed("ix", background=False) as late:
            assert not (await late.inspect(a)).in_flight
            await late.apply("a", response)
            (mine,) = await late.step()
            await late.apply("a", response)
            assert late.counters()["unexpected_responses"] == 2
            assert (await late.inspect(a)).in_flight
            assert len((await late.inspect(a)).trace) == 2
            await late.apply("a", await late.compact(mine))
            assert len((await late.inspect(a)).trace) == 1


async def test_the_inputs_of_a_compaction_stay_for_who_reads_them_and_go_then() -> None:
    options = ap.Settings(**TINY, **NO_CACHE, rollup_every=3)
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url, settings=options) as client, client.indexed("ix", background=False) as ix:
        a = await stream_of(ix)
        await drained(ix, a, [at(*range(10)), at(*range(10, 20))])
        snapshot = await ix.snapshot(a)
        (items,) = snapshot.split(1)
        first = await anext(items)
        await ix.allow_compaction([(a, 20)])
        for _ in range(6):
            await settle_down(ix)
            await ix.seal([a], 20)
        assert len((await ix.inspect(a)).trace) == 1
        assert len([first, *[item async for item in items]]) == 20
        await snapshot.aclose()
        for _ in range(12):
            await settle_down(ix)
            await ix.seal([a], 20)
        parts = [key async for key, _ in ap.open_blob(url).list("") if key.endswith(".parquet")]
        assert len(parts) == ix.counters()["trace_blobs"]
        assert len(await read(ix, a)) == 20


async def test_inspect_is_frozen(ix: Indexed) -> None:
    a = await stream_of(ix)
    view = await ix.inspect(a)
    found = view.model_dump()
    wanted = {"seal": 0, "since": 0, "trace_upper": 0, "unsealed": [], "trace": [], "in_flight": False}
    assert found == wanted
    with pytest.raises(pydantic.ValidationError):
        view.seal = 5
    assert (await ix.inspect("a")) == view
