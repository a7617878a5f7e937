"""Stores that fail honestly: wrappers around any `Blob` and `Consensus`.

A call to a store has two independent sides: it happened or not, and the caller got the answer or not. That
makes four outcomes, and networks add a fifth:

| outcome    | it happened | the caller gets                      |
|------------|-------------|--------------------------------------|
| `DONE`     | yes         | the answer                           |
| `REFUSED`  | no          | `StorageUnavailable`                 |
| `LOST`     | yes         | `Indeterminate`                      |
| `DROPPED`  | no          | `Indeterminate`                      |
| `LATE`     | not yet     | `Indeterminate`; at `land()` it does |

No wrapper lies: a call that raised `StorageUnavailable` surely did nothing. Outcomes are drawn from a seed at
given `rates`, or set one at a time by `fail_next`.
"""

import asyncio
import random  # noqa: TID251  # a schedule from a seed makes a failure repeatable
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.watch import TaskWatch, Watch
from aiopersist.storage.wrapper import Request, WrappedBlob, WrappedConsensus

T = TypeVar("T")

METHODS = {name for store in (Blob, Consensus) for name in vars(store) if not name.startswith("_")}
"""Of both contracts."""


class Outcome(StrEnum):
    """The outcome of one call; see the header."""

    DONE = "DONE"
    REFUSED = "REFUSED"
    LOST = "LOST"
    DROPPED = "DROPPED"
    LATE = "LATE"


HAPPENS = (Outcome.DONE, Outcome.LOST)


class Faults:
    """Decides the outcome of each call; several wrappers may share it.

    `rates` gives the share of calls for each outcome (the rest is `DONE`), drawn from `seed`. Each call first
    waits for a time that is drawn evenly from the range `latency_s`.
    """

    def __init__(
        self,
        seed: int = 0,
        rates: Mapping[Outcome, float] | None = None,
        *,
        latency_s: tuple[float, float] = (0.0, 0.0),
        runtime: Runtime = SYSTEM,
    ) -> None:
        self.rates = dict(rates or {})
        self.latency_s = latency_s
        self.calls: Counter[str] = Counter()
        self.injected: list[tuple[str, Outcome]] = []
        self.losing_hints = False
        self._random = random.Random(seed)
        self._runtime = runtime
        self._next: dict[str, deque[Outcome]] = {}
        self._late: list[Callable[[], Awaitable[object]]] = []

    def fail_next(self, op: str, outcome: Outcome, times: int = 1) -> None:
        """Give the next `times` calls of the method `op` of a store this outcome, after those of earlier
        `fail_next` calls. `ValueError` if no store has such a method."""
        if op not in METHODS:
            raise ValueError(f"no store has a method {op!r}: there are {', '.join(sorted(METHODS))}")
        self._next.setdefault(op, deque()).extend([outcome] * times)

    def heal(self) -> None:
        """From now on every call is `DONE`. Late calls stay late."""
        self.rates = {}
        self._next = {}

    @property
    def late(self) -> int:
        """The number of calls that have not landed yet."""
        return len(self._late)

    async def land(self) -> None:
        """Let all late calls happen now, in the order in which they were made."""
        late, self._late = self._late, []
        for act in late:
            await act()

    def outcome(self, op: str) -> Outcome:
        """Decide and count the outcome of the next call of `op`."""
        self.calls[op] += 1
        if self._next.get(op):
            chosen = self._next[op].popleft()
        else:
            chosen = self._drawn()
        if chosen is not Outcome.DONE:
            self.injected.append((op, chosen))
        return chosen

    def _drawn(self) -> Outcome:
        if not self.rates:
            return Outcome.DONE
        draw = self._random.random()
        for outcome, rate in self.rates.items():
            draw -= rate
            if draw < 0:
                return outcome
        return Outcome.DONE

    async def wait(self) -> None:
        """Wait for the latency of one call."""
        if self.latency_s[1]:
            await self._runtime.sleep(self._random.uniform(*self.latency_s))

    async def call(self, op: str, act: Callable[[], Awaitable[T]]) -> T:
        """Let `act`, a call of `op`, happen or not, and be answered or not."""
        outcome = self.outcome(op)
        await self.wait()
        if outcome is Outcome.REFUSED:
            raise StorageUnavailable(f"injected: {op} was refused")
        if outcome is Outcome.LATE:
            self._late.append(act)
        if outcome in HAPPENS:
            result = await act()
            if outcome is Outcome.DONE:
                return result
        raise Indeterminate(f"injected: the answer to {op} is lost")


class FaultyBlob(WrappedBlob):
    """A blob store that fails as `faults` says. Closing it leaves the inner one open."""

    def __init__(self, inner: Blob, faults: Faults) -> None:
        super().__init__(inner)
        self.faults = faults

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self.faults.call(op, request)

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await super().set(key, bytes(data))  # the caller may change its buffer before a late call

    async def delete(self, keys: Sequence[str]) -> None:
        await super().delete(list(keys))

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        outcome = self.faults.outcome("list")
        await self.faults.wait()
        if outcome is Outcome.REFUSED:
            raise StorageUnavailable("injected: list was refused")
        async for item in self.inner.list(prefix):
            yield item
            if outcome is not Outcome.DONE:  # a list may break in the middle
                break
        if outcome is not Outcome.DONE:
            raise Indeterminate("injected: the list broke off")

    async def aclose(self) -> None:
        return None


class FaultyConsensus(WrappedConsensus):
    """A consensus store that fails as `faults` says. While `faults.losing_hints` is true no `watch`
    ever returns. Closing it leaves the inner one open."""

    def __init__(self, inner: Consensus, faults: Faults) -> None:
        super().__init__(inner)
        self.faults = faults

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self.faults.call(op, request)

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        return await super().heads(dict(known))

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        return await super().compare_and_set_many(list(entries))

    async def watch(self, key: str) -> None:
        await super().watch(key)
        if self.faults.losing_hints:
            await asyncio.Event().wait()  # until it is cancelled

    def watch_together(self) -> Watch:
        return TaskWatch(self.watch)  # not the inner one's: its hints would never be lost

    async def aclose(self) -> None:
        return None
