"""One append of one handle, from the call to its outcome.

It *prepares* before its handle's turn: it checks the rows and uploads whole parts, or claims the staged
batches. In the turn it *stages* the rest, and makes the command. If the caller does not get the outcome, the
session keeps the append for `settle`. `append.py` runs these steps.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Protocol, Self

from msgspec import Struct
from msgspec.structs import replace

from aiopersist.base.errors import Corruption, Indeterminate, LeaseExpired, UpperMismatch
from aiopersist.base.frontier import Antichain, minimum
from aiopersist.base.supervisor import RELEASE_DEADLINE_S
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.inputs import is_repeatable, own_copy
from aiopersist.data.updates.tiny import Tiny
from aiopersist.parts.copies import Copies
from aiopersist.parts.flush import inline_to_blob, must_flush
from aiopersist.parts.put import Uploaded
from aiopersist.parts.upload import Upload
from aiopersist.shard.attempt import Attempt, Slot
from aiopersist.shard.registration import LOST_MAX, Registration
from aiopersist.shard.shard import Shard
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.once import UNMARKED, Once
from aiopersist.state.subscriptions import Ack
from aiopersist.state.writing import Appended, AppendHollow, NoRoom, PartsExpired, Write, repeat_of
from aiopersist.write.staged import StagedBatch, StagingContext, claim_free, delete_all


class UnsettledCall(Protocol):
    """A call whose caller did not get its outcome."""

    @property
    def transactions(self) -> Mapping[str, int]: ...
    @property
    def once(self) -> Once: ...
    @property
    def append(self) -> "PendingAppend":
        """The append that decides it."""

    @property
    def decided(self) -> asyncio.Future[None] | None:
        """Done once the call is decided, except for settling; `None` if it is already."""


class OfHandle(Protocol):
    """The part of `Session` that appends use."""

    context: StagingContext
    shard: Shard
    schema: Schema[Any, Any, Any]
    slot: Slot
    unsettled: UnsettledCall | None
    pending: "PendingAppend | None"

    @property
    def registration(self) -> Registration: ...
    async def ensure_registered(self) -> Registration: ...
    async def begin_turn(self) -> None: ...
    def end_turn(self) -> None: ...
    async def flush_inline(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Committed:
    """The append happened; afterwards the shard had this upper."""

    upper: Antichain


@dataclass(frozen=True, slots=True)
class NotCommitted:
    """The append did not happen, and never will."""


class PendingAppend(Struct, eq=False):
    """An append of updates to `[lower, upper)`. See the header. A few plain updates become the batch when the
    call begins; others are uploaded. A group commit of tables gives columns of the schema, or `Tiny`."""

    session: OfHandle
    lower: Antichain = Antichain()
    upper: Antichain = Antichain()
    updates: Any = None
    """`None` if only the upper moves, or if the caller makes `command`."""
    transactions: Mapping[str, int] = {}
    once: Once = UNMARKED
    replica: bool = False
    is_of_a_table: bool = False
    """Whether it is from a group commit of tables. Then its time may be any distance ahead of the clock, as
    with `write`, and a repeat raises `RepeatedMark`."""
    acks: tuple[Ack, ...] = ()
    """Of subscriptions to this shard, in the same version."""
    batch: HollowBatch | None = None
    """The updates, if they are inline."""
    registration: Registration | None = None
    """It is held until the commit."""
    upload: Upload | None = None
    command: AppendHollow | Write | None = None
    """Once it is staged."""
    lost: int = 0
    """How many registrations ended under which it had uploaded parts."""
    flushed: bool = False
    batches: Sequence[StagedBatch] = ()
    """Staged by the caller: consumed if the append happens, else free again."""
    freed: Sequence[StagedBatch] = ()
    """The `batches` that are free again, since the append did not happen."""
    uploads: list[Uploaded] = []
    """Staged by the append: deleted unless it happens."""
    needless: bool = False
    """Whether it succeeded and wrote nothing: then all staged parts are deleted."""
    outcome: Committed | NotCommitted | Indeterminate | None = NotCommitted()
    """`None` from the first attempt until its outcome is known."""
    decided: ClassVar[None] = None
    """See `UnsettledCall`."""

    def __post_init__(self) -> None:
        if self.updates is not None:
            self._take()
        elif self.is_of_a_table:
            since = minimum(self.session.schema.time_length)
            self.batch = HollowBatch(lower=self.lower, upper=self.upper, since=since)

    def _take(self) -> None:
        self.batch = self.session.context.inline(self.updates, self.lower, self.upper)
        if self.batch is None:
            self.updates = own_copy(self.updates)

    @property
    def append(self) -> Self:
        """See `UnsettledCall`."""
        return self

    @property
    def traces(self) -> list[Mapping[str, str]]:
        """Of the processes that built its batches."""
        return []

    @property
    def can_begin_again(self) -> bool:
        """Whether the input can be read a second time."""
        return self.batch is not None or is_repeatable(self.updates)

    def begin_again(self) -> None:
        """Forget the staged parts, which `release` deleted or freed."""
        self.uploads, self.upload, self.freed, self.outcome = [], None, (), NotCommitted()
        self.lost, self.flushed, self.needless = 0, False, False

    # --- before the commit -----------------------------------------------------------------------

    async def prepare(self) -> None:
        """Check the input and upload whole parts, which needs no turn."""
        registration = await self.session.ensure_registered()
        self.hold(registration)  # an upload may take longer than the handle keeps the registration
        self.upload = upload = self.session.context.upload(self.lower, registration)
        self.uploads.append(upload)
        await self._fill(upload)
        upload.check_upper(self.upper)

    async def _fill(self, upload: Upload) -> None:
        if isinstance(self.updates, Tiny):
            await upload.add(self.updates.table)
        elif self.is_of_a_table:
            await upload.add(self.updates)
        else:
            await upload.take(self.updates)

    def hold(self, registration: Registration) -> None:
        """Hold `registration`, and no other, until the commit."""
        registration.hold()
        if self.registration is not None:
            self.registration.release()
        self.registration = registration

    async def stage(self) -> bool:
        """Make the command; whether there is anything to commit."""
        batch, session = self.batch, self.session
        if batch is None and await self._covered():
            self.needless, self.outcome = True, Committed(session.shard.state.upper)
            return False
        if must_flush(session.shard):
            await session.flush_inline()
        if batch is None:
            assert self.upload is not None
            batch = await self.upload.finish(self.upper)
        self.command = self.command_of(batch)
        return True

    async def _covered(self) -> bool:
        """Whether uppers, transaction numbers or ids show that nothing needs to be written. `UpperMismatch`
        after a fresh look if the append cannot succeed."""
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
        if self.is_of_a_table:
            return False if lower == state.upper else None
        if repeat_of(state, now, self) is not None or (self.replica and upper <= state.upper):
            return True
        fits = lower == state.upper or (self.replica and lower <= state.upper <= upper)
        return False if fits else None

    def command_of(self, batch: HollowBatch) -> AppendHollow:
        """The command that appends `batch`."""
        session = self.session
        stack = session.shard.stack
        settings = stack.settings
        return AppendHollow(
            session.registration.writer if self.upload is None else self.upload.writer,
            stack.runtime.token(),
            batch,
            self.transactions,
            settings.inline_writes_total_max_bytes,
            self.replica,
            tuple([staged.record for staged in self.batches]) if self.batches else (),
            settings.txn_ids_max,
            self.once,
            inf if self.is_of_a_table else settings.clock_ahead_max_s,
            self.is_of_a_table,
            self.acks,
        )

    async def repair(self, error: PartsExpired | LeaseExpired | NoRoom) -> None:
        """Remove the obstacle to a commit that surely did not happen. Raises `error` if it cannot."""
        assert self.command is not None
        if isinstance(error, LeaseExpired):
            registration = await self.session.ensure_registered()
            self.command = replace(self.command, writer=registration.writer)
        elif isinstance(error, NoRoom):
            await self._make_room(self.command)
        else:
            self.lost += 1
            if self.lost == LOST_MAX:
                raise error
            try:
                await self._copy(self.command)
            except (LeaseExpired, Corruption) as cause:
                raise error from cause

    async def _copy(self, command: AppendHollow | Write) -> None:
        """Copy the parts whose writers are gone to a registered writer."""
        shard, registration = self.session.shard, await self.session.ensure_registered()
        self.hold(registration)  # the copy may take longer than the handle keeps the registration
        copies = Copies(shard, registration.writer)
        self.uploads.append(copies)
        batch = await copies.of(command.batch)
        self.command = replace(command, writer=registration.writer, batch=batch)
        for upload in self.uploads:
            if upload.writer not in shard.state.writers:
                upload.discard()

    async def _make_room(self, command: AppendHollow | Write) -> None:
        """Flush the inline parts of the state to a blob, or, if that cannot suffice, those of the append."""
        small = 2 * command.batch.inline_bytes <= command.inline_bytes_max
        if small and not self.flushed:
            self.flushed = True
            if await self.session.flush_inline():
                return
        writer = (await self.session.ensure_registered()).writer
        batch = await inline_to_blob(self.session.shard, writer, command.batch, self.uploads)
        self.command = replace(command, batch=batch)

    # --- its outcome -----------------------------------------------------------------------------

    def attempt(self) -> Attempt:
        """A new try to commit it. From here on the outcome is unknown."""
        assert self.command is not None
        self.outcome = None
        return Attempt(self.session.shard.register, self.command, self.session.slot)

    def answered(self, done: Appended) -> None:
        """The commit returned."""
        succeeded = done.wrote or isinstance(self.command, AppendHollow)  # `Combiner` repeats a `Write`
        self.outcome = Committed(done.upper) if succeeded else NotCommitted()
        self.needless = not done.wrote
        if done.wrote:
            assert self.command is not None
            self.session.shard.stack.metrics.appended(self.command.batch.len)

    def unanswered(self) -> None:
        """The commit raised: either nothing happened, or its attempt is in the slot."""
        if self.session.slot.busy:
            self.session.pending = self
        else:
            self.outcome = NotCommitted()

    async def decide(self, attempt: Attempt) -> None:
        """Take the outcome of the settled attempt."""
        assert attempt.after is not None
        self.outcome = Committed(attempt.after.upper) if attempt.happened else NotCommitted()
        await self.tidy()

    async def tidy(self) -> None:
        """Release the staged parts, before the caller gets the outcome. Idempotent."""
        await wait_briefly(self.release())

    def release(self) -> list[asyncio.Task[None]]:
        """Free or consume the batches, and begin to delete parts that no state names; returns the tasks of
        these deletions. Has no await, so a cancellation cannot stop it halfway. Idempotent."""
        registration, self.registration = self.registration, None
        if registration is not None:
            registration.release()
        if self.outcome is None:
            return []
        batches, self.batches = self.batches, ()
        happened = not isinstance(self.outcome, NotCommitted)
        deletions = []
        if self.needless or not happened:
            deletions = [task for upload in self.uploads if (task := upload.discard()) is not None]
        if self.needless and happened and batches:
            return [*deletions, delete_all(batches)]
        self.freed = self.freed if happened else batches
        for batch in batches:
            batch.consume() if happened else batch.unclaim()
        return deletions

    async def repeated(self) -> None:
        """It is a repeat: delete the batches that it freed, unless the caller has used them since."""
        freed, self.freed = self.freed, ()
        if needless := claim_free(freed):
            await wait_briefly([delete_all(needless)])

    def answer(self) -> Committed | NotCommitted:
        """The outcome; raises `Indeterminate` if nobody can know it."""
        if isinstance(self.outcome, Indeterminate):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


async def wait_briefly(deletions: list[asyncio.Task[None]]) -> None:
    """Give deletions a moment to end; a cancelled caller does not wait. They continue in any case."""
    task = asyncio.current_task()
    if deletions and not (task and task.cancelling()):
        await asyncio.wait(deletions, timeout=RELEASE_DEADLINE_S)
