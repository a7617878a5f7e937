"""The only door to nondeterminism: clocks, randomness, ids, sleep and the delays of retries.

Everything that decides reads them from a `Runtime`, so the whole library, several clients
included, runs under a virtual clock from a seed. A lint bans the modules behind this one
elsewhere.
"""

import asyncio
import os
import random
import time
import uuid
from collections.abc import Iterator

# Counts suspended time where the system has such a clock: a laptop's sleep must age a lease.
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

RETRY_DELAY_MIN_S = 0.004  # below a round trip to any store: a first retry costs nothing
RETRY_DELAY_MAX_S = 16.0  # a store that is back is noticed within this


class Runtime:
    """The system's clocks and randomness. Simulations replace it."""

    def wall(self) -> float:
        """Unix seconds, for people and for the clock of embedded stores."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back, and that count suspended time."""
        return time.clock_gettime(_BOOTTIME)

    def uuid(self) -> uuid.UUID:
        """A fresh random id."""
        return uuid.uuid4()

    def token(self) -> str:
        """A fresh random text, 128 bits in hex: cheaper than an id."""
        return os.urandom(16).hex()

    def uniform(self, low: float, high: float) -> float:
        """A random float between the two."""
        return random.uniform(low, high)

    async def sleep(self, seconds: float) -> None:
        """Wait that long."""
        await asyncio.sleep(seconds)

    def delays(self) -> Iterator[float]:
        """Delays of successive retries in seconds: exponential, without end, with full jitter
        (each is drawn between half of its bound and the bound)."""
        bound = RETRY_DELAY_MIN_S
        while True:
            yield self.uniform(bound / 2, bound)
            bound = min(bound * 2, RETRY_DELAY_MAX_S)


SYSTEM = Runtime()
