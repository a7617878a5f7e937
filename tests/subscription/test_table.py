"""Subscriptions to tables: changes with old and new, as a feed gives them, from a durable position."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from tests.subscription.kit import SMALL, in_time, steps_until
from tests.support.processes import Place
from tests.table.kit import changes_of


async def changes(sub: Any, count: int) -> list[ap.Change[Any, Any]]:
    """So many changes, and no more; they are acknowledged."""
    steps = await steps_until(sub, lambda found: len(changes_of(found)) >= count)
    await sub.ack(steps[-1])
    assert len(changes_of(steps)) == count
    return changes_of(steps)


async def test_changes_from_a_durable_position(client: ap.Client) -> None:
    """The contents with old None, then puts and deletions, paired; it goes on behind the last one, and what
    was not acknowledged comes again."""
    orders = client.table("orders", str, int)
    time = await orders.put_many({"b": 2, "a": 1})
    async with orders.subscription("billing") as sub:
        assert await changes(sub, 2) == [ap.Change("a", None, 1, time), ap.Change("b", None, 2, time)]
        later = [await orders.put("a", 3), await orders.delete("b")]
    async with orders.subscription("billing") as sub:
        found = changes_of(await steps_until(sub, lambda steps: len(changes_of(steps)) == 2))
        assert found == [ap.Change("a", 1, 3, later[0]), ap.Change("b", 2, None, later[1])]
    async with orders.subscription("billing") as sub:
        assert await changes(sub, 2) == found
        last = await orders.put("c", 1)
        assert await changes(sub, 1) == [ap.Change("c", None, 1, last)]
    assert (await client.admin.subscriptions("orders"))["billing"].lag == 0


async def test_a_feed_goes_on_with_its_cursor(place: Place) -> None:
    """And it with the cursor of a feed: both ways within the contents and behind them."""
    client = await place.client(**SMALL)
    table = client.table("t", int, str)
    await table.put_many((number, "x" * 20) for number in range(60))
    async with table.changes() as feed, table.subscription("sub") as sub:
        for _ in range(2):
            step, mine = await in_time(anext(feed)), await in_time(anext(sub))
            assert (step.changes, step.cursor, step.upper) == (mine.changes, mine.cursor, mine.upper)
    async with table.changes(cursor=mine.cursor) as feed, table.subscription("b", resume=step.cursor) as sub:
        last = await table.put(7, "new")
        wanted = [key for key in range(60) if key > step.changes[-1].key]
        for source in (feed, sub):
            found = changes_of(
                await steps_until(source, lambda s: any(c.time == last for c in changes_of(s)))
            )
            assert [change.key for change in found] == [*wanted, 7]


async def test_an_empty_table_and_its_first_put(place: Place) -> None:
    """It is created by the subscription; a readonly client's is unknown."""
    client = await place.client()
    table = client.table("t", str, int)
    async with table.subscription("sub") as sub:
        time = await table.put("a", 1)
        assert await changes(sub, 1) == [ap.Change("a", None, 1, time)]


async def test_it_keeps_history_for_pairs(place: Place) -> None:
    """Puts that nobody consumed are not merged, whatever `retain` says: each old and new comes."""
    client = await place.client(**SMALL)
    table = client.table("t", int, int)
    await table.put_many((key, 0) for key in range(20))
    await (await table.subscription("sub", start="now")).aclose()
    for number in range(1, 4):
        await table.put_many((key, number) for key in range(20))
    await client.admin.retain("t", 0)
    await table.aclose()
    for _ in range(2):
        await client.admin.force_compaction("t")
        await client.admin.force_gc("t")
    table = client.table("t", int, int)
    async with table.subscription("sub") as sub:
        found = await changes(sub, 60)
    assert [(change.old, change.new) for change in found] == [(n, n + 1) for n in range(3) for _ in range(20)]
    await client.admin.force_compaction("t")
    state = await client.admin.inspect("t")
    assert state.upper.time == (state.since.time or 0) + 1  # type: ignore[operator]


async def test_shares_of_a_table(place: Place) -> None:
    """Old and new of a key come to the same consumer."""
    client = await place.client()
    table = client.table("t", str, int)
    await table.put_many({f"k{number}": 0 for number in range(40)})
    subs = [await table.subscription("sub", share=(i, 2)) for i in range(2)]
    time = await table.put_many({f"k{number}": 1 for number in range(40)})
    keys = []
    for sub in subs:
        steps = await steps_until(sub, lambda found: bool(found) and found[-1].upper > ap.Antichain(time))
        found = changes_of(steps)
        assert sorted((c.old, c.new) for c in found if c.old is not None) == [(0, 1)] * (len(found) // 2)
        keys.append({change.key for change in found})
        await sub.aclose()
    assert not keys[0] & keys[1]
    assert len(keys[0] | keys[1]) == 40


async def test_a_take_over_by_another_client(place: Place) -> None:
    one, two = await place.client(), await place.client()
    await one.table("t", str, int).put("a", 1)
    async with one.table("t", str, int).subscription("sub") as first:
        await changes(first, 1)
        waiting = asyncio.create_task(anext(first))
        await asyncio.sleep(0.01)
        async with two.table("t", str, int).subscription("sub"):
            with pytest.raises(ap.OpaqueMismatch):
                await in_time(waiting)


async def test_its_table_closes_behind_it(quiet: ap.Client) -> None:
    """The subscription keeps the table open; at its end, and after an opening that failed, nothing stays."""
    table = quiet.table("t", str, int)
    time = await table.put("a", 1)
    async with table.subscription("sub") as sub:
        await table.aclose()
        assert await changes(sub, 1) == [ap.Change("a", None, 1, time)]
    assert not (await quiet.inspect("t")).readers
    with pytest.raises(ap.CodecMismatch):
        await quiet.table("t", int, int).subscription("sub")
    with pytest.raises(ap.InvalidUsage):
        await quiet.table("t", str, int).subscription("sub", share=(2, 1))
    assert not (await quiet.inspect("t")).readers
    view = (await quiet.inspect("t")).subscriptions["sub"]
    assert (view.lag, view.lag_updates, view.held_bytes, view.expired) == (0, 0, 0, False)


async def test_a_large_step_does_not_block_the_loop(quiet: ap.Client) -> None:
    """Its rows are decoded, and divided, on a worker thread, also of a step whose wait is cancelled then."""
    table = quiet.table("t", int, str)
    for start in range(0, 150_000, 10_000):
        await table.put_many((start + number, "x") for number in range(10_000))
    async with table.subscription("sub", share=(0, 2)) as sub:
        found: list[int] = []
        for turns in range(10_000):
            waiting = asyncio.create_task(anext(sub))
            await asyncio.wait([waiting], timeout=0.05)
            if turns % 2:
                waiting.cancel()
            await asyncio.wait([waiting])
            if waiting.cancelled():
                continue
            step = waiting.result()
            found += [change.key for change in step.changes]
            if step.upper > ap.Antichain(step.changes[-1].time):
                break
        assert found == sorted(set(found))
        assert 70_000 < len(found) < 80_000
