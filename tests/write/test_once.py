"""Goal: what has an id is written once, whoever repeats it and when: on the same handle or another, at the
same moment, while the first is in doubt, after compaction, collection and another process's opening; a repeat
tells the time of the first; and `happened` tells it, too, after this client's doubtful sends are settled."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.shard.wall_clock_kit import SetClock, Sites, refused
from tests.support.location import Place, Way
from tests.support.schemas import PRODUCT, SCHEMA
from tests.write.outcomes_kit import rig

pytestmark = pytest.mark.usefixtures("started_postgres")


@pytest.fixture
def sites() -> Sites:
    return Sites()


async def rows_of(client: ap.Client, name: str = "t") -> Any:
    async with client.reader(name) as r, r.snapshot() as s:
        return await s.rows()


async def test_repeats_write_nothing(client: ap.Client, location: Any) -> None:
    """Goal: on every store, by every call, handle and client; the rows of a repeat do not matter."""
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        w = await client.writer("t", SCHEMA, clock="wall")
        again, theirs = await client.writer("t", SCHEMA), await other.writer("t", SCHEMA)
        time = await w.write([("a", 1)], once="id")
        await w.write([("b", 1)])
        for handle in (w, again, theirs):
            assert await handle.write([("c", 1)], once="id") == time
            assert await handle.write([], once="id") == time
            assert await handle.compare_and_append([("c", 1, 0, 1)], 0, 1, once="id") is None
            async with handle.builder(0) as builder:
                await builder.extend([("c", 1, 0, 1)])
                batch = await builder.finish(1)
            assert await handle.compare_and_append_batch([batch], 0, 1, once="id") is None
        assert await rows_of(other) == [("a", 1, 1), ("b", 1, 1)]
        for asker in (client, other):
            assert await asker.happened("id", "t") == time
            assert await asker.happened("another", "t") is None


async def test_at_one_moment_one_is_written(client: ap.Client, location: Any) -> None:
    """Goal: all repeats get its time; others of the moment are written as ever."""
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        handles = [await each.writer("t", SCHEMA) for each in (client, client, other)]
        calls = [h.write([("a", 1)], once=f"id {n % 3}") for h in handles for n in range(12)]
        times = await asyncio.gather(*calls, *(h.write([("b", 1)]) for h in handles))
        for n in range(3):
            assert len(set(times[n:36:3])) == 1
        assert await rows_of(client) == [("a", 1, 3), ("b", 1, 3)]


async def test_an_id_without_rows_is_recorded(sites: Sites) -> None:
    """Goal: else a late repeat that has rows would be written after what came between."""
    async with sites.open() as client, client.writer("t", SCHEMA) as w:
        time = await w.write([], once="id")
        assert await w.write([("a", 1)], once="id") == time == await client.happened("id", "t")
        upper = w.upper.time
        await w.compare_and_append([], upper, upper, once="heartbeat")
        assert await client.happened("heartbeat", "t") is not None
        await w.write([("b", 1)])
        assert await rows_of(client) == [("b", 1, 1)]


async def test_a_repeat_of_a_finished_shard(sites: Sites) -> None:
    async with sites.open() as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 0, 1)], 0, ap.Antichain(), once="id")
        await w.compare_and_append([("a", 1, 0, 1)], 0, ap.Antichain(), once="id")
        assert await w.write([("a", 1)], once="id") == await client.happened("id", "t")
        with pytest.raises(ap.UpperMismatch):
            await w.write([("a", 1)], once="other")


async def test_an_id_outlives_compaction_collection_and_reopening(sites: Sites) -> None:
    limits = {"rollup_every": 4}
    async with sites.open(limits=limits) as client, client.writer("t", SCHEMA) as w:
        times = {str(n): await w.write([(str(n), n)], once=str(n)) for n in range(40)}
        await client.admin.force_compaction("t")
        await client.admin.force_gc("t")
        view = await client.admin.inspect("t")
        assert view.earliest_seqno > 20  # from now on a rollup knows the ids
    async with sites.open(limits=limits) as client, client.writer("t", SCHEMA) as w:
        for id_, time in times.items():
            assert await w.write([("new", 1)], once=id_) == time
        assert len(await rows_of(client)) == 40
        assert (await client.admin.fsck("t")).ok


async def test_an_id_is_forgotten_after_its_time(sites: Sites) -> None:
    """Goal: a day, by the store's clock; and each setting."""
    clock = SetClock()
    async with sites.open(clock) as client, sites.open(clock, limits={"once_keep_s": 10.0}) as brief:
        w = await client.writer("t", SCHEMA)
        time = await w.write([("a", 1)], once="id")
        clock.ahead_s += 24 * 3600 - 60
        assert await w.write([("a", 1)], once="id") == time
        assert await brief.happened("id", "t") is None
        clock.ahead_s += 120
        assert await client.happened("id", "t") is None
        assert await w.write([("a", 1)], once="id") > time
        assert await rows_of(client) == [("a", 1, 2)]


