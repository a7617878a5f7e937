"""Helpers that the tests of outcomes of batches share."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.internals import shard_of, staged_of
from tests.support.schemas import ROWS, SCHEMA, Row, Writer
from tests.support.shards import CAS

PENDING, CONSUMED = ap.UsageKind.OUTCOME_PENDING, ap.UsageKind.CONSUMED


@dataclass
class Rig:
    """One place in memory: `client` reaches its consensus through `faults` and its blobs through
    `blob_faults`, `honest` both directly."""

    client: ap.Client
    honest: ap.Client
    faults: Faults
    blob_faults: Faults
    blob: MemoryBlob
    stack: AsyncExitStack
    kept: list[ap.Batch] = field(default_factory=list)

    async def writer(self, client: ap.Client | None = None) -> Writer:
        return await self.stack.enter_async_context((client or self.client).writer("t", SCHEMA))

    async def blobs(self) -> set[str]:
        return {key async for key, _ in self.blob.list("") if key.endswith(".parquet")}

    async def named(self) -> set[str]:
        """The blobs that the newest state names."""
        async with self.honest.writer("t", SCHEMA) as w:
            batches = (await shard_of(w).open()).batches.values()
            return {part.key for batch in batches for part in batch.parts if part.key}

    async def history(self) -> list[Row]:
        """All updates, summed."""
        found: Counter[Any] = Counter()
        async with self.honest.reader("t", SCHEMA) as r:
            upper: Any = await r.fetch_recent_upper()
            if upper == ap.Antichain(0):
                return []
            async with r.subscribe(0) as changes:
                async for step in changes.steps():
                    for key, val, time, diff in step.updates:
                        found[key, val, time] += diff
                    if upper <= step.upper:
                        break
        return sorted((*what, diff) for what, diff in found.items() if diff)


@asynccontextmanager
async def rig(**limits: Any) -> AsyncIterator[Rig]:
    place, faults, blob_faults = uuid.uuid4().hex, Faults(), Faults()
    url = f"mem://{place}"
    async with AsyncExitStack() as stack:
        blob = MemoryBlob(place)
        honest = await stack.enter_async_context(ap.open(blob=url, consensus=url, maintenance=False))
        client = await stack.enter_async_context(
            ap.open(
                blob=FaultyBlob(blob, blob_faults),
                consensus=FaultyConsensus(MemoryConsensus(place), faults),
                settings=ap.Settings(**{"retry_timeout_s": 60.0, **limits}),
                maintenance=False,
            )
        )
        r = Rig(client, honest, faults, blob_faults, blob, stack)
        try:
            yield r
        finally:
            faults.heal()
            faults.latency_s = (0.0, 0.0)
            blob_faults.heal()
            for batch in r.kept:
                staged_of(batch).consumed_elsewhere()


async def doubtful(r: Rig, w: Writer, work: Awaitable[Any], outcome: Outcome) -> None:
    """Make that append end without an answer, its statement having ended so."""
    await w.fetch_recent_upper()
    r.faults.fail_next(CAS, outcome)
    r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
    scans = r.faults.calls["scan"]
    task = asyncio.ensure_future(work)
    while r.faults.calls["scan"] == scans:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def by_compare(r: Rig, w: Writer, batch: ap.Batch) -> None:
    await w.compare_and_append_batch([batch], 0, 1)


async def by_replica(r: Rig, w: Writer, batch: ap.Batch) -> None:
    await w.append_batch(batch, 0, 1)


async def staged(r: Rig, *, shared: bool = False) -> tuple[Writer, ap.Batch]:
    w = await r.writer()
    batch = await w.batch(ROWS, 0, 1)
    if shared:
        batch = await w.batch_from_transmittable(batch.to_transmittable())
    r.kept.append(batch)
    return w, batch
