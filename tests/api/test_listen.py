"""Goal: listens and subscriptions tell every update once, in closed intervals, whatever waits are given
up; they begin, end and wake as api.md says."""

import asyncio
import random
import subprocess
import sys
import textwrap
import time
import uuid
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from aiopersist.testing.model import Model, gathered
from aiopersist.testing.strategies import histories, times
from tests.support.schemas import PRODUCT, SCHEMA

EMPTY = ap.Antichain()


async def filled(client: ap.Client, upper: int = 5, name: str = "s") -> ap.WriteHandle[str, int]:
    """A shard with one update at each complete time."""
    writer: ap.WriteHandle[str, int] = await client.writer(name, SCHEMA)
    for t in range(upper):
        await writer.compare_and_append([("k", t, t, 1)], t, t + 1)
    return writer


async def add(writer: ap.WriteHandle[str, int], *at: int) -> None:
    for t in at:
        await writer.compare_and_append([("k", t, t, 1)], t, t + 1)


async def until(listen: ap.Listen, upper: Any) -> tuple[list[Any], list[ap.Antichain]]:
    """All updates up to the progress to `upper`, and every progress."""
    seen, told = [], []
    async with asyncio.timeout(20):
        async for item in listen:
            if isinstance(item, ap.Progress):
                told.append(item.upper)
                assert item.upper == listen.frontier
                if item.upper == ap.Antichain(upper):
                    break
            else:
                seen += item.rows()
    return seen, told


async def is_waiting(listen: ap.Listen) -> bool:
    try:
        async with asyncio.timeout(0.05):
            await anext(listen)
    except TimeoutError:
        return True
    return False


# --- where it begins ---------------------------------------------------------------------------------


class Begin(NamedTuple):
    id: str
    upper: int
    how: Any
    frontier: int
    as_of: int | None
    first: list[int]
    """Times of the updates that are told once 9 is complete."""


BEGINS = [
    Begin("listen, at the upper", 5, lambda r: r.listen(), 5, 4, [5, 6, 7, 8, 9]),
    Begin("listen, at the minimum", 0, lambda r: r.listen(), 0, None, list(range(10))),
    Begin("listen, a time", 5, lambda r: r.listen(as_of=2), 3, 2, list(range(3, 10))),
    Begin("listen, time 0", 5, lambda r: r.listen(as_of=0), 1, 0, list(range(1, 10))),
    Begin("listen, time ahead", 5, lambda r: r.listen(as_of=7), 8, 7, [8, 9]),
    Begin("subscribe", 5, lambda r: r.subscribe(), 4, 4, [4] * 5 + [5, 6, 7, 8, 9]),
    Begin("subscribe, nothing there", 0, lambda r: r.subscribe(), 0, None, list(range(10))),
    Begin("subscribe, a time", 5, lambda r: r.subscribe(2), 2, 2, [2] * 3 + [3, 4, 5, 6, 7, 8, 9]),
    Begin("subscribe, time ahead", 5, lambda r: r.subscribe(as_of=7), 7, 7, [7] * 8 + [8, 9]),
]  # fmt: skip


@pytest.mark.parametrize("case", BEGINS, ids=lambda c: c.id)
async def test_where_it_begins(mem: ap.Client, case: Begin) -> None:
    """`frontier`, `as_of` and `cursor` are valid from the opening, which does not wait for the upper;
    no progress is told for what it stands at."""
    writer = await filled(mem, case.upper)
    reader = await mem.reader("s", SCHEMA)
    async with asyncio.timeout(1):
        listen = await case.how(reader)
    assert listen.frontier == ap.Antichain(case.frontier)
    assert listen.as_of == case.as_of
    cursor = listen.cursor
    await add(writer, *range(case.upper, 10))
    seen, told = await until(listen, 10)
    assert sorted(u.time for u in seen) == case.first
    assert ap.Antichain(case.frontier) not in told
    again = await reader.listen(cursor=cursor)
    assert (again.frontier, again.as_of) == (ap.Antichain(case.frontier), case.as_of)
    assert gathered((await until(again, 10))[0]) == gathered(seen)


