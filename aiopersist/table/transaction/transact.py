"""`client.transact`: runs a body until its transaction is committed, and records its id.

The location remembers the ids of `once=` and numbers of `txn=`, in one of 64 internal shards by hash, since a
repeat may use other tables than the first run. The shard takes part in the commit.
"""

from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, TypeVar

from aiopersist.base.errors import Conflict
from aiopersist.base.user_functions import body_of, call_async, warn_in_body
from aiopersist.data.types.schema import Schema
from aiopersist.shard import fairness
from aiopersist.shard.catalog import RecordId, find, resolve_or_create
from aiopersist.shard.shards import Shards
from aiopersist.shard.stack import Stack
from aiopersist.state.model import Clock
from aiopersist.state.once import Once, hash_of
from aiopersist.state.writing import repeat_of
from aiopersist.storage.readonly import refuse
from aiopersist.storage.wishes import MARGIN
from aiopersist.subscription.joint import commit_alone, refusal
from aiopersist.subscription.order import Acknowledging
from aiopersist.subscription.subscription import JointCall
from aiopersist.table.commit.group import NOTHING, TableCommits
from aiopersist.table.commit.operation import Conflicted
from aiopersist.table.commit.participant import RecordParticipant
from aiopersist.table.commit.plan import PendingOperation, Repeated
from aiopersist.table.open import OpenTables
from aiopersist.table.transaction.consistent_read import ConsistentRead
from aiopersist.table.transaction.snapshot_transaction import Attempts, SnapshotTransaction, commit_reads
from aiopersist.table.transaction.transaction import RunAgain, Transaction
from aiopersist.write.checks import Txn, check_marks, check_once

T = TypeVar("T")

RECORDS = 64  # shards for the ids of transactions: few enough to open, many enough not to be contended
EXCLUSIVE_AFTER = 3  # conflicts in a row: then attempts are exclusive
QUIET_AFTER = 6  # conflicts: then waiting operations are decided before an exclusive attempt
WISHES_AFTER = 7  # conflicts, the last ones with other clients: then it asks them to stand back
SNAPSHOT_AFTER = 6  # conflicts of a transaction that only reads: then it reads a snapshot
PAUSE_S = 0.001  # after a conflict, with jitter; doubles with each
PAUSE_MAX_S = 0.1

Body = Callable[[Transaction], Awaitable[T]]


