"""Goal: holds keep history exactly as long as somebody wants it. Since moves only where somebody moves
it; a lease that ran out is told, never answered with wrong data; a crash loses nothing."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from tests.support.schemas import SCHEMA
from tests.support.shards import rows_until

LEASE_S = 900.0


class Clock(FaultyConsensus):
    """A consensus store whose clock the test moves; shared by several clients."""

    ahead_s = 0.0

    async def now(self) -> float:
        return await super().now() + self.ahead_s


class World:
    """Clients of one place, each like a process of its own; all see one clock."""

    def __init__(self, stack: AsyncExitStack) -> None:
        url = f"mem://{uuid.uuid4().hex}"
        self.faults = Faults()
        self.clock = Clock(ap.open_consensus(url), self.faults)
        self._blob = ap.open_blob(url)
        self._stack = stack

    async def client(self, **settings: Any) -> ap.Client:
        opening = ap.open(blob=self._blob, consensus=self.clock, settings=ap.Settings(**settings))
        return await self._stack.enter_async_context(opening)

    async def writer(self) -> ap.WriteHandle[str, int]:
        """A writer in a process of its own, with ten complete times."""
        client = await self.client()
        writer: ap.WriteHandle[str, int] = await client.writer("s", SCHEMA)
        await writer.compare_and_append([("k", t, t, 1) for t in range(10)], 0, 10)
        return writer

    def pass_time(self, seconds: float) -> None:
        self.clock.ahead_s += seconds


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)


async def since_of(client: ap.Client) -> ap.Antichain:
    """The shard's since, by a fresh look of a reader without a hold."""
    async with client.reader("s", SCHEMA) as reader:
        await reader.fetch_recent_upper()
        return reader.since


async def commit(writer: ap.WriteHandle[str, int]) -> None:
    """Any commit of anybody: it expires what is overdue."""
    upper = await writer.fetch_recent_upper()
    await writer.compare_and_append([], upper, upper)


# --- since moves only where somebody moves it ---------------------------------------------------------


async def test_opening_and_reading_never_move_since(world: World) -> None:
    writer = await world.writer()
    client = await world.client(reader_lease_s=0.2)  # heartbeats every 50 ms
    async with (
        client.reader("s", SCHEMA) as reader,
        client.reader("s", SCHEMA, hold=7) as held,
        client.reader("s", SCHEMA, hold_name="n", hold=6, lease_s=0.2) as named,
        reader.snapshot(9),
        reader.listen(as_of=8) as listen,
        reader.subscribe(9),
    ):
        await writer.compare_and_append([], 10, 12)
        assert isinstance(await anext(listen), ap.Updates)
        await asyncio.sleep(0.3)
        assert await since_of(client) == ap.Antichain(0)
        assert (held.since, named.since) == (ap.Antichain(7), ap.Antichain(6))
    await commit(writer)
    assert await since_of(client) == ap.Antichain(0)


async def test_downgrade_moves_the_hold_forward_and_since_to_the_meet(world: World) -> None:
    await world.writer()
    client, other = await world.client(), await world.client()
    a = await client.reader("s", SCHEMA, hold=0)
    b = await other.reader("s", SCHEMA, hold=3)
    assert await a.downgrade_since(5) == ap.Antichain(5)
    assert await since_of(client) == ap.Antichain(3)  # b only keeps, and it keeps 3
    assert await b.downgrade_since(ap.Antichain(4)) == ap.Antichain(4)
    assert await since_of(client) == ap.Antichain(4)
    assert await a.downgrade_since(2) == ap.Antichain(5)  # older: a heartbeat
    assert a.since == ap.Antichain(5)
    await b.aclose()
    assert await since_of(client) == ap.Antichain(4)  # letting go moves nothing
    assert await a.downgrade_since(0) == ap.Antichain(5)
    assert await since_of(client) == ap.Antichain(5)  # a's heartbeat does: it is a moving hold


