"""The consensus store's clock, which is the same for all processes, as one client knows it.

Shards with a wall clock take their times from it. The commit times of a client always rise, whatever the
clock does: each is beyond all commit times that the client has seen.

A *measurement* asks the store for its clock. Its error is at most half of the time of the answer, plus the
error of the store's own clock. Between two measurements other answers of the store may tell its clock, with
an unknown error; `read` adds the difference between the latest answer and the measurement to the error. So
after somebody sets the clock, the error is large until the next measurement.
"""

import asyncio

from aiopersist.base.frontier import Antichain
from aiopersist.base.runtime import Runtime
from aiopersist.storage.consensus import Consensus

RENEW_S = 60.0  # seconds between two measurements: clocks drift by milliseconds meanwhile
DRIFT = 1e-4  # drift of two clocks, in seconds per second: quartz is ten times better


class StoreClock:
    """See the header. Offsets are the store's clock minus the local monotonic clock."""

    def __init__(self, consensus: Consensus, runtime: Runtime) -> None:
        self._consensus = consensus
        self._runtime = runtime
        self._offset = self._measured_offset = runtime.wall() - runtime.monotonic()
        self._error_s = 0.0
        self._measured_at: float | None = None
        self._renewing = asyncio.Lock()
        self.seen = 0
        """The first time beyond each commit time on a wall clock that this client has seen."""

    async def now(self) -> float:
        """The moment, by the store's latest answer. No request, unless a measurement is due."""
        moment = self._runtime.monotonic()
        if self._measured_at is None or moment - self._measured_at > RENEW_S:
            await self.renew()
        now = await self._consensus.now()
        self._offset = now - self._runtime.monotonic()
        return now

    @property
    def is_due(self) -> bool:
        """Whether the last measurement is too old."""
        return self._measured_at is None or self._runtime.monotonic() - self._measured_at > RENEW_S

    async def renew(self) -> None:
        """Measure, if that is due. Concurrent callers share one request."""
        if self.is_due:
            async with self._renewing:
                if self.is_due:
                    await self.measure()

    async def measure(self) -> None:
        """Ask the store for its clock. One request, if the clock is not that of this machine."""
        began = self._runtime.monotonic()
        now = await self._consensus.clock()
        self._measured_at = ended = self._runtime.monotonic()
        answer_s = ended - began
        self._error_s = answer_s / 2 + self._consensus.clock_error_s
        self._offset = self._measured_offset = now - ended + answer_s / 2

    def read(self) -> tuple[float, float]:
        """The moment, and its error, both in seconds."""
        moment = self._runtime.monotonic()
        age = 0.0 if self._measured_at is None else moment - self._measured_at
        apart = abs(self._offset - self._measured_offset)
        return self._offset + moment, self._error_s + DRIFT * age + apart

    def saw(self, upper: Antichain) -> None:
        """Note the upper of a shard with a wall clock."""
        time = upper.elements[0] if upper.elements else 0
        if type(time) is int and time > self.seen:
            self.seen = time
