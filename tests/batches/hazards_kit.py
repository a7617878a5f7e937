"""Helpers that the tests of hazards of batches share."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults
from tests.support import rigs
from tests.support.clock import AskedConsensus
from tests.support.rigs import Rig


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


async def another(r: Rig, **limits: Any) -> ap.Client:
    """Another client of the same place."""
    opening = ap.open(blob=r.blob, consensus=r.consensus, settings=ap.Settings(**limits), maintenance=False)
    return await r.stack.enter_async_context(opening)


@asynccontextmanager
async def rig(runtime: Runtime = SYSTEM, **limits: Any) -> AsyncIterator[Rig]:
    def asked(name: str) -> MemoryConsensus:
        return AskedConsensus(name, runtime=runtime)

    options = {"blob": Blobs, "consensus": asked, "blob_faults": Faults(), "runtime": runtime}
    async with rigs.rig(**options, **limits) as r:
        try:
            yield r
        finally:
            for gate in (r.blob.before_set, r.blob.after_set, r.blob.before_delete):
                gate.open()
