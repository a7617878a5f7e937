"""Goal: opening a shard waits for the rollup and for the versions after it at the same time."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.wrapper import Request, WrappedBlob, WrappedConsensus
from tests.support.schemas import SCHEMA

T = TypeVar("T")


class Met:
    """Lets a rollup be read once versions are asked for, and these be read once the rollup is."""

    def __init__(self) -> None:
        self.rollup, self.versions = asyncio.Event(), asyncio.Event()


class MetBlob(WrappedBlob):
    def __init__(self, met: Met, name: str) -> None:
        super().__init__(MemoryBlob(name))
        self._met = met

    async def get(self, key: str) -> bytes | None:
        if key.endswith(".rollup"):
            self._met.rollup.set()
            await self._met.versions.wait()
        return await super().get(key)


class MetConsensus(WrappedConsensus):
    def __init__(self, met: Met, name: str) -> None:
        super().__init__(MemoryConsensus(name))
        self._met = met

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self._scanned(request) if op == "scan" else request()

    async def _scanned(self, request: Request[T]) -> T:
        self._met.versions.set()
        await self._met.rollup.wait()
        return await request()


async def test_rollup_and_versions_are_read_side_by_side() -> None:
    name = "opening-side-by-side"
    stores = MemoryBlob(name), MemoryConsensus(name)
    async with (
        ap.open(blob=stores[0], consensus=stores[1], maintenance=False) as client,
        client.writer("t", SCHEMA) as writer,
    ):
        for at in range(3):
            await writer.compare_and_append([(f"k{at}", at, at, 1)], at, at + 1)
        await client.admin.force_gc("t")
        for at in range(3, 9):
            await writer.compare_and_append([(f"k{at}", at, at, 1)], at, at + 1)
        met = Met()
        async with asyncio.timeout(30):
            async with ap.open(
                blob=MetBlob(met, name), consensus=MetConsensus(met, name), maintenance=False
            ) as other:
                assert await other.upper("t") == ap.Antichain(9)
        assert met.rollup.is_set() and met.versions.is_set()
