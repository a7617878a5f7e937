"""The steps of an append, of one handle or of several at one moment.

1. *Prepare*, outside of the handle's turn: take the rows, or claim the staged batches.
2. *Stage*, in the turn: upload what is left; the command is ready then.
3. *Commit* (`commit_staged`). What stands in the way is repaired, and the same append is tried again:
   a lease that ran out, where the parts that were uploaded under it are copied to another writer
   (`parts/copies.py`); a state without room for more inline parts.
4. *Tidy up* by the outcome. A caller who is not told keeps a case, which `settle` answers.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set, Sized
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from aiopersist.data.updates.convert import is_arrow
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
from aiopersist.parts.copies import Copies
from aiopersist.parts.flush import inline_to_blob
from aiopersist.parts.upload import Upload
from aiopersist.shard.commit import Intent, commit_all
from aiopersist.shard.registration import LOST_MAX, Registration
from aiopersist.state.model import State
from aiopersist.state.writing import Appended, AppendHollow, NoRoom, PartsExpired, Write, is_spent, repeated
from aiopersist.write.assemble import AppendableBatch, assembled, check_append
from aiopersist.write.batch import Batch
from aiopersist.write.doubt import Case, Committed, Doubt, NotCommitted, finished
from aiopersist.write.session import Session


@dataclass(eq=False)
class AppendIntent(ABC):
    """One append of one handle to `[lower, upper)`."""

    session: Session
    lower: Antichain
    upper: Antichain
    transactions: Mapping[str, int]
    replica: bool = False
    doubt: Doubt = field(default_factory=Doubt)

    def release(self) -> "list[asyncio.Task[None]]":
        """See `Doubt.release`."""
        return self.doubt.release()

    @property
    def can_begin_again(self) -> bool:
        """Whether what is to be appended is still there."""
        return True

    @abstractmethod
    async def prepare(self) -> None:
        """Check what is to be appended, as far as that needs no turn."""

    @abstractmethod
    async def stage(self) -> AppendHollow | None:
        """The command; `None` if there is nothing to write any more."""


@dataclass(eq=False)
class RowsAppend(AppendIntent):
    """Of updates."""

    updates: Any = ()
    registration: Registration | None = None
    upload: Upload | None = None

    @property
    def can_begin_again(self) -> bool:
        """Of an iterator nothing is left, though it tells a length, as a progress bar does."""
        updates = self.updates
        return isinstance(updates, Sequence | Set) or (is_arrow(updates) and isinstance(updates, Sized))

    def release(self) -> list[asyncio.Task[None]]:
        registration, self.registration = self.registration, None
        if registration is not None:
            registration.release()
        return self.doubt.release()

    async def prepare(self) -> None:
        self.registration = await self.session.ensure_registered()
        self.registration.hold()  # an upload may take longer than the handle keeps it
        self.upload = upload = self.session.upload_under(self.lower, self.registration)
        self.doubt.uploads.append(upload)
        await upload.take_whole(self.updates)
        upload.check_upper(self.upper)

    async def stage(self) -> AppendHollow | None:
        if await self._covered():
            return None
        await self.session.make_room()
        upload = self.upload
        assert upload is not None
        batch = await upload.finish(self.upper)
        stack = self.session.shard.stack
        return AppendHollow(
            upload.writer,
            stack.runtime.token(),
            batch,
            self.transactions,
            stack.settings.inline_writes_total_max_bytes,
            self.replica,
            transactions_max=stack.settings.txn_ids_max,
        )

    async def _covered(self) -> bool:
        """What can be said before anything is staged, by what never goes back: `True` if there is nothing
        to write any more; `UpperMismatch`, with the upper that does not match, after a fresh look."""
        shard = self.session.shard
        if (covered := self._is_covered(shard.state)) is None:
            state = await shard.open()
            if (covered := self._is_covered(state)) is None:
                raise UpperMismatch(self.lower, state.upper, shard_id=shard.id)
        return covered

    def _is_covered(self, state: State) -> bool | None:
        """`None` if it does not fit there."""
        lower, upper = self.lower, self.upper
        if repeated(state, self.transactions) or (self.replica and upper <= state.upper):
            return True
        fits = lower == state.upper or (self.replica and lower <= state.upper <= upper)
        return False if fits else None


@dataclass(eq=False)
class BatchesAppend(AppendIntent):
    """Of staged batches."""

    batches: Sequence[Batch] = ()

    async def prepare(self) -> None:
        batches = _distinct(self.batches, self.session)
        check_append([_value(batch) for batch in batches], self.lower, self.upper)
        for batch in batches:
            batch._begin()
        self.doubt.batches = batches

    async def stage(self) -> AppendHollow | None:
        stack, since = self.session.shard.stack, minimum(self.session.schema.time_length)
        batches = self.doubt.batches
        return AppendHollow(
            self.session.registration.writer,
            stack.runtime.token(),
            assembled([_value(batch) for batch in batches], self.lower, self.upper, since),
            self.transactions,
            stack.settings.inline_writes_total_max_bytes,
            self.replica,
            tuple(batch._staged for batch in batches),
            stack.settings.txn_ids_max,
        )


def _value(batch: Batch) -> AppendableBatch:
    return AppendableBatch(batch._hollow, batch._rewritten)


def _distinct(batches: Sequence[Batch], session: Session) -> list[Batch]:
    """The batches, all free, of this shard, and none twice."""
    found: dict[str, Batch] = {}
    for batch in batches:
        if not isinstance(batch, Batch):
            raise TypeError(f"{shown(batch)} is not an aiopersist.Batch")
        batch._check_free()
        if batch.shard_id != session.shard.id:
            text = f"batch {batch.id} is of shard {batch.shard_id}, not of {session.shard.id}"
            raise InvalidUsage(UsageKind.BATCH_NOT_FROM_THIS_SHARD, text)
        if batch.id in found:
            raise InvalidUsage(UsageKind.CONSUMED, f"batch {batch.id} is there twice")
        found[batch.id] = batch
    return list(found.values())


async def append_all(intents: Sequence[AppendIntent]) -> None:
    """AppendHollow all of them at one moment, or none; they are of different shards."""
    lost = 0
    while True:
        try:
            await _append_once(intents)
        except PartsExpired:  # and swept before they could be copied
            lost += 1
            if lost == LOST_MAX or not all(intent.can_begin_again for intent in intents):
                raise
            for intent in intents:
                intent.doubt = Doubt()
        else:
            return


async def _append_once(intents: Sequence[AppendIntent]) -> None:
    try:
        try:
            for intent in intents:
                await intent.prepare()
            async with AsyncExitStack() as turns:
                for intent in sorted(intents, key=lambda i: i.session.shard.id):  # one order: no deadlock
                    await turns.enter_async_context(intent.session.turn())
                await _append_all(intents)
        finally:
            deletions = [task for intent in intents for task in intent.release()]
            await finished(deletions)
    except (asyncio.CancelledError, Indeterminate):  # also one that came while it tidied up
        for intent in intents:
            intent.session.case = Case(intent.transactions, intent.doubt)
        raise


async def _append_all(intents: Sequence[AppendIntent]) -> None:
    staged = []
    for intent in intents:
        command = await intent.stage()
        if command is None:
            intent.doubt.needless = True
            intent.doubt.outcome = Committed(intent.session.shard.state.upper)
        else:
            staged.append(StagedAppend(intent.session, command, intent.doubt))
    if staged:
        await commit_staged(staged)


@dataclass(eq=False)
class StagedAppend:
    """An append that is ready, in the turn of its handle."""

    session: Session
    command: AppendHollow | Write
    doubt: Doubt
    lost: int = 0
    """Registrations under which it had uploaded parts."""
    flushed: bool = False

    async def repair(self, error: "PartsExpired | LeaseExpired | NoRoom", held: ExitStack) -> None:
        """Put away what stands in the way of the commit, which surely did not happen. Raises `error` if it
        cannot. A registration that is needed until the commit is given to `held`."""
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
        """The parts whose writers are gone, under one that is registered."""
        shard, registration = self.session.shard, await self.session.ensure_registered()
        registration.hold()  # copying may take longer than the handle keeps it
        held.callback(registration.release)
        copies = Copies(shard, registration.writer)
        self.doubt.uploads.append(copies)
        batch = await copies.of(self.command.batch)
        self.command = replace(self.command, writer=registration.writer, batch=batch)
        for upload in self.doubt.uploads:
            if upload.writer not in shard.state.writers:
                upload.discard()

    async def _make_room(self) -> None:
        """Flush what the state holds inline to one blob; or, if that was done before or is not the trouble,
        what the append brings."""
        session, command = self.session, self.command
        small = 2 * command.batch.inline_bytes <= command.inline_bytes_max
        if small and not self.flushed:
            self.flushed = True
            if await session.flush_inline():
                return
        writer = (await session.ensure_registered()).writer
        batch = await inline_to_blob(session.shard, writer, command.batch, self.doubt.uploads)
        self.command = replace(command, batch=batch)


async def commit_staged(appends: Sequence[StagedAppend]) -> list[Appended]:
    """Commit them at one moment. Each `doubt` knows what came of it, or that it must be settled."""
    with ExitStack() as held:
        while True:
            for append in appends:
                append.doubt.outcome = None
            try:
                jobs = [Intent(a.session.shard.register, a.command, a.session.slot) for a in appends]
                results = await commit_all(jobs)
            except BaseException as error:
                for append in appends:
                    _not_told(append)
                if isinstance(error, AlreadyAppended):
                    _tell_apart(appends)
                if not isinstance(error, PartsExpired | LeaseExpired | NoRoom):
                    raise
                (at_fault,) = (a for a in appends if a.session.shard.id == error.shard_id)
                await at_fault.repair(error, held)
                continue
            for append, done in zip(appends, results, strict=True):
                _told(append, done)
            return results


def _told(append: StagedAppend, done: Appended) -> None:
    succeeded = done.wrote or isinstance(append.command, AppendHollow)  # a group goes on without repeats
    append.doubt.outcome = Committed(done.upper) if succeeded else NotCommitted()
    append.doubt.needless = not done.wrote


def _not_told(append: StagedAppend) -> None:
    """The commit did not return: either nothing happened, or its attempt is in the slot."""
    if append.session.slot.busy:
        append.session.pending = append.doubt
    else:
        append.doubt.outcome = NotCommitted()


def _tell_apart(appends: Sequence[StagedAppend]) -> None:
    """Which of the batches were appended or deleted elsewhere."""
    for append in appends:
        state = append.session.shard.state
        for batch in append.doubt.batches:
            if is_spent(state, batch._staged.writer, batch.id):
                batch._is_elsewhere()
