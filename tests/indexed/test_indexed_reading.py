"""Goal: what is read of an `Indexed` is what a plain list of updates says, whatever was drained,
trimmed and merged meanwhile; a snapshot and the events after it are exactly all there is; maintenance does
what it says."""

import asyncio
import json
import random
import subprocess
import sys
import textwrap
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import pydantic
import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, Listener, Records, Sealed, Stream, StreamSnapshot, UnknownStream
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.schemas import TIME_MAX, Row

TINY = {"inline_writes_single_max_bytes": 0, "blob_target_size": 200, "row_group_bytes": 80}
NO_CACHE = {"blob_cache_bytes": 0}


@pytest.fixture(params=["inline", "tiny parts"])
async def either(request: Any) -> AsyncIterator[Indexed]:
    """With updates in the state, and with many small blobs."""
    options = ap.Settings(**(TINY if request.param == "tiny parts" else {}))
    async with ap.open("mem://", settings=options) as client:
        async with client.indexed("ix", background=False) as ix:
            yield ix


async def stream_of(ix: Indexed, name: str = "a") -> Stream[str, int]:
    return await ix.register(name, str, int)


def at(*times: int, key: str = "k", diff: int = 1) -> list[Row]:
    """An update at each of these times."""
    return [(key, time, time, diff) for time in times]


def plain(rows: Iterable[Any]) -> list[Row]:
    return [tuple(row) for row in rows]


def summed(rows: Iterable[Any], since: int = 0) -> dict[tuple[str, int, int], int]:
    """The oracle: what these updates come to at times from since on."""
    sums: Counter[tuple[str, int, int]] = Counter()
    for key, val, time, diff in rows:
        sums[key, val, max(time, since)] += diff
    return {row: diff for row, diff in sums.items() if diff}


async def read(ix: Indexed, stream: Stream[Any, Any]) -> list[Row]:
    async with await ix.snapshot(stream) as snapshot:
        return plain(await snapshot.rows())


async def split_rows(snapshot: StreamSnapshot[Any, Any], n: int) -> list[list[Row]]:
    async def one(items: Any) -> list[Row]:
        return [tuple(row) async for row in items]

    return await asyncio.gather(*[one(items) for items in snapshot.split(n)])


async def take(listener: Listener[Any, Any], count: int, deadline_s: float = 20) -> list[Any]:
    """The next events: rows of `Records`, and times of `Sealed`."""
    async with asyncio.timeout(deadline_s):
        return [told(await anext(listener)) for _ in range(count)]


def told(item: Any) -> Any:
    return plain(item.updates.rows()) if isinstance(item, Records) else item.time


async def rest(listener: Listener[Any, Any], quiet_s: float = 0.1) -> list[Any]:
    """What it tells until it ends, or nothing comes for a moment."""
    found: list[Any] = []
    try:
        while True:
            async with asyncio.timeout(quiet_s):
                found.append(told(await anext(listener)))
    except (TimeoutError, StopAsyncIteration):
        return found


async def settle_down(ix: Indexed, rounds: int = 60) -> None:
    """Steps, and compactions, until there is nothing to do."""
    for _ in range(rounds):
        requests = await ix.step()
        for request in requests:
            await ix.apply(request.stream, await ix.compact(request))
        if not requests:
            return
    raise AssertionError("it never comes to rest")


def check_view(view: Any) -> None:
    """What holds of an arrangement at every moment."""
    assert [low for low, *_ in view.trace[:1]] in ([], [0])
    for (_, upper, _, level, _), (lower, _, _, next_level, _) in pairwise(view.trace):
        assert upper == lower
        assert level >= next_level
    assert all(lower < upper and since <= view.since for lower, upper, since, _, _ in view.trace)
    assert view.trace_upper == (view.trace[-1][1] if view.trace else 0) <= view.seal
    assert all(low < high and least <= greatest for low, high, least, greatest in view.unsealed)
    assert all(left[1] <= right[0] for left, right in pairwise(view.unsealed))


# --- the same contents, whatever is done -------------------------------------------------------------


class Game:
    """An `Indexed` with two streams, and beside it the plain lists of what was written."""

    def __init__(self, ix: Indexed, rng: random.Random, streams: list[Stream[str, int]]) -> None:
        self.ix = ix
        self.rng = rng
        self.streams = streams
        self.written: dict[str, list[Row]] = {s.name: [] for s in streams}
        self.seal = dict.fromkeys(self.written, 0)
        self.since = dict.fromkeys(self.written, 0)
        self.seqno = 0
        self.requests: list[Any] = []

    def updates(self, stream: Stream[str, int]) -> list[Row]:
        rng, seal = self.rng, self.seal[stream.name]
        if rng.random() < 0.2 and self.written[stream.name]:  # taken back
            chosen = rng.choices(self.written[stream.name], k=5)
            return [(k, v, t, -d) for k, v, t, d in chosen if t >= seal]
        return [
            (f"k{rng.randrange(5)}", rng.randrange(3), seal + rng.randrange(12), rng.choice([1, 1, 2, -1]))
            for _ in range(rng.choice([0, 1, 3, 15]))
        ]

    async def move(self, *, maintains: bool = True) -> None:
        rng, ix = self.rng, self.ix
        choices = ["write", "seal", "since", "step", "compact", "fail"][: 6 if maintains else 3]
        what = rng.choices(choices, [5, 3, 2, 4, 3, 1][: len(choices)])[0]
        stream = rng.choice(self.streams)
        name = stream.name
        if what == "write":
            entries = [(s, self.updates(s)) for s in rng.choices(self.streams, k=2)]
            self.seqno = await ix.write(entries)
            for s, rows in entries:
                self.written[s.name] += rows
        elif what == "seal":
            self.seal[name] += rng.choice([0, 1, 4])
            self.seqno = await ix.seal([stream], self.seal[name])
        elif what == "since":
            self.since[name] = max(self.since[name], self.seal[name] + rng.choice([-3, -1, 0, 2]))
            self.seqno = await ix.allow_compaction([(stream, self.since[name])])
        elif what == "step":
            self.requests += await ix.step()
        elif self.requests:
            request = self.requests.pop()
            failed = what == "fail"
            await ix.apply(request.stream, RuntimeError() if failed else await ix.compact(request))

    async def check(self) -> None:
        for stream in self.streams:
            name = stream.name
            check_view(await self.ix.inspect(stream))
            async with await self.ix.snapshot(stream) as snapshot:
                await self.check_snapshot(snapshot, name)

    async def check_snapshot(self, snapshot: StreamSnapshot[Any, Any], name: str) -> None:
        since = self.since[name]
        assert snapshot.seqno == self.seqno
        assert (snapshot.since, snapshot.seal) == (ap.Antichain(since), ap.Antichain(self.seal[name]))
        rows = plain(await snapshot.rows())
        assert summed(rows) == summed(self.written[name], since)
        assert all(time >= since for _, _, time, _ in rows)
        pieces = await split_rows(snapshot, self.rng.choice([1, 2, 5]))
        assert sorted(row for piece in pieces for row in piece) == sorted(rows)


