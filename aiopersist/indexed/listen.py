"""Listeners of a stream: per commit its new updates, then the time to which it is sealed.

A *feed* tells its listeners of each version that changes streams, once and in order. The owner's commits go
to the owner's feed without any I/O; a reader's feed reads the versions, once for all its listeners. A
listener queues only metadata: it fetches the updates when the user takes them, and pins the versions until
then.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

from aiopersist.base.errors import Error, LeaseExpired
from aiopersist.base.resource import Resource, Scope
from aiopersist.data.updates.updates import Updates
from aiopersist.indexed.snapshot import StreamSnapshot
from aiopersist.parts.fetch import Fetch, Selection
from aiopersist.parts.named_parts import of_unsealed
from aiopersist.shard.log import Truncated, decoded, versions_between
from aiopersist.shard.shard import Shard
from aiopersist.state.model import State
from aiopersist.state.streams import StreamsChanges, UnsealedBatch

K = TypeVar("K")
V = TypeVar("V")


class Records(NamedTuple, Generic[K, V]):
    """All updates that one commit wrote to the stream, in the order of its writes."""

    updates: Updates[K, V, int]


class Sealed(NamedTuple):
    """The updates at times before `time` are complete."""

    time: int


class Events(NamedTuple):
    """The changes of a stream by one version."""

    seqno: int
    """The seqno of the version."""
    batch: UnsealedBatch | None
    seal: int | None


class RecordFeed:
    """See the header. `follows`: the feed reads the versions itself."""

    def __init__(self, shard: Shard, *, follows: bool) -> None:
        self._shard = shard
        self._follows = follows
        self._listeners: dict[str, set[Listener[Any, Any]]] = {}
        self._at = 0
        self._following: asyncio.Task[None] | None = None

    def add(self, listener: "Listener[Any, Any]") -> None:
        """Tell the listener of all versions after the newest one here."""
        if not self._listeners:
            self._at = self._shard.state.seqno
        self._listeners.setdefault(listener.stream, set()).add(listener)
        self.follow()

    def remove(self, listener: "Listener[Any, Any]") -> None:
        """Stop telling the listener. Idempotent."""
        others = self._listeners.get(listener.stream, set())
        others.discard(listener)
        if not others:
            self._listeners.pop(listener.stream, None)
        if not self._listeners and self._following is not None:
            self._following.cancel()
            self._following = None

    def publish(self, seqno: int, changes: StreamsChanges | None) -> None:
        """Tell the listeners that version `seqno` made these changes."""
        self._at = max(self._at, seqno)
        for name, listeners in list(self._listeners.items()):
            events = _events(name, seqno, changes)
            destroyed = changes is not None and name in changes.destroyed
            for listener in list(listeners):
                listener.hear(seqno, events, ends=destroyed)

    def fail(self, error: Error) -> None:
        """End all listeners with `error`; they still deliver queued events."""
        for listener in self._every():
            listener.fail(error, keep=True)

    def end(self) -> None:
        """End all listeners; they still deliver queued events."""
        for listener in self._every():
            listener.finish()

    def follow(self) -> None:
        """Read the versions, if this is a reader's feed. After a failure the next wait starts again."""
        if self._follows and self._listeners and (self._following is None or self._following.done()):
            supervisor = self._shard.stack.supervisor
            self._following = supervisor.background(self._follow(), "follow the versions of an Indexed")

    async def _follow(self) -> None:
        try:
            while True:
                newest: int = await self._shard.register.wait(self._newer)
                try:
                    await self._read(newest)
                except Truncated:
                    await self._skip()
        except Exception as error:
            for listener in self._every():
                listener.interrupt(error)
            if not isinstance(error, Error):
                raise

    async def _skip(self) -> None:
        """Continue with the first stored version; listeners that missed an earlier version end."""
        versions = await self._shard.stack.consensus.scan(self._shard.register.key, 0, 1)
        if not versions:
            return
        self._at = max(self._at, versions[0].seqno - 1)
        for listener in self._every():
            if listener.after < self._at:
                text = "versions were deleted before the listener read them: take a snapshot and listen again"
                listener.fail(LeaseExpired(text, shard_id=self._shard.id))

    def _every(self) -> "list[Listener[Any, Any]]":
        return [listener for every in self._listeners.values() for listener in every]

    def _newer(self, state: State) -> int | None:
        return state.seqno if state.seqno > self._at else None

    async def _read(self, newest: int) -> None:
        stack = self._shard.stack
        async for versions in versions_between(stack, self._shard.id, self._at + 1, newest):
            size = sum(len(version.data) for version in versions)
            diffs = await stack.compute_few(size, decoded, versions, self._shard.id)
            for diff in diffs:
                if diff.seqno == self._at + 1:  # not read meanwhile
                    self.publish(diff.seqno, diff.changes.streams)
                    await stack.runtime.sleep(0)  # listeners may take it before the next one


