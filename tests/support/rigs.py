"""A place in memory with two clients: one behind faults, and one that nothing happens to."""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.support.internals import staged_of
from tests.support.schemas import SCHEMA, Row, Writer
from tests.support.shards import named_parts, parts_in, updates_of


@dataclass
class Rig:
    """`client` reaches its versions through `faults` and its blobs through `blob_faults`, `honest` both
    directly. The batches in `kept` may stay unused."""

    client: ap.Client
    honest: ap.Client
    faults: Faults
    blob_faults: Any
    blob: Any
    consensus: MemoryConsensus
    stack: AsyncExitStack
    kept: list[ap.Batch] = field(default_factory=list)

    async def writer(self, client: ap.Client | None = None, name: str = "t") -> Writer:
        return await self.stack.enter_async_context((client or self.client).writer(name, SCHEMA))

    async def parts(self) -> list[str]:
        return await parts_in(self.blob)

    async def named(self, name: str = "t") -> list[str]:
        return await named_parts(self.honest, name)

    async def history(self) -> list[Row]:
        return await updates_of(self.honest)

    async def sums(self, as_of: int | None = None) -> dict[str, int]:
        return await sums(self.honest, as_of=as_of)


async def sums(client: ap.Client, name: str = "t", as_of: int | None = None) -> dict[str, int]:
    """Keys with their summed diffs; nothing where no time is complete."""
    async with client.reader(name, SCHEMA) as r:
        if as_of is None and await r.fetch_recent_upper() == ap.Antichain(0):
            return {}
        async with r.snapshot(as_of) as s:
            return {key: diff for key, _, diff in await s.rows()}


@asynccontextmanager
async def rig(
    *,
    blob_faults: Any = None,
    blob: type[MemoryBlob] = MemoryBlob,
    consensus: Callable[[str], MemoryConsensus] = MemoryConsensus,
    wrap: type[FaultyConsensus] = FaultyConsensus,
    runtime: Runtime = SYSTEM,
    **limits: Any,
) -> AsyncIterator[Rig]:
    """Without `blob_faults` the faults of versions are those of blobs, too."""
    place, faults = uuid.uuid4().hex, Faults()
    of_blobs, url = blob_faults or faults, f"mem://{place}"
    blobs, versions = blob(place), consensus(place)
    stores = {"blob": FaultyBlob(blobs, of_blobs), "consensus": wrap(versions, faults)}
    settings = ap.Settings(**{"retry_timeout_s": 60.0, **limits})
    async with AsyncExitStack() as stack:
        honest = await stack.enter_async_context(ap.open(blob=url, consensus=url, maintenance=False))
        client = await stack.enter_async_context(
            ap.open(**stores, settings=settings, maintenance=False, runtime=runtime)
        )
        r = Rig(client, honest, faults, of_blobs, blobs, versions, stack)
        try:
            yield r
        finally:
            for trouble in (faults, of_blobs):
                trouble.heal()
                trouble.latency_s = (0.0, 0.0)
            for batch in r.kept:
                staged_of(batch).consumed_elsewhere()
