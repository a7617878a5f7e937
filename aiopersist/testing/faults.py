"""Stores that fail honestly: wrappers around any `Blob` and `Consensus`.

A call to a store has two independent sides: it happened or not, and the caller was told or not.
That makes four outcomes, and a fifth that networks add:

| outcome    | it happened | the caller gets                      |
|------------|-------------|--------------------------------------|
| `DONE`     | yes         | the answer                           |
| `REFUSED`  | no          | `StorageUnavailable`                 |
| `LOST`     | yes         | `Indeterminate`                      |
| `DROPPED`  | no          | `Indeterminate`                      |
| `LATE`     | not yet     | `Indeterminate`; at `land()` it does |

No wrapper ever lies: a `StorageUnavailable` surely did nothing. Outcomes come from a seed
(`rates`), or one at a time from `fail_next`.
"""

import asyncio
import random  # noqa: TID251  # a schedule from a seed, which is what makes a failure repeatable
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from aiopersist.errors import Indeterminate, StorageUnavailable
from aiopersist.runtime import SYSTEM, Runtime
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Entry, Versioned

T = TypeVar("T")


class Outcome(StrEnum):
    """What becomes of one call."""

    DONE = "DONE"
    REFUSED = "REFUSED"
    LOST = "LOST"
    DROPPED = "DROPPED"
    LATE = "LATE"


HAPPENS = (Outcome.DONE, Outcome.LOST)


class Faults:
    """Decides the outcome of each call; one may be shared by several wrappers.

    `rates` gives the share of calls of each outcome (the rest is `DONE`), drawn from `seed`.
    `latency_s` is waited before each call, drawn evenly from the range.
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
        """The next `times` calls of the method `op` end so; `fail_next` again for what follows."""
        self._next.setdefault(op, deque()).extend([outcome] * times)

    def heal(self) -> None:
        """From now on every call is `DONE`. What is late stays late."""
        self.rates = {}
        self._next = {}

    @property
    def late(self) -> int:
        """How many calls have not landed yet."""
        return len(self._late)

    async def land(self) -> None:
        """Let all late calls happen now, in the order they were made."""
        late, self._late = self._late, []
        for act in late:
            await act()

    def outcome(self, op: str) -> Outcome:
        """Decide the next call of `op`."""
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
        """The latency of one call."""
        if self.latency_s[1]:
            await self._runtime.sleep(self._random.uniform(*self.latency_s))

    async def call(self, op: str, act: Callable[[], Awaitable[T]]) -> T:
        """Make one call, or not."""
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


class FaultyBlob(Blob):
    """A blob store that fails as `faults` says. Closing it leaves the inner one open."""

    def __init__(self, inner: Blob, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    async def get(self, key: str) -> bytes | None:
        return await self.faults.call("get", lambda: self.inner.get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return await self.faults.call("get_range", lambda: self.inner.get_range(key, offset, length))

    async def set(self, key: str, data: bytes | memoryview) -> None:
        kept = bytes(data)  # a late call must not see what becomes of the caller's buffer
        await self.faults.call("set", lambda: self.inner.set(key, kept))

    async def delete(self, keys: Sequence[str]) -> None:
        kept = list(keys)
        await self.faults.call("delete", lambda: self.inner.delete(kept))

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


class FaultyConsensus(Consensus):
    """A consensus store that fails as `faults` says. While `faults.losing_hints` is true no `watch`
    ever returns. Closing it leaves the inner one open."""

    def __init__(self, inner: Consensus, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    async def head(self, key: str) -> Versioned | None:
        return await self.faults.call("head", lambda: self.inner.head(key))

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        kept = dict(known)
        return await self.faults.call("heads", lambda: self.inner.heads(kept))

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self.faults.call(
            "compare_and_set", lambda: self.inner.compare_and_set(key, expected, data)
        )

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        kept = list(entries)
        return await self.faults.call("compare_and_set_many", lambda: self.inner.compare_and_set_many(kept))

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        return await self.faults.call("scan", lambda: self.inner.scan(key, from_seqno, limit))

    async def truncate(self, key: str, seqno: int) -> int:
        return await self.faults.call("truncate", lambda: self.inner.truncate(key, seqno))

    async def remove(self, key: str, expected: Versioned) -> bool:
        return await self.faults.call("remove", lambda: self.inner.remove(key, expected))

    async def list_keys(self, prefix: str) -> list[str]:
        return await self.faults.call("list_keys", lambda: self.inner.list_keys(prefix))

    async def watch(self, key: str) -> None:
        await self.faults.call("watch", lambda: self.inner.watch(key))
        if self.faults.losing_hints:
            await asyncio.Event().wait()  # until it is cancelled

    async def now(self) -> float:
        return await self.faults.call("now", self.inner.now)

    async def aclose(self) -> None:
        return None
