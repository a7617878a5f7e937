"""Many named streams in one durable state, sealed together.

async with client.indexed("orders") as ix:
    placed = await ix.register("placed", str, int)
    paid = await ix.register("paid", str, int)
    await ix.write([(placed, [("a", 1, 12, 1)]), (paid, [("a", 1, 15, 1)])])
    await ix.seal([placed, paid], 13)
"""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from aiopersist.data.types.schema import Schema
from aiopersist.errors import InvalidUsage, UsageKind, shown
from aiopersist.frontier import Antichain, Description, Time, shaped
from aiopersist.indexed.background import Background
from aiopersist.indexed.commands import Leave
from aiopersist.indexed.committer import Committer
from aiopersist.indexed.core import Core, Stream
from aiopersist.indexed.draft import AllowCompaction, Destroy, RegisterStream, Seal, StreamUpdates
from aiopersist.indexed.errors import Stopped
from aiopersist.indexed.listen import Listener, Listening
from aiopersist.indexed.maintenance import CompactionRequest, CompactionResponse, StreamsMaintenance
from aiopersist.indexed.snapshot import StreamSnapshot
from aiopersist.indexed.view import StreamView, view_of
from aiopersist.parts.fetch import Fetch
from aiopersist.resource import RELEASE_DEADLINE_S, Opening, Resource, Scope
from aiopersist.shard.attempt import Slot
from aiopersist.shard.catalog import check_name
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard

K = TypeVar("K")
V = TypeVar("V")

TURNS = 4  # of the loop: from the outcome of a command to the end of its call


class IndexedScope(Scope):
    """The life of an `Indexed`: what comes after its end is `Stopped`."""

    def closed_error(self, message: str) -> InvalidUsage:
        return self.sign(Stopped(message))


