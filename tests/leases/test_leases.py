"""Goal: holds keep history exactly as long as a reader needs it. Since moves only by a call or a policy; a
lease that ran out is an error, never wrong data; a crash loses nothing."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from tests.leases.leases_kit import CALLS, LEASE_S, World, a_world, commit, named, since_of
from tests.support.internals import shard_of
from tests.support.schemas import SCHEMA
from tests.support.shards import becomes, rows_until
from tests.support.virtual import in_virtual_time


async def since_is_let_go(mover: Any, other: ap.Client, wanted: int, *, downgrade: int = 0) -> None:
    """Commits of `mover` move since, once the next heartbeats have told what is no longer held."""
    async with asyncio.timeout(50):
        while await since_of(other) != ap.Antichain(wanted):
            await asyncio.sleep(0.05)
            await mover.downgrade_since(downgrade)


# --- since moves only by a call or a policy -----------------------------------------------------------


@in_virtual_time
async def test_opening_and_reading_never_move_since() -> None:
    async with a_world() as world:
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


@in_virtual_time
async def test_a_moving_hold_goes_on_moving_since_with_its_heartbeats() -> None:
    async with a_world() as world:
        await world.writer()
        client, other = await world.client(reader_lease_s=0.4), await world.client()
        a = await client.reader("s", SCHEMA, hold=0)
        b = await other.reader("s", SCHEMA, hold=2)
        await a.downgrade_since(6)
        assert await since_of(other) == ap.Antichain(2)
        await b.aclose()
        await becomes(lambda: since_of(other), ap.Antichain(6))


@in_virtual_time
async def test_open_snapshots_and_listens_hold_since_back() -> None:
    """Those of other processes too; and no longer once they are closed."""
    async with a_world() as world:
        writer = await world.writer()
        client, other = await world.client(reader_lease_s=0.4), await world.client()
        mover = await other.reader("s", SCHEMA, hold=0)
        reader = await client.reader("s", SCHEMA)
        listen = await reader.listen(as_of=4)
        await mover.downgrade_since(9)
        assert await since_of(other) == ap.Antichain(4)
        subscription = await reader.subscribe(as_of=6)
        await listen.aclose()
        await since_is_let_go(mover, other, 6)
        waiting = asyncio.ensure_future(reader.snapshot(20).__aenter__())
        await asyncio.sleep(0.1)
        await subscription.aclose()
        await mover.downgrade_since(100)
        await writer.compare_and_append([("k", 20, 20, 1)], 10, 21)
        snapshot = await waiting
        assert await snapshot.rows() == [*rows_until(9), ("k", 20, 1)]
        await snapshot.aclose()
        await since_is_let_go(mover, other, 100)


@pytest.mark.parametrize("what", ["snapshot", "listen"])
@in_virtual_time
async def test_what_a_closed_handle_left_open_holds_nothing(what: str) -> None:
    """Also while other handles of the process go on with the same leased reader."""
    async with a_world() as world:
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
        await since_is_let_go(mover, other, 9, downgrade=9)
        assert not shard_of(stays).register.pins
        assert not shard_of(stays).hold._pins
        await commit(writer)


@in_virtual_time
async def test_a_listen_moves_its_hold_as_it_goes() -> None:
    """The history of a long listen is not kept for ever: at the predecessor of its frontier."""
    async with a_world() as world:
        writer = await world.writer()
        client, other = await world.client(reader_lease_s=0.2), await world.client()
        mover = await other.reader("s", SCHEMA, hold=0)
        async with client.reader("s", SCHEMA) as reader, reader.listen(as_of=0) as listen:
            await mover.downgrade_since(1000)
            assert await since_of(other) == ap.Antichain(0)
            async for _ in listen.steps():
                break
            assert listen.frontier == ap.Antichain(10)
            await since_is_let_go(mover, other, 9)
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


# --- hold= --------------------------------------------------------------------------------------------


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


# --- named holds --------------------------------------------------------------------------------------


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
