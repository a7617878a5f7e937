"""`client.transact`: runs a body until its transaction is committed, and remembers its id.

Ids of `once=` and numbers of `txn=` are kept per location, in one of 64 internal shards by hash: the tables
of a repeat may be others than those of the first run. The shard joins the commit.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any, TypeVar

from aiopersist.data.types.schema import Schema
from aiopersist.errors import Conflict
from aiopersist.plain import call_async
from aiopersist.resource import Opening
from aiopersist.shard.catalog import RecordId, find, resolve_or_create
from aiopersist.shard.shards import Shards
from aiopersist.state.model import Clock
from aiopersist.state.once import Once, hash_of
from aiopersist.state.writing import repeat_of
from aiopersist.storage.readonly import refuse
from aiopersist.subscription.joint import JointAck, commit_alone, refusal
from aiopersist.subscription.subscription import joint_acks
from aiopersist.table.cut import Cut
from aiopersist.table.frozen import Attempted, FrozenTransaction, freeze
from aiopersist.table.member import Member, PlainMember
from aiopersist.table.open import OpenTables
from aiopersist.table.operation import Conflicted
from aiopersist.table.plan import PendingOperation, Repeated
from aiopersist.table.transaction import RunAgain, Transaction
from aiopersist.write.checks import Txn, check_once, check_txn
from aiopersist.write.handle import WriteHandle, session_of

T = TypeVar("T")

RECORDS = 64  # shards for the ids of transactions: few enough to open, many enough not to be contended
ALONE_AFTER = 3  # conflicts in a row
QUIET_AFTER = 6  # conflicts: then what waits is decided before it runs alone
ASKS_AFTER = 9  # conflicts: then it asks other clients to stand back
FROZEN_AFTER = 6  # conflicts of a transaction that only reads: then it reads frozen tables
PAUSE_S = 0.001  # after a conflict, with jitter; doubles with each
PAUSE_MAX_S = 0.1

Body = Callable[[Transaction], Awaitable[T]]


class TransactionRecords:
    """The internal shards that remember the ids of transactions."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._open: dict[str, PlainMember] = {}

    async def member(self, mark: str) -> PlainMember:
        """The shard for ids with that hash, opened or created if it is not."""
        name = _record_of(mark)
        known = self._open.get(name)
        if known is None or known.writer.scope.closed:
            opening: Opening[WriteHandle[Any, Any]] = self._shards.opening(
                partial(self._opened, name), "client.transact(...)"
            )
            known = self._open[name] = PlainMember(session_of(await opening))
        return known

    async def _opened(self, name: str) -> WriteHandle[Any, Any]:
        shards = self._shards
        shard = shards.at(await resolve_or_create(shards.stack, name, RecordId), name)
        return await WriteHandle.open(shard, Schema(str, bool), shards.scope, Clock.WALL)

    async def happened(self, once: Once) -> int | None:
        """The time of the transaction with that id. One request, one more for the name."""
        stack, name = self._shards.stack, _record_of(once.hashes[0])
        found = await find(stack, name, RecordId)
        if found is None:
            return None
        shard = self._shards.at(found, name)
        await shard.settle_senders()
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
        self._cut = Cut(tables.shards.stack)
        self._records = TransactionRecords(tables.shards)

    async def run(
        self,
        body: Body[T],
        txn: Txn | None,
        once: str | None,
        acks: Iterable[Any],
        max_attempts: int | None,
    ) -> T | Repeated:
        """See `Client.transact`."""
        stack = self._tables.shards.stack
        if stack.readonly:
            refuse("a transaction")
        if max_attempts is not None and (type(max_attempts) is not int or max_attempts < 1):
            raise ValueError(f"max_attempts={max_attempts!r} is no positive int")
        marks = _Marks(check_txn(txn), check_once(once, txn, stack.settings), joint_acks(acks, stack))
        await self._tables.ready()
        if marks.text is not None:
            marks.member = await self._records.member(marks.text)
            await marks.member.look()
            repeat = repeat_of(marks.member.state, await stack.clock.now(), marks)
            if repeat is not None:
                return Repeated(repeat.time)
        if (error := refusal(marks.acks)) is not None:
            raise error
        return await self._until_committed(body, marks, max_attempts)

    async def happened(self, once: str) -> int | None:
        """See `Client.happened`."""
        return await self._records.happened(check_once(once, None, self._tables.shards.stack.settings))

    async def _until_committed(
        self, body: Body[T], marks: "_Marks", max_attempts: int | None
    ) -> T | Repeated:
        runtime = self._tables.shards.stack.runtime
        keys: Any = []
        seen = Attempted()
        async with self._tables.group.courtesy.asking() as ask:
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
                    raise Conflict(keys)
                await runtime.sleep(runtime.uniform(0, min(PAUSE_S * 2**attempt, PAUSE_MAX_S)))
                if attempt >= ASKS_AFTER:
                    await seen.ask(ask)
        raise AssertionError("attempts do not end")

    async def _in_turn(self, body: Body[T], marks: "_Marks", seen: Attempted, attempt: int) -> T | Repeated:
        group, alone = self._tables.group, attempt > ALONE_AFTER
        ahead = None if seen.reads_ranges or attempt > QUIET_AFTER else group.ahead
        tx = Transaction(self._tables, self._cut, ahead)
        try:
            async with group.alone() if alone else nullcontext():
                if alone and ahead is None:
                    await group.quiet()
                result, error = await _ended(tx, body)
                waiting = await _pending(tx, result, error, marks)
                if waiting is not None:
                    if not alone:
                        await group.free()
                    tx.check()
                    group.add(waiting, alone=alone)
            if waiting is None:
                return await _given(tx, result, error, marks)
            done = await group.answer(waiting)
            tx.done_at = done.time
            return done if isinstance(done, Repeated) else done.result
        finally:
            seen.add(tx)
            tx.close()

    async def _read_frozen(self, body: Body[T], seen: Attempted) -> T:
        """One attempt on frozen tables: what it saw needs no check."""
        tx = FrozenTransaction(self._tables, self._cut, seen.touched, await freeze(self._tables, seen))
        try:
            result, error = await _ended(tx, body)
            if not tx.is_frozen:
                raise RunAgain
            tx.done_at = tx.at
            if error is not None:
                raise error
            return result
        finally:
            seen.add(tx)
            tx.close()


