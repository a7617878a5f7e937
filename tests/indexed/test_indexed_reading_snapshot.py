"""A snapshot; see `test_indexed_reading.py`."""

import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed
from tests.indexed.indexed_reading_kit import (
    NO_CACHE,
    TINY,
    at,
    plain,
    read,
    settle_down,
    split_rows,
    stream_of,
    summed,
    take,
)
from tests.support.internals import shard_of
from tests.support.schemas import INT_MAX


class Interval(NamedTuple):
    id: str
    bounds: tuple[Any, ...]
    times: list[int]


INTERVALS = [
    Interval("all", (), [7, 3, 0, INT_MAX, 3, 5]),
    Interval("from 0", (0,), [7, 3, 0, INT_MAX, 3, 5]),
    Interval("a lower", (5,), [7, INT_MAX, 5]),
    Interval("both are times", (3, 7), [3, 3, 5]),
    Interval("frontiers", (ap.Antichain(3), ap.Antichain(7)), [3, 3, 5]),
    Interval("to the end", (4, ap.Antichain()), [7, INT_MAX, 5]),
    Interval("below the last", (4, INT_MAX), [7, 5]),
    Interval("the last time alone", (INT_MAX,), [INT_MAX]),
    Interval("between", (1, 3), []),
    Interval("the first alone", (0, 1), [0]),
    Interval("equal", (3, 3), []),
    Interval("equal at 0", (0, 0), []),
    Interval("equal at the end", (INT_MAX, INT_MAX), []),
    Interval("both empty frontiers", (ap.Antichain(), ap.Antichain()), []),
]


async def test_a_snapshot_is_of_one_moment(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(3, 4))])
    async with await ix.snapshot(a) as snapshot:
        await ix.write([(a, at(5))])
        await ix.seal([a], 4)
        await ix.allow_compaction([(a, 4)])
        await settle_down(ix)
        assert snapshot.seqno == 1
        assert (snapshot.since, snapshot.seal) == (ap.Antichain(0), ap.Antichain(0))
        assert plain(await snapshot.rows()) == at(3, 4)
        assert plain((await snapshot.unsealed_rows()).rows()) == at(3, 4)
        assert len(await snapshot.trace_rows()) == 0


async def test_rows_are_of_the_trace_and_then_of_the_unsealed(either: Indexed) -> None:
    """Goal: nothing is seen twice while a batch is in both."""
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(9, 1))])
    await ix.write([(a, at(8, 2))])
    await ix.seal([a], 5)
    await ix.step()  # one of both is trimmed
    view = await ix.inspect(a)
    assert view.unsealed == [(0, 1, 9, 9), (1, 2, 2, 8)]
    async with await ix.snapshot(a) as snapshot:
        assert plain(await snapshot.rows()) == at(1, 2, 9, 8)
        assert plain((await snapshot.trace_rows()).rows()) == at(1, 2)
        assert plain((await snapshot.unsealed_rows()).rows()) == at(9, 8, 2)
        assert isinstance(await snapshot.trace_rows(), ap.Updates)
        assert isinstance((await snapshot.rows())[0], ap.Update)


@pytest.mark.parametrize("case", INTERVALS, ids=lambda case: case.id)
async def test_unsealed_rows_are_those_in_the_interval(either: Indexed, case: Interval) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(7, 3, 0))])
    await ix.write([(a, at(INT_MAX))])
    await ix.write([(a, at(3, 5))])
    await ix.allow_compaction([(a, 6)])  # stored times are shown
    async with await ix.snapshot(a) as snapshot:
        found = await snapshot.unsealed_rows(*case.bounds)
        assert [u.time for u in found] == case.times


