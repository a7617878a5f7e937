"""Group commit: commands that arrive together become one version, in the order of their calls.

1. A command joins the queue before its call first waits. Its updates are converted while it is queued.
2. The ready commands at the head of the queue are a *group*. They are applied to a draft of the streams
   (`draft.py`), one after the other.
3. The accepted updates are written: small ones into the version, others as blobs.
4. One compare-and-set makes the draft durable. Only then all callers return, even refused ones, and the
   listeners hear of it. Meanwhile the next group gathers.

Reads use the durable state, never a draft, so a failed commit has nothing to take back. A commit with an
unknown outcome is settled before anything else is decided, as for every handle.
"""

import asyncio
from functools import partial
from typing import Any

from aiopersist.base.errors import Error, Indeterminate, LeaseExpired, StorageUnavailable
from aiopersist.base.resource import for_each, run_bounded
from aiopersist.indexed.commands import ChangeStreams
from aiopersist.indexed.core import Core
from aiopersist.indexed.draft import (
    AllowCompaction,
    Barrier,
    Draft,
    Seal,
    StreamCommand,
    StreamUpdates,
    WriteStream,
)
from aiopersist.indexed.errors import Fenced, Stopped
from aiopersist.indexed.raw import InlineRoom, RawParts
from aiopersist.parts.named_parts import ZERO
from aiopersist.parts.upload import Upload
from aiopersist.shard.attempt import Slot, Unknowable
from aiopersist.shard.commit import commit, settle
from aiopersist.shard.queue import GroupQueue
from aiopersist.state.streams import StreamsChanges

ENTRIES_AT_ONCE = 32  # small entries of a write converted in one turn of the event loop
COMMANDS_AT_ONCE = 256  # commands applied or answered in one turn of the event loop: a few ms at most


class QueuedCommand:
    """A command in the queue, and the outcome for its call."""

    def __init__(self, command: StreamCommand, number: int, oldest: int, *, ready: bool) -> None:
        self.command = command
        self.number = number
        self.oldest = oldest
        """The number of the first command that was not durable when this one was called."""
        self.ready = ready
        self.uploads: list[Upload] = []
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the call, if it still waits."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # marks it as retrieved

    def discard(self) -> None:
        """Delete the blobs that were uploaded for it: surely no version names them."""
        for upload in self.uploads:
            upload.discard()


Discardable = QueuedCommand | RawParts
"""Has uploaded blobs, and can delete them."""