async def test_the_default_begins_at_the_upper_of_now(client: ap.Client, location: Any) -> None:
    """By a linearizable read: what another process has completed before is not told."""
    await filled(client, 2)
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        reader = await client.reader("s", SCHEMA)
        writer = await other.writer("s", SCHEMA)
        for t in range(2, 6):
            await add(writer, t)
            listen = await reader.listen()
            assert listen.frontier == ap.Antichain(t + 1)
            assert (await reader.subscribe()).as_of == t


@pytest.mark.parametrize("bad", [ap.Antichain(3), (1, 2), (3,), -1, 2**63, True, "3"], ids=repr)
async def test_bad_times(mem: ap.Client, bad: Any) -> None:
    await filled(mem)
    reader = await mem.reader("s", SCHEMA)
    calls = [lambda: reader.listen(as_of=bad), lambda: reader.subscribe(as_of=bad)]
    if not isinstance(bad, ap.Antichain):
        calls.append(lambda: reader.listen(until=bad))
    for call in calls:
        with pytest.raises(ap.InvalidUsage) as caught:
            await call()
        assert caught.value.kind is ap.UsageKind.INVALID_TIME


async def test_product_times_need_as_of(mem: ap.Client) -> None:
    await mem.writer("p", PRODUCT)
    reader = await mem.reader("p", PRODUCT)
    for call in (reader.listen, reader.subscribe, reader.snapshot):
        with pytest.raises(ap.InvalidUsage) as caught:
            await call()
        assert caught.value.kind is ap.UsageKind.INVALID_TIME
    with pytest.raises(ap.InvalidUsage) as caught:
        await reader.listen(as_of=3)
    assert caught.value.kind is ap.UsageKind.INVALID_TIME


@pytest.mark.parametrize("what", ["listen", "subscribe"])
async def test_history_given_up_is_told_at_once(mem: ap.Client, what: str) -> None:
    await filled(mem)
    reader = await mem.reader("s", SCHEMA, hold=0)
    await reader.downgrade_since(3)
    with pytest.raises(ap.SinceViolation) as caught:
        await getattr(reader, what)(as_of=2)
    assert (caught.value.as_of, caught.value.since) == (2, ap.Antichain(3))
    listen = await getattr(reader, what)(as_of=3)
    assert {u.time for u in (await until(listen, 5))[0]} == ({3, 4} if what == "subscribe" else {4})


async def test_the_minimum_is_readable_from_the_minimum(mem: ap.Client) -> None:
    """Reading changes from {0} needs since {0}; once it moved nobody can."""
    writer = await filled(mem, 0)
    reader = await mem.reader("s", SCHEMA, hold=0)
    await reader.downgrade_since(1)
    for call in (reader.listen, reader.subscribe):
        with pytest.raises(ap.SinceViolation):
            await call()
    await add(writer, 0, 1)
    assert (await reader.listen()).frontier == ap.Antichain(2)


# --- what it tells ------------------------------------------------------------------------------------


BLOBS = {"inline_writes_single_max_bytes": 0, "blob_target_size": 10}


@pytest.mark.parametrize("bounds", [{}, BLOBS], ids=["inline", "blobs"])
async def test_intervals_are_closed_and_unmodified(location: Any, bounds: Any) -> None:
    """Updates as they were written, none consolidated away, all before the progress past them."""
    options = ap.Settings(**bounds)
    async with ap.open(blob=location.blob, consensus=location.consensus, settings=options) as client:
        writer = await client.writer("s", SCHEMA)
        reader = await client.reader("s", SCHEMA)
        listen = await reader.subscribe()
        await writer.compare_and_append([("a", 1, 0, 1), ("a", 1, 3, -1), ("b", 2, 1, 2)], 0, 4)
        await writer.compare_and_append([], 4, 6)
        await writer.compare_and_append([("a", 1, 6, 1)], 6, 7)
        await writer.compare_and_append([("a", 1, 7, -1), ("a", 1, 8, 1)], 7, 9)
        seen, told = await until(listen, 9)
        assert gathered(seen) == {
            ("a", 1, 0): 1, ("a", 1, 3): -1, ("b", 2, 1): 2, ("a", 1, 6): 1, ("a", 1, 7): -1, ("a", 1, 8): 1,
        }  # fmt: skip
        assert len(seen) == 6
        assert told == sorted(told, key=lambda f: f.elements)
        await writer.compare_and_append([("c", 1, 9, 1)], 9, 10)
        assert [type(x).__name__ for x in (await anext(listen), await anext(listen))] == [
            "Updates",
            "Progress",
        ]
        await writer.compare_and_append([], 10, 12)
        item = await anext(listen)
        assert isinstance(item, ap.Progress) and item.upper == ap.Antichain(12)