@pytest.mark.parametrize(
    "bounds",
    [(5, 4), (1, 0), (INT_MAX, 3), (ap.Antichain(), 3), (ap.Antichain(5), ap.Antichain(4))],
    ids=str,
)
async def test_a_reversed_interval_is_an_error_that_names_both(ix: Indexed, bounds: Any) -> None:
    a = await stream_of(ix)
    async with await ix.snapshot(a) as snapshot:
        with pytest.raises(ap.InvalidUsage) as caught:
            await snapshot.unsealed_rows(*bounds)
    assert caught.value.kind is ap.UsageKind.INVALID_BOUNDS
    frontiers = [b if isinstance(b, ap.Antichain) else ap.Antichain(b) for b in bounds]
    assert all(str(frontier) in str(caught.value) for frontier in frontiers)


@pytest.mark.parametrize("bounds", [(-1, 3), (0, 2**63), ("x",), (0, True), ((1, 2),), (None, 3)], ids=str)
async def test_bounds_are_times(ix: Indexed, bounds: Any) -> None:
    a = await stream_of(ix)
    async with await ix.snapshot(a) as snapshot:
        with pytest.raises(ap.InvalidUsage):
            await snapshot.unsealed_rows(*bounds)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 150])
async def test_split_gives_disjoint_iterators_of_about_equal_size(either: Indexed, n: int) -> None:
    ix = either
    a = await stream_of(ix)
    rows = [(f"{i:03}", i, i % 10, 1) for i in range(100)]
    await ix.write([(a, rows[:60])])
    await ix.write([(a, rows[60:])])
    await ix.seal([a], 5)
    for _ in range(3):
        await ix.step()
    await ix.allow_compaction([(a, 3)])
    async with await ix.snapshot(a) as snapshot:
        pieces = await split_rows(snapshot, n)
        assert len(pieces) == n
        found = [row for piece in pieces for row in piece]
        assert sorted(found) == sorted((k, v, max(t, 3), d) for k, v, t, d in rows)
        assert max(map(len, pieces)) <= 100 // n + 1
        assert min(map(len, pieces)) >= 100 // n


async def test_split_is_about_equal_while_batches_wait_for_their_trim(either: Indexed) -> None:
    """Goal: a step trims one batch; what others hold below the trace's upper is no share of anybody, where
    times are spread evenly."""
    ix, times = either, [*range(10)] * 3
    a = await stream_of(ix)
    for _ in range(4):
        await ix.write([(a, at(*times))])
    await ix.seal([a], 5)
    await ix.step()
    await ix.write([(a, at(*range(10, 50)))])
    async with await ix.snapshot(a) as snapshot:
        sizes = [len(piece) for piece in await split_rows(snapshot, 4)]
        total = len(await snapshot.rows())
    assert sum(sizes) == total
    assert min(sizes) >= total // 8, sizes


async def test_split_of_nothing_is_empty_iterators(ix: Indexed) -> None:
    a = await stream_of(ix)
    async with await ix.snapshot(a) as snapshot:
        assert await split_rows(snapshot, 3) == [[], [], []]


@pytest.mark.parametrize("n", [0, -1, 1.0, True, None, "2"], ids=repr)
async def test_split_wants_at_least_one(ix: Indexed, n: Any) -> None:
    a = await stream_of(ix)
    async with await ix.snapshot(a) as snapshot:
        with pytest.raises(ap.InvalidUsage):
            snapshot.split(n)


async def test_a_closed_snapshot_says_so_and_so_do_its_iterators(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(*range(50)))])
    snapshot = await ix.snapshot(a)
    begun, fresh = snapshot.split(2)
    await anext(begun)
    await snapshot.aclose()
    await snapshot.aclose()
    calls: list[Callable[[], Awaitable[Any]]] = [
        snapshot.rows,
        snapshot.trace_rows,
        snapshot.unsealed_rows,
        lambda: anext(begun),
        lambda: anext(fresh),
    ]
    for call in calls:
        with pytest.raises(ap.InvalidUsage) as caught:
            await call()
        assert caught.value.kind is ap.UsageKind.CLOSED
    with pytest.raises(ap.InvalidUsage):
        snapshot.split(1)
    assert not shard_of(ix).register.pins


