"""Goal: on a wall clock an aware datetime may stand for a time, wherever one is asked for. An instant that
has passed is complete, for good; who waits for a later one does not hang on a shard at rest; a readonly
client closes nothing; and a naive datetime, or any on a logical clock, is refused."""

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import aiopersist as ap
from tests.shard.wall_clock_kit import SetClock, Sites, now_of, refused, time_at
from tests.support.location import in_a_bucket
from tests.support.schemas import SCHEMA

pytestmark = pytest.mark.usefixtures("started_postgres")
HOUR = timedelta(hours=1)
SOON = timedelta(seconds=0.3)


@pytest.fixture
def sites() -> Sites:
    return Sites()


async def rows_at(reader: Any, as_of: Any, **how: Any) -> Any:
    async with reader.snapshot(as_of, **how) as s:
        assert s.as_of == (time_at(as_of) if isinstance(as_of, datetime) else as_of)
        return await s.rows()


async def test_a_passed_instant_is_closed_for_good(client: ap.Client, location: Any) -> None:
    """Goal: on every store: without waiting, by one commit, durably; a later write comes after it."""
    async with client.writer("t", SCHEMA, clock="wall") as w, client.reader("t") as r:
        time = await w.write([("a", 1)])
        imprecise_s = 3.0 if in_a_bucket(location.consensus) else 0.0
        await asyncio.sleep(imprecise_s)  # its clock tells whole seconds, and may tell them early or late
        now = datetime.now(UTC)  # of the machine on which the servers are, too
        await asyncio.sleep(imprecise_s)
        assert time_at(now) > time
        assert await rows_at(r, now - HOUR) == []
        assert await rows_at(r, now, wait=False) == [("a", 1, 1)]
        seqno = (await client.admin.inspect("t")).seqno
        assert (await client.admin.inspect("t")).upper > time_at(now)
        assert await rows_at(r, now, wait=False) == [("a", 1, 1)]  # again: no commit more
        assert (await client.admin.inspect("t")).seqno == seqno
        assert await w.write([("b", 1)]) > time_at(now)
        assert await rows_at(r, now) == [("a", 1, 1)]
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        async with other.reader("t") as r:
            assert await rows_at(r, now, wait=False) == [("a", 1, 1)]


async def test_who_waits_for_an_instant_closes_it(sites: Sites) -> None:
    """Goal: every kind of reader, on a shard where nothing happens."""
    async with sites.open() as client, client.writer("t", SCHEMA, clock="wall") as w:
        await w.write([("a", 1)])
        r = await client.reader("t")
        async with asyncio.timeout(60):
            assert await rows_at(r, now_of(client) + SOON) == [("a", 1, 1)]
            at = now_of(client) + SOON
            async with r.subscribe(at) as subscribed:
                step = await anext(subscribed.steps())
            assert (step.updates.rows(), step.upper.time) == ([("a", 1, time_at(at), 1)], time_at(at) + 1)
            until = now_of(client) + SOON
            async with r.listen(until=until) as listening:
                steps = [step async for step in listening.steps()]
            assert steps[-1].upper >= time_at(until)
            at = now_of(client) + SOON
            async with client.workers.shared_read("t", at) as read:
                assert read.as_of == time_at(at)
            async with client.workers.shared_read("t", start=at - HOUR, end=now_of(client) + SOON) as read:
                pass


async def test_one_closing_does_for_all_who_wait(sites: Sites) -> None:
    async with sites.open() as client, client.writer("t", SCHEMA, clock="wall") as w:
        await w.write([("a", 1)])
        r = await client.reader("t")
        at = now_of(client) + SOON
        before = (await client.admin.inspect("t")).seqno
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(rows_at(r, at) for _ in range(30)))
        assert found == [[("a", 1, 1)]] * 30
        assert (
            await client.admin.inspect("t")
        ).seqno <= before + 4  # one closes; the reader's hold and heartbeat


async def test_waiting_without_patience_is_not_ready(sites: Sites) -> None:
    async with sites.open() as client, client.writer("t", SCHEMA, clock="wall"):
        r = await client.reader("t")
        later = now_of(client) + HOUR
        for ask in (
            lambda: r.snapshot(later, wait=False),
            lambda: client.workers.shared_read("t", later, wait=False),
        ):
            with pytest.raises(ap.NotReadable):
                await ask()
        assert (await client.admin.inspect("t")).upper == ap.Antichain(0)


