"""A read that several processes share: planned once, leased once, read in pieces anywhere.

1. Register a reader with a lease. It keeps the blobs of the version that registers it and of all later
   versions. The process that plans renews the lease (`KeepReader`), and so do the processes that read.
2. Plan on the state as it is then: which parts hold the wanted range.
3. Divide (`parts/divide.py`) into pieces of about equal size, which travel as bytes.
4. Each piece is read by `read_piece`, in any process: consolidated, and no row is in two pieces.
5. End the lease, or leave it to expire.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from functools import partial
from operator import and_
from typing import Any

from aiopersist.base.errors import DiffOverflow, Error, InvalidUpdate, InvalidUsage, LeaseExpired, MissingPart
from aiopersist.base.frontier import Antichain, Time, shaped
from aiopersist.base.resource import Opening, Resource, Scope
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.parts.divide import Piece, check_schemas, checked_shard, divide, divide_with, piece_condition
from aiopersist.parts.envelope import Envelope
from aiopersist.parts.fetch import Fetch, Selection
from aiopersist.parts.runs import plan_runs
from aiopersist.read.leased import why_missing
from aiopersist.read.query import Query
from aiopersist.read.range import ALL, Range, check_held, checked, hold_of, not_complete, pinned
from aiopersist.read.snapshot import Items
from aiopersist.read.stream import in_batches
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit, settle
from aiopersist.shard.instant import close_if_passed, closed_when_passed, time_of
from aiopersist.shard.lease import HEARTBEATS_PER_LEASE, check_lease_s, heartbeats
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.reading import ExpireReader, KeepReader, RegisterReader, RenewReader
from aiopersist.state.record import Record

log = logging.getLogger("aiopersist").getChild("leases")

ENVELOPE = Envelope("piece", format=1)


class TransmittedPiece(Record, frozen=True, kw_only=True):
    """A piece as it travels."""

    shard: str
    reader: str
    """The reader whose lease keeps the blobs."""
    range: Range
    piece: Piece


class SharedRead(Resource):
    """The contents of a shard at one time, or its changes within a range of times, leased for several
    processes. `client.workers.shared_read` opens it."""

    def __init__(
        self, fetch: Fetch, state: State, wanted: Range, reader: str, lease_s: float, scope: Scope, keep: bool
    ) -> None:
        self._fetch = fetch
        self._range = wanted
        self._reader = reader
        self._keep = keep
        self._parts = wanted.parts(state)
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
        """The time before which the changes end; `None`: the shard ends there, for good."""
        return self._range.end

    @property
    def updates_max(self) -> int:
        """Updates in the parts that are read: at most so many are read."""
        return sum(part.rows for _, part in self._parts)

    async def pieces(self, tasks: int) -> list[bytes]:
        """About `tasks` pieces, at least one, in the order of their rows, for `read_piece`. One
        request for each larger part."""
        with self._scope.call():
            if type(tasks) is not int or tasks < 1:
                raise ValueError(f"tasks={tasks!r} is no positive int")
            runs = plan_runs(self._parts)
            found = await divide(self._fetch, runs, self._range.selection, self._reader, tasks)
            return await self._fetch.stack.compute(lambda: [self._encoded(piece) for piece in found])

    async def _pieces_beside(self, tasks: int, staged: Sequence[HollowBatch]) -> list[tuple[bytes, bytes]]:
        """As `pieces`, and with each a second piece: all updates of the staged batches whose keys may be in
        the first piece, so that a task finds the rows that it replaces."""
        with self._scope.call():
            runs = plan_runs(self._parts)
            beside = plan_runs([(batch, part) for batch in staged for part in batch.parts])
            found = await divide_with(self._fetch, runs, self._range.selection, self._reader, tasks, beside)
            return [(self._encoded(mine), self._encoded(other, ALL)) for mine, other in found]

    def _encoded(self, piece: Piece, wanted: Range | None = None) -> bytes:
        shard, wanted = self._fetch.shard.id, wanted or self._range
        return ENVELOPE.encode(TransmittedPiece(shard=shard, reader=self._reader, range=wanted, piece=piece))

    async def aclose(self) -> None:
        """End the lease; one that was opened with `keep` expires by itself. Idempotent. A piece that is read
        later gets `LeaseExpired` once one of its parts is gone."""
        if self._scope.close() and not self._keep:
            await self._end()

    async def give_up(self) -> None:
        """End the lease, also one that was opened with `keep`."""
        if self._scope.close():
            await self._end()

    async def _end(self) -> None:
        """End the lease; in the background, if the caller is cancelled or the store takes long."""
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
        what = f"as of {self.as_of}" if self.as_of is not None else f"[{self.start}, {self.end})"
        return f"<SharedRead of {self._fetch.shard.id} {what}: {len(self._parts)} parts>"


def shared_read(
    shards: Shards,
    name: str,
    as_of: Time | datetime | None,
    start: int | datetime | None,
    end: int | datetime | None,
    *,
    wait: bool,
    lease_s: float | None,
    keep: bool,
) -> Opening[SharedRead]:
    """See `Workers.shared_read`."""
    lease = shards.stack.settings.reader_lease_s if lease_s is None else lease_s
    check_lease_s(lease)

    async def open_read() -> SharedRead:
        found = await shards.existing(name)
        schema = found.schema(found.state.schema_id)
        with shards.calls.call():  # so that closing the client ends the wait
            try:
                at, first, last = (time_of(value, found) for value in (as_of, start, end))
                wanted = checked(at, first, last, schema)  # type: ignore[arg-type]  # checked there
                instant = isinstance(as_of, datetime) or isinstance(end, datetime)
                async with _closed(found, wanted, instant=instant):
                    return await _leased(found, schema, wanted, wait, lease, shards.scope, keep)
            except Error as error:
                error.shard_id = error.shard_id or found.id
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
    await _renew(shard, transmitted.reader)
    check_schemas(transmitted.piece, shard)
    fetch = Fetch(shard, shard.schema(transmitted.piece.schema_id))
    _check_times(transmitted.range, fetch.schema)
    query = Query.of(fetch.schema, where, None)
    conditions = [c for c in (piece_condition(transmitted.piece, fetch.schema), query.where) if c is not None]
    condition = and_(*conditions) if len(conditions) == 2 else next(iter(conditions), None)
    wanted = transmitted.range.selection
    selection = Selection(lower=wanted.lower, upper=wanted.upper, as_of=wanted.as_of, where=condition)
    final = transmitted.range.as_of is not None
    rows = in_batches(fetch, transmitted.piece.named(), selection, transmitted.reader, final=final)
    async with aclosing(rows) as batches:
        try:
            async for batch in batches:
                await _renew(shard, transmitted.reader)  # a large piece may take longer than the lease
                yield batch
        except DiffOverflow as error:
            error.shard_id = shard.id
            raise
        except MissingPart as error:
            parts = (part for batch in transmitted.piece.runs for part in batch.parts)
            raise await why_missing(shard, parts, error, "read") from None


def _check_times(wanted: Range, schema: Schema[Any, Any, Any]) -> None:
    """`InvalidUpdate` unless they are times of the shard."""
    try:
        if wanted.as_of is not None:
            shaped(wanted.as_of, schema.time_length)
        for time in (wanted.start, wanted.end):
            if time is not None:
                shaped(time, None)
    except InvalidUsage as error:
        raise InvalidUpdate(f"a piece of a read has no time of the shard: {error}") from error


@asynccontextmanager
async def _closed(shard: Shard, wanted: Range, *, instant: bool) -> AsyncIterator[None]:
    """Within it, `wanted`, which ends at an `instant`, is made complete as soon as that has passed."""
    time = wanted.as_of if wanted.end is None else wanted.end - 1
    if not instant or not isinstance(time, int) or time < 0 or await close_if_passed(shard, time):
        yield
        return
    async with closed_when_passed(shard, time):
        yield


async def _leased(
    shard: Shard,
    schema: Schema[Any, Any, Any],
    wanted: Range,
    wait: bool,
    lease_s: float,
    scope: Scope,
    keep: bool,
) -> SharedRead:
    """Register the reader, wait until `wanted` is complete, and plan."""
    reader, slot = shard.stack.signed(f"r{shard.stack.runtime.uuid()}"), Slot()
    try:
        await commit(shard.register, RegisterReader(reader, Antichain(), lease_s), slot)
        state = shard.state
        if (missing := not_complete(wanted, state)) is not None:
            if not wait or missing.as_of is None:
                raise missing
            state = await _completed(shard, reader, slot, wanted, lease_s)
        planned = pinned(wanted, state)
        check_held(planned, state)
        return SharedRead(Fetch(shard, schema), state, planned, reader, lease_s, scope, keep)
    except BaseException:
        shard.stack.supervisor.spawn(_end(shard, reader, slot), "end a lease that is not used")
        raise


async def _completed(shard: Shard, reader: str, slot: Slot, wanted: Range, lease_s: float) -> State:
    """The state once `wanted` is complete; `reader` holds its history while it waits. Two commits."""
    register = shard.register
    check_held(wanted, shard.state)
    await commit(register, RenewReader(reader, hold=hold_of(wanted)), slot)
    beating = _heartbeats(shard, reader, lease_s)
    try:
        await register.wait(lambda state: None if not_complete(wanted, state) else True)
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
    return heartbeats(shard.stack, lease_s, partial(_keep, shard, reader), "heartbeats of a shared read")


async def _keep(shard: Shard, reader: str) -> None:
    await commit(shard.register, KeepReader(reader))


async def _end(shard: Shard, reader: str, slot: Slot) -> None:
    await settle(slot)  # the registration may be on its way
    await commit(shard.register, ExpireReader(reader))


async def _renew(shard: Shard, reader: str) -> None:
    """Renew the lease if a heartbeat is due. If the lease is gone, the read of a missing part says so."""
    record = shard.state.readers.get(reader)
    if record is None:
        return
    now = await shard.stack.consensus.now()
    if now - record.heartbeat > record.lease_s / HEARTBEATS_PER_LEASE:
        try:
            await _keep(shard, reader)
        except LeaseExpired:
            pass
