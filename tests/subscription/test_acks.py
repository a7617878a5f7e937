"""Acknowledgements: many share a commit, they are durable in time and at the end, and only move forward."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.subscription.kit import acked, in_time, rows, steps_until, write
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import refused
from tests.table.kit import gated, versions


async def position(client: ap.Client, name: str = "sub") -> ap.Antichain:
    return (await client.admin.subscriptions("s"))[name].position


async def becomes(client: ap.Client, upper: ap.Antichain) -> None:
    """Wait until the durable position, as another client sees it, is `upper`."""
    async with asyncio.timeout(50):
        while await position(client) != upper:
            await asyncio.sleep(0.001)


async def test_durable_at_once(client: ap.Client) -> None:
    """When it returns another client would go on behind the step."""
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub") as sub:
        step = await in_time(anext(sub))
        await sub.ack(step, durable=True)
        assert await position(client) == step.upper == ap.Antichain(1)
        view = (await client.admin.subscriptions("s"))["sub"]
        assert view.last_ack is not None


async def test_durable_in_time(place: Place) -> None:
    """Without a further call, in a task of the client."""
    client, other = await place.client(), await place.client()
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub") as sub:
        await sub.ack(await in_time(anext(sub)))
        assert await position(other) == ap.Antichain(0)
        await becomes(other, ap.Antichain(1))
        await write(client, ("a", 2))
        await sub.ack(await in_time(anext(sub)))
        await becomes(other, ap.Antichain(2))


async def test_durable_at_the_end(place: Place) -> None:
    """Of `async with`, also where its body raises; of the client, too."""
    client, other = await place.client(ack_every_s=1000), await place.client()
    for end in range(1, 4):
        await write(other, ("a", end))
        sub = await client.subscription("s", name="sub", start="snapshot" if end == 1 else None)
        if end == 2:
            with pytest.raises(ZeroDivisionError):
                async with sub:
                    await sub.ack(await in_time(anext(sub)))
                    raise ZeroDivisionError
        else:
            await sub.ack(await in_time(anext(sub)))
            await (sub.aclose() if end == 1 else client.aclose())
        assert await position(other) == ap.Antichain(end)


async def test_many_share_a_commit(place: Place) -> None:
    """A consumer that acknowledges each of a thousand steps commits a few times, not a thousand."""
    client = await place.client(ack_every_s=0.5)
    async with client.writer("s", SCHEMA) as writer, client.subscription("s", name="sub") as sub:
        before = await versions(client, "s")
        for number in range(300):
            await writer.write([("a", number)])
            await sub.ack(await in_time(anext(sub)))
        steps = await versions(client, "s") - before
        assert steps <= 300 + 100  # one that commits each time makes 600; on any machine
    assert await position(client) == ap.Antichain(300)


async def test_durable_ones_that_wait_share_a_commit(place: Place) -> None:
    client = await place.client(ack_every_s=1000)
    async with client.writer("s", SCHEMA) as writer, client.subscription("s", name="sub") as sub:
        steps = []
        for number in range(64):
            await writer.write([("a", number)])
            steps.append(await in_time(anext(sub)))
        before = await versions(client, "s")
        await asyncio.gather(*(sub.ack(step, durable=True) for step in steps))
        assert await versions(client, "s") - before <= 2
        assert await position(client) == ap.Antichain(64)


async def test_an_older_one_changes_nothing(place: Place) -> None:
    """In any order: the position is that of the latest."""
    client = await place.client()
    async with client.writer("s", SCHEMA) as writer, client.subscription("s", name="sub") as sub:
        steps = []
        for number in range(4):
            await writer.write([("a", number)])
            steps.append(await in_time(anext(sub)))
        await sub.ack(steps[2])
        for number in (0, 2, 0, 1, 2):
            await sub.ack(steps[number], durable=True)
            assert await position(client) == ap.Antichain(3)
        await sub.ack(steps[1])
    async with client.subscription("s", name="sub") as sub:
        assert await rows(sub, 1) == [("a", 3)]


async def test_steps_of_others(place: Place) -> None:
    """A step of an earlier opening, of another name, and what is no step."""
    client = await place.client()
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub") as sub:
        earlier = await in_time(anext(sub))
    async with client.subscription("s", name="other") as sub:
        other = await in_time(anext(sub))
    async with client.subscription("s", name="sub") as sub:
        for step in (earlier, other):
            assert await refused(sub.ack(step)) is ap.UsageKind.INVALID_CURSOR
            assert await refused(sub.commit(step, [])) is ap.UsageKind.INVALID_CURSOR
        with pytest.raises(TypeError):
            await sub.ack("step")  # type: ignore[type-var]
        mine = await in_time(anext(sub))
    assert await refused(sub.ack(mine)) is ap.UsageKind.CLOSED
    assert await refused(anext(sub)) is ap.UsageKind.CLOSED
    await sub.aclose()
    assert await position(client) == ap.Antichain(0)


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE, Outcome.REFUSED])
async def test_lost_answers(place: Place, outcome: Outcome) -> None:
    """Of the commit of an acknowledgement: it is repeated until it is durable, and never moves back."""
    async with gated(place.urls, ack_every_s=0.01) as (client, gate):
        async with client.writer("s", SCHEMA) as writer, client.subscription("s", name="sub") as sub:
            for number in range(1, 4):
                await writer.write([("a", number)])
                step = await in_time(anext(sub))
                gate.fail_next("compare_and_set", outcome)
                await in_time(sub.ack(step, durable=number % 2 == 0))
                await becomes(client, ap.Antichain(number))
                await gate.land()
                assert await position(client) == ap.Antichain(number)


@pytest.mark.parametrize("durable", [True, False])
async def test_cancelled_at_every_await(place: Place, durable: bool) -> None:
    """An acknowledgement that was cancelled counts or not; a later one counts in any case."""
    async with gated(place.urls, ack_every_s=0.005) as (client, _):
        async with client.writer("s", SCHEMA) as writer, client.subscription("s", name="sub") as sub:
            for number in range(1, 40):
                await writer.write([("a", number)])
                step = await in_time(anext(sub))
                acking = asyncio.create_task(sub.ack(step, durable=durable))
                for _ in range(number):
                    await asyncio.sleep(0)
                acking.cancel()
                await asyncio.wait([acking])
                assert await position(client) in (ap.Antichain(number - 1), ap.Antichain(number))
                await in_time(sub.ack(step, durable=True))
                assert await position(client) == ap.Antichain(number)


async def test_opening_cancelled_at_every_await(place: Place) -> None:
    """It leaves nothing that hinders the next one, and no position is lost."""
    client = await place.client()
    await write(client, ("a", 1))
    async with client.subscription("s", name="sub") as sub:
        await acked(sub, 1)
    await write(client, ("a", 2))
    for turns in range(60):
        opening = asyncio.ensure_future(client.subscription("s", name="sub"))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():
            await opening.result().aclose()
    async with client.subscription("s", name="sub") as sub:
        assert await rows(sub, 1) == [("a", 2)]


async def test_closing_cancelled_at_every_await(place: Place) -> None:
    """The acknowledgement goes on to be made durable, and the subscription to be left."""
    client = await place.client(ack_every_s=1000)
    for number in range(1, 20):
        await write(client, ("a", number))
        sub = await client.subscription("s", name="sub")
        await sub.ack((await steps_until(sub, lambda found: found[-1:] != []))[-1])
        closing = asyncio.create_task(sub.aclose())
        for _ in range(number):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await becomes(client, ap.Antichain(number))
        async with asyncio.timeout(50):
            while (await client.admin.subscriptions("s"))["sub"].owner is not None:
                await asyncio.sleep(0.001)


async def test_several_that_wait_for_steps(place: Place) -> None:
    """Each gets steps of its own, in order."""
    client = await place.client()
    async with client.writer("s", SCHEMA) as writer, client.subscription("s", name="sub") as sub:
        waiting = [asyncio.create_task(anext(sub)) for _ in range(3)]
        found: list[Any] = []
        for number in range(3):
            await asyncio.sleep(0.001)
            await writer.write([("a", number)])
            found.append((await in_time(waiting[number])).updates.rows()[0].val)
        assert found == [0, 1, 2]