class Committer:
    """See the header."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._queue = GroupQueue[QueuedCommand](
            core.stack.supervisor, "commit the commands of an Indexed", self._carry_out
        )
        self._group: list[QueuedCommand] = []
        self._called = 0
        self._failure: tuple[int, Exception] | None = None
        """The last failed commit: the number of its last command, and its error."""
        self._slot = Slot()
        self._in_doubt: list[Discardable] = []
        """The uploads of the commit in the slot."""

    async def run(self, command: StreamCommand) -> Any:
        """The command's durable result, or its refusal. Nothing if cancelled before its commit begins."""
        return await self._outcome(self._enqueue(command, ready=True))

    async def write(self, entries: list[tuple[StreamUpdates, Any]]) -> int:
        """Convert these updates and write them. The moment of this call sets their order among commands."""
        core, turn = self._core, self._core.stack.runtime.sleep
        pending = self._enqueue(command := WriteStream([rows for rows, _ in entries]), ready=False)
        try:
            for number, (rows, updates) in enumerate(entries):
                schema_id = core.streams.names.get(rows.stream, 0)  # a missing stream is refused later
                upload = Upload(core.shard, rows.schema, schema_id, core.check_owner(), ZERO, raw=True)
                pending.uploads.append(upload)
                await upload.take(updates)
                if number % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                    await turn(0)
            for rows, upload in zip(command.entries, pending.uploads, strict=True):
                rows.pieces, rows.seen, rows.count = await upload.finish_raw(), upload.seen, upload.rows_taken
                rows.goodbytes = sum(size for _, size in rows.pieces)
        except BaseException:
            self._withdraw(pending)
            raise
        pending.ready = True
        self._queue.begin()
        seqno: int = await self._outcome(pending)
        return seqno

    async def flush(self) -> None:
        """Return once all earlier commands are durable; raise the error of their commit if it failed. Settles
        an earlier commit in doubt first."""
        if self._queue.waiting or self._group or self._slot.busy:
            await self.run(Barrier())

    async def aclose(self) -> None:
        """Cancel the commands that are not durable yet."""
        await self._queue.stop()
        for pending in [*self._group, *self._queue.take()]:
            if not pending.outcome.done():
                begun = pending in self._group
                text = "it was stopped before the answer of the store" if begun else "the Indexed was stopped"
                pending.fail(Indeterminate(text) if begun else Stopped(text))
                if not begun:
                    pending.discard()
        self._group = []

    # --- the queue -------------------------------------------------------------------------------

    def _enqueue(self, command: StreamCommand, *, ready: bool) -> QueuedCommand:
        self._core.check_owner()
        self._called += 1
        oldest = next((pending.number for pending in (*self._group[:1], *self._queue.waiting)), self._called)
        pending = QueuedCommand(command, self._called, oldest, ready=ready)
        self._queue.waiting[pending] = None
        if ready:
            self._queue.begin()
        return pending

    async def _outcome(self, pending: QueuedCommand) -> Any:
        try:
            return await asyncio.shield(pending.outcome)
        except asyncio.CancelledError:
            if pending in self._queue.waiting:
                self._withdraw(pending)
            raise

    def _withdraw(self, pending: QueuedCommand) -> None:
        """Remove a command that was cancelled or cannot be stored, as if it was never called."""
        self._queue.withdraw(pending)
        pending.outcome.cancel()
        pending.discard()
        self._queue.begin()

    async def _carry_out(self) -> bool:
        self._group = group = self._queue.take(self._ready())
        try:
            if group:
                await self._commit([pending for pending in group if not self._failed_before(pending)])
        except Exception as error:
            self._failure = group[-1].number, error
        self._group = []
        return bool(group)

    def _ready(self) -> int:
        """How many commands at the head of the queue are ready, and so are the next group."""
        for number, pending in enumerate(self._queue.waiting):
            if not pending.ready or (pending.command.is_exclusive and number):
                return number
            if pending.command.is_exclusive:
                return 1
        return len(self._queue.waiting)

    def _failed_before(self, pending: QueuedCommand) -> bool:
        """Whether a commit that `pending` depends on failed: then its call gets that error."""
        if isinstance(pending.command, CONSUMING) or self._failure is None:
            return False
        last, error = self._failure
        if pending.oldest > last:
            return False
        pending.fail(error)
        return True

    # --- a group ---------------------------------------------------------------------------------

    async def _commit(self, group: list[QueuedCommand]) -> None:
        """Make the group durable and answer its callers. Its errors have already gone to the callers."""
        uploads: list[Discardable] = [*group]
        # Before the first await: from here on the commands may happen, even if their callers are cancelled.
        for pending in group:
            pending.command.begun = True
        try:
            await self._settle()
            core = self._core
            owner = core.check_owner()
            draft = Draft(core.state, core.shard.schema)
            outcomes = await self._applied(group, draft)
            uploads.append(raw := RawParts(core.shard, owner, InlineRoom(core.inline_room)))
            changes = await self._finished(draft, raw)
        except Exception as error:
            self._fail(group, uploads, error)
            raise
        try:
            seqno: int | None = None
            if changes is not None:
                change = ChangeStreams(owner, changes, draft.schemas)
                seqno = await commit(core.shard.register, change, self._slot)
        except Exception as error:
            if self._slot.busy:
                self._in_doubt, uploads = uploads, []
            self._fail(group, uploads, error)
            raise
        if seqno is not None:
            self._publish(seqno, changes)
        answers = list(zip(group, outcomes, strict=True))
        await for_each(answers, self._answer, COMMANDS_AT_ONCE, core.stack.runtime)

    async def _applied(self, group: list[QueuedCommand], draft: Draft) -> list[Any]:
        """The results of the commands, or their refusals."""
        outcomes: list[Any] = []
        await for_each(
            group,
            lambda pending: outcomes.append(_applied(pending.command, draft)),
            COMMANDS_AT_ONCE,
            self._core.stack.runtime,
        )
        return outcomes

    async def _finished(self, draft: Draft, raw: RawParts) -> StreamsChanges | None:
        """Write the accepted updates; returns the changes of the streams."""
        core = self._core
        jobs = []
        for name, updates in draft.accepted.items():
            pieces = [piece for rows in updates for piece in rows.pieces]
            jobs.append(partial(raw.write, pieces, updates[0].schema, draft.schema_id(name)))
        parts = await run_bounded(core.stack.settings.fetch_max_outstanding_parts, jobs)
        return draft.finish(dict(zip(draft.accepted, parts, strict=True)))

    async def _settle(self) -> None:
        """Settle an earlier commit in doubt. If it happened, tell the listeners."""
        try:
            attempt = await settle(self._slot)
        except Unknowable:  # another instance has taken over: the next commit raises `Fenced`
            self._in_doubt = []
            return
        except Error as error:
            text = f"an earlier commit is still in doubt, so this one did not begin: {error}"
            raise StorageUnavailable(text, shard_id=self._core.shard.id) from error
        if attempt is None:
            return
        uploads, self._in_doubt = self._in_doubt, []
        if not attempt.happened:
            for upload in uploads:
                upload.discard()
        elif isinstance(attempt.command, ChangeStreams):
            self._publish(attempt.seqno, attempt.command.changes)

    def _publish(self, seqno: int, changes: StreamsChanges | None) -> None:
        """Tell the listeners of a durable version. If that fails, the listeners end, not the callers."""
        feed = self._core.feed
        try:
            feed.publish(seqno, changes)
        except Exception as error:
            self._core.stack.supervisor.failures.report("telling the listeners of an Indexed", error)
            feed.fail(LeaseExpired(f"version {seqno} could not be passed on: {error!r}"))

    def _fail(self, group: list[QueuedCommand], uploads: list[Discardable], error: Exception) -> None:
        """Raise `error` in the calls, and delete `uploads`, which surely no version names."""
        core = self._core
        if isinstance(error, Fenced):
            core.be_fenced(error)
        for pending in group:
            core.counts["failed_commands"] += isinstance(pending.command, CONSUMING)
            pending.fail(error)
        for upload in uploads:
            upload.discard()

    def _answer(self, answer: tuple[QueuedCommand, Any]) -> None:
        (pending, outcome), counts = answer, self._core.counts
        if isinstance(outcome, Exception):
            counts["failed_commands"] += isinstance(pending.command, CONSUMING)
            pending.discard()
            pending.fail(outcome)
            return
        if isinstance(pending.command, WriteStream):
            counts["writes"] += 1
            counts["records"] += sum(rows.count for rows in pending.command.entries)
            counts["bytes"] += sum(rows.goodbytes for rows in pending.command.entries)
        if not pending.outcome.done():
            pending.outcome.set_result(outcome)


CONSUMING = (WriteStream, Seal, AllowCompaction)


def _applied(command: StreamCommand, draft: Draft) -> Any:
    """The command's result, or its refusal."""
    try:
        return command(draft)
    except Error as refusal:
        return refusal
