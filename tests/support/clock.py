"""A clock whose time passes at once, so that no test waits."""

import asyncio

from aiopersist.runtime import Runtime


class Hurried(Runtime):
    """Time passes only by sleeping, and then at once."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return self.passed

    async def sleep(self, seconds: float) -> None:
        self.passed += seconds
        await asyncio.sleep(0)