async def test_a_moving_hold_goes_on_moving_since_with_its_heartbeats(world: World) -> None:
    await world.writer()
    client, other = await world.client(reader_lease_s=0.4), await world.client()
    a = await client.reader("s", SCHEMA, hold=0)
    b = await other.reader("s", SCHEMA, hold=2)
    await a.downgrade_since(6)
    assert await since_of(other) == ap.Antichain(2)
    await b.aclose()
    async with asyncio.timeout(5):
        while await since_of(other) != ap.Antichain(6):
            await asyncio.sleep(0.05)


async def test_open_snapshots_and_listens_hold_since_back(world: World) -> None:
    """Those of other processes too; and no longer once they are closed."""
    writer = await world.writer()
    client, other = await world.client(reader_lease_s=0.4), await world.client()
    mover = await other.reader("s", SCHEMA, hold=0)
    reader = await client.reader("s", SCHEMA)
    listen = await reader.listen(as_of=4)
    await mover.downgrade_since(9)
    assert await since_of(other) == ap.Antichain(4)
    subscription = await reader.subscribe(as_of=6)
    await listen.aclose()
    async with asyncio.timeout(5):  # told by the next heartbeat
        while await since_of(other) != ap.Antichain(6):
            await asyncio.sleep(0.05)
            await mover.downgrade_since(0)
    waiting = asyncio.ensure_future(reader.snapshot(20).__aenter__())
    await asyncio.sleep(0.1)
    await subscription.aclose()
    await mover.downgrade_since(100)
    await writer.compare_and_append([("k", 20, 20, 1)], 10, 21)
    snapshot = await waiting
    assert await snapshot.rows() == [*rows_until(9), ("k", 20, 1)]
    await snapshot.aclose()
    async with asyncio.timeout(5):
        while await since_of(other) != ap.Antichain(100):
            await asyncio.sleep(0.05)
            await mover.downgrade_since(0)


@pytest.mark.parametrize("what", ["snapshot", "listen"])
async def test_what_a_closed_handle_left_open_holds_nothing(world: World, what: str) -> None:
    """Also while other handles of the process go on with the same leased reader."""
    writer = await world.writer()
    client, other = await world.client(reader_lease_s=0.2), await world.client()
    stays = await client.reader("s", SCHEMA)
    reader = await client.reader("s", SCHEMA)
    opened: Any = await (reader.snapshot(3) if what == "snapshot" else reader.listen(as_of=3))
    waiting = asyncio.ensure_future(reader.snapshot(50).__aenter__())
    await asyncio.sleep(0.02)
    await reader.aclose()
    with pytest.raises(ap.InvalidUsage, match="CLOSED"):
        await waiting
    with pytest.raises(ap.InvalidUsage, match="CLOSED"):
        await (opened.rows() if what == "snapshot" else anext(opened))
    mover = await other.reader("s", SCHEMA, hold=0)
    async with asyncio.timeout(5):
        while await since_of(other) != ap.Antichain(9):
            await asyncio.sleep(0.05)
            await mover.downgrade_since(9)
    assert not stays._shard.register.pins
    assert not stays._shard.hold._needs
    await commit(writer)


async def test_a_listen_moves_its_hold_as_it_goes(world: World) -> None:
    """The history of a long listen is not kept for ever: at the predecessor of its frontier."""
    writer = await world.writer()
    client, other = await world.client(reader_lease_s=0.2), await world.client()
    mover = await other.reader("s", SCHEMA, hold=0)
    async with client.reader("s", SCHEMA) as reader, reader.listen(as_of=0) as listen:
        await mover.downgrade_since(1000)
        assert await since_of(other) == ap.Antichain(0)
        async for _ in listen.steps():
            break
        assert listen.frontier == ap.Antichain(10)
        async with asyncio.timeout(5):
            while await since_of(other) != ap.Antichain(9):
                await asyncio.sleep(0.05)
                await mover.downgrade_since(0)
        await writer.compare_and_append([("z", 1, 10, 1)], 10, 11)
        step = await anext(listen.steps())
        assert step.updates.rows() == [("z", 1, 10, 1)]