@pytest.mark.parametrize("seed", range(4))
async def test_the_same_contents_before_and_after_every_step(either: Indexed, seed: int) -> None:
    """Goal: writes, seals, since beyond seal, drains, trims and merges in any order: the model's contents."""
    ix, rng = either, random.Random(seed)
    game = Game(ix, rng, [await stream_of(ix, "a"), await stream_of(ix, "b")])
    kept: list[tuple[StreamSnapshot[Any, Any], list[Row]]] = []
    _, events = await ix.listen(game.streams[0])
    for number in range(36):
        await game.move()
        await game.check()
        if number % 10 == 5:
            snapshot = await ix.snapshot(rng.choice(game.streams))
            kept.append((snapshot, sorted(plain(await snapshot.rows()))))
    await settle_down(ix)
    await game.check()
    for snapshot, rows in kept:
        assert sorted(plain(await snapshot.rows())) == rows
        await snapshot.aclose()
    heard = await rest(events)
    assert [row for item in heard if isinstance(item, list) for row in item] == game.written["a"]
    assert [item for item in heard if isinstance(item, int)][-1:] in ([], [game.seal["a"]])


@pytest.mark.parametrize("seed", range(2))
async def test_the_same_contents_over_take_overs_and_backends(location: Any, seed: int) -> None:
    """Goal: a new owner, a reader and the garbage collection between them change nothing of it."""
    options = ap.Settings(**TINY, rollup_every=4)
    rng = random.Random(seed)
    async with (
        ap.open(blob=location.blob, consensus=location.consensus, settings=options) as client,
        ap.open(blob=location.blob, consensus=location.consensus) as other,
    ):
        game: Game | None = None
        for _ in range(2):
            async with client.indexed("ix", background=False) as ix:
                streams = [await stream_of(ix, "a"), await stream_of(ix, "b")]
                game = game or Game(ix, rng, streams)
                game.ix, game.streams, game.requests = ix, streams, []
                for _ in range(12):
                    await game.move()
                await settle_down(ix)
                await game.check()
                async with other.indexed("ix", readonly=True) as reader:
                    for stream in streams:
                        async with await reader.snapshot(stream) as snapshot:
                            await game.check_snapshot(snapshot, stream.name)


async def test_since_beyond_the_seal_advances_all_that_is_read(either: Indexed) -> None:
    """Goal: also what is written later, and what was merged physically at times beyond its upper."""
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(0, 1, 5))])
    await ix.seal([a], 2)
    await ix.step()
    await ix.write([(a, at(2, 3, 9))])
    await ix.seal([a], 4)
    await ix.step()
    await ix.allow_compaction([(a, 7)])
    wanted = summed(at(0, 1, 5, 2, 3, 9), 7)
    assert summed(await read(ix, a)) == wanted
    (request,) = await ix.step()
    await ix.apply("a", await ix.compact(request))
    view = await ix.inspect(a)
    assert (view.seal, view.since, view.trace_upper) == (4, 7, 4)
    assert view.trace[0][:3] == (0, 4, 7)
    async with await ix.snapshot(a) as snapshot:
        assert {u.time for u in (await snapshot.trace_rows())} == {7}  # beyond its upper
        assert summed(await snapshot.rows()) == wanted
        assert (snapshot.since, snapshot.seal) == (ap.Antichain(7), ap.Antichain(4))
    await ix.write([(a, at(4, 6, 8))])
    await ix.seal([a], 6)
    await settle_down(ix)
    assert summed(await read(ix, a)) == summed(at(0, 1, 5, 2, 3, 9, 4, 6, 8), 7)
    await ix.allow_compaction([(a, TIME_MAX)])
    await settle_down(ix)
    assert {row[2] for row in await read(ix, a)} == {TIME_MAX}


@pytest.mark.parametrize("seed", [0])
async def test_the_same_contents_while_the_background_is_at_work(seed: int) -> None:
    options = ap.Settings(**TINY, indexed_step_s=0.001, rollup_every=4)
    rng = random.Random(seed)
    async with ap.open("mem://", settings=options) as client, client.indexed("ix") as ix:
        game = Game(ix, rng, [await stream_of(ix, "a"), await stream_of(ix, "b")])
        _, events = await ix.listen(game.streams[1])
        for _ in range(40):
            await game.move(maintains=False)
            await game.check()
        heard = await rest(events)
        assert [row for item in heard if isinstance(item, list) for row in item] == game.written["b"]
        counters = ix.counters()
        assert counters["compactions"] > 0
        assert counters["failed_steps"] == counters["failed_commands"] == 0