async def test_steps(mem: ap.Client) -> None:
    writer = await filled(mem, 3)
    listen = await (await mem.reader("s", SCHEMA)).listen(as_of=0)
    steps = listen.steps()
    assert aiter(steps) is steps
    step = await anext(steps)
    assert (gathered(step.updates), step.upper) == ({("k", 1, 1): 1, ("k", 2, 2): 1}, ap.Antichain(3))
    assert (step.upper, step.cursor) == (listen.frontier, listen.cursor)
    await writer.compare_and_append([], 3, 4)
    step = await anext(steps)
    assert (len(step.updates), step.updates.rows(), step.upper) == (0, [], ap.Antichain(4))
    await writer.compare_and_append([("z", 1, 4, 1)], 4, EMPTY)
    rest = [step async for step in listen.steps()]
    assert [(s.updates.rows(), s.upper) for s in rest] == [([("z", 1, 4, 1)], EMPTY)]
    with pytest.raises(StopAsyncIteration):
        await anext(steps)


async def test_it_ends_after_the_empty_frontier(client: ap.Client) -> None:
    writer = await filled(client, 2)
    reader = await client.reader("s", SCHEMA)
    listens = [await reader.listen(), await reader.listen(as_of=0), await reader.subscribe()]
    await writer.compare_and_append([("k", 7, 7, 1)], 2, EMPTY)
    listens += [await reader.listen(as_of=0), await reader.subscribe(), await reader.listen(as_of=2**63 - 1)]
    ends = []
    for listen in listens:
        items = [item async for item in listen]
        ends.append([item.upper for item in items if isinstance(item, ap.Progress)])
        assert listen.frontier == EMPTY
        assert [item async for item in listen] == []
    last = ap.Antichain(2**63 - 1)
    assert all(told[-1] == EMPTY for told in ends[:5]), ends
    assert ends[5] == []  # it stood there from the beginning
    assert listens[4].as_of == 2**63 - 1 and last not in ends[4]
    assert (await reader.listen()).frontier == EMPTY


class Until(NamedTuple):
    id: str
    as_of: int
    until: Any
    uppers: list[int]
    times: list[int]


@pytest.mark.parametrize(
    "case",
    [
        Until("clipped", 0, 4, [4], [1, 2, 3]),
        Until("a frontier", 0, ap.Antichain(4), [4], [1, 2, 3]),
        Until("at an upper", 0, 6, [6], [1, 2, 3, 4, 5]),
        Until("beyond", 2, 8, [6, 8], [3, 4, 5, 6, 7]),
        Until("where it stands", 3, 4, [], []),
        Until("behind it", 3, 1, [], []),
    ],
    ids=lambda c: c.id,
)
async def test_until(mem: ap.Client, case: Until) -> None:
    writer = await filled(mem, 6)
    listen = await (await mem.reader("s", SCHEMA)).listen(as_of=case.as_of, until=case.until)
    seen: list[Any] = []
    told = []
    async with asyncio.timeout(5):
        async for item in listen:
            if isinstance(item, ap.Progress):
                told.append(item.upper)
                if item.upper == ap.Antichain(6) and len(case.uppers) > 1:
                    await writer.compare_and_append([("k", t, t, 1) for t in range(6, 10)], 6, 10)
            else:
                seen += item.rows()
    assert told == [ap.Antichain(u) for u in case.uppers]
    assert sorted(u.time for u in seen) == case.times
    with pytest.raises(StopAsyncIteration):
        await anext(listen)