async def test_concurrent_downgrades_of_a_handle_share_one_hold(world: World) -> None:
    await world.writer()
    client, other = await world.client(), await world.client()
    reader = await client.reader("s", SCHEMA)
    await asyncio.gather(*[reader.downgrade_since(t) for t in (3, 5, 4, 2)])
    assert reader.since == await since_of(other) == ap.Antichain(5)
    await reader.aclose()
    mover = await other.reader("s", SCHEMA, hold=5)
    await mover.downgrade_since(9)
    assert await since_of(other) == ap.Antichain(9)  # nothing was left behind


# --- hold= ---------------------------------------------------------------------------------------------


async def test_a_hold_keeps_history(world: World) -> None:
    await world.writer()
    client, other = await world.client(), await world.client()
    held = await client.reader("s", SCHEMA, hold=ap.Antichain(2))
    assert held.since == ap.Antichain(2)
    mover = await other.reader("s", SCHEMA, hold=0)
    await mover.downgrade_since(8)
    async with held.snapshot(2) as snapshot:
        assert await snapshot.rows() == rows_until(2)
    with pytest.raises(ap.SinceViolation) as caught:
        await held.snapshot(1)
    assert (caught.value.as_of, caught.value.since) == (1, ap.Antichain(2))
    with pytest.raises(ap.SinceViolation):
        await client.reader("s", SCHEMA, hold=1)
    with pytest.raises(ap.SinceViolation) as caught:
        await other.reader("s", SCHEMA, hold_name="late", hold=1)
    assert caught.value.since == ap.Antichain(2)


@pytest.mark.parametrize("bad", [-1, 2**63, (1, 2), ap.Antichain((1,)), True, "3"], ids=repr)
async def test_bad_holds_are_invalid_times(world: World, bad: Any) -> None:
    await world.writer()
    client = await world.client()
    reader = await client.reader("s", SCHEMA)
    for call in (lambda: client.reader("s", SCHEMA, hold=bad), lambda: reader.downgrade_since(bad)):
        with pytest.raises(ap.InvalidUsage) as caught:
            await call()
        assert caught.value.kind is ap.UsageKind.INVALID_TIME
    assert await since_of(client) == ap.Antichain(0)


# --- named holds -----------------------------------------------------------------------------------------


async def named(client: ap.Client, **options: Any) -> ap.ReadHandle[str, int]:
    return await client.reader("s", SCHEMA, hold_name="nightly", **options)


async def test_a_named_hold_is_taken_over_where_it_stands(world: World) -> None:
    await world.writer()
    first, second = await world.client(), await world.client()
    old = await named(first, hold=2)
    await old.downgrade_since(4)
    new = await named(second, hold=9)  # ignored
    assert new.since == ap.Antichain(4)
    mover = await second.reader("s", SCHEMA, hold=4)
    await mover.downgrade_since(8)
    assert await since_of(second) == ap.Antichain(4)
    async with new.snapshot(4) as snapshot:
        assert await snapshot.rows() == rows_until(4)


