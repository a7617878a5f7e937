"""The public calls of an `Indexed`: many named streams in one durable state, sealed together.

async with client.indexed("orders") as ix:
    placed = await ix.register("placed", str, int)
    paid = await ix.register("paid", str, int)
    await ix.write([(placed, [("a", 1, 12, 1)]), (paid, [("a", 1, 15, 1)])])
    await ix.seal([placed, paid], 13)
"""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar, overload

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import Antichain, Description, Time, shaped
from aiopersist.base.resource import Opening, Resource, Scope
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.inputs import GivenUpdates, own_copy
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
from aiopersist.shard.catalog import check_name
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard

K = TypeVar("K")
V = TypeVar("V")

TURNS = 4  # of the event loop, from the outcome of a command to the end of its call


class IndexedScope(Scope):
    """The life of an `Indexed`: calls after its end are `Stopped`."""

    def closed_error(self, message: str) -> InvalidUsage:
        return self.sign(Stopped(message))


class Indexed(Resource):
    """Many named streams that are sealed together. Serves many tasks at once.

    One instance at a time may change the streams: a new one takes over, and the calls of the earlier one are
    `Fenced` from its next commit on. A `readonly` instance follows: each call reads the head first, and calls
    that change anything are `InvalidUsage`.

    Each command (`write`, `seal`, `allow_compaction`) takes the next seqno, in the order of the calls, even
    if it is `Refused`. One compare-and-set makes all commands durable that arrive together: one request,
    after one request per part of large updates. Reads see only durable data. An unknown outcome
    (`Indeterminate`) is settled before the next command.

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

    @overload
    async def register(self, name: str, key: type[K], val: type[V]) -> "Stream[K, V]": ...
    @overload
    async def register(self, name: str, key: type[K], val: None) -> "Stream[K, None]": ...
    @overload
    async def register(self, name: str, key: Any, val: Any) -> "Stream[Any, Any]": ...

    async def register(self, name: str, key: Any, val: Any) -> "Stream[Any, Any]":
        """The stream of that name; creates it with seal and since at 0 if it does not exist. `key` and `val`
        as for a `Schema`. `CodecMismatch` if the stream has other types, `UnknownStream` if it was destroyed.
        One commit for a new stream."""
        with self._call(changes=True):
            stream = Stream(check_name(name), Schema(key, val))
            await self._committer.run(RegisterStream(stream.name, stream.schema))
            return stream

    @overload
    async def load(self, name: str, key: type[K], val: type[V]) -> "Stream[K, V] | None": ...
    @overload
    async def load(self, name: str, key: type[K], val: None) -> "Stream[K, None] | None": ...
    @overload
    async def load(self, name: str, key: Any, val: Any) -> "Stream[Any, Any] | None": ...

    async def load(self, name: str, key: Any, val: Any) -> "Stream[Any, Any] | None":
        """As `register`, but creates nothing: `None` if the stream does not exist."""
        with self._call():
            stream = Stream(check_name(name), Schema(key, val))
            await self._now()
            if name in self._core.streams.destroyed:
                self._core.arrangement(name)  # raises `UnknownStream`
            if name not in self._core.streams.names:
                return None
            self._core.check_schema(stream)
            return stream

    async def destroy(self, name: "str | Stream[Any, Any]") -> bool:
        """Forget a stream and its data for ever. Returns `True`, or `False` if it was destroyed before. Its
        listeners end; open snapshots stay. `UnknownStream` if it was never registered. One commit."""
        with self._call(changes=True):
            destroyed: bool = await self._committer.run(Destroy(_name(name)))
            return destroyed

    async def description(self, name: "str | Stream[Any, Any]") -> Description:
        """The description of the stream: its lower is 0, its upper the seal. `UnknownStream`."""
        with self._call():
            await self._now()
            arrangement = self._core.arrangement(_name(name))
            return Description(0, arrangement.seal, arrangement.since)

    # --- commands --------------------------------------------------------------------------------

    async def write(self, updates: "Iterable[tuple[Stream[Any, Any], GivenUpdates[Any, Any]]]") -> int:
        """Write to several streams, all or nothing: pairs of a stream and updates, as for
        `compare_and_append`, in any order of times. Returns the seqno once the write is durable. `Refused` if
        a time is before its stream's seal, or a stream does not exist. `InvalidUpdate` for updates that
        cannot be stored; this takes no seqno. Later commands wait for the end of all iterators of updates."""
        with self._call(changes=True):
            pairs = _pairs(updates, "updates")
            entries = [
                (StreamUpdates(_stream(stream).name, stream.schema), own_copy(rows)) for stream, rows in pairs
            ]
            return await self._committer.write(entries)

    async def seal(self, streams: "Iterable[Stream[Any, Any]]", time: int) -> int:
        """Close the times before `time`, in all of these streams or in none. Returns the seqno. `Refused` if
        a stream is sealed beyond `time`, or does not exist."""
        with self._call(changes=True):
            names = tuple(_stream(stream).name for stream in _iterable(streams, "streams"))
            return await self._command(Seal(names, _time(time)))

    async def allow_compaction(self, sinces: "Iterable[tuple[Stream[Any, Any], Antichain | int]]") -> int:
        """Let history before these sinces be forgotten, in all of the streams or in none. A since may be
        beyond the seal. Returns the seqno. `Refused` if a since would go back, or a stream does not exist."""
        with self._call(changes=True):
            pairs = _pairs(sinces, "sinces")
            moved = tuple((_stream(stream).name, _time(since)) for stream, since in pairs)
            return await self._command(AllowCompaction(moved))

    # --- reading ---------------------------------------------------------------------------------

    def snapshot(self, stream: "Stream[K, V]") -> Opening[StreamSnapshot[K, V]]:
        """The durable contents of the stream now. Close the snapshot after use. No request for the owner; one
        for a `readonly` instance."""

        async def open_snapshot() -> StreamSnapshot[K, V]:
            with self._call():
                return (await self._read(stream))[0]

        return Opening(open_snapshot, "indexed.snapshot(...)")

    def listen(self, stream: "Stream[K, V]") -> Opening[Listening[K, V]]:
        """A snapshot, and a listener of everything after it: per commit at most one `Records`, then at most
        one `Sealed`. Close both; `async with` does."""

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
        """The batches and frontiers of the stream, for people and dashboards."""
        with self._call():
            await self._now()
            name = _name(stream)
            return view_of(self._core.arrangement(name), in_flight=self._maintenance.in_flight(name))

    def counters(self) -> dict[str, int | float]:
        """Sizes in the newest state of this instance, and counts of its work since it opened. No request."""
        self._check()
        return self._core.counters()

    # --- maintenance -----------------------------------------------------------------------------

    async def step(self) -> list[CompactionRequest]:
        """One round of maintenance by hand: moves sealed updates from the unsealed batches to the traces, and
        collects garbage if it is due. Returns the compactions that are due. Does all that it can, then raises
        the first failure. No request if there is nothing to do."""
        with self._call(changes=True):
            return await self._maintenance.step()

    async def compact(self, request: CompactionRequest) -> CompactionResponse:
        """Carry out a compaction that `step` returned; pass the result or the error to `apply`. Requests for
        every part that is read or written."""
        with self._call(changes=True):
            if not isinstance(request, CompactionRequest):
                raise InvalidUsage(UsageKind.INVALID_TYPE, f"{shown(request)} is not a CompactionRequest")
            await self._committer.flush()
            return await self._maintenance.compact(request)

    async def apply(
        self, stream: "str | Stream[Any, Any]", response: CompactionResponse | BaseException
    ) -> None:
        """Replace the inputs of a compaction by its result. A result that no step requested, or that no
        longer fits, changes nothing and is counted. After an error a later step returns the request again.
        One commit."""
        with self._call(changes=True):
            if not isinstance(response, CompactionResponse | BaseException):
                raise InvalidUsage(UsageKind.INVALID_TYPE, f"{shown(response)} is no response and no error")
            await self._committer.flush()
            await self._maintenance.apply(_name(stream), response)

    # --- the end ---------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Commit the pending commands, end the listeners, and give up the ownership. If the commit fails, its
        callers get the error, and the `Indexed` still stops. Idempotent."""
        if self._stopping is None:
            self._scope.check_place()
            self._stopping = self._stack.supervisor.spawn(self._stop(), "stop an Indexed")
        await self._stack.supervisor.released(self._stopping)

    async def aclose(self) -> None:
        """`stop`."""
        await self.stop()

    async def _stop(self) -> None:
        self._background.stop()
        with suppress(Exception):  # TimeoutError, too; its callers get the error
            async with asyncio.timeout(self._stack.supervisor.patience_s()):
                await self._committer.flush()
        await self._committer.aclose()
        for _ in range(TURNS):  # calls that were answered return
            await self._stack.runtime.sleep(0)
        self._core.feed.end()
        self._scope.close()
        async with AsyncExitStack() as steps:  # the last step runs first; all run, even if one fails
            steps.push_async_callback(self._shard.hold.release)
            steps.push_async_callback(self._maintenance.garbage.registration.release)
            if self._core.owner is not None and self._core.fenced is None:
                leave = Leave(self._core.owner)
                steps.push_async_callback(commit, self._shard.register, leave)

    # --- common to all calls ---------------------------------------------------------------------

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
        """Bring the state in memory up to date: with all that was durable, or called, before this call."""
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
    text = f"{shown(value)} is not a stream: use one that register or load returned"
    raise InvalidUsage(UsageKind.INVALID_TYPE, text, value=value)


def _name(value: "str | Stream[Any, Any]") -> str:
    return value.name if isinstance(value, Stream) else check_name(value)


def _time(value: "Antichain | Time") -> int:
    bound = shaped(value, None)
    if not bound.elements:
        raise InvalidUsage(UsageKind.INVALID_TIME, "the time may not be the empty frontier {}", time=value)
    time = bound.time
    assert isinstance(time, int)
    return time


def _iterable(values: Any, argument: str) -> Iterable[Any]:
    if isinstance(values, Stream) or not isinstance(values, Iterable):
        raise InvalidUsage(UsageKind.INVALID_TYPE, f"{argument} is {shown(values)}, not a list", value=values)
    return values


def _pairs(values: Any, argument: str) -> list[tuple[Any, Any]]:
    pairs = []
    for pair in _iterable(values, argument):
        if not isinstance(pair, tuple | list) or isinstance(pair, Stream) or len(pair) != 2:
            text = f"{argument} has {shown(pair)}, not a pair with a stream"
            raise InvalidUsage(UsageKind.INVALID_TYPE, text, value=pair)
        first, second = pair  # an iterator may fill one list anew for each
        pairs.append((first, second))
    return pairs