async def test_batches_keep_their_order_through_rollups() -> None:
    """Goal: seqnos and times of several digits are numbers, not text, for whoever opens next."""
    options = ap.Settings(**TINY, rollup_every=2)
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url, settings=options) as client, client.indexed("ix", background=False) as ix:
        a = await stream_of(ix)
        for seal in (2, 9, 11, 99, 100, 1005):
            await ix.write([(a, at(seal - 1, 10**6))])
            await ix.seal([a], seal)
            for _ in range(3):
                await ix.step()
        for t in range(12):
            await ix.write([(a, at(2000 + t))])
            await ix.step()
        view, rows = await ix.inspect(a), await read(ix, a)
    assert [batch[0] for batch in view.trace] == [0, 2, 9, 11, 99, 100]
    check_view(view)
    async with ap.open(url) as other:
        for readonly in (True, False):
            async with other.indexed("ix", readonly=readonly, background=False) as again:
                assert await again.inspect("a") == view
                stream = await again.load("a", str, int)
                assert stream is not None
                assert await read(again, stream) == rows


async def test_sweeping_leaks_spares_what_is_named_and_what_is_being_made() -> None:
    """Goal: neither live blobs nor the output of a compaction under way are leaks; a former owner's is."""
    url = f"mem://{uuid.uuid4().hex}"

    async def parts() -> int:
        return len([key async for key, _ in ap.open_blob(url).list("") if key.endswith(".parquet")])

    async with ap.open(url) as other:
        async with (
            ap.open(url, settings=ap.Settings(**TINY)) as client,
            client.indexed("ix", background=False) as ix,
        ):
            a = await stream_of(ix)
            await drained(ix, a, [at(*range(10)), at(*range(10, 20))])
            await ix.allow_compaction([(a, 20)])
            (request,) = await ix.step()
            response = await ix.compact(request)
            await other.sweep_leaked_blobs(dry_run=False)
            await ix.apply("a", response)
            assert len(await read(ix, a)) == 20
            await drained(ix, a, [at(*range(20, 30)), at(*range(30, 40))])
            await ix.allow_compaction([(a, 40)])
            (request,) = await ix.step()
            await ix.compact(request)  # its response is lost
            leaked = await parts()
        await other.sweep_leaked_blobs(dry_run=False)
        assert await parts() < leaked
        async with other.indexed("ix", background=False) as again:
            stream = await again.load("a", str, int)
            assert stream is not None
            assert len(await read(again, stream)) == 40
            await other.sweep_leaked_blobs(dry_run=False)
            assert len(await read(again, stream)) == 40


# --- a snapshot --------------------------------------------------------------------------------------


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


class Interval(NamedTuple):
    id: str
    bounds: tuple[Any, ...]
    times: list[int]


INTERVALS = [
    Interval("all", (), [7, 3, 0, TIME_MAX, 3, 5]),
    Interval("from 0", (0,), [7, 3, 0, TIME_MAX, 3, 5]),
    Interval("a lower", (5,), [7, TIME_MAX, 5]),
    Interval("both are times", (3, 7), [3, 3, 5]),
    Interval("frontiers", (ap.Antichain(3), ap.Antichain(7)), [3, 3, 5]),
    Interval("to the end", (4, ap.Antichain()), [7, TIME_MAX, 5]),
    Interval("below the last", (4, TIME_MAX), [7, 5]),
    Interval("the last time alone", (TIME_MAX,), [TIME_MAX]),
    Interval("between", (1, 3), []),
    Interval("the first alone", (0, 1), [0]),
    Interval("equal", (3, 3), []),
    Interval("equal at 0", (0, 0), []),
    Interval("equal at the end", (TIME_MAX, TIME_MAX), []),
    Interval("both empty frontiers", (ap.Antichain(), ap.Antichain()), []),
]


@pytest.mark.parametrize("case", INTERVALS, ids=lambda case: case.id)
async def test_unsealed_rows_are_those_in_the_interval(either: Indexed, case: Interval) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(7, 3, 0))])
    await ix.write([(a, at(TIME_MAX))])
    await ix.write([(a, at(3, 5))])
    await ix.allow_compaction([(a, 6)])  # stored times are shown
    async with await ix.snapshot(a) as snapshot:
        found = await snapshot.unsealed_rows(*case.bounds)
        assert [u.time for u in found] == case.times


@pytest.mark.parametrize(
    "bounds",
    [(5, 4), (1, 0), (TIME_MAX, 3), (ap.Antichain(), 3), (ap.Antichain(5), ap.Antichain(4))],
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
    assert not ix._shard.register.pins


async def test_an_open_snapshot_of_a_reader_keeps_its_blobs(location: Any) -> None:
    """Goal: the owner compacts, collects and destroys; who has it open in another client reads on."""
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


# --- drain, evict, trim ------------------------------------------------------------------------------


async def test_a_drain_makes_one_sorted_batch_of_what_was_sealed(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, [("b", 1, 3, 1), ("a", 1, 7, 1), ("b", 1, 3, 2), ("a", 9, 3, 1)])])
    await ix.write([(a, [("b", 1, 3, -1), ("a", 2, 0, 1), ("z", 1, 4, 1), ("z", 1, 4, -1)])])
    await ix.seal([a], 5)
    assert (await ix.inspect(a)).trace == []  # logically moved, not yet physically
    assert await ix.step() == []
    view = await ix.inspect(a)
    assert view.trace == [(0, 5, 0, 0, 3)]
    assert view.unsealed == [(0, 1, 7, 7)]
    async with await ix.snapshot(a) as snapshot:
        wanted = [("a", 2, 0, 1), ("a", 9, 3, 1), ("b", 1, 3, 2)]
        assert plain((await snapshot.trace_rows()).rows()) == wanted
    await ix.seal([a], 8)
    await ix.step()
    view = await ix.inspect(a)
    assert view.trace == [(0, 5, 0, 0, 3), (5, 8, 0, 0, 1)]
    assert view.unsealed == []