CALLS: dict[str, Callable[[ap.ReadHandle[str, int]], Awaitable[Any]]] = {
    "snapshot": lambda r: r.snapshot(9),
    "snapshot, no time": lambda r: r.snapshot(),
    "listen": lambda r: r.listen(),
    "listen, a time": lambda r: r.listen(as_of=9),
    "subscribe": lambda r: r.subscribe(),
    "fetch_recent_upper": lambda r: r.fetch_recent_upper(),
    "downgrade_since": lambda r: r.downgrade_since(9),
    "release": lambda r: r.release(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
async def test_the_earlier_owner_is_told_at_its_next_call(world: World, call: Any) -> None:
    await world.writer()
    first, second = await world.client(), await world.client()
    old = await named(first, hold=2)
    new = await named(second)
    for _ in range(2):  # and at every further one
        with pytest.raises(ap.OpaqueMismatch) as caught:
            await call(old)
        assert caught.value.shard_id == old.shard_id
    assert caught.value.expected != caught.value.actual
    assert await new.downgrade_since(3) == ap.Antichain(3)
    await old.aclose()
    assert await new.downgrade_since(4) == ap.Antichain(4)  # which the old one's end did not touch


async def test_closing_leaves_a_named_hold_to_its_lease_and_release_ends_it(world: World) -> None:
    writer = await world.writer()
    client, other = await world.client(), await world.client()
    await (await named(client, hold=3)).aclose()
    mover = await other.reader("s", SCHEMA, hold=0)
    await mover.downgrade_since(7)
    assert await since_of(other) == ap.Antichain(3)
    again = await named(client)
    assert again.since == ap.Antichain(3)
    await again.release()
    with pytest.raises(ap.InvalidUsage, match="CLOSED"):
        await again.fetch_recent_upper()
    await mover.downgrade_since(7)
    assert await since_of(other) == ap.Antichain(7)
    assert (await named(client)).since == ap.Antichain(7)  # a new one
    await client.aclose()
    world.pass_time(LEASE_S + 1)
    await commit(writer)
    fresh = await other.reader("s", SCHEMA, hold=8)
    await fresh.downgrade_since(9)
    assert await since_of(other) == ap.Antichain(9)


async def test_two_names_are_two_holds(world: World) -> None:
    await world.writer()
    client = await world.client()
    a = await client.reader("s", SCHEMA, hold_name="a", hold=1)
    b = await client.reader("s", SCHEMA, hold_name="b", hold=2)
    assert (await a.downgrade_since(5), await b.downgrade_since(6)) == (ap.Antichain(5), ap.Antichain(6))
    assert await since_of(client) == ap.Antichain(5)
    assert a.reader_id != b.reader_id


# --- expiry ----------------------------------------------------------------------------------------------


READS = {name: call for name, call in CALLS.items() if name != "release"}  # which is fine with what is gone


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
    """Only what was open is lost; whatever is opened afterwards, in any order, knows nothing of it."""
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
    """Since passed it while nobody held it back: an error, whatever it asks for."""
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
        async with asyncio.timeout(5):
            await waiting


async def test_heartbeats_keep_a_lease_alive(world: World) -> None:
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


async def test_heartbeats_survive_an_outage(world: World) -> None:
    """A heartbeat that fails is repeated, and the lease lives if the store is back in time."""
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
        assert handle._session.own is not None
        handle._session.own.stop()  # no more heartbeats: it is dead
    for _ in range(12):
        world.pass_time(95)
        await commit(writer)
        assert await since_of(client) == ap.Antichain(10)
    restarted = await world.client()
    again = await restarted.reader("s", SCHEMA, hold_name="state", hold=10)
    async with again.snapshot(10) as snapshot:
        assert await snapshot.rows() == rows_until(10)


# --- one leased reader per process and shard ---------------------------------------------------------------


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
    assert reader_id in readers[-1]._shard.state.readers
    await readers[-1].aclose()
    again = await client.reader("s", SCHEMA)
    assert reader_id not in again._shard.state.readers


async def test_readers_opened_and_closed_at_once_leave_nothing(world: World) -> None:
    """The registration of a process survives any order of opening and closing, and its heartbeats with
    it."""
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
    assert list(probe._shard.state.readers) == [probe.reader_id]


async def test_a_need_is_held_though_a_heartbeat_is_on_its_way(world: World) -> None:
    """The heartbeat was decided before the listen was opened, and says that nothing is needed."""
    await world.writer()
    client, other = await world.client(), await world.client()
    reader = await client.reader("s", SCHEMA)
    first = await reader.listen(as_of=3)
    await first.aclose()
    world.faults.latency_s = (0.02, 0.03)
    heartbeat = asyncio.ensure_future(reader._shard.hold.heartbeat())
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
    async with asyncio.timeout(2):
        await client.aclose()
    for wait in waits:
        with pytest.raises(ap.InvalidUsage, match="CLOSED"):
            await wait
    with pytest.raises(ap.InvalidUsage, match="CLOSED"):
        await anext(rows)
