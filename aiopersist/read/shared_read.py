"""A read that several processes share: planned once, leased once, read in pieces anywhere.

1. Register a reader with a lease. It keeps the blobs of the version that registers it and of all later
   versions. The planning process and all reading processes renew the lease (`KeepReader`).
2. Plan on the current state: list the parts that may have updates of the range.
3. Divide them (`parts/divide.py`) into pieces of about equal size, encoded as bytes.
4. Any process reads a piece with `read_piece`: consolidated, and no row is in two pieces.
5. End the lease, or let it expire.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from operator import and_
from typing import Any

from aiopersist.base.errors import Error, InvalidUpdate, InvalidUsage
from aiopersist.base.frontier import Antichain, Time, shaped
from aiopersist.base.resource import Opening, Resource, Scope
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.parts.divide import Piece, check_schemas, checked_shard, divide, divide_with, piece_condition
from aiopersist.parts.envelope import Envelope
from aiopersist.parts.fetch import Fetch, Selection
from aiopersist.parts.runs import plan_runs
from aiopersist.read.leased import keep_lease, leased_batches
from aiopersist.read.puller import Items
from aiopersist.read.query import Query
from aiopersist.read.range import ALL, Range, check_held, checked, hold_of, not_complete, pinned
from aiopersist.read.tagged import check_alone, check_tag, read_tag
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit, settle
from aiopersist.shard.instant import close_if_passed, closed_when_passed, time_of
from aiopersist.shard.lease import check_lease_s, heartbeats
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.reading import ExpireReader, RegisterReader, RenewReader
from aiopersist.state.record import Record

log = logging.getLogger("aiopersist").getChild("leases")

ENVELOPE = Envelope("piece", format=1)


class TransmittedPiece(Record, frozen=True, kw_only=True):
    """A piece, encoded for another process."""

    shard: str
    reader: str
    """The reader whose lease keeps the blobs."""
    range: Range
    piece: Piece


class SharedRead(Resource):
    """The contents of a shard at one time, or its changes within a range of times, leased for several
    processes. `client.workers.shared_read` opens it."""

    def __init__(
        self, fetch: Fetch, state: State, times: Range, reader: str, lease_s: float, scope: Scope, keep: bool
    ) -> None:
        self._fetch = fetch
        self._range = times
        self._reader = reader
        self._keep = keep
        self._parts = times.parts(state)
        self._scope = Scope("the shared read", scope, fetch.shard.id)
        self._beating = None if keep else _heartbeats(fetch.shard, reader, lease_s)

    @property
    def schema(self) -> Schema[Any, Any, Any]:
        return self._fetch.schema

    @property
    def as_of(self) -> Time | None:
        """The time of the contents; `None` for changes."""
        return self._range.as_of

    @property
    def start(self) -> int | None:
        """The first time of the changes; `None` for contents."""
        return self._range.start

    @property
    def end(self) -> int | None:
        """The changes end before this time; `None` if the shard's upper is the empty frontier."""
        return self._range.end

    @property
    def updates_max(self) -> int:
        """An upper bound of the updates that are read: those in its parts."""
        return sum(part.rows for _, part in self._parts)

    async def pieces(self, tasks: int, where: Any = None) -> list[bytes]:
        """About `tasks` pieces, at least one, in the order of their rows, for `read_piece`. With `where` only
        of the parts and row groups that may have matching rows: give `read_piece` the same condition. One
        request for each larger part. `InvalidUsage` of kind `INVALID_COLUMN` for a bad condition."""
        with self._scope.call():
            if type(tasks) is not int or tasks < 1:
                raise ValueError(f"tasks={tasks!r} is not a positive int")
            query = Query.of(self._fetch.schema, where, None)
            runs = await self._fetch.stack.compute(query.runs, self._parts)
            selection = replace(self._range.selection, where=where)
            pieces = await divide(self._fetch, runs, selection, self._reader, tasks)
            return await self._fetch.stack.compute(lambda: [self._encoded(piece) for piece in pieces])

    async def _pieces_beside(self, tasks: int, staged: Sequence[HollowBatch]) -> list[tuple[bytes, bytes]]:
        """As `pieces`, each with a second piece: all updates of the staged batches whose keys may be in the
        first one. So a task finds the rows that it replaces."""
        with self._scope.call():
            runs = plan_runs(self._parts)
            beside = plan_runs([(batch, part) for batch in staged for part in batch.parts])
            pairs = await divide_with(self._fetch, runs, self._range.selection, self._reader, tasks, beside)
            return [(self._encoded(piece), self._encoded(other, ALL)) for piece, other in pairs]

    def _encoded(self, piece: Piece, times: Range | None = None) -> bytes:
        shard, times = self._fetch.shard.id, times or self._range
        return ENVELOPE.encode(TransmittedPiece(shard=shard, reader=self._reader, range=times, piece=piece))

    async def aclose(self) -> None:
        """End the lease; with `keep` it stays until it expires. Idempotent. A later read of a piece gets
        `LeaseExpired` once one of its parts is gone."""
        if self._scope.close() and not self._keep:
            await self._end()

    async def give_up(self) -> None:
        """End the lease, even with `keep`."""
        if self._scope.close():
            await self._end()

    async def _end(self) -> None:
        """End the lease; in the background if the caller is cancelled or the store takes long."""
        if self._beating is not None:
            self._beating.cancel()
        ending = self._fetch.stack.supervisor.spawn(self._expire(), "end the lease of a shared read")
        await self._fetch.stack.supervisor.released(ending)

    async def _expire(self) -> None:
        try:
            await commit(self._fetch.shard.register, ExpireReader(self._reader))
        except Error as error:  # the rows that were read stay right
            shard = self._fetch.shard
            text = "the lease of a shared read of %s could not be ended, and expires: %s"
            log.warning(text, shard.label, error, extra={"shard": shard.known_as})

    def __repr__(self) -> str:
        times = f"as of {self.as_of}" if self.as_of is not None else f"[{self.start}, {self.end})"
        return f"<SharedRead of {self._fetch.shard.id} {times}: {len(self._parts)} parts>"