async def test_a_drain_keeps_stored_times_though_since_is_beyond(either: Indexed) -> None:
    """Its since is {0}, for exactly that description."""
    ix = either
    a = await stream_of(ix)
    await ix.allow_compaction([(a, 50)])
    await ix.write([(a, at(1, 2))])
    await ix.seal([a], 3)
    await ix.step()
    assert (await ix.inspect(a)).trace == [(0, 3, 0, 0, 2)]
    async with await ix.snapshot(a) as snapshot:
        assert plain((await snapshot.trace_rows()).rows()) == at(1, 2)
        assert {u.time for u in await snapshot.rows()} == {50}


async def test_where_nothing_is_to_be_read_no_batch_is_made(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(9))])
    await ix.seal([a], 5)
    await ix.step()
    view = await ix.inspect(a)
    assert (view.seal, view.trace_upper, view.trace) == (5, 0, [])
    await ix.seal([a], 10)
    await ix.step()
    assert (await ix.inspect(a)).trace == [(0, 10, 0, 0, 1)]


async def test_a_batch_around_the_interval_that_holds_nothing_in_it_makes_no_batch(either: Indexed) -> None:
    """Goal: its least and greatest times say that there may be something, and there is nothing."""
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(2, 100))])
    await ix.write([(a, at(2, 100))])
    await ix.seal([a], 3)
    await ix.step()
    assert (await ix.inspect(a)).unsealed == [(0, 1, 100, 100), (1, 2, 2, 100)]
    await ix.seal([a], 50)
    await ix.step()
    view = await ix.inspect(a)
    assert (view.trace_upper, view.trace) == (3, [(0, 3, 0, 0, 1)])
    assert view.unsealed == [(0, 1, 100, 100), (1, 2, 100, 100)]
    await ix.seal([a], 101)
    await ix.step()
    assert (await ix.inspect(a)).trace == [(0, 3, 0, 0, 1), (3, 101, 0, 0, 1)]


async def test_what_cancels_to_nothing_is_an_empty_batch_without_a_blob(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(*range(20)))])
    await ix.write([(a, at(*range(20), diff=-1))])
    await ix.seal([a], 20)
    await ix.step()
    view = await ix.inspect(a)
    assert (view.trace, view.unsealed) == ([(0, 20, 0, 0, 0)], [])
    counters = ix.counters()
    for name in ("trace_blobs", "trace_bytes", "unsealed_blobs", "unsealed_bytes"):
        assert counters[name] == 0
    assert await read(ix, a) == []


async def test_a_step_trims_one_batch_which_keeps_its_seqnos(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(1, 20))])
    await ix.write([(a, at(30, 31))])
    await ix.write([(a, at(2, 21, 22))])
    await ix.write([(a, at(3, 4))])
    await ix.seal([a], 10)
    await ix.step()
    view = await ix.inspect(a)
    assert view.unsealed == [(0, 1, 20, 20), (1, 2, 30, 31), (2, 3, 2, 22)]
    await ix.step()
    view = await ix.inspect(a)
    assert view.unsealed == [(0, 1, 20, 20), (1, 2, 30, 31), (2, 3, 21, 22)]
    assert summed(await read(ix, a)) == summed(at(1, 20, 30, 31, 2, 21, 22, 3, 4))


async def test_a_batch_is_trimmed_down_to_the_traces_upper_and_not_if_it_begins_there(
    either: Indexed,
) -> None:
    """Goal: the trace's upper itself is not in the trace; so what is there stays, and alone."""
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(1, 10))])
    await ix.write([(a, at(10, 11))])
    await ix.write([(a, at(9))])
    await ix.seal([a], 10)
    await ix.step()
    view = await ix.inspect(a)
    assert view.unsealed == [(0, 1, 10, 10), (1, 2, 10, 11)]
    before = ix._core.state.seqno
    await ix.step()
    assert ix._core.state.seqno == before  # nothing was rewritten
    assert summed(await read(ix, a)) == summed(at(1, 10, 10, 11, 9))


async def test_steps_with_nothing_to_do_touch_no_store() -> None:
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    blob, consensus = (
        FaultyBlob(ap.open_blob(url), faults),
        FaultyConsensus(ap.open_consensus(url), faults),
    )
    options = ap.Settings(**TINY, rollup_every=4)
    async with ap.open(blob=blob, consensus=consensus, settings=options) as client:
        async with client.indexed("ix", background=False) as ix:
            a, b = await stream_of(ix), await stream_of(ix, "b")
            for t in range(9):
                await ix.write([(a, at(t, t + 3)), (b, at(50))])
                await ix.seal([a, b], t)
                await settle_down(ix)
            await ix.allow_compaction([(a, 5)])
            await settle_down(ix)
            for _ in range(6):
                await ix.step()
            before = faults.calls.total()
            for _ in range(5):
                assert await ix.step() == []
            assert faults.calls.total() == before
            await ix.seal([a, b], 9)
            await ix.step()
            assert faults.calls.total() > before