async def test_a_readonly_client_closes_nothing(sites: Sites) -> None:
    """Goal: it reads what is complete, is not ready, or waits for another to close it."""
    async with sites.open() as client, sites.open(readonly=True) as watching:
        w = await client.writer("t", SCHEMA, clock="wall")
        await w.write([("a", 1)])
        r, theirs = await client.reader("t"), await watching.reader("t")
        at = now_of(client)
        with pytest.raises(ap.NotReadable):
            await theirs.snapshot(at, wait=False)
        waiting = asyncio.create_task(rows_at(theirs, at))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        seqno = (await client.admin.inspect("t")).seqno
        async with asyncio.timeout(60):
            assert await rows_at(r, at, wait=False) == await waiting == [("a", 1, 1)]
            assert await rows_at(theirs, at, wait=False) == [("a", 1, 1)]
        assert (await client.admin.inspect("t")).seqno > seqno


async def test_a_cancelled_reader_leaves_nothing_behind(sites: Sites) -> None:
    """Goal: the wait for an instant ends with its reader: nobody closes it, and no task stays."""
    async with sites.open() as client, client.writer("t", SCHEMA, clock="wall"):
        r = await client.reader("t")
        before = {task for task in asyncio.all_tasks() if "close" in task.get_name()}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await r.snapshot(now_of(client) + HOUR)
        listening = await r.listen(until=now_of(client) + HOUR)
        subscribed = await r.subscribe(now_of(client) + HOUR)
        await listening.aclose()
        await subscribed.aclose()
        await asyncio.sleep(0)
        assert {task for task in asyncio.all_tasks() if "close" in task.get_name()} == before


async def test_a_subscription_that_is_resumed_before_its_instant(sites: Sites) -> None:
    """Goal: its cursor is of contents that nobody has closed: the second one does."""
    clock = SetClock()
    async with sites.open(clock) as client, client.writer("t", SCHEMA, clock="wall") as w:
        time = await w.write([("a", 1)])
        r = await client.reader("t")
        at = now_of(client) + HOUR
        subscribed = await r.subscribe(at)
        cursor = subscribed.cursor
        await subscribed.aclose()
        clock.ahead_s += 7200
        async with asyncio.timeout(60), r.subscribe(cursor=cursor) as again:
            step = await anext(again.steps())
        assert step.updates.rows() == [("a", 1, time_at(at), 1)]
        assert time < time_at(at)


async def test_instants_are_exact(sites: Sites) -> None:
    """Goal: to the microsecond, whatever the offset of the time zone; a listen begins after its instant."""
    async with sites.open() as client, client.writer("t", SCHEMA, clock="wall") as w:
        time = await w.write([("a", 1)])
        r = await client.reader("t")
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)
        for zone in (UTC, timezone(timedelta(hours=-9.5)), timezone(timedelta(hours=14))):
            assert await rows_at(r, at.astimezone(zone)) == [("a", 1, 1)]
            assert await rows_at(r, at.astimezone(zone) - timedelta(microseconds=1)) == []
        await w.write([("b", 1)])
        async with r.listen(at, until=now_of(client)) as listening:
            keys = [u.key async for step in listening.steps() for u in step.updates]
        assert keys == ["b"]


@pytest.mark.parametrize("bad", ["naive", "logical", "1960"])
async def test_what_is_no_instant_of_the_shard_is_refused(sites: Sites, bad: str) -> None:
    async with sites.open() as client:
        w = await client.writer("t", SCHEMA, clock=None if bad == "logical" else "wall")
        await w.write([("a", 1)])
        r, before = await client.reader("t"), (await client.admin.inspect("t")).upper
        at = {"naive": datetime(2026, 5, 1), "1960": datetime(1960, 1, 1, tzinfo=UTC)}
        time = at.get(bad, datetime(2026, 5, 1, tzinfo=UTC))
        asks = (
            lambda: r.snapshot(time),
            lambda: r.listen(time),
            lambda: r.listen(until=time),
            lambda: r.subscribe(time),
            lambda: client.workers.shared_read("t", time),
            lambda: client.workers.shared_read("t", start=time),
            lambda: client.workers.shared_read("t", start=0, end=time),
        )
        for ask in asks:
            with refused("INVALID_TIME"):
                await ask()
        assert (await client.admin.inspect("t")).upper == before


async def test_a_finished_and_a_dropped_shard(sites: Sites) -> None:
    """Goal: on a finished one every instant is complete; the wait on one that is dropped ends."""
    async with sites.open() as client, sites.open() as other:
        w = await client.writer("t", SCHEMA, clock="wall")
        await w.write([("a", 1)])
        r, theirs = await client.reader("t"), await other.reader("t")
        waiting = asyncio.create_task(rows_at(theirs, now_of(other) + HOUR))
        upper = await w.fetch_recent_upper()
        await w.compare_and_append([], upper, ap.Antichain())
        later = now_of(client) + timedelta(days=400)
        assert await rows_at(r, later, wait=False) == [("a", 1, 1)]
        async with asyncio.timeout(60):
            assert await waiting == [("a", 1, 1)]
