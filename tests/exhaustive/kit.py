"""Small models of the real code, explored exhaustively: actors with clients of their own on two stores in
memory, whose requests happen in the order that a test chooses, and all orders there are.

Between two requests an actor runs as far as it can. A request of the consensus store is one step; its answer
may be lost, it may come late or never, and a task may be cancelled while it waits. Requests to the blob store
are steps where a model says so."""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import anyio.to_thread
import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate
from aiopersist.base.runtime import Runtime
from aiopersist.base.threads import Threads
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.shard import Shard
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.wrapper import Request, WrappedBlob, WrappedConsensus
from tests.storage.objects_kit import Choose, actor, explore
from tests.support.internals import stack_of

T = TypeVar("T")
SETTINGS = ap.Settings(
    retry_timeout_s=None, inline_writes_single_max_bytes=0, reader_lease_s=1e9, writer_lease_s=1e9
)
WRITES = frozenset({"compare_and_set", "compare_and_set_many"})
AT_ONCE = frozenset({"now", "clock", "list_keys"})  # they say nothing that a model is about
LONG_S = 3.0  # who sleeps for so long sleeps for ever: a heartbeat is no part of a model
NOW_S = 1.7e9
RUNS_MAX = 300_000
REQUESTS_MAX = 1000  # of one run


class _Fixed(Runtime):
    """Nothing of it depends on the run but the order of its calls."""

    def __init__(self, who: str) -> None:
        self._who = who
        self.begin()

    def begin(self) -> None:
        self._ids = 0

    def token(self) -> str:
        self._ids += 1
        return f"{self._who}-{self._ids}"

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(int=uuid.uuid5(uuid.NAMESPACE_OID, self.token()).int, version=4)

    def wall(self) -> float:
        return NOW_S

    def monotonic(self) -> float:
        return 0.0

    def process(self) -> str:
        return self._who

    def uniform(self, low: float, high: float) -> float:
        return low

    async def sleep(self, seconds: float) -> None:
        await (asyncio.Event().wait() if seconds > LONG_S else asyncio.sleep(0))


class _Waiting(NamedTuple):
    who: str
    what: str
    go: asyncio.Future[str]