async def test_steps_and_compactions_take_no_seqno_and_are_told_to_no_listener(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    snapshot, events = await ix.listen(a)
    for t in range(4):
        await ix.write([(a, at(t, t + 5))])
        await ix.seal([a], t + 1)
        await ix.allow_compaction([(a, t)])
        await settle_down(ix)
    wanted = [item for t in range(4) for item in (at(t, t + 5), t + 1)]
    assert await rest(events) == wanted
    async with await ix.snapshot(a) as after:
        assert (snapshot.seqno, after.seqno) == (0, 12)


async def test_a_step_that_fails_raises_counts_and_is_repeated() -> None:
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    blob = FaultyBlob(ap.open_blob(url), faults)
    options = ap.Settings(**TINY, **NO_CACHE, retry_timeout_s=0.01)
    async with ap.open(blob=blob, consensus=ap.open_consensus(url), settings=options) as client:
        async with client.indexed("ix", background=False) as ix:
            a, b = await stream_of(ix), await ix.register("b", str, str)
            await ix.write([(a, at(*range(30))), (b, [("k", "v", 1, 1)])])
            await ix.seal([a, b], 10)
            faults.rates = {Outcome.REFUSED: 1.0}
            for _ in range(2):
                with pytest.raises(ap.StorageUnavailable):
                    await ix.step()
            faults.heal()
            assert ix.counters()["failed_steps"] == 2
            view = await ix.inspect(a)
            assert (view.trace, len(view.unsealed)) == ([], 1)
            await ix.step()
            assert (await ix.inspect(a)).trace == [(0, 10, 0, 0, 10)]
            assert summed(await read(ix, a)) == summed(at(*range(30)))


# --- compaction --------------------------------------------------------------------------------------


async def drained(ix: Indexed, a: Stream[str, int], batches: list[list[Row]]) -> None:
    """A batch of the trace for each of these, over an interval of ten times."""
    for rows in batches:
        seal = (await ix.inspect(a)).seal
        await ix.write([(a, [(k, v, seal, d) for k, v, _, d in rows])])
        await ix.seal([a], seal + 10)
        await ix.step()


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


# --- listen ------------------------------------------------------------------------------------------


async def test_events_are_per_commit_records_and_then_the_last_seal(either: Indexed) -> None:
    ix = either
    a, b = await stream_of(ix), await stream_of(ix, "b")
    await ix.write([(a, at(1))])
    snapshot, events = await ix.listen(a)
    assert plain(await snapshot.rows()) == at(1)
    await asyncio.gather(
        ix.write([(a, at(9, 8)), (b, at(0)), (a, at(10))]),
        ix.seal([a], 3),
        ix.write([(a, at(7))]),
        ix.seal([a, b], 5),
        ix.write([(a, [])]),
        ix.write([(a, at(2))]),
        return_exceptions=True,
    )
    await ix.write([(a, at(6))])
    await ix.seal([a], 6)
    assert await rest(events) == [at(9, 8, 10, 7), 5, at(6), 6]
    await snapshot.aclose()
    await events.aclose()


async def test_nothing_is_told_of_what_does_not_change_the_stream(ix: Indexed) -> None:
    a, b = await stream_of(ix), await stream_of(ix, "b")
    await ix.seal([a], 5)
    _, events = await ix.listen(a)
    await ix.write([(b, at(1))])
    await ix.write([(a, []), (b, at(1))])
    await ix.write([])
    await ix.seal([b], 3)
    await ix.allow_compaction([(a, 4)])
    for refused in (ix.write([(b, at(4)), (a, at(4))]), ix.seal([a], 4)):
        with pytest.raises(ap.Error):
            await refused
    await ix.register("c", str, int)
    await ix.destroy("b")
    await settle_down(ix)
    assert await rest(events) == []
    await ix.write([(a, at(5))])
    assert await rest(events) == [at(5)]


async def test_the_items_are_records_and_sealed(ix: Indexed) -> None:
    a = await stream_of(ix)
    _, events = await ix.listen(a)
    await ix.write([(a, at(5))])
    await ix.seal([a], 2)
    first, second = await anext(events), await anext(events)
    assert isinstance(first, Records) and isinstance(first.updates, ap.Updates)
    assert second == Sealed(2) and isinstance(second.time, int)


async def test_a_snapshot_and_what_is_told_after_it_are_exactly_everything(either: Indexed) -> None:
    """Goal: listeners that are opened at any moment beside concurrent writers agree on one order; each has
    what came before in its snapshot and what came after in its events, with nothing twice."""
    ix, rng = either, random.Random(1)
    a, b = await stream_of(ix), await stream_of(ix, "b")
    _, all_events = await ix.listen(a)
    opened: list[tuple[list[Row], Any]] = []

    async def write(number: int) -> None:
        for i in range(15):
            rows = [(f"{number}.{i}", j, rng.randrange(100), 1) for j in range(rng.choice([1, 2, 9]))]
            await ix.write([(b, at(1)), (a, rows)])
            if rng.random() < 0.3:
                await asyncio.sleep(0.001)

    async def maintain() -> None:
        for _ in range(10):
            await settle_down(ix)
            await asyncio.sleep(0.002)

    async def follow() -> None:
        await asyncio.sleep(rng.random() * 0.1)
        snapshot, events = await ix.listen(a)
        async with snapshot:
            opened.append((plain(await snapshot.rows()), events))

    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(write(n))
        for _ in range(12):
            group.create_task(follow())
        group.create_task(maintain())
    everything = [row for item in await rest(all_events) for row in item]
    assert sorted(everything) == sorted(await read(ix, a))
    for before, events in opened:
        after = [row for item in await rest(events, 0.02) for row in item]
        assert before + after == everything
    assert len({len(before) for before, _ in opened}) > 1


async def test_listeners_in_another_client_hear_the_same(location: Any) -> None:
    """Goal: a reader's events are those of the owner, in the same order, over a change of the owner."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as client,
        ap.open(blob=location.blob, consensus=location.consensus) as other,
    ):
        ix = await client.indexed("ix", background=False)
        a, b = await stream_of(ix), await stream_of(ix, "b")
        await ix.write([(a, at(0))])
        async with other.indexed("ix", readonly=True) as reader:
            snapshot, events = await reader.listen(a)
            _, own = await ix.listen(a)
            assert plain(await snapshot.rows()) == at(0)
            await asyncio.gather(*[ix.write([(a, at(5 + n)), (b, at(n))]) for n in range(6)])
            await ix.seal([a], 3)
            await settle_down(ix)
            with pytest.raises(ap.Error):
                await ix.write([(a, at(2))])
            heard = await take(own, 2)
            assert await take(events, 2) == heard == [at(*range(5, 11)), 3]
            async with client.indexed("ix", background=False) as late:
                await late.write([(a, at(20))])
                await late.seal([a], 12)
                await settle_down(late)
                await late.write([(a, at(21))])
                assert await take(events, 3) == [at(20), 12, at(21)]
                second, again = await reader.listen(a)
                assert summed(await second.rows()) == summed(at(0, *range(5, 11), 20, 21))
                await late.destroy("a")
                assert await rest(events, 5) == await rest(again, 5) == []
        await ix.stop()


@pytest.mark.parametrize("where", ["owner", "reader"])
async def test_what_a_listener_has_not_taken_yet_is_kept_for_it(where: str) -> None:
    """Goal: drained, evicted, trimmed, merged, collected and even destroyed: it is told as it was written."""
    options = ap.Settings(**TINY, **NO_CACHE, rollup_every=2, watch_timeout_s=0.2)
    url = f"mem://{uuid.uuid4().hex}"
    async with (
        ap.open(url, settings=options) as client,
        ap.open(url, settings=options) as other,
        client.indexed("ix", background=False) as ix,
        other.indexed("ix", readonly=True) as reader,
    ):
        a, b = await stream_of(ix), await stream_of(ix, "b")
        _, events = await (ix if where == "owner" else reader).listen(a)
        wanted: list[Any] = []
        for t in range(0, 30, 5):
            rows = at(*range(t + 7, t - 1, -1))
            await ix.write([(a, rows)])
            await ix.seal([a], t + 5)
            wanted += [rows, t + 5]
            await settle_down(ix)
        await ix.allow_compaction([(a, 30)])
        await settle_down(ix)
        await asyncio.sleep(0.05)
        await ix.destroy("a")
        for _ in range(6):
            await ix.seal([b], 0)
            await ix.step()
        async with asyncio.timeout(10):
            assert [told(item) async for item in events] == wanted
        await events.aclose()


@pytest.mark.parametrize("where", ["owner", "reader"])
async def test_a_listener_that_is_too_far_behind_ends_with_lease_expired(where: str) -> None:
    """Goal: at the limit it hears all; one commit more, and it has lost its place for good. Others go on."""
    options = ap.Settings(listen_queue_max=5)
    url = f"mem://{uuid.uuid4().hex}"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(ap.open(url, settings=options))
        ix = await stack.enter_async_context(client.indexed("ix", background=False))
        a, b = await stream_of(ix), await stream_of(ix, "b")
        source = ix
        if where == "reader":
            other = await stack.enter_async_context(ap.open(url, settings=options))
            source = await stack.enter_async_context(other.indexed("ix", readonly=True))
        _, slow = await source.listen(a)
        _, slower = await source.listen(a)
        _, beside = await source.listen(b)
        for t in range(5):
            await asyncio.gather(ix.write([(a, at(t))]), ix.seal([a], 0))
            await ix.write([])
        await ix.write([(b, at(1))])
        await asyncio.sleep(0.1)
        assert await take(slow, 5) == [at(t) for t in range(5)]
        await ix.write([(a, at(5))])
        await asyncio.sleep(0.1)
        for _ in range(2):
            with pytest.raises(ap.LeaseExpired):
                await take(slower, 1, 5)
        assert await take(slow, 1) == [at(5)]
        assert await take(beside, 1) == [at(1)]


class LostLease(NamedTuple):
    """A stream of twelve writes, a reader that heard nothing meanwhile, and what it listened by."""

    ix: Indexed
    stream: Any
    reader: Indexed
    events: Any


@asynccontextmanager
async def lost_lease() -> AsyncIterator[LostLease]:
    """Its lease ran out, and the versions after the one that it knows were truncated."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    quick = {"reader_lease_s": 0.3, "watch_timeout_s": 0.1, "retry_timeout_s": 0.05}
    options = ap.Settings(**quick, rollup_every=2)
    async with (
        ap.open(url, settings=options) as client,
        ap.open(blob=ap.open_blob(url), consensus=consensus, settings=options) as other,
        client.indexed("ix", background=False) as ix,
        other.indexed("ix", readonly=True) as reader,
    ):
        a = await stream_of(ix)
        _, events = await reader.listen(a)
        faults.rates = {Outcome.REFUSED: 1.0}
        await asyncio.sleep(0.6)
        for t in range(12):
            await ix.write([(a, at(t))])
            await ix.step()
        faults.heal()
        yield LostLease(ix, a, reader, events)


async def test_a_reader_that_lost_its_lease_ends_with_lease_expired() -> None:
    """Goal: its versions were truncated while it heard nothing: it says so, and never skips any."""
    async with lost_lease() as (ix, a, reader, events):
        with pytest.raises(ap.LeaseExpired):
            async with asyncio.timeout(10):
                while True:
                    try:
                        await anext(events)
                    except ap.StorageUnavailable:
                        continue
        snapshot, again = await reader.listen(a)
        assert summed(await snapshot.rows()) == summed(at(*range(12)))
        await ix.write([(a, at(50))])
        assert await take(again, 1) == [at(50)]


@pytest.mark.parametrize("where", ["owner", "reader"])
async def test_waits_that_are_given_up_lose_nothing(where: str) -> None:
    rng = random.Random(2)
    url, faults = f"mem://{uuid.uuid4().hex}", Faults(latency_s=(0.0, 0.004))
    options = ap.Settings(**TINY, **NO_CACHE)
    blob = FaultyBlob(ap.open_blob(url), faults)
    async with (
        ap.open(url, settings=options) as client,
        ap.open(blob=blob, consensus=ap.open_consensus(url), settings=options) as other,
    ):
        owning, following = (other, client) if where == "owner" else (client, other)
        async with (
            owning.indexed("ix", background=False) as ix,
            following.indexed("ix", readonly=True) as reader,
        ):
            a = await stream_of(ix)
            _, events = await (ix if where == "owner" else reader).listen(a)

            async def write() -> list[Any]:
                wanted: list[Any] = []
                for t in range(12):
                    rows = at(*range(t, t + rng.choice([1, 20])))
                    await asyncio.gather(ix.write([(a, rows)]), ix.seal([a], t))
                    wanted += [rows] if t == 0 else [rows, t]
                return wanted

            writing = asyncio.ensure_future(write())
            heard: list[Any] = []
            async with asyncio.timeout(20):
                while not heard or heard[-1] != 11:
                    try:
                        async with asyncio.timeout(rng.choice([0, 0.0005, 0.003, 0.05])):
                            heard.append(told(await anext(events)))
                    except TimeoutError:
                        continue
            assert [item for item in heard if item != 0] == await writing


async def test_several_who_wait_share_the_events(ix: Indexed) -> None:
    a = await stream_of(ix)
    _, events = await ix.listen(a)
    waits = [asyncio.ensure_future(anext(events)) for _ in range(6)]
    for t in range(3):
        await asyncio.sleep(0.005)
        await asyncio.gather(ix.write([(a, at(t + 1))]), ix.seal([a], t + 1))
    async with asyncio.timeout(5):
        items = [told(item) for item in await asyncio.gather(*waits)]
    assert items == [item for t in range(3) for item in (at(t + 1), t + 1)]


async def test_a_destroyed_stream_ends_its_listeners_after_all_that_was_written(either: Indexed) -> None:
    ix = either
    a, b = await stream_of(ix), await stream_of(ix, "b")
    _, slow = await ix.listen(a)
    _, waiting = await ix.listen(a)
    _, other = await ix.listen(b)
    await ix.write([(a, at(*range(9))), (b, at(1))])
    await ix.seal([a], 4)
    assert await take(waiting, 2) == [at(*range(9)), 4]
    wait = asyncio.ensure_future(anext(waiting, "the end"))
    await asyncio.sleep(0)
    await ix.destroy("a")
    async with asyncio.timeout(5):
        assert await wait == "the end"
        assert [told(item) async for item in slow] == [at(*range(9)), 4]
    assert await anext(slow, None) is None
    await ix.write([(b, at(2))])
    assert await rest(other) == [at(1), at(2)]


@pytest.mark.parametrize("readonly", [False, True], ids=["owner", "reader"])
async def test_a_listen_that_does_not_succeed_registers_nothing(mem: ap.Client, readonly: bool) -> None:
    """Goal: unknown, of other codecs, or cancelled at any moment: no listener and no pin is left behind."""
    async with mem.indexed("ix", background=False) as owner:
        a, gone = await stream_of(owner), await stream_of(owner, "gone")
        await owner.destroy("gone")
        async with mem.indexed("ix", readonly=True) as reader, mem.indexed("other") as another:
            source = reader if readonly else owner
            wrong = await another.register("a", str, float)
            with pytest.raises(UnknownStream):
                await source.listen(gone)
            for call in (source.listen, source.snapshot):
                with pytest.raises(ap.CodecMismatch):
                    await call(wrong)
            for turns in range(12):
                task = asyncio.ensure_future(source.listen(a))
                for _ in range(turns):
                    await asyncio.sleep(0)
                if task.cancel():
                    await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled():
                    snapshot, events = await task
                    await snapshot.aclose()
                    await events.aclose()
            assert not source._shard.register.pins
            assert not source._core.feed._listeners


async def test_closing_a_listener_ends_its_wait_and_lets_go(ix: Indexed) -> None:
    a = await stream_of(ix)
    snapshot, events = await ix.listen(a)
    wait = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.01)
    await events.aclose()
    await events.aclose()
    await snapshot.aclose()
    with pytest.raises((ap.InvalidUsage, StopAsyncIteration)):
        await wait
    with pytest.raises((ap.InvalidUsage, StopAsyncIteration)):
        await anext(events)
    assert not ix._shard.register.pins
    await ix.write([(a, at(1))])


