"""Goal: closing a client whose store is gone takes one deadline in all, however much is open, and tells of an
acknowledgement that is not durable."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.ending import CANCELLED_S
from aiopersist.base.supervisor import RELEASE_DEADLINE_S
from aiopersist.testing.faults import Outcome
from tests.conftest import StoreUrls
from tests.subscription.kit import in_time, write
from tests.support.schemas import SCHEMA
from tests.support.virtual import in_virtual_time
from tests.table.kit import Gate, gated

HANDLES = 80  # more than are closed at once
CALLS = ("compare_and_set", "compare_and_set_many", "head", "heads", "scan", "now", "set", "get", "delete")


async def _open_all(client: ap.Client) -> Any:
    """Handles of all kinds that owe the store a last request; returns a subscription with a step."""
    await write(client, ("a", 1))
    await client.table("t", str, int).put("a", 1)
    for _ in range(HANDLES):
        writer = await client.writer("s", SCHEMA)
        await writer.write([("a", 1)])
        await client.reader("s", SCHEMA)
    sub = await client.subscription("s", SCHEMA, name="sub")
    return sub, await in_time(anext(sub))


@in_virtual_time
async def test_a_store_that_does_not_answer() -> None:
    """Whether it closes a handle, a table, or all."""
    loop = asyncio.get_running_loop()
    async with gated("mem://closing", ack_every_s=1000) as (client, gate):
        sub, step = await _open_all(client)
        await sub.ack(step)
        gate.hold(*CALLS)
        began = loop.time()
        with pytest.raises(ap.Indeterminate, match="may not be durable"):
            await client.aclose()
        took_s = loop.time() - began
        assert RELEASE_DEADLINE_S <= took_s <= RELEASE_DEADLINE_S + 2 * CANCELLED_S
        gate.open()


@in_virtual_time
async def test_a_store_that_is_slow() -> None:
    """Goal: all is released, though it takes longer than the deadline: something ends all the time."""
    async with gated("mem://slow", ack_every_s=1000) as (client, gate):
        sub, step = await _open_all(client)
        await sub.ack(step)
        gate.latency_s = (0.3, 0.3)
        await client.aclose()
    async with gated("mem://slow") as (client, _):
        view = await client.admin.inspect("s")
        assert (view.readers, view.writers) == ({}, {})
        assert (await client.admin.subscriptions("s"))["sub"].owner is None
        assert (await client.admin.subscriptions("s"))["sub"].position == step.upper


@pytest.mark.parametrize("body", ["ends", "raises", "is cancelled"])
@pytest.mark.parametrize("whole", [False, True], ids=["subscription", "client"])
async def test_an_acknowledgement_that_is_not_durable(elsewhere: StoreUrls, body: str, whole: bool) -> None:
    """The end of `async with` raises, of the subscription or else of the client; after an error of its body
    it is a note of that."""
    raised = {"ends": None, "raises": ZeroDivisionError(), "is cancelled": asyncio.CancelledError()}[body]

    async def use(client: ap.Client, gate: Gate) -> None:
        async with AsyncExitStack() as stack:
            opening = client.subscription("s", SCHEMA, name="sub")
            sub: Any = await (opening if whole else stack.enter_async_context(opening))
            await sub.ack(await in_time(anext(sub)))
            gate.rates = {Outcome.REFUSED: 1.0}
            if raised is not None:
                raise raised

    with pytest.raises((ap.StorageUnavailable, type(raised or ap.Error("")))) as caught:
        async with gated(elsewhere, retry_timeout_s=0.0, ack_every_s=1000) as (client, gate):
            await write(client, ("a", 1))
            try:
                await use(client, gate)
            finally:
                if not whole:
                    gate.heal()
    if raised is None:
        assert isinstance(caught.value, ap.StorageUnavailable)
    else:
        assert caught.value is raised
        assert any("as it was closed" in note for note in raised.__notes__)
    async with gated(elsewhere) as (client, _):
        assert (await client.admin.subscriptions("s"))["sub"].position == ap.Antichain(0)
