"""Helpers that the tests of hazards of batches share."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.support.clock import AskedConsensus
from tests.support.internals import shard_of
from tests.support.schemas import SCHEMA, Writer


class Gate:
    """A gate. While it is shut, callers wait, and `reached` tells that one came."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def pass_(self) -> None:
        if not self._open.is_set():
            self.reached.set()
        await self._open.wait()


class Blobs(MemoryBlob):
    """Blobs with a gate before and after each upload, and before each deletion."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.before_set, self.after_set, self.before_delete = Gate(), Gate(), Gate()
        self.deletes_half = False
        """A deletion deletes the first key only, and fails."""
        self.deletion_turns = 0
        """Turns of the loop that a deletion takes."""

    async def parts(self) -> set[str]:
        return {key async for key, _ in self.list("") if key.endswith(".parquet")}

    async def set(self, key: str, data: bytes | memoryview) -> None:
        if not key.endswith(".parquet"):
            await super().set(key, data)
            return
        await self.before_set.pass_()
        await super().set(key, data)
        await self.after_set.pass_()

    async def delete(self, keys: Sequence[str]) -> None:
        await self.before_delete.pass_()
        for _ in range(self.deletion_turns):
            await asyncio.sleep(0)
        if self.deletes_half:
            await super().delete(keys[:1])
            raise ap.StorageUnavailable("only some were deleted")
        await super().delete(keys)


@dataclass
class Rig:
    client: ap.Client
    place: str
    blob: Blobs
    faults: Faults
    stack: AsyncExitStack

    async def writer(self, client: ap.Client | None = None, name: str = "t") -> Writer:
        return await self.stack.enter_async_context((client or self.client).writer(name, SCHEMA))

    async def another(self, **limits: Any) -> ap.Client:
        """Another client of the same place."""
        return await self.stack.enter_async_context(
            ap.open(
                blob=self.blob,
                consensus=MemoryConsensus(self.place),
                settings=ap.Settings(**limits),
                maintenance=False,
            )
        )

    async def named(self, name: str = "t") -> set[str]:
        """The blobs that the newest state names."""
        async with self.client.writer(name, SCHEMA) as w:
            batches = (await shard_of(w).open()).batches.values()
            return {part.key for batch in batches for part in batch.parts if part.key}

    async def rows(self, as_of: int) -> list[tuple[str, int, int]]:
        async with self.client.reader("t", SCHEMA) as r, r.snapshot(as_of) as s:
            return await s.rows()


@asynccontextmanager
async def rig(runtime: Runtime = SYSTEM, **limits: Any) -> AsyncIterator[Rig]:
    place, faults = uuid.uuid4().hex, Faults()
    async with AsyncExitStack() as stack:
        blob = Blobs(place)
        client = await stack.enter_async_context(
            ap.open(
                blob=blob,
                consensus=FaultyConsensus(AskedConsensus(place, runtime=runtime), faults),
                settings=ap.Settings(**{"retry_timeout_s": 60.0, **limits}),
                maintenance=False,
                runtime=runtime,
            )
        )
        try:
            yield Rig(client, place, blob, faults, stack)
        finally:
            faults.heal()
            for gate in (blob.before_set, blob.after_set, blob.before_delete):
                gate.open()