async def test_a_listener_tells_what_stopping_has_committed(mem: ap.Client) -> None:
    """Goal: what is durable is told before the end: an iteration that ends in peace has heard all of it."""
    ix = await mem.indexed("ix", background=False)
    a = await stream_of(ix)
    _, events = await ix.listen(a)
    heard: list[Any] = []

    async def follow() -> None:
        async for item in events:
            heard.append(told(item))  # noqa: PERF401  # what was heard so far counts

    following = asyncio.ensure_future(follow())
    await ix.write([(a, at(1))])
    write = asyncio.ensure_future(ix.write([(a, at(2))]))
    await asyncio.sleep(0)
    await ix.stop()
    assert await write == 2
    async with asyncio.timeout(5):
        await following
    assert heard == [at(1), at(2)]


async def test_hundreds_of_listeners_on_one_stream(mem: ap.Client) -> None:
    """They cost no requests of their own: each hears everything, fast or slow."""
    async with mem.indexed("ix", background=False) as ix, mem.indexed("ix", readonly=True) as reader:
        a = await stream_of(ix)
        listeners = [(await (reader if n % 2 else ix).listen(a))[1] for n in range(200)]
        before = mem.metrics["consensus.scan"].count + mem.metrics["consensus.head"].count
        for t in range(10):
            await ix.write([(a, at(t))])
        heard = await asyncio.gather(*[take(listener, 10) for listener in listeners])
        assert all(items == [at(t) for t in range(10)] for items in heard)
        assert mem.metrics["consensus.scan"].count + mem.metrics["consensus.head"].count - before < 60


