"""The only access to nondeterminism: clocks, randomness, ids, sleep and the delays of retries.

All code takes these from a `Runtime`, so the whole library, with several clients, can run from a seed with a
virtual clock. A lint rule bans the underlying modules everywhere else.

Also the process that an object belongs to: a forked child has a copy of each client. The copy shares the
sockets with the parent, and lacks the threads and the locks of files.
"""

import asyncio
import os
import random
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

from aiopersist.base.errors import InvalidUsage, UsageKind

T = TypeVar("T")

# Counts suspended time, if the system has such a clock: a laptop's sleep must age a lease.
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

RETRY_DELAY_MIN_S = 0.004  # shorter than a round trip to any store: a first retry costs nothing
TOKENS_AT_ONCE = 64
RETRY_DELAY_MAX_S = 16.0  # the store's recovery is noticed within this time


class Runtime:
    """The system's clocks and randomness. Simulations replace it."""

    wall: Callable[[], float] = staticmethod(time.time)
    """Unix seconds, for people and for embedded stores."""
    monotonic: Callable[[], float] = staticmethod(partial(time.clock_gettime, _BOOTTIME))
    """Seconds that never go back, suspended time included."""

    def uuid(self) -> uuid.UUID:
        """A fresh random id."""
        return uuid.uuid4()

    def token(self) -> str:
        """128 fresh random bits in hex; cheaper than an id."""
        try:
            return _tokens.pop()
        except IndexError:
            return _more_tokens()

    def process(self) -> str:
        """This process, for people: its host and its process id."""
        return f"{socket.gethostname()}:{os.getpid()}"

    def uniform(self, low: float, high: float) -> float:
        """A random float between `low` and `high`."""
        return random.uniform(low, high)

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        await asyncio.sleep(seconds)

    def delays(self) -> Iterator[float]:
        """Delays of successive retries in seconds: exponential, without end, with jitter (each is drawn
        between half of its bound and its bound)."""
        bound = RETRY_DELAY_MIN_S
        while True:
            yield self.uniform(bound / 2, bound)
            bound = min(bound * 2, RETRY_DELAY_MAX_S)


_tokens: deque[str] = deque()  # of this process; each is used once, in any thread


def _more_tokens() -> str:
    """A token. Others are stored: the system makes many random bytes as fast as a few."""
    data = os.urandom(16 * TOKENS_AT_ONCE).hex()
    first, *others = [data[at : at + 32] for at in range(0, len(data), 32)]
    _tokens.extend(others)
    return first


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tokens.clear)

SYSTEM = Runtime()

FORK_ADVICE = "start the process by `spawn`, or open it after the fork, in each process, and never before"


class OwnProcess:
    """The process that made an object. `what` names the object in errors."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """`InvalidUsage` in any other process."""
        if not self.is_here:
            raise self.refusal()

    def refusal(self) -> InvalidUsage:
        """The error of a call in another process."""
        return InvalidUsage(UsageKind.WRONG_LOOP, f"{self._what} was opened before a fork: {FORK_ADVICE}")


def begun(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task that has run up to its first wait, which saves a turn of the loop. On Python 3.11, and in loops
    with their own tasks, it begins in the next turn, as usual."""
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12) and loop.get_task_factory() is None:
        return asyncio.Task(work, loop=loop, name=name, eager_start=True)
    return loop.create_task(work, name=name)
