"""Goal: a shard's clock is set when it is created and never changes. On a wall clock `write` picks now, by
the one clock of the consensus store, never before the upper nor before what the client has seen, whatever the
clocks of clients do; and no append carries the upper far beyond now."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.shard.wall_clock_kit import MICROS, SetClock, Sites, refused
from tests.support.internals import stack_of
from tests.support.schemas import PRODUCT, SCHEMA

pytestmark = pytest.mark.usefixtures("started_postgres")
AHEAD_MAX = 3600 * MICROS


@pytest.fixture
def sites() -> Sites:
    return Sites()


async def test_write_picks_now(client: ap.Client, location: Any) -> None:
    """Goal: between what the clock says before and after, up to its error; a second client goes on."""
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        async with client.writer("t", SCHEMA, clock="wall") as w, other.writer("t", SCHEMA) as w2:
            before, error = client.clock()
            times = [await w.write([("a", 1)]), await w2.write([("b", 1)]), await w.write([("c", 1)])]
            after, error_after = client.clock()
            lag = 5.0  # the store's answers, by which `write` goes, are at most so old
            assert (before - error - lag) * MICROS <= times[0]
            assert times[-1] <= (after + error_after + 1) * MICROS
            assert times == sorted(set(times))
            assert 0 <= error < 60
        view = await other.inspect("t")
        assert (view.clock, view.table) == ("wall", False)


async def test_a_clock_is_set_once(sites: Sites) -> None:
    async with sites.open() as client, sites.open() as other:
        await client.writer("wall", SCHEMA, clock="wall")
        await client.writer("logical", SCHEMA)
        for name, kept, another in (("wall", "wall", "logical"), ("logical", "logical", "wall")):
            for asker in (client, other):
                with refused("INVALID_CLOCK"):
                    await asker.writer(name, SCHEMA, clock=another)
                async with asker.writer(name, SCHEMA, clock=kept), asker.writer(name, SCHEMA):
                    assert (await asker.inspect(name)).clock == kept
        bad: Any
        for bad in ("", "WALL", 3, [], ap):
            with refused("INVALID_CLOCK"):
                await client.writer("new", SCHEMA, clock=bad)
        with refused("INVALID_CLOCK"):
            await client.writer("new", PRODUCT, clock="wall")
        assert set(await client.list_shards()) == {"wall", "logical"}


async def test_two_who_create_at_once_agree(sites: Sites) -> None:
    async with sites.open() as a, sites.open() as b:
        opened = await asyncio.gather(
            a.writer("t", SCHEMA, clock="wall"),
            b.writer("t", SCHEMA, clock="logical"),
            return_exceptions=True,
        )
        assert sorted(isinstance(each, ap.InvalidUsage) for each in opened) == [False, True]
        kept = "wall" if isinstance(opened[1], BaseException) else "logical"
        assert (await a.inspect("t")).clock == (await b.inspect("t")).clock == kept


@pytest.mark.parametrize("jump_s", [-86_400.0, 60.0])
async def test_times_rise_when_a_clock_jumps(sites: Sites, jump_s: float) -> None:
    """Goal: within a client over all its shards, and within a shard over all clients."""
    clock = SetClock()
    async with sites.open(clock) as client, sites.open() as other:
        one, two = [await client.writer(name, SCHEMA, clock="wall") for name in "ab"]
        theirs = await other.writer("a", SCHEMA)
        times = [await one.write([("x", 1)])]
        clock.ahead_s += jump_s
        times += [await two.write([("x", 1)]), await one.write([("x", 1)])]
        await theirs.fetch_recent_upper()
        times += [await theirs.write([("x", 1)]), await theirs.write([("x", 1)])]
        assert times == sorted(set(times))
        if jump_s > 0:
            assert times[1] - times[0] >= jump_s * MICROS


async def test_what_a_client_has_read_is_before_what_it_writes(sites: Sites) -> None:
    """Goal: also to another shard, by a client whose clock is behind."""
    behind = SetClock()
    behind.ahead_s = -50.0
    async with sites.open() as ahead, sites.open(behind) as client:
        seen = await (await ahead.writer("a", SCHEMA, clock="wall")).write([("x", 1)])
        w = await client.writer("b", SCHEMA, clock="wall")
        assert await w.write([("x", 1)]) < seen
        async with client.reader("a") as r:
            await r.fetch_recent_upper()
        assert await w.write([("x", 1)]) == seen + 1


async def test_an_upper_does_not_run_ahead(sites: Sites) -> None:
    """Goal: for appends of rows, batches, replicas and several shards; a refused batch stays its owner's."""
    async with sites.open() as client:
        w, v = [await client.writer(name, SCHEMA, clock="wall") for name in "ab"]
        now = int(client.clock()[0] * MICROS)
        far, near = now + AHEAD_MAX + 60 * MICROS, now + AHEAD_MAX - 60 * MICROS
        async with w.builder(0) as builder:
            await builder.extend([("x", 1, now, 1)])
            batch = await builder.finish(far)
        refusals = (
            lambda: w.compare_and_append([], 0, far),
            lambda: w.append([("x", 1, now, 1)], 0, far),
            lambda: w.compare_and_append_batch([batch], 0, far),
            lambda: client.compare_and_append_many([ap.Append(v, [], 0, now), ap.Append(w, [], 0, far)]),
        )
        for refusal in refusals:
            with refused("INVALID_CLOCK"):
                await refusal()
        assert await w.fetch_recent_upper() == await v.fetch_recent_upper() == ap.Antichain(0)
        await w.compare_and_append_batch([batch], 0, near)
        assert await w.write([("y", 1)]) == near
        await w.compare_and_append([], near + 1, ap.Antichain())
        async with client.reader("a") as r, r.snapshot(near) as s:
            assert await s.rows() == [("x", 1, 1), ("y", 1, 1)]


