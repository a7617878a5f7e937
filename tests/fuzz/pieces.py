"""A location whose pieces of work are done after they were changed: their checksum is right, and what they
say is not."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import Any

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus

SCHEMA = ap.Schema(key=str, val=int)
SETTINGS = ap.Settings(inline_writes_single_max_bytes=900, rollup_every=1000, retry_timeout_s=0.0)
LEASE_S = 1e9
Stores = tuple[MemoryBlob, MemoryConsensus]


@cache
def location() -> tuple[Stores, dict[str, list[bytes]]]:
    """The stores, and pieces of each kind."""
    stores = MemoryBlob(), MemoryConsensus()
    return stores, asyncio.run(_fill(stores))


async def _fill(stores: Stores) -> dict[str, list[bytes]]:
    async with _opened(stores) as client:
        async with client.writer("log", SCHEMA) as writer:
            for time, rows in enumerate((3, 80, 2)):
                batch = [(f"k{n:04}", n, time, 1) for n in range(rows)]
                await writer.compare_and_append(batch, time, time + 1)
        async with client.reader("log", SCHEMA) as reader, reader.snapshot(2) as snapshot:
            parts = [part.to_transmittable() for part in snapshot.parts()]
        async with client.workers.shared_read("log", lease_s=LEASE_S, keep=True) as shared:
            pieces = await shared.pieces(1)
        async with client.workers.shared_read("log", start=0, end=3, lease_s=LEASE_S, keep=True) as shared:
            pieces += await shared.pieces(2)
        async with client.workers.shared_compaction("log") as compaction:
            work = await compaction.pieces(2)
    return {"part": parts, "piece": pieces, "compaction": work}


def _opened(stores: Stores) -> Any:
    blob, consensus = stores
    return ap.open(blob=blob, consensus=consensus, settings=SETTINGS, maintenance=False)


async def _read(client: ap.Client, data: bytes) -> object:
    return [batch async for batch in client.workers.read_piece(data)]


USES: dict[str, Callable[[ap.Client, bytes], Awaitable[object]]] = {
    "part": lambda client, data: client.workers.fetch_part(data),
    "piece": _read,
    "compaction": lambda client, data: client.workers.compact_piece(data),
}


def use(kind: str, data: bytes) -> object:
    """Do the work of a piece."""

    async def used() -> object:
        async with _opened(location()[0]) as client:
            return await USES[kind](client, data)

    return asyncio.run(used())


def user(kind: str) -> Callable[[bytes], object]:
    return partial(use, kind)