async def test_an_iteration_that_ends_in_peace_has_heard_all_that_was_durable() -> None:
    """Goal: a follower that is a little slower than the store hears what was committed before the stop."""
    async with ap.open("mem://") as client:
        ix = await client.indexed("ix", background=False)
        a = await stream_of(ix)
        _, events = await ix.listen(a)
        for t in range(3):
            await ix.write([(a, at(t))])
        await ix.stop()
        assert await rest(events) == [at(t) for t in range(3)]


async def test_a_listener_opened_after_the_lease_was_lost_is_not_ended_by_the_loss() -> None:
    """Goal: what an older listener has missed is no concern of one that began after it."""
    async with lost_lease() as (ix, a, reader, early):
        snapshot, late = await reader.listen(a)
        assert len(await snapshot.rows()) == 12
        await ix.write([(a, at(50))])
        assert await take(late, 1, 5) == [at(50)]
        with pytest.raises(ap.LeaseExpired):
            await take(early, 13, 5)


# --- other processes ---------------------------------------------------------------------------------

WRITER = """
    import asyncio, sys
    import aiopersist as ap

    async def main(blob, consensus):
        async with ap.open(blob=blob, consensus=consensus) as client:
            async with client.indexed("ix") as ix:
                a = await ix.register("a", str, int)
                sys.stdin.readline()
                for t in range(1, 13):
                    await asyncio.gather(*[ix.write([(a, [(str(n), t, t, 1)])]) for n in range(3)])
                    await ix.seal([a], t)
                    if t % 4 == 0:
                        await ix.allow_compaction([(a, t)])
                        await ix.step()
                await ix.destroy("a")

    asyncio.run(main(*sys.argv[1:]))
"""