def shared_read(
    shards: Shards,
    name: str,
    as_of: Time | datetime | None,
    start: int | datetime | None,
    end: int | datetime | None,
    *,
    tag: str | None,
    wait: bool,
    lease_s: float | None,
    keep: bool,
) -> Opening[SharedRead]:
    """See `Workers.shared_read`."""
    if tag is not None:
        check_alone(as_of, start, end)
    lease = shards.stack.settings.reader_lease_s if lease_s is None else lease_s
    check_lease_s(lease)

    async def open_read() -> SharedRead:
        shard = await shards.existing(name)
        schema = shard.schema(shard.state.schema_id)
        with shards.calls.call():  # the close of the client ends the wait
            try:
                if tag is not None:
                    return await _leased_tag(shard, schema, tag, lease, shards.scope, keep)
                at, first, last = (time_of(value, shard) for value in (as_of, start, end))
                times = checked(at, first, last, schema)  # type: ignore[arg-type]  # checked there
                instant = isinstance(as_of, datetime) or isinstance(end, datetime)
                async with _closed(shard, times, instant=instant):
                    return await _leased(shard, schema, times, wait, lease, shards.scope, keep)
            except Error as error:
                error.shard_id = error.shard_id or shard.id
                raise

    return shards.opening(open_read, f"client.workers.shared_read({name!r})")


def read_piece(shards: Shards, data: bytes, where: Any) -> "Items[pa.RecordBatch]":
    """See `Workers.read_piece`."""
    transmitted = ENVELOPE.decode(data, TransmittedPiece)
    rows, trace = _piece(shards, transmitted, where), ENVELOPE.trace(data)
    traced = shards.stack.tracing.iteration("read.piece", transmitted.shard, rows, trace)
    return Items(shards.scope, traced, shards.stack.supervisor)


async def _piece(
    shards: Shards, transmitted: TransmittedPiece, where: Any
) -> "AsyncGenerator[pa.RecordBatch, None]":
    shard = await shards.of_a_piece(checked_shard(transmitted.shard, transmitted.piece))
    check_schemas(transmitted.piece, shard)
    fetch = Fetch(shard, shard.schema(transmitted.piece.schema_id))
    _check_times(transmitted.range, fetch.schema)
    query = Query.of(fetch.schema, where, None)
    conditions = [c for c in (piece_condition(transmitted.piece, fetch.schema), query.where) if c is not None]
    condition = and_(*conditions) if len(conditions) == 2 else next(iter(conditions), None)
    bounds = transmitted.range.selection
    selection = Selection(lower=bounds.lower, upper=bounds.upper, as_of=bounds.as_of, where=condition)
    final = transmitted.range.as_of is not None
    runs = transmitted.piece.named()
    async with aclosing(leased_batches(fetch, runs, selection, transmitted.reader, "read", final)) as batches:
        async for batch in batches:
            yield batch


