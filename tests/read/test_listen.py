"""Goal: listens and subscriptions give every update once, in closed intervals, also after cancelled waits;
they begin, end and wake as documented."""

import asyncio
from typing import Any, NamedTuple

import pytest

import aiopersist as ap
from aiopersist.testing.model import gathered
from tests.read.listen_kit import add, filled, until
from tests.support.schemas import PRODUCT, SCHEMA

EMPTY = ap.Antichain()


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


BLOBS = {"inline_writes_single_max_bytes": 0, "blob_target_size": 10}


class Until(NamedTuple):
    id: str
    as_of: int
    until: Any
    uppers: list[int]
    times: list[int]


# --- where it begins ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BEGINS, ids=lambda c: c.id)
async def test_where_it_begins(mem: ap.Client, case: Begin) -> None:
    """`frontier`, `as_of` and `cursor` are valid from the opening, which does not wait for the upper;
    no progress is told for what it stands at."""
    writer = await filled(mem, case.upper)
    reader = await mem.reader("s", SCHEMA)
    async with asyncio.timeout(50):
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
    """Reading changes from {0} needs since {0}; once since has moved they cannot be read."""
    writer = await filled(mem, 0)
    reader = await mem.reader("s", SCHEMA, hold=0)
    await reader.downgrade_since(1)
    for call in (reader.listen, reader.subscribe):
        with pytest.raises(ap.SinceViolation):
            await call()
    await add(writer, 0, 1)
    assert (await reader.listen()).frontier == ap.Antichain(2)


# --- what it tells ------------------------------------------------------------------------------------


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
    async with asyncio.timeout(50):
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
        await client.admin.drop("s")
        for wait in waits:
            with pytest.raises(ap.ShardFinalized) as caught:
                async with asyncio.timeout(50):
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