async def test_what_is_no_id_is_refused(sites: Sites) -> None:
    async with sites.open() as client, client.writer("t", SCHEMA) as w, client.writer("p", PRODUCT) as p:
        bad: Any
        for bad in ("", "x" * 257, "é" * 129, 7, b"id", "\ud800", ["a"]):
            for call in (
                lambda bad=bad: w.write([("a", 1)], once=bad),
                lambda bad=bad: w.compare_and_append([("a", 1, 0, 1)], 0, 1, once=bad),
                lambda bad=bad: client.happened(bad, "t"),
            ):
                with refused("INVALID_TXN"):
                    await call()
        with refused("INVALID_TXN"):
            await w.write([("a", 1)], txn=("app", 1), once="id")
        with refused("INVALID_TXN"):
            await p.compare_and_append([], (0, 0), (1, 1), once="id")
        with pytest.raises(ap.UnknownShard):
            await client.happened("id", "nothing")
        assert w.upper == ap.Antichain(0)
        for good in ("x", "x" * 256, "é" * 128):
            await w.write([], once=good)


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
@pytest.mark.parametrize("how", ["write", "compare"])
async def test_a_repeat_while_the_first_is_in_doubt(outcome: Outcome, how: str) -> None:
    """Goal: by the same handle, by another one, and by an honest client; it is there once, and `settle` and
    `happened` say that it happened."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w, r.client.writer("t", SCHEMA) as another:
        async with r.honest.writer("t", SCHEMA) as honest:

            async def send(handle: Any) -> Any:
                if how == "write":
                    return await handle.write([("a", 1)], once="id")
                return await handle.compare_and_append([("a", 1, 0, 1)], 0, 1, once="id")

            r.faults.fail_next("compare_and_set", outcome)
            r.faults.latency_s = (0.005, 0.005)
            first = asyncio.create_task(send(w))
            await asyncio.sleep(0.012)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await asyncio.gather(send(honest), send(another), send(w))
            r.faults.heal()
            assert await rows_of(r.honest) == [("a", 1, 1)]
            assert await r.client.happened("id", "t") == await r.honest.happened("id", "t") == 0


async def test_settle_after_a_repeat_elsewhere(sites: Sites) -> None:
    """Goal: a cancelled call that another has done by the same id is committed, as `settle` says."""
    async with sites.open() as client, sites.open() as other:
        w, theirs = await client.writer("t", SCHEMA), await other.writer("t", SCHEMA)
        call = asyncio.create_task(w.write([("a", 1)], once="id"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await theirs.write([("a", 1)], once="id")
        assert isinstance(await w.settle(), ap.Committed)
        assert await rows_of(client) == [("a", 1, 1)]
        with pytest.raises(asyncio.CancelledError):
            call.result()


async def test_happened_settles_a_handle_that_is_closed() -> None:
    """Goal: a send that is held on its way, of a handle that was closed meanwhile, is decided first: it does
    not arrive after `happened` said that it did not happen."""
    place, way = Place(), Way()
    async with place.open() as other, place.open(way) as client:
        w = await client.writer("t", SCHEMA)
        way.holds = lambda op, what: op == "compare_and_set" and b'"once"' in bytes(what)
        call = asyncio.create_task(w.compare_and_append([("a", 1, 0, 1)], 0, 1, once="id"))
        await way.until_held()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        closing = asyncio.create_task(w.aclose())
        await asyncio.sleep(0)
        found = await client.happened("id", "t")
        way.go.set()
        await closing
        for _ in range(50):
            await asyncio.sleep(0)
        assert await other.happened("id", "t") is found is None