async def test_drop_ends_what_waits(client: ap.Client, location: Any) -> None:
    """With `ShardFinalized`, again and again; the empty upper is never told as progress."""
    await filled(client)
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        far = await other.reader("s", SCHEMA)
        near = await client.reader("s", SCHEMA)
        open_snapshot = await near.snapshot(3)
        listens = [await r.listen() for r in (far, near)]
        waits = [asyncio.ensure_future(anext(listen)) for listen in listens]
        waits += [
            asyncio.ensure_future(anext(x.steps())) for x in [await near.listen(), await near.subscribe(9)]
        ]
        waits.append(asyncio.ensure_future(near.snapshot(99).__aenter__()))
        await asyncio.sleep(0.05)
        await client.drop("s")
        for wait in waits:
            with pytest.raises(ap.ShardFinalized) as caught:
                async with asyncio.timeout(10):
                    await wait
            assert caught.value.shard_id == near.shard_id
        for call in (
            lambda: anext(listens[1]),
            near.listen,
            near.subscribe,
            near.snapshot,
            open_snapshot.rows,
        ):
            with pytest.raises(ap.ShardFinalized):
                await call()


# --- product times ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_product_times_are_advanced_without_gap_or_overlap(data: Any) -> None:
    """Against the oracle: a listen opened at any moment of a history, from any time."""
    history, as_of = data.draw(histories(2)), data.draw(times(2))
    opened_at = data.draw(st.integers(0, len(history)))
    subscribe, eager = data.draw(st.booleans()), data.draw(st.booleans())

    async def scenario() -> None:
        async with ap.open("mem://") as client:
            writer = await client.writer("p", PRODUCT)
            reader = await client.reader("p", PRODUCT)
            model, listen, seen, told = Model([(0, 0)]), None, [], []
            for number, append in enumerate([*history, None]):
                if number == opened_at:
                    listen = await (reader.subscribe if subscribe else reader.listen)(as_of=as_of)
                    at = as_of if subscribe else (0, 0)
                    assert (listen.frontier, listen.as_of) == (ap.Antichain(at), as_of)
                if append is None:
                    break
                rows, lower, upper = append
                await writer.compare_and_append(rows, lower, upper)
                model.append(rows, lower.elements, upper.elements)
                if listen is not None and (eager or number == len(history) - 1):
                    await catch_up(listen, model, seen, told)
            assert listen is not None
            await catch_up(listen, model, seen, told)
            assert all(a < b for a, b in pairwise(told))

    async def catch_up(listen: ap.Listen, model: Model, seen: list[Any], told: list[Any]) -> None:
        upper = ap.Antichain(*model.upper)
        if (subscribe and not model.complete(as_of)) or upper == ap.Antichain((0, 0)):
            return
        while listen.frontier != upper:
            async with asyncio.timeout(5):
                item = await anext(listen)
            if isinstance(item, ap.Progress):
                told.append(item.upper)
                assert gathered(seen) == expected(model, item.upper), item
            else:
                seen += item.rows()

    def expected(model: Model, upper: ap.Antichain) -> Any:
        found = model.changes(as_of, upper=upper.elements)
        if subscribe:
            found.update({(k, v, as_of): d for k, v, d in model.contents(as_of)})
        return found

    asyncio.run(scenario())


async def test_an_update_that_is_advanced_past_its_batch_comes_later(mem: ap.Client) -> None:
    """At (0, 1), in a batch that ends before (3, 1), where a listener from (3, 0) sees it."""
    writer = await mem.writer("p", PRODUCT)
    reader = await mem.reader("p", PRODUCT)
    listen = await reader.listen(as_of=(3, 0))
    first, second = ap.Antichain((0, 5), (2, 0)), ap.Antichain((0, 6), (4, 0))
    await writer.compare_and_append([("a", 1, (0, 1), 1)], (0, 0), first)
    step = await anext(listen.steps())
    assert (step.updates.rows(), step.upper) == ([], first)
    await writer.compare_and_append([("b", 1, (2, 2), 1)], first, second)
    step = await anext(listen.steps())
    assert gathered(step.updates) == {("a", 1, (3, 1)): 1, ("b", 1, (3, 2)): 1}