async def test_an_upper_that_is_far_ahead_does_not_end_the_shard(sites: Sites) -> None:
    """Goal: after a clock that was a year ahead, appends go on, one time after the other."""
    wrong = SetClock()
    wrong.ahead_s = 365 * 86_400.0
    async with sites.open(wrong) as broken:
        async with broken.writer("t", SCHEMA, clock="wall") as w:
            time = await w.write([("a", 1)])
    async with sites.open() as client, client.writer("t", SCHEMA) as w:
        assert await w.write([("b", 1)]) == time + 1
        await w.compare_and_append([("c", 1, time + 2, 1)], time + 2, time + 3)
        with refused("INVALID_CLOCK"):
            await w.compare_and_append([], time + 3, time + 5)


async def test_the_error_of_a_clock_covers_how_far_it_was_set(sites: Sites) -> None:
    """Goal: `client.clock` is right within its error, also after the store's clock was set."""
    clock = SetClock()
    async with sites.open(clock) as client, client.writer("t", SCHEMA, clock="wall") as w:
        moment, error = client.clock()
        assert abs(moment - clock.wall()) <= error + 0.5
        clock.ahead_s += 100.0
        await w.write([("a", 1)])
        moment, error = client.clock()
        assert abs(moment - clock.wall()) <= error + 0.5
        assert error >= 99.0
        await stack_of(client).clock.measure()
        assert client.clock()[1] < 50.0


async def test_only_a_wall_clock_is_measured_anew() -> None:
    """Goal: once a minute, while shards with a wall clock are written; a logical one costs no request."""
    from aiopersist.storage.memory import MemoryBlob, MemoryConsensus

    class Aging(SetClock):
        passed = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.passed

    class Counted(FaultyConsensus):
        looks = 0

        async def clock(self) -> float:
            self.looks += 1
            return await super().clock()

    aging, faults = Aging(), Faults()
    consensus = Counted(MemoryConsensus(), faults)
    stores = {"blob": FaultyBlob(MemoryBlob(), faults), "consensus": consensus}
    async with ap.open(**stores, maintenance=False, runtime=aging) as client:  # type: ignore[arg-type]
        assert consensus.looks == 1
        logical = await client.writer("l", SCHEMA)
        aging.passed += 100
        await logical.write([("a", 1)])
        assert consensus.looks == 1
        wall = await client.writer("w", SCHEMA, clock="wall")
        for _ in range(5):
            await wall.write([("a", 1)])
        assert consensus.looks == 2
        aging.passed += 100
        assert client.clock()[1] >= 100 * 1e-5
        for _ in range(100):
            await asyncio.sleep(0)
            client.clock()
        assert consensus.looks == 3


async def test_retention_means_wall_time(sites: Sites) -> None:
    """Goal: since moves to `now - keep`, however the commits lie, and never to the upper."""
    clock = SetClock()
    async with sites.open(clock) as client, client.writer("t", SCHEMA, clock="wall") as w:
        await client.admin.retain("t", timedelta(hours=1))
        first = await w.write([("a", 1)])
        clock.ahead_s += 1800
        await w.write([("b", 1)])
        await client.admin.force_compaction("t")
        assert (await client.admin.inspect("t")).since < first
        clock.ahead_s += 3000
        last = await w.write([("c", 1)])
        await client.admin.force_compaction("t")
        since = (await client.admin.inspect("t")).since.time
        assert first < since < last
        assert abs(since - (clock.wall() - 3600) * MICROS) < 60 * MICROS
        clock.ahead_s += 10 * 86_400
        await client.admin.force_compaction("t")
        assert (await client.admin.inspect("t")).since == ap.Antichain(last)
        async with client.reader("t") as r, r.snapshot() as s:
            assert [key for key, _, _ in await s.rows()] == ["a", "b", "c"]


async def test_a_shard_that_is_finished_meanwhile(sites: Sites) -> None:
    """Goal: `write` says so by the error that it has on every clock."""
    async with sites.open() as client, sites.open() as other:
        w, theirs = await client.writer("t", SCHEMA, clock="wall"), await other.writer("t", SCHEMA)
        await theirs.compare_and_append([], 0, ap.Antichain())
        with pytest.raises(ap.UpperMismatch):
            await w.write([("a", 1)])
