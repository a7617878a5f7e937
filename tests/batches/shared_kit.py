"""Helpers that the tests of batches that are handed over share."""

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob
from tests.support.internals import shard_of, staged_of
from tests.support.processes import Clock
from tests.support.schemas import SCHEMA, Writer
from tests.support.shards import parts_in, updates_of

ROWS = [("a", 1, 0, 1), ("b", 2, 1, 3)]


@dataclass
class World:
    """Clients of one place in memory, each like a process of its own."""

    stack: AsyncExitStack
    settings: dict[str, Any]
    faults: Faults = field(default_factory=Faults)
    copies: list[ap.Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        url = f"mem://{uuid.uuid4().hex}"
        self.blob = ap.open_blob(url)
        self.clock = Clock(ap.open_consensus(url), self.faults)

    async def client(self, **settings: Any) -> ap.Client:
        opening = ap.open(
            blob=FaultyBlob(self.blob, self.faults),
            consensus=self.clock,
            settings=ap.Settings(**{"retry_timeout_s": 60.0, **self.settings, **settings}),
            maintenance=False,
        )
        return await self.stack.enter_async_context(opening)

    async def writer(self, **settings: Any) -> Writer:
        """A writer of "t" in a client of its own."""
        return await self.stack.enter_async_context((await self.client(**settings)).writer("t", SCHEMA))

    async def restore(self, w: Writer, data: bytes) -> ap.Batch:
        """A copy that may be left unused: another one is used instead."""
        self.copies.append(await w.batch_from_transmittable(data))
        return self.copies[-1]

    async def blobs(self) -> list[str]:
        return await parts_in(self.blob)

    async def history(self) -> list[tuple[str, int, int, int]]:
        return await updates_of(await self.client())


@asynccontextmanager
async def world(**settings: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        w = World(stack, settings)
        try:
            yield w
        finally:
            w.faults.heal()
            for copy in w.copies:
                staged_of(copy).consumed_elsewhere()


SPENT = "spent"  # the outcome of the second call


async def used(use: Any, w: Writer, batch: ap.Batch) -> str:
    """Use it at the upper that is there, as often as that takes; what came of it."""
    while True:
        try:
            await use(w, batch, (await w.fetch_recent_upper()).time)
        except ap.AlreadyAppended:
            return SPENT
        except ap.UpperMismatch:
            continue
        return "done"


async def check_blobs(place: World, w: Writer) -> list[str]:
    """Every blob that is named is there; and nothing else but what is returned."""
    state = await shard_of(w).open()
    named = {part.key for batch in state.batches.values() for part in batch.parts if part.key}
    there = set(await place.blobs())
    assert named <= there
    return sorted(there - named)
