"""Clocks: one whose time passes at once, so that no test waits, and one that takes a turn of the loop."""

import asyncio

from aiopersist.base.runtime import Runtime
from aiopersist.storage.memory import MemoryConsensus


class Hurried(Runtime):
    """Time passes only by sleeping, and then at once."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return self.passed

    async def sleep(self, seconds: float) -> None:
        self.passed += seconds
        await asyncio.sleep(0)


class AskedConsensus(MemoryConsensus):
    """Versions whose clock takes a turn of the loop, as that of a server at times."""

    async def now(self) -> float:
        await asyncio.sleep(0)
        return await super().now()
