"""Expiry, one leased reader per process and shard; see `test_leases.py`."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.leases.leases_kit import CALLS, LEASE_S, World, a_world, commit, named, since_of
from tests.support.internals import session_of, shard_of
from tests.support.schemas import SCHEMA
from tests.support.shards import rows_until
from tests.support.virtual import in_virtual_time

READS = {name: call for name, call in CALLS.items() if name != "release"}  # which is fine with what is gone


# --- expiry -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "nightly"], ids=["hold", "named"])
@pytest.mark.parametrize("call", READS.values(), ids=READS.keys())
async def test_with_a_hold_every_call_after_expiry_is_told(world: World, name: str | None, call: Any) -> None:
    writer = await world.writer()
    client = await world.client()
    held = await client.reader("s", SCHEMA, hold=2, hold_name=name)
    world.pass_time(LEASE_S + 1)
    await commit(writer)  # of another process
    for _ in range(2):
        with pytest.raises(ap.LeaseExpired) as caught:
            await call(held)
        assert caught.value.shard_id == held.shard_id


async def test_without_a_hold_a_reader_registers_anew(world: World) -> None:
    """Only open snapshots and listens are lost; later ones, opened in any order, are not affected."""
    writer = await world.writer()
    for opened in ("snapshot", "snapshot, no time", "listen", "listen, a time", "subscribe"):
        client = await world.client()
        reader = await client.reader("s", SCHEMA)
        old_snapshot, old_listen = await reader.snapshot(3), await reader.listen(as_of=3)
        waiting = asyncio.ensure_future(anext(await reader.listen(as_of=9)))
        await asyncio.sleep(0)
        world.pass_time(LEASE_S + 1)
        await commit(writer)
        new: Any = await CALLS[opened](reader)
        if opened.startswith("snapshot"):
            assert await new.rows() == rows_until(9)
            await new.aclose()
        else:
            if opened == "subscribe":
                assert len((await anext(new.steps())).updates) == 10
            wait = asyncio.ensure_future(anext(new))
            await asyncio.sleep(0.02)
            assert not wait.done()
            wait.cancel()
        with pytest.raises(ap.LeaseExpired):
            await old_snapshot.rows()
        with pytest.raises(ap.LeaseExpired):
            await anext(old_listen)
        with pytest.raises(ap.LeaseExpired):
            async for _ in old_snapshot.batches():
                pass
        with pytest.raises(ap.LeaseExpired):
            await waiting
        await client.aclose()


async def test_a_listen_opened_after_an_expiry_elsewhere_goes_on(world: World) -> None:
    """Its process has not seen yet that its registration is gone."""
    writer = await world.writer()
    client = await world.client()
    reader = await client.reader("s", SCHEMA)
    before = reader.reader_id
    world.pass_time(LEASE_S + 1)
    await commit(writer)
    async with reader.listen(as_of=4) as listen:
        first = await anext(listen.steps())
        assert first.updates.rows() == [("k", t, t, 1) for t in range(5, 10)]
        assert reader.reader_id != before


async def test_an_expired_listen_never_skips_history(world: World) -> None:
    """Since passed it while no hold kept it back: every call is an error."""
    writer = await world.writer()
    client, other = await world.client(), await world.client()
    reader = await client.reader("s", SCHEMA)
    listen = await reader.listen(as_of=2)
    cursor = listen.cursor
    world.pass_time(LEASE_S + 1)
    mover = await other.reader("s", SCHEMA, hold=0)
    await mover.downgrade_since(8)
    await commit(writer)
    assert await since_of(other) == ap.Antichain(8)
    step = await anext(listen.steps())  # what its process knew already is right
    for _ in range(2):
        with pytest.raises(ap.LeaseExpired):
            await anext(listen.steps())
    assert step.updates.rows() == [("k", t, t, 1) for t in range(3, 10)]
    with pytest.raises(ap.SinceViolation) as caught:
        await reader.listen(cursor=cursor)
    assert (caught.value.as_of, caught.value.since) == (2, ap.Antichain(8))
    async with reader.listen(as_of=8) as later:
        assert (await anext(later.steps())).updates.rows() == [("k", 9, 9, 1)]


async def test_an_error_is_told_by_the_waiting_step(world: World) -> None:
    """A listener that waits while its lease runs out learns it from the very commit that expired it."""
    writer = await world.writer()
    client = await world.client()
    listen = await (await client.reader("s", SCHEMA)).listen()
    waiting = asyncio.ensure_future(anext(listen))
    await asyncio.sleep(0.02)
    world.pass_time(LEASE_S + 1)
    await writer.compare_and_append([("x", 1, 10, 1)], 10, 11)
    with pytest.raises(ap.LeaseExpired):
        async with asyncio.timeout(50):
            await waiting


@in_virtual_time
async def test_heartbeats_keep_a_lease_alive() -> None:
    async with a_world() as world:
        writer = await world.writer()
        client = await world.client(reader_lease_s=0.4)
        held = await client.reader("s", SCHEMA, hold=2)
        named_one = await named(client, hold=3, lease_s=0.4)
        listen = await held.listen(as_of=9)
        for t in range(10, 22):
            await asyncio.sleep(0.1)
            await writer.compare_and_append([("x", t, t, 1)], t, t + 1)
        assert await held.downgrade_since(0) == ap.Antichain(2)
        assert await named_one.downgrade_since(0) == ap.Antichain(3)
        seen = []
        async for step in listen.steps():
            seen += step.updates.rows()
            if step.upper == ap.Antichain(22):
                break
        assert [u.time for u in seen] == list(range(10, 22))


@in_virtual_time
async def test_heartbeats_survive_an_outage() -> None:
    """A heartbeat that fails is repeated, and the lease lives if the store is back in time."""
    async with a_world() as world:
        writer = await world.writer()
        client = await world.client(reader_lease_s=1.0, retry_timeout_s=0.05)
        held = await client.reader("s", SCHEMA, hold=2)
        world.faults.rates = {Outcome.REFUSED: 1.0}
        await asyncio.sleep(0.5)
        world.faults.heal()
        await asyncio.sleep(0.6)
        await commit(writer)
        await asyncio.sleep(0.6)
        await commit(writer)
        assert await held.downgrade_since(0) == ap.Antichain(2)


async def test_a_crash_does_not_lose_history(world: World) -> None:
    """A process held 10 in one reader and 100 in another and crashed. They expire one after the other;
    its restart must still be able to read at 10."""
    client = await world.client()
    writer = await client.writer("s", SCHEMA)
    await writer.compare_and_append([("k", t, t, 1) for t in range(200)], 0, 200)
    crashed = await world.client()
    keeps = await crashed.reader("s", SCHEMA, hold_name="state", hold=10, lease_s=100)
    keeps_too = await crashed.reader("s", SCHEMA, hold=10)  # only keeps
    moves = await crashed.reader("s", SCHEMA, hold=10, lease_s=200)
    await keeps.downgrade_since(10)
    await moves.downgrade_since(100)
    assert await since_of(client) == ap.Antichain(10)
    for handle in (keeps, keeps_too, moves):
        assert session_of(handle).own is not None
        session_of(handle).own.stop()  # no more heartbeats: it is dead
    for _ in range(12):
        world.pass_time(95)
        await commit(writer)
        assert await since_of(client) == ap.Antichain(10)
    restarted = await world.client()
    again = await restarted.reader("s", SCHEMA, hold_name="state", hold=10)
    async with again.snapshot(10) as snapshot:
        assert await snapshot.rows() == rows_until(10)


# --- one leased reader per process and shard ----------------------------------------------------------


async def test_all_handles_of_a_process_share_one_leased_reader(world: World) -> None:
    await world.writer()
    client, other = await world.client(), await world.client()
    before = client.metrics["consensus.compare_and_set"].count
    readers = [await client.reader("s", SCHEMA) for _ in range(20)]
    assert len({r.reader_id for r in readers}) == 1
    assert client.metrics["consensus.compare_and_set"].count - before == 1
    assert (await other.reader("s", SCHEMA)).reader_id != readers[0].reader_id
    async with client.reader("s", SCHEMA, hold=0) as held:
        assert held.reader_id != readers[0].reader_id
    for reader in readers[:-1]:
        await reader.aclose()
    async with readers[-1].snapshot() as snapshot:
        assert await snapshot.rows() == rows_until(9)
    reader_id = readers[-1].reader_id
    assert reader_id in shard_of(readers[-1]).state.readers
    await readers[-1].aclose()
    again = await client.reader("s", SCHEMA)
    assert reader_id not in shard_of(again).state.readers


@in_virtual_time
async def test_readers_opened_and_closed_at_once_leave_nothing() -> None:
    """The registration of a process survives any order of opening and closing, and its heartbeats with
    it."""
    async with a_world() as world:
        writer = await world.writer()
        client = await world.client(reader_lease_s=0.3)

        async def come_and_go(number: int) -> None:
            for _ in range(5):
                async with client.reader("s", SCHEMA) as reader:
                    async with reader.snapshot(number) as snapshot:
                        assert await snapshot.rows() == rows_until(number)
                    await asyncio.sleep(0.001 * number)

        await asyncio.gather(*[come_and_go(n) for n in range(8)])
        last = await client.reader("s", SCHEMA)
        listen = await last.listen(as_of=9)
        await asyncio.sleep(0.6)  # two leases
        await commit(writer)
        await writer.compare_and_append([("x", 1, 10, 1)], 10, 11)
        assert (await anext(listen.steps())).upper == ap.Antichain(11)
        await client.aclose()
        probe = await (await world.client()).reader("s", SCHEMA)
        assert list(shard_of(probe).state.readers) == [probe.reader_id]


async def test_a_need_is_held_though_a_heartbeat_is_on_its_way(world: World) -> None:
    """The heartbeat was decided before the listen was opened, and says that nothing is needed."""
    await world.writer()
    client, other = await world.client(), await world.client()
    reader = await client.reader("s", SCHEMA)
    first = await reader.listen(as_of=3)
    await first.aclose()
    world.faults.latency_s = (0.02, 0.03)
    heartbeat = asyncio.ensure_future(shard_of(reader).hold.heartbeat())
    await asyncio.sleep(0.001)
    listen = await reader.listen(as_of=5)
    await heartbeat
    world.faults.latency_s = (0, 0)
    mover = await other.reader("s", SCHEMA, hold=0)
    await mover.downgrade_since(9)
    assert await since_of(other) == ap.Antichain(5)
    assert len((await anext(listen.steps())).updates) == 4


async def test_closing_a_client_is_quick_with_all_kinds_of_things_open(world: World) -> None:
    await world.writer()
    client = await world.client()
    reader = await client.reader("s", SCHEMA)
    held = await client.reader("s", SCHEMA, hold=4)
    snapshot = await reader.snapshot(9)
    rows = aiter(snapshot)
    await anext(rows)
    listens = [await handle.listen() for handle in (reader, held) for _ in range(5)]
    waits = [asyncio.ensure_future(anext(listen)) for listen in listens]
    waits.append(asyncio.ensure_future(reader.snapshot(99).__aenter__()))
    await asyncio.sleep(0.02)
    async with asyncio.timeout(50):
        await client.aclose()
    for wait in waits:
        with pytest.raises(ap.InvalidUsage, match="CLOSED"):
            await wait
    with pytest.raises(ap.InvalidUsage, match="CLOSED"):
        await anext(rows)
