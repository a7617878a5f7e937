"""Helpers that the tests of leases share."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiopersist as ap
from aiopersist.testing.faults import Faults
from tests.support.processes import Clock
from tests.support.schemas import SCHEMA

LEASE_S = 900.0


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


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)


async def since_of(client: ap.Client) -> ap.Antichain:
    """The shard's since, by a fresh look of a reader without a hold."""
    async with client.reader("s", SCHEMA) as reader:
        await reader.fetch_recent_upper()
        return reader.since


async def commit(writer: ap.WriteHandle[str, int]) -> None:
    """Any commit of any client: it expires overdue registrations."""
    upper = await writer.fetch_recent_upper()
    await writer.compare_and_append([], upper, upper)


async def named(client: ap.Client, **options: Any) -> ap.ReadHandle[str, int]:
    return await client.reader("s", SCHEMA, hold_name="nightly", **options)


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
