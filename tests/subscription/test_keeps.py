"""Goal: a subscription keeps versions and replaced blobs only while somebody reads the contents by it: not
before its first step, and not once another opening, or nobody, has its position."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.subscription.subscription import Subscription
from tests.subscription.kit import SMALL, in_time, rows, rows_of, steps_until, write
from tests.support.processes import Place

ROWS = [(f"k{n:03}", n) for n in range(100)]


def pins(sub: Subscription[Any]) -> int:
    """How many reads of this process keep a version of the shard."""
    return sub._consumer.shard.register.pins.total()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_one_that_is_never_iterated_keeps_history_and_no_version(quiet_mem: ap.Client) -> None:
    await write(quiet_mem, *ROWS)
    async with quiet_mem.subscription("s", name="sub") as sub:
        assert pins(sub) == 0
        for value in range(3):
            await write(quiet_mem, ("k000", value))
        await quiet_mem.retain("s", 1)
        await quiet_mem.force_compaction("s")
        before = (await quiet_mem.inspect("s")).seqno
        for _ in range(2):  # the first collection writes a rollup, which the reader may need from then on
            await quiet_mem.force_gc("s")
            await sub._consumer.shard.hold.heartbeat()
        await quiet_mem.force_gc("s")
        assert (await quiet_mem.inspect("s")).earliest_seqno > before
        step = await in_time(anext(sub))
        assert sorted(rows_of([step])) == sorted(ROWS)  # as they were when it was opened
        assert await rows(sub, 3) == [("k000", value) for value in range(3)]


async def mid_contents(client: ap.Client, lease_s: float = 60) -> Subscription[Any]:
    """A subscription that stands within the contents."""
    await write(client, *ROWS)
    sub = await client.subscription("s", name="sub", lease_s=lease_s)
    assert (await in_time(anext(sub))).contents
    assert pins(sub) == 1
    return sub


@pytest.mark.several_shards
async def test_one_that_was_taken_over_gives_up_what_it_keeps(location: Any) -> None:
    given = {"blob": location.blob, "consensus": location.consensus, "settings": ap.Settings(**SMALL)}
    async with ap.open(**given, maintenance=False) as client, ap.open(**given, maintenance=False) as other:
        first = await mid_contents(client, lease_s=0.5)
        async with other.subscription("s", name="sub") as second:
            await until(lambda: pins(first) == 0)
            await first._consumer.shard.hold.heartbeat()
            view = await other.inspect("s")
            holds = {hold.id: hold for hold in view.holds if hold.kind == "reader"}
            assert first._consumer.shard.hold.reader not in holds
            with pytest.raises(ap.OpaqueMismatch):
                await in_time(anext(first))
            assert await rows(second, len(ROWS)) == ROWS
        await first.aclose()


async def test_its_next_step_says_so_and_gives_up_what_it_keeps(quiet_mem: ap.Client) -> None:
    async with ap.open("mem://", settings=ap.Settings(**SMALL), maintenance=False) as client:
        first = await mid_contents(client)
        async with client.subscription("s", name="sub") as second:
            with pytest.raises(ap.OpaqueMismatch):
                await in_time(anext(first))
            await until(lambda: pins(first) == 0)
            assert await rows(second, len(ROWS)) == ROWS


async def test_one_that_has_expired_gives_up_what_it_keeps() -> None:
    async with AsyncExitStack() as stack:
        place = Place(stack, SMALL)
        client, hour = await place.client(), timedelta(hours=1)
        await write(client, *ROWS)
        async with client.subscription("s", name="sub", expire_after=hour, lease_s=5.0) as sub:
            assert (await in_time(anext(sub))).contents
            await write(client, ("k000", 0))  # something waits for it
            place.clock.ahead_s += 2 * hour.total_seconds()
            assert (await client.admin.subscriptions("s"))["sub"].expired
            await write(client, ("k000", 1))  # a commit notes it
            await until(lambda: pins(sub) == 0)
            with pytest.raises(ap.SubscriptionExpired):
                await in_time(anext(sub))


async def test_one_that_is_closed_while_its_contents_are_opened_keeps_nothing(quiet_mem: ap.Client) -> None:
    await write(quiet_mem, *ROWS)
    sub = await quiet_mem.subscription("s", name="sub")
    feed, opened = sub._feed, asyncio.Event()
    snapshot = feed._handle.snapshot

    async def slow(as_of: int) -> Any:
        found = await snapshot(as_of)
        opened.set()
        await asyncio.sleep(0.05)
        return found

    feed._handle.snapshot = slow  # type: ignore[method-assign, assignment]
    waiting = asyncio.create_task(anext(sub))  # type: ignore[arg-type]
    await in_time(opened.wait())
    await feed.aclose()
    with pytest.raises(ap.InvalidUsage, match="closed"):
        await in_time(waiting)
    assert pins(sub) == 0
    await sub.aclose()


async def test_the_contents_of_a_table_are_those_of_the_opening(quiet_mem: ap.Client) -> None:
    stock = quiet_mem.table("stock", str, int)
    await stock.put_many(dict(ROWS))
    async with stock.subscription("sub") as sub:
        await stock.put_many({key: -1 for key, _ in ROWS})
        await quiet_mem.retain("stock", 1)
        await quiet_mem.force_compaction("stock")
        found = await steps_until(sub, lambda steps: len(steps) >= 2)
        assert {change.key: change.new for change in found[0].changes} == dict(ROWS)
        assert {change.old for change in found[1].changes} == set(dict(ROWS).values())