class Indexed(Resource):
    """Serves many tasks at once. One instance at a time may change it: opening takes over from the one
    before, whose calls are `Fenced` from its next commit on. Opened `readonly` it follows along: each call
    reads the head first, and calls that change anything are `InvalidUsage`.

    Commands (`write`, `seal`, `allow_compaction`) take the next seqno each, in the order in which they were
    called, also when they are `Refused`. Those that arrive together are made durable by one compare-and-set,
    which costs one request; large updates cost a request per part before it. Nobody sees what is not durable.
    If the outcome is unknown (`Indeterminate`), it is decided before anything else is done.

    After `stop`, every call is `Stopped`.
    """

    def __init__(self, shard: Shard, core: Core, parent: Scope, *, background: bool) -> None:
        self._scope = IndexedScope("the Indexed", parent, shard.id, lambda _: shard.label)
        self._shard = shard
        self._core = core
        self._stack = shard.stack
        self._committer = Committer(core)
        self._maintenance = StreamsMaintenance(core, self._committer)
        self._background = Background(core, self._maintenance)
        self._stopping: asyncio.Task[None] | None = None
        if background and core.owner is not None:
            self._background.start()

    # --- streams ---------------------------------------------------------------------------------

    async def register(self, name: str, key: Any, val: Any) -> "Stream[Any, Any]":
        """The stream of that name; created with seal and since at 0 if it is not there. `key` and `val` are
        what a `Schema` takes. `CodecMismatch` if it stores others, `UnknownStream` if it was destroyed. One
        commit for a new one."""
        with self._call(changes=True):
            stream = Stream(check_name(name), Schema(key, val))
            await self._committer.run(RegisterStream(stream.name, stream.schema))
            return stream

    async def load(self, name: str, key: Any, val: Any) -> "Stream[Any, Any] | None":
        """The stream of that name, or `None`: as `register`, but creates nothing."""
        with self._call():
            stream = Stream(check_name(name), Schema(key, val))
            await self._now()
            if name in self._core.streams.destroyed:
                self._core.arrangement(name)  # says so
            if name not in self._core.streams.names:
                return None
            self._core.check_schema(stream)
            return stream

    async def destroy(self, name: "str | Stream[Any, Any]") -> bool:
        """Forget a stream and its data, for ever: `True` by the call that did it, `False` after. Its
        listeners end; open snapshots stay. `UnknownStream` if it was never registered. One commit."""
        with self._call(changes=True):
            gone: bool = await self._committer.run(Destroy(_name(name)))
            return gone

    async def description(self, name: "str | Stream[Any, Any]") -> Description:
        """Lower 0, upper = seal, and since, of the stream; `UnknownStream`."""
        with self._call():
            await self._now()
            found = self._core.arrangement(_name(name))
            return Description(0, found.seal, found.since)

    # --- commands --------------------------------------------------------------------------------

    async def write(self, updates: "Iterable[tuple[Stream[Any, Any], Any]]") -> int:
        """Write to several streams, all or nothing: pairs of a stream and updates, as `compare_and_append`
        takes them, in any order of times. Returns the seqno, once it is durable. `Refused` if a time is not
        at or beyond its stream's seal, or a stream is not there; `InvalidUpdate` for what cannot be stored,
        which takes no seqno. Later commands wait until the updates were read from an iterator."""
        with self._call(changes=True):
            pairs = _pairs(updates, "updates")
            entries = [(StreamUpdates(_stream(stream).name, stream.schema), given) for stream, given in pairs]
            return await self._committer.write(entries)

    async def seal(self, streams: "Iterable[Stream[Any, Any]]", time: int) -> int:
        """No more updates at times before `time`: of all of these streams, or of none. Returns the seqno.
        `Refused` if one is sealed beyond it, or not there."""
        with self._call(changes=True):
            names = tuple(_stream(stream).name for stream in _iterable(streams, "streams"))
            return await self._command(Seal(names, _time(time)))

    async def allow_compaction(self, sinces: "Iterable[tuple[Stream[Any, Any], Antichain | int]]") -> int:
        """History before these sinces may be forgotten: of all of the streams, or of none. A since may be
        beyond the seal. Returns the seqno. `Refused` for one that would go back, or a stream that is not
        there."""
        with self._call(changes=True):
            pairs = _pairs(sinces, "sinces")
            moved = tuple((_stream(stream).name, _time(since)) for stream, since in pairs)
            return await self._command(AllowCompaction(moved))

    # --- reading ---------------------------------------------------------------------------------

    def snapshot(self, stream: "Stream[K, V]") -> Opening[StreamSnapshot[K, V]]:
        """All that is durable now. Close it when you are done. No request for the owner; one for a reader."""

        async def open_snapshot() -> StreamSnapshot[K, V]:
            with self._call():
                return (await self._read(stream))[0]

        return Opening(open_snapshot, "indexed.snapshot(...)")

    def listen(self, stream: "Stream[K, V]") -> Opening[Listening[K, V]]:
        """A pair: a snapshot, and what comes after exactly that: per commit one `Records`, then one `Sealed`,
        as far as there was anything. Close both; `async with` does."""

        async def open_listen() -> Listening[K, V]:
            with self._call():
                snapshot, fetch = await self._read(stream)  # no await from there to here
                hold, queue_max = self._shard.hold, self._stack.settings.listen_queue_max
                listener: Listener[K, V] = Listener(
                    stream.name, fetch, self._core.feed, hold.reader, queue_max
                )
                return Listening(snapshot, listener)

        return Opening(open_listen, "indexed.listen(...)")

    async def inspect(self, stream: "str | Stream[Any, Any]") -> StreamView:
        """The stream from within."""
        with self._call():
            await self._now()
            name = _name(stream)
            return view_of(self._core.arrangement(name), in_flight=self._maintenance.in_flight(name))

    def counters(self) -> dict[str, int | float]:
        """How much is there, by what is known here, and what this instance has done since it was opened. No
        request."""
        self._check()
        return self._core.counters()

    # --- maintenance -----------------------------------------------------------------------------

    async def step(self) -> list[CompactionRequest]:
        """One round of maintenance by hand: what is sealed moves to the traces, what is in the traces leaves
        the unsealed batches, and garbage is collected if it is due. Returns the compactions that are wanted.
        Raises what failed. With nothing to do it makes no request."""
        with self._call(changes=True):
            return await self._maintenance.step()

    async def compact(self, request: CompactionRequest) -> CompactionResponse:
        """Carry out what a step has asked for; hand the result, or the error, to `apply`."""
        with self._call(changes=True):
            if not isinstance(request, CompactionRequest):
                raise InvalidUsage(UsageKind.INVALID_TYPE, f"{shown(request)} is no request of a step")
            await self._committer.flush()
            return await self._maintenance.compact(request)

    async def apply(
        self, stream: "str | Stream[Any, Any]", response: CompactionResponse | BaseException
    ) -> None:
        """Replace the inputs of a compaction by its result. One that was not asked for, or no longer fits,
        changes nothing and is counted; after an error it is asked for again. One commit."""
        with self._call(changes=True):
            if not isinstance(response, CompactionResponse | BaseException):
                raise InvalidUsage(UsageKind.INVALID_TYPE, f"{shown(response)} is no response, and no error")
            await self._committer.flush()
            await self._maintenance.apply(_name(stream), response)

    # --- the end ---------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Commit what is pending, end the listeners, let go. If that commit fails its callers get the error,
        and it stops all the same. Idempotent."""
        if self._stopping is None:
            self._scope.check_place()
            self._stopping = self._stack.supervisor.spawn(self._stop(), "stop an Indexed")
        await asyncio.wait([self._stopping], timeout=2 * RELEASE_DEADLINE_S)

    async def aclose(self) -> None:
        """`stop`."""
        await self.stop()

    async def _stop(self) -> None:
        self._background.stop()
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await self._committer.flush()
        except Exception:  # TimeoutError, too
            pass  # its callers know
        await self._committer.aclose()
        for _ in range(TURNS):  # who was answered returns
            await self._stack.runtime.sleep(0)
        self._core.feed.end()
        self._scope.close()
        async with AsyncExitStack() as steps:  # the last one first; each of them, whatever fails
            steps.push_async_callback(self._shard.hold.release)
            steps.push_async_callback(self._maintenance.garbage.registration.release)
            if self._core.owner is not None and self._core.fenced is None:
                leave = Leave(self._core.owner)
                steps.push_async_callback(commit, self._shard.register, leave, Slot())

    # --- what all calls do -----------------------------------------------------------------------

    def _call(self, *, changes: bool = False) -> Any:
        self._check()
        if changes:
            self._core.check_owner()
        return self._scope.call()

    def _check(self) -> None:
        if self._stopping is not None:
            raise self._scope.closed_error("the Indexed is stopped")
        self._scope.check()
        if self._core.owner is not None:
            self._core.check_owner()

    async def _now(self) -> None:
        """From here on the state in memory holds all that was durable, or asked for, when the call began."""
        if self._core.owner is not None:
            await self._committer.flush()
        else:
            await self._shard.open()

    async def _read(self, stream: "Stream[K, V]") -> "tuple[StreamSnapshot[K, V], Fetch]":
        core, hold = self._core, self._shard.hold
        name = _stream(stream).name
        await self._now()
        await hold.ensure()
        while not hold.registered:
            await hold.ensure()
        arrangement = core.arrangement(name)  # no await from here to the pin
        core.check_schema(stream)
        fetch = Fetch(self._shard, stream.schema)
        return StreamSnapshot(self._scope, fetch, hold, arrangement, core.streams.seqno), fetch

    async def _command(self, command: Seal | AllowCompaction) -> int:
        seqno: int = await self._committer.run(command)
        return seqno

    def __repr__(self) -> str:
        return f"<Indexed {self._shard.id}: {len(self._core.streams.names)} streams>"


def _stream(value: Any) -> "Stream[Any, Any]":
    if isinstance(value, Stream):
        return value
    text = f"{shown(value)} is not a stream that register or load has given"
    raise InvalidUsage(UsageKind.INVALID_TYPE, text, value=value)


def _name(value: "str | Stream[Any, Any]") -> str:
    return value.name if isinstance(value, Stream) else check_name(value)


def _time(value: "Antichain | Time") -> int:
    found = shaped(value, None)
    if not found.elements:
        raise InvalidUsage(UsageKind.INVALID_TIME, "it may not be the empty frontier {}", time=value)
    time = found.time
    assert isinstance(time, int)
    return time


def _iterable(values: Any, what: str) -> list[Any]:
    if isinstance(values, Stream) or not isinstance(values, Iterable):
        raise InvalidUsage(UsageKind.INVALID_TYPE, f"{what} is {shown(values)}, not a list", value=values)
    return list(values)


def _pairs(values: Any, what: str) -> list[tuple[Any, Any]]:
    found = _iterable(values, what)
    for pair in found:
        if not isinstance(pair, tuple | list) or isinstance(pair, Stream) or len(pair) != 2:
            text = f"{what} has {shown(pair)}, not a pair with a stream"
            raise InvalidUsage(UsageKind.INVALID_TYPE, text, value=pair)
    return [(first, second) for first, second in found]
