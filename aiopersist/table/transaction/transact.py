"""`client.transact`: runs a body until its transaction is committed, and remembers its id.

Ids of `once=` and numbers of `txn=` are kept per location, in one of 64 internal shards by hash: the tables
of a repeat may be others than those of the first run. The shard joins the commit.
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
from aiopersist.table.commit.participant import Participant, RecordParticipant
from aiopersist.table.commit.plan import PendingOperation, Repeated
from aiopersist.table.open import OpenTables
from aiopersist.table.transaction.consistent_read import ConsistentRead
from aiopersist.table.transaction.frozen import Attempted, FrozenTransaction, freeze
from aiopersist.table.transaction.transaction import RunAgain, Transaction
from aiopersist.write.checks import Txn, check_marks, check_once

T = TypeVar("T")

RECORDS = 64  # shards for the ids of transactions: few enough to open, many enough not to be contended
ALONE_AFTER = 3  # conflicts in a row
QUIET_AFTER = 6  # conflicts: then what waits is decided before it runs alone
WISHES_AFTER = 7  # conflicts, the last of them with other clients: they are asked to stand back
FROZEN_AFTER = 6  # conflicts of a transaction that only reads: then it reads frozen tables
PAUSE_S = 0.001  # after a conflict, with jitter; doubles with each
PAUSE_MAX_S = 0.1

Body = Callable[[Transaction], Awaitable[T]]


class TransactionRecords:
    """The internal shards that remember the ids of transactions."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._open: dict[str, RecordParticipant] = {}

    async def member(self, mark: str) -> RecordParticipant:
        """The shard for ids with that hash, created if it does not exist."""
        name = _record_of(mark)
        if (known := self._open.get(name)) is None:
            shard = self._shards.at(await resolve_or_create(self._shards.stack, name, RecordId), name)
            await shard.open_or_create(Schema(str, bool), Clock.WALL)
            known = self._open.setdefault(name, RecordParticipant(shard))
        return known

    async def happened(self, once: Once, group: TableCommits) -> int | None:
        """The time of the transaction with that id, once no commit of `group` may record it. One request, one
        more for the name."""
        stack, name = self._shards.stack, _record_of(once.hashes[0])
        found = await find(stack, name, RecordId)
        if found is None:
            return None
        shard = self._shards.at(found, name)
        await group.settled(shard)
        state = await shard.register.refresh()
        if state is None:  # it was named by a client that did not come to create it
            return None
        return once.done_at(state.once, await stack.clock.now())


def _record_of(mark: str) -> str:
    return f"{int(mark[:4], 16) % RECORDS:02}"


