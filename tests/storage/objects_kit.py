"""A bucket in memory whose requests happen in the order that a test chooses, and all orders there are."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from aiopersist.base.errors import Indeterminate
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.objects.bucket import Bucket, Object, Tagged
from aiopersist.storage.objects.consensus import ObjectsConsensus

actor: ContextVar[str] = ContextVar("actor", default="")


class Objects(Bucket):
    """Objects in a dict. Each request is one step. If the world's lists take time, they pass where no
    name is, then look at the next name and pass on to the one after it in a step of its own."""

    def __init__(self, world: "World") -> None:
        self.stored = world.stored
        self._world = world
        self._step = world.step

    def _put(self, name: str, data: bytes) -> str | None:
        if name in self.stored:
            return None
        self.stored[name] = Object(data, str(hash(data)))
        return self.stored[name].tag

    def _told(self, answer: Any) -> Any:
        self._world.tell(answer)
        return answer

    async def create(self, name: str, data: bytes) -> str | None:
        how = await self._step(f"create {name}")
        if how == "late":
            self._world.later(self._put, name, data)
            raise Indeterminate("no answer")
        created = self._put(name, data)
        if how == "twice":  # a driver that had no answer sends it again
            created = self._put(name, data)
        if how == "lost":
            raise Indeterminate("no answer")
        self._told(created)
        return created

    async def get(self, name: str) -> Object | None:
        await self._step(f"get {name}")
        found: Object | None = self._told(self.stored.get(name))
        return found

    async def find(self, prefix: str, *, after: str = "", limit: int | None = None) -> list[Tagged]:
        await self._step(f"list {prefix}")
        names = self._names(prefix, after)
        if not self._world.passes:
            return list(self._told([Tagged(name, self.stored[name].tag) for name in names[:limit]]))
        found = list[Tagged]()
        while names and len(found) != limit:
            self._told(names[0])
            await self._step(f"look at {names[0]}")
            names = [name for name in self._names(prefix, after) if name >= names[0]]
            found += self._told([Tagged(name, self.stored[name].tag) for name in names[:1]])
            names = names[1:]
        return found

    def _names(self, prefix: str, after: str) -> list[str]:
        return sorted(name for name in self.stored if name.startswith(prefix) and name > after)

    async def folders(self, prefix: str) -> list[str]:
        await self._step("folders")
        names = (name.removeprefix(prefix) for name in self.stored if name.startswith(prefix))
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            await self._step(f"delete {name}")
            self.stored.pop(name, None)

    async def now(self) -> float:
        return SYSTEM.wall()

    async def clock(self) -> float:
        return SYSTEM.wall()

    @property
    def clock_error_s(self) -> float:
        return 0.0

    async def aclose(self) -> None:
        pass


class _Waiting(NamedTuple):
    who: str
    what: str
    go: asyncio.Future[str]


class _Fixed(Runtime):
    """Nothing of it depends on the run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ids = 0

    def token(self) -> str:
        self._ids += 1
        return f"{self._name}-{self._ids}"

    def monotonic(self) -> float:
        return 0.0


async def nobody_goes_on() -> None:
    """Until whatever may go on without an answer has done so: the loop has nothing to call but this."""
    loop: Any = asyncio.get_running_loop()
    await asyncio.sleep(0)
    while loop._ready:
        await asyncio.sleep(0)


