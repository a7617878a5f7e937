"""Compaction by several processes: one claims and applies, the others do the work.

1. *Claim* all batches, so that no other process compacts them meanwhile.
2. *Divide* (`parts/divide.py`): key ranges over all runs.
3. Any process compacts a piece to sorted parts (`compact_piece`), under the writer that has the claim. The
   ranges are in order, so the parts of all pieces make one run.
4. *Apply*: one commit replaces the inputs by the run. Over all pieces, the diffs that were written
   must sum to the diffs that were read.

A piece that is done twice, or whose process was killed, leaves parts that no version names; after the writer
has ended, the sweep deletes them. More runs than one process may read at once need several rounds.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import field

from aiopersist.base.errors import BatchExpired, Corruption, Error, InvalidUpdate, InvalidUsage, LeaseExpired
from aiopersist.base.frontier import Antichain
from aiopersist.base.resource import Opening, Resource, Scope
from aiopersist.compact.local import Work, bounded, target_of
from aiopersist.parts.divide import Piece, check_schemas, checked_shard, divide, piece_condition
from aiopersist.parts.envelope import Envelope
from aiopersist.parts.fetch import Fetch, Selection
from aiopersist.parts.rewrite import Budget, Target, rewrite
from aiopersist.shard.attempt import Unknowable
from aiopersist.shard.commit import commit
from aiopersist.shard.registration import Registration, begun_anew
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.compaction import Replace, TakeClaim, Total, plan_all
from aiopersist.state.record import HollowPart, Record
from aiopersist.state.retention import ApplyRetention

log = logging.getLogger("aiopersist").getChild("maintenance")

PIECE = Envelope("compaction", format=1)
RESULT = Envelope("compacted", format=1)


class Goal(NamedTuple):
    """The batches that must become one: all up to the ordinal `last`, at `since` or later."""

    last: int
    since: Antichain


class CompactionPiece(Record, frozen=True, kw_only=True):
    """A piece of the work, encoded for the process that does it."""

    shard: str
    writer: str
    division: str
    """The id of the call of `pieces`: only its own pieces fit together."""
    number: int
    lower: Antichain
    since: Antichain
    inline_max_bytes: int
    piece: Piece


class CompactedPiece(Record, frozen=True, kw_only=True):
    """The result of a piece, encoded for the process that applies it."""

    writer: str
    division: str
    number: int
    parts: tuple[HollowPart, ...]
    uncompacted: int | None = field(name="loose")
    read: tuple[int, int]
    """The number of updates, and the sum of their diffs."""
    wrote: tuple[int, int]


class SharedCompaction(Resource):
    """One claimed round of a compaction. `shared_compaction` opens it; `apply` finishes it."""

    def __init__(
        self, shard: Shard, registration: Registration | None, work: Work | None, goal: Goal, scope: Scope
    ) -> None:
        self.goal = goal
        """Pass it to the next round: then later appends do not prolong the compaction."""
        self._shard = shard
        self._registration = registration
        self._work = work
        self._pieces = 0
        self._division = ""
        self._scope = Scope("the compaction", scope, shard.id)

    @property
    def is_needed(self) -> bool:
        """Whether there is work; `False` if the shard is one sorted batch already."""
        return self._work is not None

    async def pieces(self, tasks: int) -> list[bytes]:
        """About `tasks` pieces of work, in order, for `compact_piece`. One request for each larger part."""
        with self._scope.call():
            if self._work is None or self._registration is None:
                return []
            work, target = self._work, target_of(self._shard, self._work, self._registration.writer)
            fetch = Fetch(self._shard, target.schema, cached=False)
            selection = Selection(advance_to=target.since)
            pieces = await divide(fetch, work.read, selection, "", max(tasks, 1))
            self._pieces, self._division = len(pieces), str(self._shard.stack.runtime.uuid())
            return [
                PIECE.encode(
                    CompactionPiece(
                        shard=self._shard.id,
                        writer=target.writer,
                        division=self._division,
                        number=number,
                        lower=target.lower,
                        since=target.since,
                        # a batch has at most one inline part
                        inline_max_bytes=target.inline_max_bytes if len(pieces) == 1 else 0,
                        piece=piece,
                    )
                )
                for number, piece in enumerate(pieces)
            ]

    async def apply(self, results: Sequence[bytes]) -> bool:
        """Replace the inputs by the results of all pieces; whether that was applied. `False`: the inputs have
        changed, or the claim is lost. `InvalidUpdate` unless each piece has one result. One commit."""
        with self._scope.call():
            if self._work is None or self._registration is None:
                return False
            compacted = _in_order(results, self._division, self._pieces)
            read, wrote = _sum(r.read for r in compacted), _sum(r.wrote for r in compacted)
            self._check(read)
            parts = [part for result in compacted for part in result.parts]
            counts = [result.uncompacted for result in compacted]
            uncompacted = None if None in counts else sum(count or 0 for count in counts)
            batch = self._work.batch(parts, uncompacted)
            command = Replace(self._registration.writer, self._work.spec.inputs, batch, read, wrote)
            try:
                done: bool = await commit(self._shard.register, command)
            except (BatchExpired, Unknowable):
                return False
            return done

    def _check(self, read: Total) -> None:
        """`Corruption` unless each update was read once; checked if the state has the number of updates."""
        assert self._work is not None
        parts = [part for _, part in self._work.parts]
        if any(part.inline is not None or part.truncated is not None for part in parts):
            return
        if (rows := sum(part.rows for part in parts)) != read.rows:
            text = f"the pieces of a compaction have {read.rows} updates, its inputs {rows}"
            raise Corruption(text, shard_id=self._shard.id)

    async def aclose(self) -> None:
        """Release the claim, and end the writer: the sweep deletes parts that were not applied. Continues in
        the background if the caller is cancelled or the store takes long. Idempotent. One commit."""
        if self._scope.close() and self._registration is not None:
            await self._shard.stack.supervisor.released(_ended(self._shard, self._registration))

    def __repr__(self) -> str:
        return f"<SharedCompaction of {self._shard.id}: {'claimed' if self.is_needed else 'nothing to do'}>"


def shared_compaction(shards: Shards, name: str, goal: Goal | None) -> Opening[SharedCompaction]:
    """See `Workers.shared_compaction`."""

    async def open_round() -> SharedCompaction:
        shard = await shards.existing(name)
        if goal is None:
            await commit(shard.register, ApplyRetention(exact=True))
        state = shard.state
        last = goal or Goal(max(state.batches, default=-1), state.since)
        with shards.calls.call():  # the close of the client ends a wait for a claim
            return await begun_anew(lambda: _claimed(shard, last, shards.scope))

    return shards.opening(open_round, f"client.workers.shared_compaction({name!r})")


async def compact_piece(shards: Shards, data: bytes) -> bytes:
    """See `Workers.compact_piece`."""
    task = PIECE.decode(data, CompactionPiece)
    shard = await shards.of_a_piece(checked_shard(task.shard, task.piece))
    with shards.stack.tracing.span("compaction.piece", shard.known_as, PIECE.trace(data)):
        return await _compact_piece(shard, task)


async def _compact_piece(shard: Shard, task: CompactionPiece) -> bytes:
    check_schemas(task.piece, shard)
    schema = shard.schema(task.piece.schema_id)
    target = Target(schema, task.writer, task.lower, task.since, task.inline_max_bytes)
    selection = Selection(advance_to=task.since, where=piece_condition(task.piece, schema))
    try:
        done = await rewrite(shard, task.piece.named(), selection, target)
    except LeaseExpired as error:
        raise await _why_missing(shard, task, error) from None
    except InvalidUsage as error:  # all times and names come from the piece
        raise InvalidUpdate(f"a piece of a compaction cannot be done: {error}", shard_id=shard.id) from error
    return RESULT.encode(
        CompactedPiece(
            writer=task.writer,
            division=task.division,
            number=task.number,
            parts=done.parts,
            uncompacted=done.output.uncompacted,
            read=done.read,
            wrote=done.output.wrote,
        )
    )


async def _why_missing(shard: Shard, task: CompactionPiece, error: LeaseExpired) -> Error:
    """The error for a missing part: `Corruption` if the claim still holds, so that nothing can have replaced
    the part; else `error`."""
    state = await shard.open()
    if any(claim.writer == task.writer for claim in state.claims.values()):
        return Corruption(f"a claimed part is not in the blob store: {error}", shard_id=shard.id)
    return error


async def _claimed(shard: Shard, goal: Goal, scope: Scope) -> SharedCompaction:
    delays = shard.stack.runtime.delays()
    stall = shard.stack.stall_log(lambda: f"a compaction of {shard.label}")
    registration = await Registration.fresh(shard)
    registration.hold()
    try:
        while True:
            state = await shard.open()
            spec = plan_all(state, goal.last, goal.since)
            if spec is None or not state.since.elements:  # with an empty since maintenance drops the batches
                break
            work = bounded(spec, Budget.of(shard.stack.settings).runs_max(spec.parts))
            if await commit(shard.register, TakeClaim(registration.writer, work.spec.inputs)):
                return SharedCompaction(shard, registration, work, goal, scope)
            stall.note("another process compacts it")
            await shard.stack.runtime.sleep(next(delays))
    except BaseException:
        _ended(shard, registration)
        raise
    await shard.stack.supervisor.released(_ended(shard, registration))
    return SharedCompaction(shard, None, None, goal, scope)


def _ended(shard: Shard, registration: Registration) -> "asyncio.Task[None]":
    """A task that ends the writer, and with it the claim, even if its caller is cancelled."""
    registration.release()
    registration.stop()
    return shard.stack.supervisor.spawn(_expire(shard, registration), "end the writer of a compaction")


async def _expire(shard: Shard, registration: Registration) -> None:
    try:
        await registration.expire()
    except Error as error:  # the results stay applied
        text = "the claim of a compaction of %s stays until its lease ends: %s"
        log.warning(text, shard.label, error, extra={"shard": shard.known_as})


def _in_order(results: Sequence[bytes], division: str, pieces: int) -> list[CompactedPiece]:
    compacted = sorted((RESULT.decode(data, CompactedPiece) for data in results), key=lambda r: r.number)
    if [r.number for r in compacted] != list(range(pieces)) or any(r.division != division for r in compacted):
        text = f"pass one result of each of the {pieces} pieces, not of {[r.number for r in compacted]}"
        raise InvalidUpdate(text)
    return compacted


def _sum(totals: Iterable[tuple[int, int]]) -> Total:
    counts = list(totals)
    return Total(sum(rows for rows, _ in counts), sum(diffs for _, diffs in counts) % 2**64)