class Transactions:
    """The transactions of one client."""

    def __init__(self, tables: OpenTables) -> None:
        self._tables = tables
        self._cut = ConsistentRead(tables.shards.stack)
        self._records = TransactionRecords(tables.shards)

    async def run(
        self,
        body: Body[T],
        txn: Txn | None,
        once: str | None,
        call: JointCall | None,
        max_attempts: int | None,
    ) -> T | Repeated:
        """See `Client.transact`; `call` has its acknowledgements, and is entered."""
        stack = self._tables.shards.stack
        warn_in_body(stack, "Client.transact", "all of it in one body", depth=4)
        if stack.readonly:
            refuse("a transaction")
        if max_attempts is not None and (type(max_attempts) is not int or max_attempts < 1):
            raise ValueError(f"max_attempts={max_attempts!r} is no positive int")
        marks = _Marks(*check_marks(txn, once, stack.settings), call)
        await self._tables.ready()
        if (text := marks.text) is not None:
            marks.member = member = await self._records.member(text)
            if (repeat := await self._repeat(marks, look=not member.register.is_own)) is not None:
                return repeat
        if marks.acks and (error := refusal(marks.acks)) is not None:
            raise error
        return await self._until_committed(body, marks, max_attempts)

    async def _repeat(self, marks: "_Marks", *, look: bool = True) -> Repeated | None:
        """What a transaction gives that was done before. Without a look it may be that nobody here knows of
        that: then its commit tells."""
        member = marks.member
        if member is None:
            return None
        if look:
            await member.look()
        repeat = repeat_of(member.state, await self._tables.shards.stack.clock.now(), marks)
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
        seen, needs_s, started = Attempted(), 0.0, runtime.monotonic()
        for attempt in count(1):
            try:
                if attempt > FROZEN_AFTER and seen.may_be_frozen and not marks.are_any:
                    return await self._read_frozen(body, seen)
                return await self._in_turn(body, marks, seen, attempt)
            except Conflicted as conflict:
                keys = conflict.keys
            except RunAgain as again:
                keys = again.keys or keys
            if attempt == max_attempts:
                if (repeat := await self._repeat(marks)) is not None:
                    return repeat
                raise Conflict(keys)
            needs_s = max(needs_s, runtime.monotonic() - self._tables.group.stood_back_s - seen.began_at)
            await runtime.sleep(runtime.uniform(0, min(PAUSE_S * 2**attempt, PAUSE_MAX_S)))
            if attempt >= WISHES_AFTER and (registers := await seen.registers()):
                await fairness.wish(registers, MARGIN * needs_s, runtime.monotonic() - started)
                needs_s *= 2  # a body may take longer where nobody disturbs it
        raise AssertionError("attempts do not end")

    async def _in_turn(self, body: Body[T], marks: "_Marks", seen: Attempted, attempt: int) -> T | Repeated:
        group, alone = self._tables.group, attempt > ALONE_AFTER
        ahead = None if seen.reads_ranges or attempt > QUIET_AFTER else group.ahead
        tx = Transaction(self._tables, self._cut, ahead)
        try:
            if alone:  # others wait for what runs alone, those for which it waits, too
                await marks.turn()
            async with group.alone() if alone else NOTHING:
                if alone and ahead is None:
                    await group.quiet()
                seen.began_at = self._tables.shards.stack.runtime.monotonic() - group.stood_back_s
                result, error = await _ended(tx, body, self._tables.shards.stack)
                if error is not None and (repeat := await self._repeat(marks)) is not None:
                    return repeat  # the error may come of that: it was done before
                waiting = await _pending(tx, result, error, marks)
                if waiting is not None:
                    if not alone:
                        await marks.turn()
                        await group.free()
                    tx._check_ahead()
                    group.add(waiting, alone=alone)
                    marks.queued(True)
            if waiting is None:
                return await _given(tx, result, error, marks)
            done = await group.answer(waiting)
            tx.done_at = done.time
            return done if isinstance(done, Repeated) else done.result
        finally:
            marks.queued(False)
            seen.add(tx)
            tx._close()

    async def _read_frozen(self, body: Body[T], seen: Attempted) -> T:
        """One attempt on frozen tables: what it saw needs no check."""
        tx = FrozenTransaction(self._tables, self._cut, seen.touched, await freeze(self._tables, seen))
        try:
            result, error = await _ended(tx, body, self._tables.shards.stack)
            if not tx.is_frozen:
                raise RunAgain
            tx.done_at = tx.at
            if error is not None:
                raise error
            return result
        finally:
            seen.add(tx)
            tx._close()


async def _given(tx: Transaction, result: T, error: Exception | None, marks: "_Marks") -> T:
    """What a body gave that touched nothing."""
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
    """What the group commit decides: it gives the result of the body, or raises its error or a conflict.
    `None` if there is nothing to decide."""
    for some in list(tx.touched.values()) if error is None else ():
        if some.table is None:
            await some.open()
    touched = [some for some in tx.touched.values() if some.table is not None]
    if not touched and (error is not None or (not tx.plain and marks.member is None)):
        return None
    members: tuple[Participant, ...] = tuple([some.member for some in touched])
    waiting = PendingOperation(
        members,
        tx._action(result, error),
        [[*some.read, *some.written] for some in touched],
        marks.member or next(iter((*members, *tx.plain))),
        reruns=bool([some for some in touched if some.ranges]),
    )
    if error is None:
        waiting.rows = tx.plain
        waiting.transactions, waiting.once = marks.transactions, marks.once
        waiting.acks, waiting.acknowledging = marks.acks, marks.acknowledging
        waiting.binds = tx._writes or marks.member is not None or bool(marks.acks)
    return waiting


async def _ended(tx: Transaction, body: Body[T], stack: Stack) -> tuple[T, Exception | None]:
    """What the body gave, or raised."""
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
    """By what a transaction is known again, the shard that remembers it, and what it acknowledges."""

    def __init__(self, transactions: dict[str, int], once: Once, call: JointCall | None) -> None:
        self.transactions = transactions
        self.once = once
        self.acks = () if call is None else call.acks
        self.acknowledging: Acknowledging | None = call if self.acks else None
        self.member: RecordParticipant | None = None

    async def turn(self) -> None:
        """Return once what it acknowledges is next; see `Acknowledging.turn`."""
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
        """What decides which shard remembers it, as a hash in hex."""
        for app in self.transactions:
            return hash_of(app)
        return next(iter(self.once.hashes), None)
