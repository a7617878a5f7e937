"""Take-overs: one opening at a time moves the position; the others are woken, and can do nothing more."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.state.diff import decode_diff
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.wrapper import WrappedConsensus
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.subscription.kit import acked, in_time, rows, steps_until, write
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import comes_to_rest, refused


async def other_client(location: Any) -> Any:
    return await ap.open(blob=location.blob, consensus=location.consensus)


async def test_a_take_over_wakes_the_first(client: ap.Client, location: Any) -> None:
    """One that waits for a step is woken by the news; its steps and durable acknowledgements are refused,
    closing it raises nothing, and the second goes on where the first was durable."""
    await write(client, ("a", 1))
    async with await other_client(location) as two:
        first = await client.subscription("s", name="sub")
        await acked(first, 1)
        await write(client, ("b", 2))
        step = await in_time(anext(first))
        waiting = asyncio.create_task(anext(first))
        await asyncio.sleep(0.05)
        async with two.subscription("s", name="sub") as second:
            with pytest.raises(ap.OpaqueMismatch, match="was taken over by another opening"):
                await in_time(waiting)
            with pytest.raises(ap.OpaqueMismatch):
                await in_time(anext(first))
            with pytest.raises(ap.OpaqueMismatch):
                await in_time(first.ack(step, durable=True))
            with pytest.raises(ap.OpaqueMismatch):
                await in_time(first.commit(step, []))
            await first.ack(step)
            await first.aclose()
            assert await acked(second, 1) == [("b", 2)]
        views = await two.subscriptions("s")
        assert (views["sub"].position, views["sub"].owner) == (ap.Antichain(2), None)


@pytest.mark.parametrize("hinted", [True, False])
async def test_a_first_that_has_not_heard(place: Place, hinted: bool) -> None:
    """Its next durable acknowledgement says so, also an old one, and also where no hint has come."""
    faults = Faults()
    faults.losing_hints = not hinted
    consensus = FaultyConsensus(place.consensus(), faults)
    limits = ap.Settings(watch_timeout_s=1000, ack_every_s=1000)
    async with ap.open(blob=place.blob, consensus=consensus, settings=limits, maintenance=False) as client:
        await write(client, ("a", 1))
        async with client.subscription("s", name="sub") as first:
            step = await in_time(anext(first))
            await first.ack(step, durable=True)
            await write(client, ("a", 2))
            new = await in_time(anext(first))
            async with (await place.client()).subscription("s", name="sub") as second:
                for some in (step, new):
                    with pytest.raises(ap.OpaqueMismatch):
                        await in_time(first.ack(some, durable=True))
                assert await rows(second, 1) == [("a", 2)]


async def test_a_first_that_waits_hears_though_hints_are_lost(place: Place) -> None:
    """It looks for itself, not only when the follower would: by a request for all its subscriptions."""
    faults = Faults()
    faults.losing_hints = True
    consensus = FaultyConsensus(place.consensus(), faults)
    limits = ap.Settings(watch_timeout_s=1000, ack_every_s=0.05)
    async with ap.open(blob=place.blob, consensus=consensus, settings=limits, maintenance=False) as client:
        other = await place.client()
        subs = []
        for name in ("s", "t"):
            await write(client, ("a", 1), name=name)
            subs.append(await client.subscription(name, name="sub", start="now"))
        waiting = [asyncio.create_task(anext(sub)) for sub in subs]
        await comes_to_rest(lambda: faults.calls["head"], 0.2)
        for name, some in zip(("s", "t"), waiting, strict=True):
            await (await other.subscription(name, name="sub")).aclose()
            with pytest.raises(ap.OpaqueMismatch):
                await in_time(some)


async def test_late_acknowledgements_of_the_first(place: Place) -> None:
    """What it had not yet made durable never counts."""
    client = await place.client(ack_every_s=1000)
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub") as first:
        await first.ack(await in_time(anext(first)))
        async with (await place.client()).subscription("s", name="sub") as second:
            await first.aclose()
            assert (await client.admin.subscriptions("s"))["sub"].position == ap.Antichain(0)
            assert await rows(second, 1) == [("a", 1)]


class Overtaken(WrappedConsensus):
    """Once the first subscription is opened, does something before the next compare-and-set."""

    def __init__(self, inner: Consensus, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self.then, self.openings = then, 0

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        if self.openings == 1:
            self.openings += 1
            await self.then()
        self.openings += bool(decode_diff(data).changes.subscriptions)
        return await super().compare_and_set(key, expected, data)


@pytest.mark.parametrize("has_position", [False, True])
async def test_an_opening_that_is_passed_at_once(place: Place, has_position: bool) -> None:
    """Goal: before it holds history another opening takes the name over, and since follows that one. It was
    taken over, and no history of the subscription is gone."""
    two = await place.client()
    await write(two, ("a", 1))
    if has_position:
        async with two.subscription("s", name="sub") as sub:
            await acked(sub, 1)

    async def overtake() -> None:
        await write(two, ("b", 2))
        await write(two, ("c", 3))
        async with two.subscription("s", name="sub") as second:
            await acked(second, 2 if has_position else 3)
        await two.retain("s", 0)
        await two.force_compaction("s")

    consensus = Overtaken(place.consensus(), overtake)
    async with ap.open(blob=place.blob, consensus=consensus, maintenance=False) as one:
        with pytest.raises(ap.OpaqueMismatch, match="was taken over by another opening"):
            await in_time(one.subscription("s", name="sub"))
        async with one.subscription("s", name="sub") as third:
            await write(two, ("d", 4))
            assert await rows(third, 1) == [("d", 4)]


async def test_many_openings_at_once(place: Place) -> None:
    """Of several clients: one is left, and it has all."""
    clients = [await place.client() for _ in range(4)]
    await write(clients[0], ("a", 1))
    subs = await asyncio.gather(*(c.subscription("s", name="sub") for c in clients for _ in range(2)))
    steps = []
    for sub in subs:
        try:
            step = await in_time(anext(sub))
            await sub.ack(step, durable=True)
            steps.append(step)
        except ap.OpaqueMismatch:
            pass
    assert len(steps) == 1
    for sub in subs:
        await sub.aclose()


async def test_the_owner_shows_while_its_heart_beats(place: Place) -> None:
    """`lease_s` after the last heartbeat no owner is told; that ends nothing."""
    client, other = await place.client(), await place.client()
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub", lease_s=100.0) as sub:
        assert (await other.subscriptions("s"))["sub"].owner is not None
        place.clock.ahead_s += 101
        assert (await other.subscriptions("s"))["sub"].owner is None
        await acked(sub, 1)
        assert (await other.subscriptions("s"))["sub"].owner is not None


async def test_heartbeats(place: Place) -> None:
    """They go out by themselves, while nothing comes."""
    client = await place.client()
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub", lease_s=0.2):
        state = client._shards.at(await client.shard_id("s")).state
        first = state.subscriptions["sub"].heartbeat
        async with asyncio.timeout(50):
            while (await client.admin.inspect("s")).subscriptions["sub"].owner is None or (
                client._shards.at(await client.shard_id("s")).state.subscriptions["sub"].heartbeat == first
            ):
                await asyncio.sleep(0.01)


async def test_it_expires(place: Place) -> None:
    """After it has acknowledged nothing for so long while there was something. Then it holds nothing, and
    opening it needs a `start`."""
    client = await place.client()
    hour = timedelta(hours=1)
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub", expire_after=hour) as sub:
        await acked(sub, 1)
    place.clock.ahead_s += 2 * 3600
    async with client.subscription("s", name="sub", expire_after=hour) as sub:  # nothing waited
        await write(client, ("a", 2))
        place.clock.ahead_s += 3601
        await write(client, ("a", 3))
        with pytest.raises(ap.SubscriptionExpired):
            await steps_until(sub, lambda found: len(found) == 3)
    view = (await client.admin.subscriptions("s"))["sub"]
    assert (view.expired, view.owner, view.held_bytes) == (True, None, 0)
    assert not any(hold.kind == "subscription" for hold in (await client.admin.inspect("s")).holds)
    with pytest.raises(ap.SubscriptionExpired):
        await client.subscription("s", name="sub")
    async with client.subscription("s", name="sub", start=1) as sub:
        assert await rows(sub, 1) == [("a", 3)]


@pytest.mark.parametrize("acks_late", [False, True], ids=["before", "after"])
async def test_it_does_not_expire_with_nothing_to_read(place: Place, acks_late: bool) -> None:
    """Goal: it has acknowledged all that there is, before or after an empty commit was compacted with it."""
    client, hour = await place.client(), timedelta(hours=1)
    async with client.writer("s", SCHEMA) as writer:
        await writer.write([("a", 1)])
        await writer.write([("a", 2)])
        async with client.subscription("s", name="sub", expire_after=hour) as sub:
            step = await in_time(anext(sub))
            if not acks_late:
                await sub.ack(step, durable=True)
            await writer.compare_and_append([], 2, 9)
            await client.admin.force_compaction("s")
            if acks_late:
                await sub.ack(step, durable=True)
        await writer.compare_and_append([], 9, 10)
        await client.admin.force_compaction("s")
        assert len((await client.admin.inspect("s")).batches) == 2
        await (await client.subscription("s", name="sub", expire_after=hour)).aclose()
        view = (await client.admin.subscriptions("s"))["sub"]
        assert (view.position, view.lag_updates, view.held_bytes) == (ap.Antichain(2), 0, 0)
        place.clock.ahead_s += 2 * 3600
        async with client.subscription("s", name="sub", expire_after=hour) as sub:
            await writer.write([("a", 3)])
            assert await acked(sub, 1) == [("a", 3)]


async def test_the_contents_of_nothing_expire_not(place: Place) -> None:
    """Goal: the upper was moved, and nothing was ever written."""
    client, hour = await place.client(), timedelta(hours=1)
    async with client.writer("s", SCHEMA) as writer:
        await writer.compare_and_append([], 0, 5)
        await (await client.subscription("s", name="sub", expire_after=hour)).aclose()
        place.clock.ahead_s += 2 * 3600
        await (await client.subscription("s", name="sub", expire_after=hour)).aclose()
        await writer.write([("a", 1)])
        place.clock.ahead_s += 2 * 3600
        with pytest.raises(ap.SubscriptionExpired):
            await client.subscription("s", name="sub", expire_after=hour)


async def test_a_drop_ends_it(place: Place) -> None:
    """Its owner is told; the name is free; an unknown name is a `LookupError`."""
    client, other = await place.client(), await place.client()
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub") as sub:
        step = await in_time(anext(sub))
        waiting = asyncio.create_task(anext(sub))
        await asyncio.sleep(0.01)
        await other.drop_subscription("s", "sub")
        with pytest.raises(ap.OpaqueMismatch) as caught:
            await in_time(waiting)
        assert caught.value.actual is None
        with pytest.raises(ap.OpaqueMismatch):
            await in_time(sub.ack(step, durable=True))
    assert await other.subscriptions("s") == {}
    for name in ("sub", "never"):
        with pytest.raises(LookupError, match=name):
            await other.drop_subscription("s", name)
    with pytest.raises(ap.UnknownShard):
        await other.drop_subscription("nothing", "sub")
    async with other.subscription("s", name="sub") as sub:
        assert await rows(sub, 1) == [("a", 1)]


async def test_the_end_of_the_shard(place: Place) -> None:
    """Who waits is told; closing raises nothing."""
    client = await place.client()
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub") as sub:
        step = await in_time(anext(sub))
        waiting = asyncio.create_task(anext(sub))
        await asyncio.sleep(0.01)
        await (await place.client()).drop("s")
        with pytest.raises(ap.ShardFinalized):
            await in_time(waiting)
        with pytest.raises(ap.ShardFinalized):
            await in_time(sub.ack(step, durable=True))


async def test_it_survives_a_lost_lease_of_its_reads(place: Place) -> None:
    """A process that stood still for longer than the lease of a reader: the position holds what follows, so
    the subscription reads on."""
    client, other = await place.client(reader_lease_s=100.0), await place.client()
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub", lease_s=1e6) as sub:
        await acked(sub, 1)
        await write(other, ("a", 2))
        assert await rows(sub, 1) == [("a", 2)]
        place.clock.ahead_s += 1000
        await write(other, ("a", 3))  # ends the reader
        await other.retain("s", 0)
        await other.force_compaction("s")
        assert await acked(sub, 1) == [("a", 3)]
        await write(other, ("a", 4))
        assert await acked(sub, 1) == [("a", 4)]


async def test_closing_ends_what_waits(quiet: ap.Client) -> None:
    await write(quiet, ("a", 1))
    sub = await quiet.subscription("s", SCHEMA, name="sub", start="now")
    waiting = asyncio.create_task(refused(anext(sub)))
    await asyncio.sleep(0.01)
    await sub.aclose()
    assert await in_time(waiting) is ap.UsageKind.CLOSED
    assert not (await quiet.inspect("s")).readers