class World:
    """The actors of a scenario on one bucket, and what they were told. `passes`: its lists take time."""

    def __init__(self, makes: Mapping[str, type[ObjectsConsensus]], *, passes: bool = False) -> None:
        self.stored: dict[str, Object] = {}
        self.passes = passes
        self.faults: dict[str, Sequence[str]] = {}
        """By actor, what may happen to its creations: `lost` loses the answer, `late` happens after that, if
        at all, `twice` is sent twice."""
        self._makes = makes
        self._late: list[asyncio.Task[None]] = []
        self._told: dict[str, list[str]] = defaultdict(list)
        self._waiting: list[_Waiting] = []
        self._free = True

    def handle(self, who: str) -> ObjectsConsensus:
        """A store of its own on the bucket, of the class that was given for that actor."""
        return self._makes.get(who, ObjectsConsensus)(Objects(self), runtime=_Fixed(who))

    def tell(self, what: Any) -> None:
        """Note what an actor has learned: with what is stored, it decides all that can follow."""
        self._told[actor.get()].append(repr(what))

    async def step(self, what: str) -> str:
        """Wait until the request is chosen; how it goes then."""
        if self._free:
            return ""
        waiting = _Waiting(actor.get(), what, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        return await waiting.go

    def later(self, act: Callable[..., object], *args: object) -> None:
        """Let a request that was sent happen at some later moment, or never."""

        async def happens() -> None:
            await self.step("happens late")
            act(*args)

        self._late.append(asyncio.ensure_future(happens()))

    async def run(self, actors: Mapping[str, Callable[[], Awaitable[None]]], choose: "Choose") -> None:
        """Run the actors to their ends; `choose` says whose request happens next, and how."""
        self._free = False
        tasks = []
        for name, act in actors.items():
            actor.set(name)
            tasks.append(asyncio.ensure_future(act()))
        try:
            while True:
                await nobody_goes_on()
                if all(task.done() for task in tasks):
                    break
                assert self._waiting, "nobody can go on"
                self._waiting.sort(key=lambda w: (w.who, w.what))
                options = [(w, how) for w in self._waiting for how in self._ways(w)]
                waiting, how = options[choose(len(options), self._mark)]
                self._waiting.remove(waiting)
                self._told[waiting.who].append(f"{waiting.what} {how}")
                waiting.go.set_result(how)
            for task in tasks:
                task.result()
        finally:
            for task in [*tasks, *self._late]:
                task.cancel()
            await asyncio.wait([*tasks, *self._late])
            self._free = True

    def _ways(self, waiting: _Waiting) -> list[str]:
        more = self.faults.get(waiting.who, ()) if waiting.what.startswith("create") else ()
        return ["", *more]

    def _mark(self) -> Any:
        stored = tuple(sorted((name, stored.data) for name, stored in self.stored.items()))
        return stored, tuple(sorted((who, tuple(told)) for who, told in self._told.items()))


class Counting(Bucket):
    """Counts requests. `fails`: the error of the next request of that kind, which does not happen."""

    def __init__(self, inner: Bucket) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, Exception] = {}

    async def _call(self, what: str, request: Callable[[], Awaitable[Any]]) -> Any:
        self.calls[what] += 1
        if what in self.fails:
            raise self.fails.pop(what)
        return await request()

    async def create(self, name: str, data: bytes) -> str | None:
        created: str | None = await self._call("create", lambda: self.inner.create(name, data))
        return created

    async def get(self, name: str) -> Object | None:
        found: Object | None = await self._call("get", lambda: self.inner.get(name))
        return found

    async def find(self, prefix: str, *, after: str = "", limit: int | None = None) -> list[Tagged]:
        return list(await self._call("list", lambda: self.inner.find(prefix, after=after, limit=limit)))

    async def folders(self, prefix: str) -> list[str]:
        return list(await self._call("folders", lambda: self.inner.folders(prefix)))

    async def delete(self, names: Sequence[str]) -> None:
        await self._call("delete", lambda: self.inner.delete(names))

    async def now(self) -> float:
        return await self.inner.now()

    async def clock(self) -> float:
        return await self.inner.clock()

    @property
    def clock_error_s(self) -> float:
        return self.inner.clock_error_s

    async def aclose(self) -> None:
        await self.inner.aclose()


class Place:
    """A bucket in memory, and handles on it that count."""

    def __init__(self) -> None:
        self.world = World({})

    def handle(self, runtime: Runtime | None = None) -> tuple[ObjectsConsensus, Counting]:
        bucket = Counting(Objects(self.world))
        return ObjectsConsensus(bucket, runtime=runtime or Runtime(), poll_s=0.01), bucket


Choose = Callable[[int, Callable[[], Any]], int]
"""Of so many; the mark of where the run is costs more than a step, and is asked for where a path is new."""


class Pruned(BaseException):
    """What would follow was explored before."""


def explore(run: Callable[[Choose], None], worlds_max: int) -> int:
    """Run the scenario once for each order of requests that matters, and return how many runs that took. Runs
    that reach what another run has reached end there."""
    seen: set[Any] = set()
    path: list[list[int]] = []  # the choice, and how many there are
    for number in range(1, worlds_max + 1):
        depth = 0

        def choose(count: int, mark: Callable[[], Any]) -> int:
            nonlocal depth
            at, depth = depth, depth + 1
            if at == len(path):
                if (reached := mark()) in seen:
                    raise Pruned
                seen.add(reached)
                path.append([0, count])
            return path[at][0]

        try:
            run(choose)
        except Pruned:
            pass
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return number
        path[-1][0] += 1
    raise AssertionError(f"more than {worlds_max} runs")


def bucket_of(consensus: object) -> Bucket:
    """The bucket of a consensus store."""
    assert isinstance(consensus, ObjectsConsensus)
    return consensus._bucket