async def test_until_of_product_times(mem: ap.Client) -> None:
    """Which no upper need be comparable with: what is not before it is never told."""
    writer = await mem.writer("p", PRODUCT)
    reader = await mem.reader("p", PRODUCT)
    listen = await reader.listen(as_of=(0, 0), until=(3, 3))
    grid = [(a, b) for a in range(6) for b in range(6)]
    lower = ap.Antichain((0, 0))
    for upper in (ap.Antichain((0, 5), (4, 0)), ap.Antichain((5, 2), (0, 6)), ap.Antichain((6, 6))):
        rows = [(f"{t}", 1, t, 1) for t in grid if lower.less_equal(t) and not upper.less_equal(t)]
        await writer.compare_and_append(rows, lower, upper)
        lower = upper
        if upper != ap.Antichain((6, 6)):
            first = [u.time for u in (await anext(listen.steps())).updates]
            assert first and all(t[0] < 3 or t[1] < 3 for t in first)
    steps = [step async for step in listen.steps()]
    assert steps[-1].upper == ap.Antichain((3, 3))
    assert all(t.time[0] < 3 or t.time[1] < 3 for step in steps for t in step.updates)


# --- cancelled waits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["items", "steps", "both"])
@pytest.mark.parametrize("seed", range(1))
async def test_cancelled_waits_lose_and_double_nothing(location: Any, way: str, seed: int) -> None:
    """Random tiny timeouts, of both kinds, while two writers write; parts inline and in blobs."""
    rng = random.Random(seed)
    options = ap.Settings(inline_writes_single_max_bytes=120, blob_target_size=200)
    place = {"blob": location.blob, "consensus": location.consensus, "settings": options}
    async with ap.open(**place) as client, ap.open(**place) as other:
        writers = [await c.writer("s", SCHEMA) for c in (client, other)]
        listen = await (await client.reader("s", SCHEMA)).subscribe()
        written = []

        async def write(writer: ap.WriteHandle[str, int], number: int) -> None:
            for i in range(12):
                rows = [(f"{number}.{i}", j) for j in range(rng.choice([1, 2, 20]))]
                t = await writer.write(rows)
                written.extend((k, v, t, 1) for k, v in rows)

        writing = asyncio.gather(*[write(w, n) for n, w in enumerate(writers)])
        seen: list[Any] = []
        while not writing.done() or listen.frontier != await writers[0].fetch_recent_upper():
            seconds = rng.choice([0, 0.0001, 0.001, 0.01])
            steps = way == "steps" or (way == "both" and rng.random() < 0.5)
            try:
                if rng.random() < 0.5:
                    item: Any = await asyncio.wait_for(anext(listen.steps() if steps else listen), seconds)
                else:
                    async with asyncio.timeout(seconds):
                        item = await anext(listen.steps() if steps else listen)
            except TimeoutError:
                continue
            if isinstance(item, ap.Step):
                seen += item.updates.rows()
            elif isinstance(item, ap.Updates):
                seen += item.rows()
        await writing
        assert gathered(seen) == gathered(written)
        assert len(seen) == len(written)