class TransactionRecords:
    """The internal shards that remember the ids of transactions."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._open: dict[str, RecordParticipant] = {}

    async def participant(self, mark: str) -> RecordParticipant:
        """The shard for ids with that hash, created if it does not exist."""
        name = _record_of(mark)
        if (record := self._open.get(name)) is None:
            shard = self._shards.at(await resolve_or_create(self._shards.stack, name, RecordId), name)
            await shard.open_or_create(Schema(str, bool), Clock.WALL)
            record = self._open.setdefault(name, RecordParticipant(shard))
        return record

    async def happened(self, once: Once, group: TableCommits) -> int | None:
        """The time of the transaction with that id, once no commit of `group` may still record it. One
        request, and one for the name."""
        stack, name = self._shards.stack, _record_of(once.hashes[0])
        shard_id = await find(stack, name, RecordId)
        if shard_id is None:
            return None
        shard = self._shards.at(shard_id, name)
        await group.outcome_known(shard)
        state = await shard.register.refresh()
        if state is None:  # a client named it, and has not created it
            return None
        return once.done_at(state.once, await stack.clock.now())


def _record_of(mark: str) -> str:
    return f"{int(mark[:4], 16) % RECORDS:02}"


class Transactions:
    """The transactions of one client."""

    def __init__(self, tables: OpenTables) -> None:
        self._tables = tables
        self._consistent_read = ConsistentRead(tables.shards.stack)
        self._records = TransactionRecords(tables.shards)

    async def run(
        self,
        body: Body[T],
        txn: Txn | None,
        once: str | None,
        call: JointCall | None,
        max_attempts: int | None,
    ) -> T | Repeated:
        """See `Client.transact`; `call`, which is entered, has its acknowledgements."""
        stack = self._tables.shards.stack
        warn_in_body(stack, "Client.transact", "all of it in one body", depth=4)
        if stack.readonly:
            refuse("a transaction")
        if max_attempts is not None and (type(max_attempts) is not int or max_attempts < 1):
            raise ValueError(f"max_attempts={max_attempts!r} is no positive int")
        marks = _Marks(*check_marks(txn, once, stack.settings), call)
        await self._tables.ready()
        if (text := marks.text) is not None:
            marks.participant = participant = await self._records.participant(text)
            if (repeat := await self._repeat(marks, look=not participant.register.is_own)) is not None:
                return repeat
        if marks.acks and (error := refusal(marks.acks)) is not None:
            raise error
        return await self._until_committed(body, marks, max_attempts)

    async def _repeat(self, marks: "_Marks", *, look: bool = True) -> Repeated | None:
        """The result of a transaction that was done before. Without `look`, this process may not know that
        yet; then the commit tells."""
        participant = marks.participant
        if participant is None:
            return None
        if look:
            await participant.look()
        repeat = repeat_of(participant.state, await self._tables.shards.stack.clock.now(), marks)
        return None if repeat is None else Repeated(repeat.time)

    async def happened(self, once: str) -> int | None:
        """See `Client.happened`."""
        tables = self._tables
        return await self._records.happened(
            check_once(once, None, tables.shards.stack.settings), tables.group
        )

    async def _until_committed(
        self, body: Body[T], marks: "_Marks", max_attempts: int | None
    ) -> T | Repeated:
        runtime = self._tables.shards.stack.runtime
        keys: Any = []
        attempts, body_s, started = Attempts(), 0.0, runtime.monotonic()
        for attempt in count(1):
            try:
                if attempt > SNAPSHOT_AFTER and attempts.may_read_snapshot and not marks.are_any:
                    return await self._run_on_snapshot(body, attempts)
                return await self._attempt(body, marks, attempts, attempt)
            except Conflicted as conflict:
                keys = conflict.keys
            except RunAgain as again:
                keys = again.keys or keys
            if attempt == max_attempts:
                if (repeat := await self._repeat(marks)) is not None:
                    return repeat
                raise Conflict(keys)
            body_s = max(body_s, runtime.monotonic() - self._tables.group.stood_back_s - attempts.began_at)
            await runtime.sleep(runtime.uniform(0, min(PAUSE_S * 2**attempt, PAUSE_MAX_S)))
            if attempt >= WISHES_AFTER and (registers := await attempts.registers()):
                await fairness.wish(registers, MARGIN * body_s, runtime.monotonic() - started)
                body_s *= 2  # a body may take longer without conflicts
        raise AssertionError("attempts do not end")

    async def _attempt(
        self, body: Body[T], marks: "_Marks", attempts: Attempts, attempt: int
    ) -> T | Repeated:
        group, exclusive = self._tables.group, attempt > EXCLUSIVE_AFTER
        speculation = None if attempts.reads_ranges or attempt > QUIET_AFTER else group.speculation
        tx = Transaction(self._tables, self._consistent_read, speculation)
        try:
            if exclusive:  # before others wait for it: it may wait for them
                await marks.turn()
            async with group.exclusive() if exclusive else NOTHING:
                if exclusive and speculation is None:
                    await group.wait_until_idle()
                attempts.began_at = self._tables.shards.stack.runtime.monotonic() - group.stood_back_s
                result, error = await _run_body(tx, body, self._tables.shards.stack)
                if error is not None and (repeat := await self._repeat(marks)) is not None:
                    return repeat  # the error may follow from the first run
                operation = await _pending(tx, result, error, marks)
                if operation is not None:
                    if not exclusive:
                        await marks.turn()
                        await group.wait_until_free()
                    tx._check_speculation()
                    group.add(operation, exclusive=exclusive)
                    marks.queued(True)
            if operation is None:
                return await _outcome_without_tables(tx, result, error, marks)
            done = await group.answer(operation)
            tx.done_at = done.time
            return done if isinstance(done, Repeated) else done.result
        finally:
            marks.queued(False)
            attempts.add(tx)
            tx._close()

    async def _run_on_snapshot(self, body: Body[T], attempts: Attempts) -> T:
        """One attempt on a snapshot: its reads need no check."""
        tx = SnapshotTransaction(
            self._tables, self._consistent_read, attempts.touched, await commit_reads(self._tables, attempts)
        )
        try:
            result, error = await _run_body(tx, body, self._tables.shards.stack)
            if not tx.reads_only:
                raise RunAgain
            tx.done_at = tx.at
            if error is not None:
                raise error
            return result
        finally:
            attempts.add(tx)
            tx._close()


async def _outcome_without_tables(tx: Transaction, result: T, error: Exception | None, marks: "_Marks") -> T:
    """The outcome of a body that used no table."""
    tx.done_at = 0
    if error is not None:
        raise error
    if marks.acknowledging is not None:
        await marks.acknowledging.turn()
        await commit_alone(marks.acks)
    return result


async def _pending(
    tx: Transaction, result: Any, error: Exception | None, marks: "_Marks"
) -> PendingOperation | None:
    """The operation for the group commit, which returns the result of the body, or raises its error or a
    conflict. `None` if the body used no table."""
    for touched in list(tx.touched.values()) if error is None else ():
        if touched.table is None:
            await touched.open()
    tables = [touched for touched in tx.touched.values() if touched.table is not None]
    if not tables and (error is not None or (not tx.appends and marks.participant is None)):
        return None
    participants = tuple([touched.participant for touched in tables])
    operation = PendingOperation(
        participants,
        tx._action(result, error),
        [[*touched.read, *touched.written] for touched in tables],
        marks.participant or [*participants, *tx.appends][0],
        reruns=bool([touched for touched in tables if touched.ranges]),
    )
    if error is None:
        operation.rows = tx.appends
        operation.transactions, operation.once = marks.transactions, marks.once
        operation.acks, operation.acknowledging = marks.acks, marks.acknowledging
        operation.binds = tx._writes or marks.participant is not None or bool(marks.acks)
    return operation


async def _run_body(tx: Transaction, body: Body[T], stack: Stack) -> tuple[T, Exception | None]:
    """The result or the error of the body."""
    result: Any = None
    try:
        with body_of(stack):
            result = await call_async(body, tx)
    except Exception as raised:
        return result, raised
    except BaseExceptionGroup as raised:  # of tasks of the body
        if (again := RunAgain.within(raised)) is None:
            raise
        raise RunAgain(again.keys) from raised
    finally:
        tx.ended = True
    return result, None


class _Marks:
    """The ids of a transaction, the shard that remembers them, and its acknowledgements."""

    def __init__(self, transactions: dict[str, int], once: Once, call: JointCall | None) -> None:
        self.transactions = transactions
        self.once = once
        self.acks = () if call is None else call.acks
        self.acknowledging: Acknowledging | None = call if self.acks else None
        self.participant: RecordParticipant | None = None

    async def turn(self) -> None:
        """Return once its acknowledgements are next; see `Acknowledging.turn`."""
        if self.acknowledging is not None:
            await self.acknowledging.turn(to_queue=True)

    def queued(self, queued: bool) -> None:
        """Whether it waits for the group commit."""
        if self.acknowledging is not None:
            self.acknowledging.queued = queued

    @property
    def are_any(self) -> bool:
        """Whether there is something to record."""
        return self.text is not None or bool(self.acks)

    @property
    def text(self) -> str | None:
        """The hash, in hex, that selects the shard which remembers it."""
        for app in self.transactions:
            return hash_of(app)
        return next(iter(self.once.hashes), None)
