"""What happens to the requests of a machine: each goes its way, whatever becomes of its caller.

A request whose caller is cancelled, or whose machine crashes, goes on: it may land afterwards. No answer
lies: `StorageUnavailable` says that nothing happened, `Indeterminate` that nobody knows
(`aiopersist/testing/faults.py`)."""

import asyncio
import random  # noqa: TID251  # everything here comes from a seed
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any, TypeVar

from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.base.runtime import Runtime
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.objects.clock import AGREE
from aiopersist.storage.watch import TaskWatch, Watch
from aiopersist.storage.wrapper import READS, Request, WrappedBlob, WrappedConsensus
from aiopersist.testing.simulation.between import Between, HeardClock

T = TypeVar("T")
BLOB, CONSENSUS = "blob", "consensus"
_TWICE = frozenset(
    {"set", "delete", "truncate", "compare_and_set", "compare_and_set_many", "stash.commit", "stash.take"}
)
_READS = READS | {"stash.load", "stash.token"}


@dataclass(frozen=True)
class Weather:
    """Shares of the requests to which something happens, and how long requests take, in seconds."""

    refused: float = 0.0
    """It did not happen, and its caller is told so."""
    lost: float = 0.0
    """It happened; its answer is lost."""
    dropped: float = 0.0
    """It did not happen; its answer is lost."""
    late: float = 0.0
    """Its answer is lost, and it happens up to `slow_s` later."""
    duplicated: float = 0.0
    """A write happens twice; one answer comes."""
    slow: float = 0.0
    """It takes up to `slow_s`."""
    hints_lost: float = 0.0
    """A machine gets no hint of commits from its start to its crash."""
    cut_off: float = 0.0
    """Each second, the chance of a machine to lose both stores, or one of them, for up to `slow_s`."""
    full: float = 0.0
    """Each second, the chance of the stores to refuse all writes for up to `slow_s`."""
    foreign: float = 0.0
    """It happened; something between answers in place of the store, with an error and a date of its own."""
    dates: float = 0.0
    """Something between gives the store's answer a date of its own, and some of the next ones as well."""
    crashes: float = 0.0
    """The share of the starts of a supervised program that end in a crash."""
    far: float = 0.0
    """The share of the machines whose requests take `FAR` times as long."""
    latency_s: float = 0.002
    """Each way of a request takes up to so long, so requests overtake each other."""
    slow_s: float = 2.0

    def without(self, kind: str) -> "Weather":
        """The same without one kind of fault."""
        return replace(self, **{kind: 0.0})

    @property
    def kinds(self) -> list[str]:
        """The faults that it has."""
        names = [field.name for field in fields(self) if field.name not in ("latency_s", "slow_s")]
        return [name for name in names if getattr(self, name)]


FAR = 25

CALM = Weather()
"""Nothing fails; requests take their time."""

STORMY = Weather(
    refused=0.02, lost=0.02, dropped=0.02, late=0.01, duplicated=0.02, slow=0.01, hints_lost=0.2,
    cut_off=0.05, full=0.02, crashes=0.5,
)  # fmt: skip
"""Everything fails, seldom enough that work gets done."""