async def test_a_step_that_was_given_up_loses_nothing_to_other_iterations() -> None:
    """It had some of the updates of its interval already; now items are asked for."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    blob = FaultyBlob(ap.open_blob(url), faults)
    options = ap.Settings(inline_writes_single_max_bytes=0, blob_cache_bytes=0, fetch_max_outstanding_parts=1)
    async with ap.open(blob=blob, consensus=ap.open_consensus(url), settings=options) as client:
        await filled(client, 3)
        listen = await (await client.reader("s", SCHEMA)).listen(as_of=0)
        faults.latency_s = (0.1, 0.1)  # for each of two parts
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(listen.steps()), 0.15)
        seen, told = await until(listen, 3)
        assert ([u.time for u in seen], told) == ([1, 2], [ap.Antichain(3)])


async def test_the_default_begins_though_both_frontiers_move(mem: ap.Client) -> None:
    """Between the look at the upper and the hold somebody appends and gives up what was before."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()

    class Racing(FaultyConsensus):
        races = 0

        async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
            if self.races:
                self.races -= 1
                (t,) = (await writer.fetch_recent_upper()).elements
                await add(writer, t)
                await mover.downgrade_since(t)
            return await super().compare_and_set(key, expected, data)

    consensus = Racing(ap.open_consensus(url), faults)
    async with ap.open(url) as other, ap.open(blob=ap.open_blob(url), consensus=consensus) as client:
        writer = await filled(other, 3)
        mover = await other.reader("s", SCHEMA, hold=0)
        for opened in ("listen", "subscribe", "downgrade_since"):
            reader = await client.reader("s", SCHEMA)
            consensus.races = 2
            if opened == "downgrade_since":
                assert await reader.downgrade_since(0) == mover.since
            else:
                await getattr(reader, opened)()
            assert consensus.races == 0
            await reader.aclose()


async def test_several_who_wait_share_the_items(mem: ap.Client) -> None:
    writer = await filled(mem, 0)
    listen = await (await mem.reader("s", SCHEMA)).subscribe()
    waits = [asyncio.ensure_future(anext(listen)) for _ in range(6)]
    for t in range(3):
        await asyncio.sleep(0.01)
        await add(writer, t)
    items = await asyncio.gather(*waits)
    assert sorted(u.time for item in items if isinstance(item, ap.Updates) for u in item) == [0, 1, 2]


async def test_an_error_does_not_look_like_the_end(mem: ap.Client) -> None:
    """A listen that failed fails again; one that goes on from its cursor misses nothing."""
    faults = Faults()
    url = f"mem://{uuid.uuid4().hex}"
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    options = ap.Settings(retry_timeout_s=0.02, watch_timeout_s=0.05)
    async with (
        ap.open(blob=ap.open_blob(url), consensus=consensus, settings=options) as client,
        ap.open(url) as other,
    ):
        writer = await filled(other, 2)
        reader = await client.reader("s", SCHEMA)
        listen = await reader.listen(as_of=0)
        assert (await anext(listen.steps())).upper == ap.Antichain(2)
        faults.rates = {Outcome.REFUSED: 1.0}
        for _ in range(3):
            with pytest.raises(ap.StorageUnavailable):
                async with asyncio.timeout(5):
                    await anext(listen)
        faults.heal()
        await add(writer, 2)
        async with reader.listen(cursor=listen.cursor) as again, asyncio.timeout(5):
            assert (await anext(again.steps())).updates.rows() == [("k", 2, 2, 1)]


# --- waking ------------------------------------------------------------------------------------------