async def _given(tx: Transaction, result: T, error: Exception | None, marks: "_Marks") -> T:
    """What a body gave that touched nothing."""
    tx.done_at = 0
    if error is not None:
        raise error
    if marks.acks:
        await commit_alone(marks.acks)
    return result


async def _pending(
    tx: Transaction, result: Any, error: Exception | None, marks: "_Marks"
) -> PendingOperation | None:
    """What the group commit decides: it gives the result of the body, or raises its error or a conflict.
    `None` if there is nothing to decide."""
    for some in list(tx.touched.values()) if error is None else ():
        await some.open()
    touched = [some for some in tx.touched.values() if some.table is not None]
    if not touched and (error is not None or (not tx.plain and marks.member is None)):
        return None
    members: tuple[Member, ...] = tuple(some.member for some in touched)
    waiting = PendingOperation(
        members,
        tx.action(result, error),
        tuple([*some.read, *some.written] for some in touched),
        marks.member or next(iter((*members, *tx.plain))),
        reruns=any(some.ranges for some in touched),
    )
    if error is None:
        waiting.rows = tx.plain
        waiting.transactions, waiting.once, waiting.acks = marks.transactions, marks.once, marks.acks
        waiting.binds = tx.writes or marks.member is not None or bool(marks.acks)
    return waiting


async def _ended(tx: Transaction, body: Body[T]) -> tuple[T, Exception | None]:
    """What the body gave, or raised."""
    result: Any = None
    try:
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

    def __init__(self, transactions: dict[str, int], once: Once, acks: tuple[JointAck, ...]) -> None:
        self.transactions = transactions
        self.once = once
        self.acks = acks
        self.member: PlainMember | None = None

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
