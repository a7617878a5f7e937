"""The steps of an append, of one handle or of several at one moment.

1. *Prepare*, before the handle's turn: take and check the rows and upload whole parts, or claim the staged
   batches.
2. *Stage*, in the turn, once an earlier append of the handle is settled: return early from a repeat or a
   mismatch, by frontiers and transaction numbers, which never go back; upload the rest, and make the command.
3. *Commit* (`commit_staged`). An obstacle is repaired, and the same append is tried again. After a lease that
   ran out, the parts that were uploaded under it are copied to another writer (`parts/copies.py`); a state
   without room for more inline parts is flushed.
4. *Tidy up* by the outcome: delete the parts of a refused append, which no state names. If the caller is not
   told the outcome, the session keeps the call for `settle`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence, Set, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from aiopersist.data.updates.convert import is_arrow
from aiopersist.data.updates.given import taken
from aiopersist.errors import (
    AlreadyAppended,
    Corruption,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    UpperMismatch,
    UsageKind,
    shown,
)
from aiopersist.frontier import Antichain, minimum
from aiopersist.measure.tracing import Tracing
from aiopersist.parts.copies import Copies
from aiopersist.parts.flush import inline_to_blob
from aiopersist.parts.upload import Upload
from aiopersist.shard.commit import Intent, commit_all
from aiopersist.shard.registration import LOST_MAX, Registration
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.once import UNMARKED, Once
from aiopersist.state.spending import is_spent
from aiopersist.state.subscriptions import Ack
from aiopersist.state.writing import Appended, AppendHollow, NoRoom, PartsExpired, Write, repeat_of
from aiopersist.write.assemble import AppendableBatch, assembled, check_append
from aiopersist.write.batch import Batch, inside
from aiopersist.write.outcome import Committed, NotCommitted, PendingAppend, UnsettledCall, wait_briefly
from aiopersist.write.session import Session, in_turns
from aiopersist.write.staged import StagedBatch


@dataclass(eq=False)
class AppendIntent(ABC):
    """One append of one handle to `[lower, upper)`."""

    session: Session
    lower: Antichain
    upper: Antichain
    transactions: Mapping[str, int]
    once: Once = UNMARKED
    replica: bool = False
    acks: tuple[Ack, ...] = ()
    """Of subscriptions to this shard, in the same version."""
    pending: PendingAppend = field(default_factory=PendingAppend)

    def release(self) -> "list[asyncio.Task[None]]":
        """See `PendingAppend.release`."""
        return self.pending.release()

    @property
    def can_begin_again(self) -> bool:
        """Whether the input can be taken a second time."""
        return True

    @property
    def traces(self) -> list[Mapping[str, str]]:
        """Of the processes that built what is appended."""
        return []

    @abstractmethod
    async def prepare(self) -> None:
        """Do the checks of the input that need no turn."""

    @abstractmethod
    async def stage(self) -> AppendHollow | None:
        """The command; `None` if nothing is left to write."""

    def command(self, writer: str, batch: HollowBatch, batches: Sequence[StagedBatch] = ()) -> AppendHollow:
        """Append `batch`, which is made of the staged `batches` if there are any."""
        stack = self.session.shard.stack
        return AppendHollow(
            writer,
            stack.runtime.token(),
            batch,
            self.transactions,
            stack.settings.inline_writes_total_max_bytes,
            self.replica,
            tuple(staged.record for staged in batches),
            stack.settings.txn_ids_max,
            self.once,
            stack.settings.clock_ahead_max_s,
            acks=self.acks,
        )


@dataclass(eq=False)
class RowsAppend(AppendIntent):
    """An append of updates."""

    updates: Any = ()
    registration: Registration | None = None
    upload: Upload | None = None

    def __post_init__(self) -> None:
        self.updates = taken(self.updates)

    @property
    def can_begin_again(self) -> bool:
        """Not of an iterator, even if it has a length, as a progress bar has."""
        updates = self.updates
        return isinstance(updates, Sequence | Set) or (is_arrow(updates) and isinstance(updates, Sized))

    def release(self) -> list[asyncio.Task[None]]:
        registration, self.registration = self.registration, None
        if registration is not None:
            registration.release()
        return super().release()

    async def prepare(self) -> None:
        self.registration = await self.session.ensure_registered()
        self.registration.hold()  # an upload may take longer than the handle keeps it
        self.upload = upload = self.session.context.upload(self.lower, self.registration)
        self.pending.uploads.append(upload)
        await self._take(upload)
        upload.check_upper(self.upper)

    async def _take(self, upload: Upload) -> None:
        await upload.take_whole(self.updates)

    async def stage(self) -> AppendHollow | None:
        if await self._covered():
            return None
        await self.session.make_room()
        upload = self.upload
        assert upload is not None
        return self.command(upload.writer, await upload.finish(self.upper))

    async def _covered(self) -> bool:
        """Whether nothing is left to write, by uppers and transaction numbers, which never go back,
        and by ids. `UpperMismatch` after a fresh look if the append cannot succeed."""
        shard = self.session.shard
        now = await shard.register.now() if self.once.hashes else 0.0
        if (covered := self._is_covered(shard.state, now)) is None:
            state = await shard.open()
            if (covered := self._is_covered(state, now)) is None:
                raise UpperMismatch(self.lower, state.upper, shard_id=shard.id)
        return covered

    def _is_covered(self, state: State, now: float) -> bool | None:
        """As `_covered`; `None` if the append does not fit `state`."""
        lower, upper = self.lower, self.upper
        if repeat_of(state, now, self) is not None or (self.replica and upper <= state.upper):
            return True
        fits = lower == state.upper or (self.replica and lower <= state.upper <= upper)
        return False if fits else None


class ColumnsAppend(RowsAppend):
    """An append of a table in the columns of the schema, which the library made itself. Its time is that of
    the clock, or the upper, however far that is ahead, as of a `write`. A repeat is refused:
    `RepeatedMark`."""

    def command(self, writer: str, batch: HollowBatch, batches: Sequence[StagedBatch] = ()) -> AppendHollow:
        return replace(super().command(writer, batch, batches), is_strict=True, ahead_max_s=inf)

    async def _take(self, upload: Upload) -> None:
        await upload.add(self.updates)

    def _is_covered(self, state: State, now: float) -> bool | None:
        return False if self.lower == state.upper else None


@dataclass(eq=False)
class BatchesAppend(AppendIntent):
    """An append of staged batches."""

    batches: Sequence[Batch] = ()

    def __post_init__(self) -> None:
        self.batches = tuple(self.batches)

    @property
    def traces(self) -> list[Mapping[str, str]]:
        return [inside(batch).trace for batch in self.batches if isinstance(batch, Batch)]

    async def prepare(self) -> None:
        batches = _distinct(self.batches, self.session)
        check_append([_value(batch) for batch in batches], self.lower, self.upper)
        for batch in batches:
            batch.claim()
        self.pending.batches = batches

    async def stage(self) -> AppendHollow | None:
        batches, since = self.pending.batches, minimum(self.session.schema.time_length)
        whole = assembled([_value(batch) for batch in batches], self.lower, self.upper, since)
        return self.command(self.session.registration.writer, whole, batches)


def _value(batch: StagedBatch) -> AppendableBatch:
    return AppendableBatch(batch.hollow, batch.rewrite)


def _distinct(batches: Sequence[Batch], session: Session) -> list[StagedBatch]:
    """The batches, which must be free, of this shard, and named once each."""
    found: dict[str, StagedBatch] = {}
    for batch in batches:
        if not isinstance(batch, Batch):
            raise TypeError(f"{shown(batch)} is not an aiopersist.Batch")
        staged = inside(batch)
        staged.check_free()
        if batch.shard_id != session.shard.id:
            text = f"batch {batch.id} is of shard {batch.shard_id}, not of {session.shard.id}"
            raise InvalidUsage(UsageKind.BATCH_NOT_FROM_THIS_SHARD, text)
        if batch.id in found:
            raise InvalidUsage(UsageKind.CONSUMED, f"batch {batch.id} is there twice")
        found[batch.id] = staged
    return list(found.values())


def append_all(intents: Sequence[AppendIntent], joined: Sequence[Intent] = ()) -> Awaitable[None]:
    """Make all appends at one moment, or none; they are of different shards. The `joined` commands, of other
    shards, share the commit; their attempts are for the caller to settle."""
    stack = (intents[0].session.shard if intents else joined[0].register).stack
    if stack.tracing.on:
        return _append_within_span(stack.tracing, intents, joined)
    return _append_until_done(intents, joined)


async def _append_within_span(
    tracing: Tracing, intents: Sequence[AppendIntent], joined: Sequence[Intent]
) -> None:
    traces = [trace for intent in intents for trace in intent.traces]
    with tracing.span("append", ", ".join(intent.session.shard.known_as for intent in intents), *traces):
        await _append_until_done(intents, joined)


async def _append_until_done(intents: Sequence[AppendIntent], joined: Sequence[Intent]) -> None:
    """Append; begin again after a lease that ran out."""
    lost = 0
    while True:
        try:
            await _append_once(intents, joined)
        except PartsExpired:  # and the parts were swept before they could be copied
            lost += 1
            if lost == LOST_MAX or not all(intent.can_begin_again for intent in intents):
                raise
            for intent in intents:
                intent.pending = PendingAppend()
        else:
            return


async def _append_once(intents: Sequence[AppendIntent], joined: Sequence[Intent]) -> None:
    try:
        try:
            for intent in intents:
                await intent.prepare()
            in_order = sorted(intents, key=lambda i: i.session.shard.id)  # the same for all: no deadlock
            await in_turns([i.session for i in in_order], partial(_append_all, intents, joined))
        finally:
            deletions = [task for intent in intents for task in intent.release()]
            await wait_briefly(deletions)
    except (asyncio.CancelledError, Indeterminate):  # also a cancellation while it tidied up
        for intent in intents:
            intent.session.unsettled = UnsettledCall(intent.transactions, intent.once, intent.pending)
        raise


async def _append_all(intents: Sequence[AppendIntent], joined: Sequence[Intent]) -> None:
    staged = []
    for intent in intents:
        command = await intent.stage()
        if command is None:
            intent.pending.needless = True
            intent.pending.outcome = Committed(intent.session.shard.state.upper)
        else:
            staged.append(StagedAppend(intent.session, command, intent.pending))
    if staged or joined:
        await commit_staged(staged, joined)


@dataclass(eq=False)
class StagedAppend:
    """An append that is ready, in the turn of its handle."""

    session: Session
    command: AppendHollow | Write
    pending: PendingAppend
    lost: int = 0
    """How many registrations ended under which it had uploaded parts."""
    flushed: bool = False

    async def repair(self, error: "PartsExpired | LeaseExpired | NoRoom", held: ExitStack) -> None:
        """Remove the obstacle that `error` names, after which the commit surely did not happen. Raises
        `error` if it cannot. A registration that is needed until the commit is released by `held`."""
        if isinstance(error, LeaseExpired):
            registration = await self.session.ensure_registered()
            self.command = replace(self.command, writer=registration.writer)
        elif isinstance(error, NoRoom):
            await self._make_room()
        else:
            self.lost += 1
            if self.lost == LOST_MAX:
                raise error
            try:
                await self._copy(held)
            except (LeaseExpired, Corruption) as gone:
                raise error from gone

    async def _copy(self, held: ExitStack) -> None:
        """Copy the parts whose writers are gone to a writer that is registered."""
        shard, registration = self.session.shard, await self.session.ensure_registered()
        registration.hold()  # copying may take longer than the handle keeps it
        held.callback(registration.release)
        copies = Copies(shard, registration.writer)
        self.pending.uploads.append(copies)
        batch = await copies.of(self.command.batch)
        self.command = replace(self.command, writer=registration.writer, batch=batch)
        for upload in self.pending.uploads:
            if upload.writer not in shard.state.writers:
                upload.discard()

    async def _make_room(self) -> None:
        """Flush the inline parts of the state to one blob. If that was done before, or cannot suffice, flush
        the inline parts of the append."""
        session, command = self.session, self.command
        small = 2 * command.batch.inline_bytes <= command.inline_bytes_max
        if small and not self.flushed:
            self.flushed = True
            if await session.flush_inline():
                return
        writer = (await session.ensure_registered()).writer
        batch = await inline_to_blob(session.shard, writer, command.batch, self.pending.uploads)
        self.command = replace(command, batch=batch)


async def commit_staged(appends: Sequence[StagedAppend], joined: Sequence[Intent] = ()) -> list[Appended]:
    """Commit all of them at one moment, or none, and what is `joined`. Each `pending` knows its outcome, or
    that it is to be settled."""
    with ExitStack() as held:
        while True:
            for append in appends:
                append.pending.outcome = None
            try:
                jobs = [Intent(a.session.shard.register, a.command, a.session.slot) for a in appends]
                results = (await commit_all([*jobs, *joined]))[: len(jobs)]
            except BaseException as error:
                for append in appends:
                    _without_answer(append)
                if isinstance(error, AlreadyAppended):
                    _mark_spent(appends)
                if not isinstance(error, PartsExpired | LeaseExpired | NoRoom):
                    raise
                (at_fault,) = (a for a in appends if a.session.shard.id == error.shard_id)
                await at_fault.repair(error, held)
                continue
            for append, done in zip(appends, results, strict=True):
                _answered(append, done)
            return results


def _answered(append: StagedAppend, done: Appended) -> None:
    """The commit returned."""
    succeeded = done.wrote or isinstance(append.command, AppendHollow)  # a group goes on without repeats
    append.pending.outcome = Committed(done.upper) if succeeded else NotCommitted()
    append.pending.needless = not done.wrote
    if done.wrote:
        append.session.shard.stack.metrics.appended(append.command.batch.len)


def _without_answer(append: StagedAppend) -> None:
    """The commit did not return: either nothing happened, or its attempt is in the slot."""
    if append.session.slot.busy:
        append.session.pending = append.pending
    else:
        append.pending.outcome = NotCommitted()


def _mark_spent(appends: Sequence[StagedAppend]) -> None:
    """Mark the batches that were appended or deleted elsewhere."""
    for append in appends:
        state = append.session.shard.state
        for batch in append.pending.batches:
            if is_spent(state, batch.registration.writer, batch.id):
                batch.spent_elsewhere()
