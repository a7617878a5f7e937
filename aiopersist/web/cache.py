"""Data that an inspector keeps for a client between two pages: the census, recent shards, running counts.

Background work runs as tasks of the client, so it ends with the client.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from aiopersist.base.runtime import Runtime
from aiopersist.base.supervisor import Supervisor
from aiopersist.client.client import Client
from aiopersist.gc.sweep import Usage
from aiopersist.shard.catalog import resolve_any
from aiopersist.shard.shard import Shard
from aiopersist.web.census import Census
from aiopersist.web.reading import warm_up_reading
from aiopersist.web.reads import Reads
from aiopersist.web.work import Works

T = TypeVar("T")

WAIT_S = 0.15  # for the state of a shard: the page has other work, too
SHARDS_KEPT = 8  # so that not every page loads the state again


class StillReading(Exception):
    """The page is not ready: the browser should ask again soon."""


class Count(Generic[T]):
    """A count that takes long, and its last result."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.result: T | None = None
        self.at: float | None = None
        """When the count ended, in Unix seconds."""
        self.problem: str | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether a count is running."""
        return self._task is not None and not self._task.done()

    def begin(self, supervisor: Supervisor, count: Callable[[], Coroutine[Any, Any, T]], name: str) -> None:
        """Start a count in the background, unless one is running."""
        if not self.running:
            self._task = supervisor.background(self._count(count), name)

    async def _count(self, count: Callable[[], Coroutine[Any, Any, T]]) -> None:
        try:
            self.result, self.problem = await count(), None
        except Exception as error:  # the page shows it
            self.problem = f"{type(error).__name__}: {error}"
        self.at = self._runtime.wall()


class ClientCache:
    """See the header. One per client."""

    def __init__(self, client: Client) -> None:
        client._stack.supervisor.background(client._stack.compute(warm_up_reading), "import what pages need")
        self.census = Census(client)
        self.usage: Count[Usage] = Count(client._stack.runtime)
        self.reads = Reads()
        self.works = Works()
        self.live_streams = 0
        self._shards: OrderedDict[str, Shard] = OrderedDict()
        self._opening: dict[str, asyncio.Task[Shard]] = {}

    async def shard_soon(self, client: Client, name: str) -> Shard:
        """As `shard`, but raises `StillReading` after `WAIT_S`; the reading continues."""
        task = self._opening.get(name)
        if task is None:
            work = self.shard(client, name)
            task = client._stack.supervisor.spawn(work, "read the state of a shard", abandon=True)
            self._opening[name] = task
            task.add_done_callback(lambda task: self._opening.pop(name, None))
        await asyncio.wait([task], timeout=WAIT_S)
        if not task.done():
            raise StillReading
        return task.result()

    async def shard(self, client: Client, name: str) -> Shard:
        """The shard or `Indexed` with this name or id, and its newest state. The last few stay in memory, so
        their next page reads only new versions. `UnknownShard`, `ShardFinalized`."""
        with client._shards.calls.call():
            shard = client._shards.at(await resolve_any(client._stack, name), name)
            await shard.open()
        self._shards[shard.id] = shard
        self._shards.move_to_end(shard.id)
        while len(self._shards) > SHARDS_KEPT:
            self._shards.popitem(last=False)
        return shard