READER = """
    import asyncio, json, sys
    import aiopersist as ap
    from aiopersist.indexed import Records

    async def main(blob, consensus):
        async with ap.open(blob=blob, consensus=consensus) as client:
            async with client.indexed("ix", readonly=True) as ix:
                a = await ix.load("a", str, int)
                snapshot, events = await ix.listen(a)
                print(json.dumps([list(row) for row in await snapshot.rows()]), flush=True)
                await snapshot.aclose()
                async for item in events:
                    found = item.updates.rows() if isinstance(item, Records) else item.time
                    print(json.dumps(found), flush=True)

    asyncio.run(main(*sys.argv[1:]))
"""


def skip_but_for_sqlite_and_s3(location: Any) -> None:
    if location.consensus.startswith("mem"):
        pytest.skip("memory is of one process")
    if location.consensus.startswith("postgres") and location.blob.startswith("file"):
        pytest.skip("Postgres is seen beside S3")


def program(text: str, location: Any) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text), location.blob, location.consensus]


@pytest.mark.slow
async def test_another_process_writes_and_a_listener_here_hears_all(location: Any) -> None:
    skip_but_for_sqlite_and_s3(location)
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        with subprocess.Popen(program(WRITER, location), stdin=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            async with asyncio.timeout(40):
                while True:
                    try:
                        reader = await client.indexed("ix", readonly=True)
                        break
                    except UnknownStream:
                        await asyncio.sleep(0.05)
                while (a := await reader.load("a", str, int)) is None:
                    await asyncio.sleep(0.02)
                snapshot, events = await reader.listen(a)
                assert await snapshot.rows() == []
                await snapshot.aclose()
                process.stdin.write("go\n")
                process.stdin.flush()
                heard = [told(item) async for item in events]
                assert await asyncio.to_thread(process.wait, 20) == 0
        rows = [row for item in heard if isinstance(item, list) for row in item]
        assert rows == [(str(n), t, t, 1) for t in range(1, 13) for n in range(3)]
        assert [item for item in heard if isinstance(item, int)] == list(range(1, 13))
        await reader.stop()


@pytest.mark.slow
async def test_a_listener_in_another_process_hears_what_is_written_here(location: Any) -> None:
    skip_but_for_sqlite_and_s3(location)
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        async with client.indexed("ix", background=False) as ix:
            a = await stream_of(ix)
            await ix.write([(a, at(0))])
            with subprocess.Popen(program(READER, location), stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                async with asyncio.timeout(40):
                    first = json.loads(await asyncio.to_thread(process.stdout.readline))
                    wanted: list[Any] = []
                    for t in range(1, 9):
                        await ix.write([(a, at(t + 2, t))])
                        await ix.seal([a], t)
                        await settle_down(ix)
                        wanted += [at(t + 2, t), t]
                    await ix.destroy("a")
                    text = await asyncio.to_thread(process.stdout.read)
                    assert await asyncio.to_thread(process.wait, 20) == 0
    assert plain(first) == at(0)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [plain(item) if isinstance(item, list) else item for item in lines] == wanted
