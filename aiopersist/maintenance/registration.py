"""One registration for all maintenance jobs of a shard in this client. It begins with the first job, and ends
after a while without jobs. If a job fails or is cancelled, no further job uses the registration; it ends,
with its claims, when the other jobs are done. Its lease is short, so other processes take over soon after a
crash.

If a process stood still for longer than the lease, its registration has ended. The job does not fail: it
starts again under another registration (`under`). The sweep deletes the parts that it had uploaded.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiopersist.shard.registration import Registration, begun_anew
from aiopersist.shard.shard import Shard

T = TypeVar("T")

LEASE_S = 60.0  # heartbeats renew it while a job uses it
LINGER_S = 30.0  # less than the lease: an hour of appends registers once, not at each compaction


class SharedRegistration:
    """See the header."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._beginning = asyncio.Lock()
        self._current: Registration | None = None
        self._was_used = False
        self._lingering: asyncio.Task[None] | None = None

    async def under(self, job: Callable[[Registration], Awaitable[T]]) -> T:
        """Do `job` under a registration; if that runs out meanwhile, start again under another one."""

        async def attempt() -> T:
            async with self.held() as registration:
                return await job(registration)

        return await begun_anew(attempt)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Registration]:
        """A context around one job under the registration."""
        async with self._beginning:
            if self._current is None or not self._current.alive:
                lease_s = min(LEASE_S, self._shard.stack.settings.writer_lease_s)
                self._current = await Registration.fresh(self._shard, lease_s)
            registration = self._current
            registration.on_unused = lambda: self._unused(registration)
            registration.hold()
        self._was_used = True
        try:
            yield registration
        except BaseException:
            self._retire(registration)
            raise
        finally:
            registration.release()

    async def release(self) -> None:
        """End the registration when no job uses it: now, or after the last one."""
        registration = self._current
        if registration is None:
            return
        self._retire(registration)
        if not registration.in_use:
            await self._end(registration)

    def _retire(self, registration: Registration) -> None:
        if self._current is registration:
            self._current = None

    def _unused(self, registration: Registration) -> None:
        supervisor = self._shard.stack.supervisor
        if self._current is not registration:
            supervisor.spawn(self._end(registration), "end a registration with its claims")
        elif self._lingering is None or self._lingering.done():
            self._lingering = supervisor.background(self._linger(), "end a registration that is not needed")

    async def _linger(self) -> None:
        while self._current is not None:
            self._was_used = False
            await self._shard.stack.runtime.sleep(LINGER_S)
            if self._current is not None and not self._was_used and not self._current.in_use:
                await self.release()

    async def _end(self, registration: Registration) -> None:
        if not registration.alive:
            return
        try:
            async with asyncio.timeout(self._shard.stack.supervisor.patience_s()):
                await registration.expire()
        except Exception as error:
            text = f"ending a registration of {self._shard.label}, which stays until its lease ends,"
            self._shard.stack.supervisor.failures.report(text, error)