class Network:
    """All requests of a world: their dice, counts and trace."""

    def __init__(
        self, dice: random.Random, weather: Weather, loop: asyncio.AbstractEventLoop, between: Between
    ) -> None:
        self.weather = weather
        self.between = between
        self.counts: Counter[str] = Counter()
        self.full_until = 0.0
        self._dice = dice
        self._loop = loop
        self._under_way: dict[asyncio.Task[Any], None] = {}
        self._trace = sha256()

    @property
    def digest(self) -> str:
        """Of everything that was traced until now."""
        return self._trace.hexdigest()

    def note(self, *what: object) -> None:
        """Add to the trace."""
        self._trace.update(f"{self._loop.time():.9f} {what!r}\n".encode())

    def happens(self, kind: str) -> bool:
        """Draw whether a fault happens; it is counted."""
        rate: float = getattr(self.weather, kind)
        # drawn at rate 0, too: without one fault the others stay as they are
        drawn = self._dice.random() < rate
        self.counts[kind] += drawn
        return drawn

    def send(self, line: "Wire", op: str, act: Request[T], store: str) -> "asyncio.Task[T]":
        """A request on its way, which nobody can stop."""
        return self._own(self._carried(line, op, act, store))

    async def settle(self) -> None:
        """Wait for every request that is under way."""
        while self._under_way:
            await asyncio.wait(list(self._under_way))

    def delay_s(self, distance: float) -> float:
        """For one way."""
        bound = self.weather.slow_s if self.happens("slow") else distance * self.weather.latency_s
        return self._dice.uniform(0, bound)

    def drop_all(self) -> None:
        """No request that is under way happens any more, as after a crash of the stores."""
        for task in self._under_way:
            task.cancel()

    def _own(self, request: Any) -> "asyncio.Task[Any]":
        task = self._loop.create_task(request)
        self._under_way[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._under_way.pop(task, None)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _carried(self, line: "Wire", op: str, act: Request[T], store: str) -> T:
        sent = line.heard.clock.sent()
        await self._sleep(self.delay_s(line.distance))
        if line.is_cut_off(store) or self.happens("refused"):
            raise self._failed(line, op, StorageUnavailable(f"simulated: {op} was refused"))
        if op not in _READS and self._loop.time() < self.full_until:
            raise self._failed(line, op, StorageUnavailable("simulated: the store is full"))
        if self.happens("late"):
            self._own(self._afterwards(line, op, act))
            raise self._failed(line, op, Indeterminate(f"simulated: the answer to {op} is lost"))
        if self.happens("dropped"):
            raise self._failed(line, op, Indeterminate(f"simulated: the answer to {op} is lost"))
        result = await act()
        self.note(line.name, op, result)
        if op in _TWICE and self.happens("duplicated"):
            self._own(self._afterwards(line, op, act, within_s=self.weather.latency_s))
        await self._sleep(self.delay_s(line.distance))
        if line.is_cut_off(store) or self.happens("lost"):
            raise self._failed(line, op, Indeterminate(f"simulated: the answer to {op} is lost"))
        self._dated(line, op, sent)
        return result

    def _dated(self, line: "Wire", op: str, sent: float) -> None:
        """The answer comes, or one of something between, which raises what is concluded from it."""
        weather = self.weather
        if not op.startswith("stash.") and self.between.happens(weather.foreign):
            self.counts["foreign"] += 1
            line.heard.foreign(sent)
            raise self._failed(line, op, self.between.error(op, writing=op not in _READS))
        if weather.foreign or weather.dates:
            self.counts["foreign dates"] += line.heard.own(sent, weather.dates)

    async def _afterwards(
        self, line: "Wire", op: str, act: Request[T], within_s: float | None = None
    ) -> None:
        if within_s is None:  # half of them soon, so that they meet what their callers do next
            within_s = self.weather.slow_s if self._dice.random() < 0.5 else 10 * self.weather.latency_s
        await self._sleep(self._dice.uniform(0, within_s))
        try:
            self.note(line.name, "late", op, await act())
        except ValueError:  # a truncation whose key moved meanwhile: nobody is told
            self.note(line.name, "late", op, "refused")

    def _failed(self, line: "Wire", op: str, error: Exception) -> Exception:
        self.note(line.name, op, type(error).__name__)
        return error

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)  # noqa: TID251  # of the virtual clock


class Wire:
    """Between one life of a machine and the stores."""

    def __init__(
        self,
        network: Network,
        name: str,
        from_world: Callable[..., Any],
        runtime: Runtime,
        distance: float = 1.0,
    ) -> None:
        self.network = network
        self.distance = distance
        """How many times as long as usual its requests take."""
        self.heard = HeardClock(network.between, runtime)
        self.name = name
        self.cut_off_until = {BLOB: 0.0, CONSENSUS: 0.0}
        self.losing_hints = network.happens("hints_lost")
        self._from_world = from_world

    def is_cut_off(self, store: str) -> bool:
        """Whether no request gets through to that store."""
        return self.network._loop.time() < self.cut_off_until[store]

    async def call(self, op: str, act: Request[T], store: str) -> T:
        """Make a request."""
        self.network.counts["requests"] += 1
        sent: asyncio.Task[T] = self._from_world(self.network.send, self, op, act, store)
        return await asyncio.shield(sent)


class SimulatedBlob(WrappedBlob):
    """A blob store at the end of a line. Closing it leaves the inner one open."""

    def __init__(self, inner: Blob, line: Wire) -> None:
        super().__init__(inner)
        self._line = line

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self._line.call(op, request, BLOB)

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await super().set(key, bytes(data))

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async def listed() -> list[tuple[str, int]]:
            return [item async for item in self.inner.list(prefix)]

        for item in await self._line.call("list", listed, BLOB):
            yield item

    async def aclose(self) -> None:
        return None


class SimulatedConsensus(WrappedConsensus):
    """A consensus store at the end of a line. Closing it leaves the inner one open."""

    def __init__(self, inner: Consensus, line: Wire) -> None:
        super().__init__(inner)
        self._line = line

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self._line.call(op, request, CONSENSUS)

    def limit_clock(self, ahead_max_s: float) -> None:
        self._line.heard.clock.ahead_max_s = ahead_max_s

    async def now(self) -> float:
        clock = self._line.heard.clock
        return clock.now() if clock.is_known else await super().now()

    async def clock(self) -> float:
        clock = self._line.heard.clock
        for _ in range(AGREE):
            answer = await super().clock()
            if not clock.is_in_doubt:
                break
        return clock.now() if clock.is_known else answer

    async def watch(self, key: str) -> None:
        if self._line.losing_hints:
            await asyncio.Event().wait()  # until it is cancelled
        await self.inner.watch(key)

    def watch_together(self) -> Watch:
        return TaskWatch(self.watch)

    async def aclose(self) -> None:
        return None
