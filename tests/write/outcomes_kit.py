"""Helpers that the tests of outcomes of appends share."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.support.clock import AskedConsensus
from tests.support.schemas import SCHEMA
from tests.support.shards import honest_and_faulty


@dataclass
class Rig:
    """One place in memory: `client` reaches it through `faults`, `honest` directly."""

    client: ap.Client
    honest: ap.Client
    faults: Faults
    consensus: MemoryConsensus
    blob: MemoryBlob

    async def rows(self, as_of: int | None = None) -> dict[str, int]:
        """Keys with their summed diffs, as an untroubled client reads them."""
        async with self.honest.reader("t", SCHEMA) as r, r.snapshot(as_of) as s:
            return {key: diff for key, _, diff in await s.rows()}

    async def blobs(self) -> list[str]:
        return [key async for key, _ in self.blob.list("") if key.endswith(".parquet")]


@asynccontextmanager
async def rig(**limits: Any) -> AsyncIterator[Rig]:
    place, faults = uuid.uuid4().hex, Faults()
    blob, consensus = MemoryBlob(place), AskedConsensus(place)
    limits = {"retry_timeout_s": 60.0, **limits}
    url = f"mem://{place}"
    stores = FaultyBlob(blob, faults), FaultyConsensus(consensus, faults)
    async with honest_and_faulty(url, *stores, **limits) as (honest, client):
        try:
            yield Rig(client, honest, faults, consensus, blob)
        finally:
            faults.heal()
    await blob.aclose()
    await consensus.aclose()


async def by_compare(w: ap.WriteHandle[str, int]) -> None:
    await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
