"""Helpers that the tests of appends to several shards share."""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.support.schemas import SCHEMA, Writer

MANY = "compare_and_set_many"


NAMES = ["a", "b", "c"]


async def contents(client: ap.Client, name: str) -> dict[str, int]:
    """Keys with their summed diffs at the greatest complete time; nothing where there is none."""
    async with client.reader(name, SCHEMA) as r:
        if await r.fetch_recent_upper() == ap.Antichain(0):
            return {}
        async with r.snapshot() as s:
            return {key: diff for key, _, diff in await s.rows()}


@dataclass
class Rig:
    """One place in memory: `client` reaches it through `faults`, `honest` directly."""

    client: ap.Client
    honest: ap.Client
    faults: Faults
    blob: MemoryBlob
    stack: AsyncExitStack

    async def writers(
        self, names: Sequence[str] = NAMES[:2], client: ap.Client | None = None
    ) -> list[Writer]:
        opener = client or self.client
        return [await self.stack.enter_async_context(opener.writer(name, SCHEMA)) for name in names]

    async def contents(self, names: Sequence[str] = NAMES[:2]) -> list[dict[str, int]]:
        return [await contents(self.honest, name) for name in names]

    async def blobs(self) -> list[str]:
        return sorted([key async for key, _ in self.blob.list("") if key.endswith(".parquet")])


@asynccontextmanager
async def rig(wrap: type[FaultyConsensus] = FaultyConsensus, **limits: Any) -> AsyncIterator[Rig]:
    place, faults = uuid.uuid4().hex, Faults()
    url = f"mem://{place}"
    async with AsyncExitStack() as stack:
        blob = MemoryBlob(place)
        honest = await stack.enter_async_context(ap.open(blob=url, consensus=url, maintenance=False))
        client = await stack.enter_async_context(
            ap.open(
                blob=blob,  # an upload that is late would leave a blob after its deletion
                consensus=wrap(MemoryConsensus(place), faults),
                settings=ap.Settings(**{"retry_timeout_s": 60.0, **limits}),
                maintenance=False,
            )
        )
        try:
            yield Rig(client, honest, faults, blob, stack)
        finally:
            faults.heal()
            faults.latency_s = (0.0, 0.0)


def rows(key: str, at: int = 0) -> list[tuple[str, int, int, int]]:
    return [(key, 1, at, 1)]


def one_each(writers: Sequence[Writer], key: str = "k", at: int = 0) -> list[ap.Append]:
    """The same row for each."""
    return [ap.Append(w, rows(key, at), at, at + 1) for w in writers]
