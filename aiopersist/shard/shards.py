"""The shards of one client by id, and the life of its handles. Each call of `Client` forwards to a
function of the package that carries it out, with the `Shards` as its first argument.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from aiopersist.base.ending import both
from aiopersist.base.errors import Error
from aiopersist.base.resource import Handle, Opening, Scope, run_bounded
from aiopersist.base.runtime import Runtime
from aiopersist.base.settings import Settings
from aiopersist.base.supervisor import Supervisor
from aiopersist.measure.providers import Measures
from aiopersist.shard.catalog import ShardId, resolve, resolve_or_create
from aiopersist.shard.clock import StoreClock
from aiopersist.shard.follow import Follower
from aiopersist.shard.register import Register
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.consensus import Consensus

H = TypeVar("H", bound=Handle)

KEPT_FOR_PIECES = 8  # shards
CLOSE_AT_ONCE = 64  # handles closed at the same time, so that their commits share a few statements


class Shards:
    """See the header."""

    def __init__(
        self,
        blob: CacheBlob,
        consensus: Consensus,
        measures: Measures,
        settings: Settings,
        runtime: Runtime,
        *,
        readonly: bool,
    ) -> None:
        self._open: WeakValueDictionary[str, Shard] = WeakValueDictionary()
        label_of = _labels(self._open)
        self.calls = Scope("the client", label_of=label_of)
        """The scope of the client's calls. It ends first, so that no new call begins."""
        self.scope = Scope("the client", label_of=label_of)
        """The scope of handles. It ends after they are closed."""
        owner = Supervisor(runtime, label_of)
        owner.background_context = measures.tracing.background_context
        follower = Follower(consensus, settings.watch_timeout_s, owner)
        clock = StoreClock(consensus, runtime)
        self.stack = Stack(
            blob,
            consensus,
            settings,
            runtime,
            owner,
            follower,
            clock,
            runtime.token(),
            readonly=readonly,
            metrics=measures.metrics,
            tracing=measures.tracing,
        )
        self.on_new: Callable[[Shard], None] = lambda shard: None
        """Called with each shard that is seen for the first time."""
        self._handles: dict[Handle, None] = {}  # no set: they are closed in a fixed order
        self._openings: set[asyncio.Future[None]] = set()
        self._recent: deque[Shard] = deque(maxlen=KEPT_FOR_PIECES)

    def at(self, shard_id: ShardId, name: str | None = None) -> Shard:
        """The shard of that id, whether it exists or not; `name` is its name for the user. No I/O."""
        shard = self._open.get(shard_id)
        if shard is None:
            shard = self._open[shard_id] = Shard(self.stack, shard_id)
            self.on_new(shard)
        if name is not None and name != shard_id:
            shard.name = name
        return shard

    async def existing(self, name: str) -> Shard:
        """The shard of that name or id, with its newest state; `UnknownShard`."""
        shard = self.at(await resolve(self.stack, name), name)
        await shard.open()
        return shard

    async def of_a_piece(self, name: str) -> Shard:
        """`existing`, for a piece of work of another process. No handle keeps this shard alive, so the last
        few are kept here: otherwise each piece would load the state again."""
        shard = await self.existing(name)
        self._recent.append(shard)
        return shard

    async def named(self, name: str) -> Shard:
        """The shard of that name or id; a free name gets the id of a shard that does not exist yet."""
        return self.at(await resolve_or_create(self.stack, name, ShardId), name)

    def opening(self, opener: Callable[[], Awaitable[H]], call: str) -> Opening[H]:
        """The opening of the handle that `opener` returns; `call` is the user's call, for messages."""
        return Opening(lambda: self._opened(opener), call)

    def clock(self) -> tuple[float, float]:
        """See `Client.clock`."""
        clock = self.stack.clock
        if clock.is_due:
            self.stack.supervisor.background(clock.renew(), "measure the clock")
        return clock.read()

    def registers(self) -> list[Register]:
        """The states of the shards that are open."""
        return [shard.register for reference in self._open.valuerefs() if (shard := reference()) is not None]

    def handles(self) -> list[Handle]:
        """Every handle that is open."""
        return list(self._handles)

    async def release(self) -> list[Error]:
        """End the calls, then close all handles. Returns their errors: acknowledgements that were lost."""
        self.calls.close()
        self.stack.supervisor.begin_end()
        closings = [partial(_closed, handle) for handle in self.handles()]
        _, errors = await both(self._drain, partial(run_bounded, CLOSE_AT_ONCE, closings))
        return [error for error in errors if error is not None]

    async def _opened(self, opener: Callable[[], Awaitable[H]]) -> H:
        self.calls.check()
        opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._openings.add(opening)
        try:
            with self.scope.call():
                handle = await opener()
            self._handles[handle] = None  # it must be closed even if the user forgets it
            handle._scope.on_close = partial(self._ended, handle, handle._scope.on_close)
            if self.calls.closed:
                await handle.aclose()
                self.calls.check()
            return handle
        finally:
            self._openings.discard(opening)
            opening.set_result(None)

    def _ended(self, handle: Handle, on_close: Callable[[], None]) -> None:
        self._handles.pop(handle, None)
        on_close()

    async def _drain(self) -> None:
        """Wait a moment for handles that are being opened; `_opened` then closes them."""
        if self._openings:
            await asyncio.wait(self._openings, timeout=self.stack.supervisor.patience_s())


async def _closed(handle: Handle) -> Error | None:
    try:
        await handle.aclose()
    except Error as error:
        return error
    return None


def _labels(shards: WeakValueDictionary[str, Shard]) -> Callable[[str], str | None]:
    """A function from the id of an open shard to its label for users. It does not keep the client alive."""

    def label_of(shard_id: str) -> str | None:
        shard = shards.get(shard_id)
        return None if shard is None else shard.label

    return label_of