class Model:
    """The actors of one run, and what they were told."""

    def __init__(self, blob_steps: bool = False) -> None:
        self.blob, self.consensus = MemoryBlob(), MemoryConsensus(runtime=_Fixed("stores"))
        self.clients: dict[str, ap.Client] = {}
        self.blob_steps = blob_steps
        self._old: list[ap.Client] = []
        self.begin()

    def begin(self) -> None:
        """Forget the run before."""
        self.blob._shared.blobs.clear()
        self.consensus._shared.logs.clear()
        self.faults: dict[str, list[str]] = {}
        """By actor, what may happen to its next writes, each once: `lost` loses the answer, `late` happens
        after that, if at all."""
        self.cancels: dict[str, int] = {}
        """By actor, how often it may be cancelled."""
        self.free = True
        """Whether requests happen at once."""
        self._requests = 0
        self._late: list[asyncio.Task[None]] = []
        self._told: dict[str, list[str]] = defaultdict(list)
        self._waiting: list[_Waiting] = []
        for client in self.clients.values():
            stack_of(client).runtime.begin()

    async def client(self, who: str) -> ap.Client:
        """That actor's own; the same in all runs."""
        if who not in self.clients:
            self.clients[who] = await ap.open(
                blob=_Blob(self.blob, self, who),
                consensus=_Consensus(self.consensus, self, who),
                settings=SETTINGS,
                maintenance=False,
                runtime=_Fixed(who),
            )
        return self.clients[who]

    async def fresh(self, who: str) -> ap.Client:
        """A client of that actor for this run alone: it knows nothing, and has no blob."""
        if who in self.clients:
            self._old.append(self.clients.pop(who))
        return await self.client(who)

    async def shard(self, who: str, shard: ShardId) -> Shard:
        """A shard as a client of that actor first sees it, with what is there."""
        found = Shard(stack_of(await self.client(who)), shard)
        await found.register.refresh()
        return found

    def tell(self, who: str, what: object) -> None:
        """Note what an actor has learned: with what is stored, it decides all that can follow."""
        self._told[who].append(repr(what))

    async def aclose(self) -> None:
        for client in (*self.clients.values(), *self._old):
            await client.aclose()

    async def forget(self) -> None:
        """Close the clients of runs that are over."""
        old, self._old = self._old, []
        for client in old:
            await client.aclose()

    async def request(self, who: str, op: str, act: Request[T]) -> T:
        self._requests += 1
        if self._requests > REQUESTS_MAX:  # who asks would take an error for one of the store
            await asyncio.Event().wait()
        if self.free or op in AT_ONCE:
            return await act()
        how = await self._step(who, op)
        if how == "late":
            self._late.append(asyncio.ensure_future(self._afterwards(who, op, act)))
            raise Indeterminate("its answer is lost")
        result = await act()
        if how == "lost":
            raise Indeterminate("its answer is lost")
        self.tell(who, result)
        return result

    async def _afterwards(self, who: str, op: str, act: Callable[[], Awaitable[object]]) -> None:
        await self._step(f"late {who}", op)
        await act()

    async def _step(self, who: str, what: str) -> str:
        waiting = _Waiting(who, what, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        return await waiting.go

    async def run(self, actors: Mapping[str, Callable[[], Awaitable[None]]], choose: Choose) -> None:
        """Run the actors to their ends; `choose` says whose request happens next, and how."""
        self.free, tasks = False, dict[str, asyncio.Task[None]]()
        for name, act in actors.items():
            actor.set(name)
            tasks[name] = asyncio.ensure_future(act())
        try:
            while True:
                await _until_all_wait()
                assert self._requests <= REQUESTS_MAX, "they ask for ever"
                if all(task.done() for task in tasks.values()):
                    break
                options = self._options(tasks)
                assert options, "nobody can go on"
                self._choose(options[choose(len(options), self._mark)], tasks)
            for task in tasks.values():
                task.result()
        finally:
            self.free = True
            for waiting in self._waiting:  # statements of cancelled callers never happen
                waiting.go.cancel()
            left: Iterable[asyncio.Task[None]] = [*tasks.values(), *self._late]
            while left:  # who settles goes on after a cancellation
                for task in left:
                    task.cancel()
                await _until_all_wait()
                left = [task for task in left if not task.done()]
            await _until_all_wait()

    def _options(self, tasks: Mapping[str, asyncio.Task[None]]) -> list[tuple[_Waiting | None, str]]:
        self._waiting = [waiting for waiting in self._waiting if not waiting.go.done()]
        self._waiting.sort(key=lambda waiting: (waiting.who, waiting.what))
        found: list[tuple[_Waiting | None, str]] = []
        for waiting in self._waiting:
            found += [(waiting, how) for how in self._ways(waiting)]
        names = [name for name in tasks if self.cancels.get(name) and not tasks[name].done()]
        return [*found, *((None, name) for name in names)]

    def _ways(self, waiting: _Waiting) -> Iterable[str]:
        """How that request may go."""
        return ("", *(self.faults.get(waiting.who, ()) if waiting.what in WRITES else ()))

    def _choose(self, option: tuple[_Waiting | None, str], tasks: Mapping[str, asyncio.Task[None]]) -> None:
        waiting, how = option
        if waiting is None:
            self.cancels[how] -= 1
            self.tell(how, "cancelled")
            tasks[how].cancel()
            return
        if how:
            self.faults[waiting.who].remove(how)
        self._waiting.remove(waiting)
        self.tell(waiting.who, f"{waiting.what} {how}")
        waiting.go.set_result(how)

    def _mark(self) -> Any:
        logs = tuple(
            (key, log.first, tuple(log.data)) for key, log in sorted(self.consensus._shared.logs.items())
        )
        blobs = tuple(sorted(self.blob._shared.blobs)) if self.blob_steps else ()
        told = tuple(sorted((who, tuple(what)) for who, what in self._told.items()))
        return logs, blobs, told, tuple((waiting.who, waiting.what) for waiting in self._waiting)


async def _until_all_wait() -> None:
    """Until every task waits for a request, or for ever."""
    loop: Any = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(0)
        due = any(not timer._cancelled and timer._when <= loop.time() for timer in loop._scheduled)
        if not loop._ready and not due:
            return


class _Consensus(WrappedConsensus):
    def __init__(self, inner: MemoryConsensus, model: Model, who: str) -> None:
        super().__init__(inner)
        self._model = model
        self._who = who

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self._model.request(self._who, op, request)

    async def watch(self, key: str) -> None:
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        return None


class _Blob(WrappedBlob):
    def __init__(self, inner: MemoryBlob, model: Model, who: str) -> None:
        super().__init__(inner)
        self._model = model
        self._who = who

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self._model.request(self._who, op, request) if self._model.blob_steps else request()

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async def listed() -> list[tuple[str, int]]:
            return [item async for item in self.inner.list(prefix)]

        for item in await self._request("list", listed):
            yield item

    async def aclose(self) -> None:
        return None


@contextmanager
def _threads_inline() -> Iterator[None]:
    async def run(self: Threads, work: Callable[[], Any]) -> Any:
        return work()

    async def run_sync(func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return func(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Threads, "run", run)
        patch.setattr(anyio.to_thread, "run_sync", run_sync)
        yield


Cast = Callable[
    [Model], Awaitable[tuple[Mapping[str, Callable[[], Awaitable[None]]], Callable[[], Awaitable[None]]]]
]
"""Sets the stores up; returns the actors, and the check of what must hold after them."""


def played(
    cast: Cast, *, blob_steps: bool = False, runs_max: int = RUNS_MAX, model: Model | None = None
) -> int:
    """Play the cast in all orders; the number of runs."""
    with _threads_inline(), asyncio.Runner() as runner:
        model = model or Model(blob_steps)

        async def one(choose: Choose) -> None:
            await model.forget()
            model.begin()
            actors, check = await cast(model)
            await model.run(actors, choose)
            await check()

        try:
            return explore(lambda choose: runner.run(one(choose)), runs_max)
        finally:
            runner.run(model.aclose())
