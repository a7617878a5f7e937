"""For tests of applications: a clock that they move, and a client whose stores fail on demand.

The pytest plugin, `pytest_aiopersist.py` beside the package, makes fixtures of both.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.base.settings import Settings
from aiopersist.client.client import Client
from aiopersist.client.open import open as open_client
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus


class MovedClock(Runtime):
    """The clock of the system, ahead of it by all moves. Give it to `ap.open(runtime=...)`.

    It goes on by itself, so nothing that waits hangs. To the library a move looks like a pause of the
    machine: it is later, sleeps until then end, and leases that ran out meanwhile are over. It moves
    all that a client times: the times of shards with a wall clock in memory or SQLite, retention, leases,
    and delays of retries. It does not move the clocks of Postgres and S3, of other processes, of `asyncio`
    (its timeouts), or of your own code, unless that asks `now`.
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._sleepers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def now(self) -> datetime:
        """Now, in UTC."""
        return datetime.fromtimestamp(self.wall(), UTC)

    def move(self, by: timedelta | float) -> None:
        """Move the clock ahead by a duration, or by seconds, at once; `ValueError` for one below zero. Tasks
        that wake run when the caller next awaits."""
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        if not seconds >= 0:
            raise ValueError(f"a clock is moved ahead only, not by {by}")
        self._ahead_s += seconds
        for loop, moved in tuple(self._sleepers):
            loop.call_soon_threadsafe(moved.set)

    def wall(self) -> float:
        return super().wall() + self._ahead_s

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead_s

    async def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        await super().sleep(0)
        while (left_s := until - self.monotonic()) > 0:
            await self._slept(left_s)

    async def _slept(self, seconds: float) -> None:
        """Until then, or until the clock is moved."""
        sleeper = (asyncio.get_running_loop(), asyncio.Event())
        self._sleepers.add(sleeper)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await sleeper[1].wait()
        finally:
            self._sleepers.discard(sleeper)


@dataclass(frozen=True)
class FaultyClient:
    """A client on stores in memory, and the faults that decide each request to them: `blob` for the methods
    of `Blob` (`set`, `get_range`), `consensus` for those of `Consensus` (`compare_and_set`, `head`)."""

    client: Client
    blob: Faults
    consensus: Faults

    def heal(self) -> None:
        """From now on every request happens, is answered, and is not delayed."""
        for faults in (self.blob, self.consensus):
            faults.heal()
            faults.latency_s = (0.0, 0.0)


@asynccontextmanager
async def open_faulty(settings: Settings, runtime: Runtime = SYSTEM) -> AsyncIterator[FaultyClient]:
    """A faulty client on fresh stores, which is healed before it is closed."""
    blob, consensus = MemoryBlob(), MemoryConsensus(runtime=runtime)
    faults = Faults(runtime=runtime), Faults(runtime=runtime)
    stores = FaultyBlob(blob, faults[0]), FaultyConsensus(consensus, faults[1])
    opening = open_client(blob=stores[0], consensus=stores[1], settings=settings, runtime=runtime)
    async with opening as client:
        faulty = FaultyClient(client, *faults)
        try:
            yield faulty
        finally:
            faulty.heal()