async def test_an_open_snapshot_of_a_reader_keeps_its_blobs(location: Any) -> None:
    """Goal: the owner compacts, collects and destroys; a snapshot that is open in another client reads on."""
    options = ap.Settings(**TINY, **NO_CACHE, rollup_every=2)
    async with (
        ap.open(blob=location.blob, consensus=location.consensus, settings=options) as client,
        ap.open(blob=location.blob, consensus=location.consensus, settings=options) as other,
        client.indexed("ix", background=False) as ix,
        other.indexed("ix", readonly=True) as reader,
    ):
        a, b = await stream_of(ix), await stream_of(ix, "b")
        rows = [(f"{i}", i, i % 6, 1) for i in range(40)]
        await ix.write([(a, rows)])
        await ix.seal([a], 3)
        await ix.step()
        snapshot = await reader.snapshot(a)
        await ix.seal([a], 6)
        await ix.step()
        await ix.allow_compaction([(a, 6)])
        await settle_down(ix)
        await ix.destroy("a")
        for _ in range(4):
            await ix.seal([b], 0)
            await ix.step()
        assert sorted(plain(await snapshot.rows())) == sorted(rows)
        assert len(await snapshot.trace_rows()) == len([row for row in rows if row[2] < 3])
        await snapshot.aclose()


async def test_a_large_stream_of_tiny_parts_is_read_in_order(mem: ap.Client) -> None:
    """Goal: of a write of many parts the order is kept, in the batch, after its trim, and for listeners."""
    async with ap.open("mem://", settings=ap.Settings(**TINY)) as client:
        async with client.indexed("ix", background=False) as ix:
            a = await stream_of(ix)
            _, events = await ix.listen(a)
            rng = random.Random(3)
            rows = [
                (f"{rng.randrange(10**6)}", i, rng.randrange(20), rng.choice([1, -1])) for i in range(300)
            ]
            await ix.write([(a, rows[:150]), (a, rows[150:])])
            assert ix.counters()["unsealed_blobs"] > 10
            assert await take(events, 1) == [rows]
            async with await ix.snapshot(a) as snapshot:
                assert plain((await snapshot.unsealed_rows()).rows()) == rows
                assert plain(await snapshot.rows()) == rows
            await ix.seal([a], 11)
            await ix.step()
            async with await ix.snapshot(a) as snapshot:
                late = [row for row in rows if row[2] >= 11]
                assert plain((await snapshot.unsealed_rows()).rows()) == late
                early = plain((await snapshot.trace_rows()).rows())
                assert early == sorted(row for row in rows if row[2] < 11)
            assert (await ix.inspect(a)).unsealed == [
                (0, 1, min(row[2] for row in late), max(row[2] for row in late))
            ]


async def test_large_updates_that_do_not_fit_in_memory_are_drained_sorted() -> None:
    options = ap.Settings(**TINY, compaction_memory_bytes=20_000)
    async with ap.open("mem://", settings=options) as client:
        async with client.indexed("ix", background=False) as ix:
            a = await stream_of(ix)
            rng = random.Random(5)
            rows = [(f"{rng.randrange(400)}", 1, rng.randrange(3), 1) for _ in range(400)]
            await ix.write([(a, rows[:250])])
            await ix.write([(a, rows[250:])])
            await ix.seal([a], 3)
            await ix.step()
            async with await ix.snapshot(a) as snapshot:
                found = plain((await snapshot.trace_rows()).rows())
            assert found == sorted((*row, diff) for row, diff in summed(rows).items())
            view = await ix.inspect(a)
            assert (view.unsealed, view.trace) == ([], [(0, 3, 0, 0, len(found))])


async def test_sums_beyond_64_bits_stay_side_by_side(ix: Indexed) -> None:
    a = await stream_of(ix)
    most = 2**63 - 1
    await ix.write([(a, [("k", 1, 1, most), ("k", 1, 2, most)])])
    await ix.seal([a], 2)
    await ix.step()
    await ix.seal([a], 3)
    await ix.allow_compaction([(a, 2)])
    await settle_down(ix)
    await ix.allow_compaction([(a, 3)])
    await settle_down(ix)
    assert sum(row[3] for row in await read(ix, a)) == 2 * most