def _check_times(times: Range, schema: Schema[Any, Any, Any]) -> None:
    """`InvalidUpdate` unless the range has times of the shard."""
    try:
        if times.as_of is not None:
            shaped(times.as_of, schema.time_length)
        for time in (times.start, times.end):
            if time is not None:
                shaped(time, None)
    except InvalidUsage as error:
        raise InvalidUpdate(f"a piece of a read has no time of the shard: {error}") from error


@asynccontextmanager
async def _closed(shard: Shard, times: Range, *, instant: bool) -> AsyncIterator[None]:
    """A context that makes a range that ends at an `instant` complete as soon as that has passed."""
    time = times.as_of if times.end is None else times.end - 1
    if not instant or not isinstance(time, int) or time < 0 or await close_if_passed(shard, time):
        yield
        return
    async with closed_when_passed(shard, time):
        yield


async def _leased(
    shard: Shard,
    schema: Schema[Any, Any, Any],
    times: Range,
    wait: bool,
    lease_s: float,
    scope: Scope,
    keep: bool,
) -> SharedRead:
    """Register the reader, wait until the range is complete, and plan."""
    async with _registered(shard, lease_s) as (reader, slot):
        state = shard.state
        if (missing := not_complete(times, state)) is not None:
            if not wait or missing.as_of is None:
                raise missing
            state = await _completed(shard, reader, slot, times, lease_s)
        planned = pinned(times, state)
        check_held(planned, state)
        return SharedRead(Fetch(shard, schema), state, planned, reader, lease_s, scope, keep)


async def _leased_tag(
    shard: Shard, schema: Schema[Any, Any, Any], tag: str, lease_s: float, scope: Scope, keep: bool
) -> SharedRead:
    """Register the reader, and plan the contents of the tag."""
    check_tag(shard.state, tag)
    async with _registered(shard, lease_s) as (reader, _):
        tagged = await read_tag(shard, shard.state, tag)
        times = Range(as_of=tagged.as_of)
        return SharedRead(Fetch(shard, schema), tagged.contents, times, reader, lease_s, scope, keep)


@asynccontextmanager
async def _registered(shard: Shard, lease_s: float) -> AsyncIterator[tuple[str, Slot]]:
    """A reader that holds the versions from now on; after an error its lease is ended."""
    reader, slot = shard.stack.signed(f"r{shard.stack.runtime.uuid()}"), Slot()
    try:
        await commit(shard.register, RegisterReader(reader, Antichain(), lease_s), slot)
        yield reader, slot
    except BaseException:
        shard.stack.supervisor.spawn(_end(shard, reader, slot), "end a lease that is not used")
        raise


async def _completed(shard: Shard, reader: str, slot: Slot, times: Range, lease_s: float) -> State:
    """The state once the range is complete; `reader` holds its history meanwhile. Two commits."""
    register = shard.register
    check_held(times, shard.state)
    await commit(register, RenewReader(reader, hold=hold_of(times)), slot)
    beating = _heartbeats(shard, reader, lease_s)
    try:
        await register.wait(lambda state: None if not_complete(times, state) else True)
    finally:
        beating.cancel()
    state = shard.state
    unpin = register.pin(state.seqno)
    try:
        await commit(register, RenewReader(reader, hold=Antichain()), slot)
    finally:
        unpin()
    return state


def _heartbeats(shard: Shard, reader: str, lease_s: float) -> asyncio.Task[None]:
    return heartbeats(shard.stack, lease_s, partial(keep_lease, shard, reader), "heartbeats of a shared read")


async def _end(shard: Shard, reader: str, slot: Slot) -> None:
    await settle(slot)  # the outcome of the registration may be unknown
    await commit(shard.register, ExpireReader(reader))