def _events(name: str, seqno: int, changes: StreamsChanges | None) -> Events | None:
    """The changes of the stream of that name, for its listeners. A batch is new if the stream's seqno moved
    to its end; other batches were trimmed."""
    change = changes.arrangements.get(name) if changes is not None else None
    if change is None or (change.seqno is None and change.seal is None):
        return None
    new = (batch for batch in change.unsealed.values() if batch.seqno_upper == change.seqno)
    return Events(seqno, next(new, None), change.seal)


class Listener(Resource, Generic[K, V]):
    """An async iterator of `Records` and `Sealed`. A wait may be cancelled and repeated without losing any.
    It ends when the stream is destroyed or the `Indexed` is stopped. `LeaseExpired` if it fell behind,
    `Fenced` if another instance has taken over. A request per part that is not inline; the listeners of a
    `readonly` instance also read the new versions, once for all."""

    def __init__(self, stream: str, fetch: Fetch, feed: RecordFeed, reader: str, queue_max: int) -> None:
        self.stream = stream
        self._scope = Scope("the listener", None, fetch.shard.id)  # it outlives the Indexed
        self._fetch = fetch
        self._feed = feed
        self._reader = reader
        self._queue_max = queue_max
        self._queue: deque[Events] = deque()
        self._batch_is_delivered = False  # of the first events in the queue
        self.after = fetch.shard.state.seqno
        """The seqno of the last version that the feed told it of."""
        self._unpin: Callable[[], None] = fetch.shard.register.pin(fetch.shard.state.seqno)
        self._woken = asyncio.Event()
        self._turn = asyncio.Lock()
        self._ended = False
        self._failure: Error | None = None
        self._interruption: Exception | None = None
        feed.add(self)

    def __aiter__(self) -> "Listener[K, V]":
        return self

    async def __anext__(self) -> Records[K, V] | Sealed:
        with self._scope.call():
            async with self._turn:
                while not self._queue:
                    await self._wait()
                events = self._queue[0]
                if events.batch is not None and not self._batch_is_delivered:
                    parts = of_unsealed([events.batch])
                    records = await self._fetch.updates(parts, Selection(), self._reader)
                    if self._failure is not None and not self._queue:
                        raise self._failure
                    self._batch_is_delivered = True  # no await from here
                    self._take(done=events.seal is None)
                    return Records(records)
                assert events.seal is not None
                self._take(done=True)
                return Sealed(events.seal)

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise StopAsyncIteration
        if self._interruption is not None:
            error, self._interruption = self._interruption, None
            raise error
        self._feed.follow()
        self._woken.clear()
        await self._woken.wait()

    def _take(self, *, done: bool) -> None:
        """Remove the first events from the queue if all of them are `done`."""
        if done:
            self._batch_is_delivered = False
            self._move_pin(self._queue.popleft().seqno)

    # --- called by the feed ----------------------------------------------------------------------

    def hear(self, seqno: int, events: Events | None, *, ends: bool) -> None:
        """Queue the events of one version for this stream."""
        if seqno <= self.after or self._ended or self._failure is not None:
            return
        self.after = seqno
        if events is not None:
            self._queue.append(events)
        elif not self._queue:
            self._move_pin(seqno)
        if len(self._queue) > self._queue_max:
            text = f"the listener is more than {self._queue_max} commits behind"
            self.fail(LeaseExpired(text, shard_id=self._fetch.shard.id))
        elif ends:
            self.finish()
        self._woken.set()

    def finish(self) -> None:
        """End; deliver the events in the queue first."""
        self._ended = True
        self._feed.remove(self)
        if not self._queue:
            self._unpin()
        self._woken.set()

    def fail(self, error: Error, *, keep: bool = False) -> None:
        """End with `error`; the events in the queue are lost, unless `keep`."""
        self._failure = error
        if not keep:
            self._queue.clear()
        if not self._queue:
            self._unpin()
        self._feed.remove(self)
        self._woken.set()

    def interrupt(self, error: Exception) -> None:
        """Raise `error` in the waiting call; the next call waits again."""
        if self._turn.locked():
            self._interruption = error
            self._woken.set()

    async def aclose(self) -> None:
        """Stop, and drop the events in the queue. Idempotent."""
        self._scope.close()
        self._queue.clear()
        self.finish()

    def _move_pin(self, seqno: int) -> None:
        if (self._ended or self._failure is not None) and not self._queue:
            self._unpin()
            return
        unpin, self._unpin = self._unpin, self._fetch.shard.register.pin(seqno)
        unpin()


class Listening(NamedTuple, Generic[K, V]):
    """A snapshot and the listener of all later events. Unpack it, or use `async with`, which closes both."""

    snapshot: StreamSnapshot[K, V]
    listener: Listener[K, V]

    async def aclose(self) -> None:
        """Close both. Idempotent."""
        try:
            await self.listener.aclose()
        finally:
            await self.snapshot.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