WRITER = """
    import asyncio, sys, time
    import aiopersist as ap

    async def main(blob, consensus):
        async with ap.open(blob=blob, consensus=consensus) as client:
            writer = await client.writer("s", ap.Schema(key=str, val=int))
            for _ in range(5):
                await asyncio.sleep(0.15)
                await writer.write([(repr(time.time()), 1)])

    asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_wakes_a_listen_without_polling(location: Any) -> None:
    """Long before `watch_timeout_s`, and between the writes nothing is asked of the store."""
    if location.consensus.startswith("mem"):
        pytest.skip("memory is of one process")
    options = ap.Settings(watch_timeout_s=30)
    async with ap.open(blob=location.blob, consensus=location.consensus, settings=options) as client:
        await filled(client, 1)
        listen = await (await client.reader("s", SCHEMA)).listen()
        program = [sys.executable, "-c", textwrap.dedent(WRITER), location.blob, location.consensus]
        latencies: list[float] = []
        before = client.metrics["consensus.head"].count
        with subprocess.Popen(program) as process:
            async with asyncio.timeout(30):
                while len(latencies) < 5:
                    item = await anext(listen)
                    if isinstance(item, ap.Updates):
                        latencies += [time.time() - float(u.key) for u in item]
            await asyncio.to_thread(process.wait, 20)
        assert sorted(latencies)[2] < 1.0, latencies
        assert client.metrics["consensus.head"].count - before < 30


async def test_another_client_wakes_a_listen(client: ap.Client, location: Any) -> None:
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        writer = await filled(client, 1)
        listen = await (await other.reader("s", SCHEMA)).listen()
        latencies = []
        for t in range(1, 8):
            waiting = asyncio.ensure_future(until(listen, t + 1))
            await asyncio.sleep(0.02)
            began = time.monotonic()
            await add(writer, t)
            await waiting
            latencies.append(time.monotonic() - began)
        assert sorted(latencies)[3] < 0.5, latencies


async def test_a_lost_hint_costs_latency_only() -> None:
    """No `watch` ever returns: a listen looks for itself after `watch_timeout_s`."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    faults.losing_hints = True
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    options = ap.Settings(watch_timeout_s=0.2)
    async with (
        ap.open(blob=ap.open_blob(url), consensus=consensus, settings=options) as client,
        ap.open(url) as other,
    ):
        writer = await filled(other, 1)
        listen = await (await client.reader("s", SCHEMA)).listen()
        for t in range(1, 4):
            waiting = asyncio.ensure_future(until(listen, t + 1))
            await asyncio.sleep(0.02)
            began = time.monotonic()
            await add(writer, t)
            await waiting
            assert time.monotonic() - began < 2


async def test_own_commits_wake_without_a_request(mem: ap.Client) -> None:
    writer = await filled(mem, 1)
    listen = await (await mem.reader("s", SCHEMA)).listen()
    waiting = asyncio.ensure_future(until(listen, 2))
    await asyncio.sleep(0.05)
    await add(writer, 1)
    seen, _ = await waiting
    assert [u.time for u in seen] == [1]
    assert mem.metrics["consensus.scan"].count == 0
    assert mem.metrics["blob.get"].count <= 1  # the location's id


async def test_hundreds_of_listens_on_one_shard(mem: ap.Client) -> None:
    """Fast ones, slow ones and some that leave: each sees everything, by one reader's requests."""
    writer = await filled(mem, 1)
    reader = await mem.reader("s", SCHEMA)
    counts = []

    async def follow(number: int) -> None:
        async with reader.listen(as_of=0) as listen:
            seen = 0
            async for step in listen.steps():
                seen += len(step.updates)
                if number % 3 == 0:
                    await asyncio.sleep(0.01 * (number % 7))
                if number % 10 == 9 and seen > 3:
                    return
                if step.upper == ap.Antichain(11):
                    counts.append(seen)
                    return

    heads = mem.metrics["consensus.head"].count
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(300):
            group.create_task(follow(number))
        await asyncio.sleep(0.05)
        for t in range(1, 11):
            await add(writer, t)
            await asyncio.sleep(0.005)
    assert counts == [10] * 270
    assert mem.metrics["consensus.head"].count - heads < 100
    assert not reader._shard.register.pins
    assert not reader._shard.hold._needs


async def test_a_slow_consumer_gets_larger_steps(mem: ap.Client) -> None:
    """It is not told what it did not ask for: what piled up comes as one interval."""
    writer = await filled(mem, 1)
    listen = await (await mem.reader("s", SCHEMA)).listen()
    await add(writer, *range(1, 200))
    step = await anext(listen.steps())
    assert (len(step.updates), step.upper) == (199, ap.Antichain(200))


async def test_closing_ends_a_wait(mem: ap.Client) -> None:
    await filled(mem, 1)
    listen = await (await mem.reader("s", SCHEMA)).listen()
    waiting = asyncio.ensure_future(anext(listen))
    assert await is_waiting(await (await mem.reader("s", SCHEMA)).listen())
    await listen.aclose()
    with pytest.raises(ap.InvalidUsage, match="CLOSED"):
        await waiting
    for call in (lambda: anext(listen), lambda: anext(listen.steps())):
        with pytest.raises(ap.InvalidUsage, match="CLOSED"):
            await call()
    await listen.aclose()
