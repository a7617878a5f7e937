"""Group commit of tables: operations of one client that wait at the same moment share one commit at one time,
over all their shards.

A task of the client, the *leader*, takes all waiting operations. It applies them to the views in their order
(`plan.py`): each sees the writes of those before it, and an operation that raises fails alone. Then one
commit writes the changes of all shards.

- The commit wins only if no shard has changed since the plan. So a win proves, to each operation whose tables
  take part, that its reads were valid at the moment of the commit.
- If another client came first, the views catch up, and the operations whose reads changed run again.
- An operation that wrote nothing, or raised, is answered only after a read of the head that was sent after
  the operation began. If it read several tables, all their heads are read, and none has moved: then its reads
  were valid at the moment at which these requests began.

So each result reflects the state at or after the call.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from functools import partial
from operator import call

from aiopersist.base.errors import (
    CodecMismatch,
    Corruption,
    Error,
    InvalidUsage,
    OpaqueMismatch,
    ShardFinalized,
    SubscriptionExpired,
    Unsupported,
    UpperMismatch,
)
from aiopersist.base.frontier import successor
from aiopersist.base.resource import for_each, run_bounded
from aiopersist.shard import fairness
from aiopersist.shard.attempt import Attempt, Slot
from aiopersist.shard.commit import settle
from aiopersist.shard.queue import GroupQueue
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.command import micros
from aiopersist.state.once import Once
from aiopersist.state.remembering import Remember
from aiopersist.state.subscriptions import Ack
from aiopersist.state.writing import RepeatedMark, last_complete
from aiopersist.subscription.joint import JointAcks
from aiopersist.table.commit.participant import (
    Participant,
    TableParticipant,
    WrittenParticipant,
    check_distinct,
)
from aiopersist.table.commit.plan import Done, PendingOperation, Plan, Repeated, ShardPlan, Speculation
from aiopersist.table.view.contents import SLICE_KEYS
from aiopersist.table.view.view import View
from aiopersist.write.append import append_all
from aiopersist.write.pending import PendingAppend

GROUP_MAX = 4096  # operations in a group: bounds the time for which a group keeps the loop busy
LOOKS_AT_ONCE = 16  # heads read at the same time
ANSWERS_AT_ONCE = 256  # calls that go on in one turn of the loop
NOTHING: nullcontext[None] = nullcontext()
EXCLUSIVE_S = 1.0  # for which others wait at most for an exclusive transaction


class TableCommits:
    """The queue of one client. See the header."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._queue = GroupQueue[PendingOperation](
            stack.supervisor, "commit the operations of tables", self._carry_out_next
        )
        self._next_group: Sequence[PendingOperation] = ()
        """The group that is planned next."""
        self.speculation = Speculation(lambda: (*self._next_group, *self._queue.waiting))
        self._held_back: dict[PendingOperation, None] = {}
        """Operations that wait until an exclusive transaction has joined the queue."""
        self._exclusive = asyncio.Lock()
        self._free = asyncio.Event()
        """Set while no transaction is exclusive."""
        self._free.set()
        self.turn = asyncio.Lock()
        """A group or a large put holds it while it is carried out."""
        self._slots: defaultdict[Shard, Slot] = defaultdict(Slot)
        """For commits that move subscriptions or record ids in shards to which they do not append."""
        self.stood_back_s = 0.0
        """The total time for which it has let other clients go first."""
        self._commits_several = True
        """Whether the store can write several shards at one moment; `True` until it refuses."""

    @property
    def queueing(self) -> int:
        """How many operations wait for the next group."""
        return len(self._queue.waiting) + len(self._held_back)

    def do(self, operation: PendingOperation) -> Awaitable[Done | Repeated]:
        """Carry it out, and return once it is durable. A call that is cancelled before its group begins
        writes nothing; later it may happen."""
        self.add(operation)
        return self.answer(operation)

    def add(self, operation: PendingOperation, *, exclusive: bool = False) -> None:
        """Queue it for the next group. `answer` must follow."""
        operation.origin = self._stack.tracing.origin()
        if exclusive or self._free.is_set():
            self._enqueue(operation)
        else:
            self._held_back[operation] = None

    async def answer(self, operation: PendingOperation) -> Done | Repeated:
        """Return once it is durable."""
        try:
            return await operation.answer
        except BaseException:  # it may be cancelled while it waits
            self._held_back.pop(operation, None)
            if self._queue.withdraw(operation):
                self.speculation.begin_anew()
            raise

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Within it no other operation of this client overtakes the caller's, for `EXCLUSIVE_S` at most: the
        caller may wait for one of them, even for the next exclusive one. Operations that wait already go
        first."""
        await self._exclusive.acquire()
        with ExitStack() as turn:
            turn.callback(self._let_go)
            self._free.clear()
            limit = asyncio.get_running_loop().call_later(EXCLUSIVE_S, turn.close)
            turn.callback(limit.cancel)
            yield

    async def wait_until_idle(self) -> None:
        """Within `exclusive`: wait until earlier operations are decided, for `EXCLUSIVE_S` at most."""
        await self._queue.idle(EXCLUSIVE_S)

    async def wait_until_free(self) -> None:
        """Return once no transaction is exclusive, or its time is over."""
        await self._free.wait()

    def _let_go(self) -> None:
        operations, self._held_back = self._held_back, {}
        for operation in operations:
            self._enqueue(operation)
        self._free.set()
        self._exclusive.release()

    def _enqueue(self, operation: PendingOperation) -> None:
        self._queue.add(operation)
        self.speculation.enqueue(operation)

    async def _carry_out_next(self) -> None:
        async with self.turn:
            await self._carry_out(self._queue.take(GROUP_MAX))

    async def decided(self) -> None:
        """Return once the group that was begun before this call has happened, or never will."""
        async with self.turn:
            return

    async def _carry_out(self, group: Sequence[PendingOperation]) -> None:
        """Carry them out; each gets its result, or the error."""
        try:
            tracing = self._stack.tracing
            with tracing.group(operation.origin for operation in group) if tracing.on else NOTHING:
                try:
                    await self._in_rounds(group)
                finally:
                    self._set_plan((), None)
        except (
            CodecMismatch,
            Corruption,
            InvalidUsage,
            ShardFinalized,
            Unsupported,
            UpperMismatch,  # of a closed shard
        ) as error:  # one operation caused it: the others go on
            await self._split(group, error)
        except BaseException as error:
            for operation in group:
                operation.give(error)
            if not isinstance(error, Exception):
                raise

    async def _split(self, group: Sequence[PendingOperation], error: Error) -> None:
        """A command was refused, and nothing was written: carry the operations out in smaller groups, first
        by their shards, then one by one."""
        rest = [operation for operation in group if not operation.answer.done()]
        by_shards: dict[frozenset[Participant], list[PendingOperation]] = {}
        for operation in rest:
            by_shards.setdefault(frozenset(operation.shards), []).append(operation)
        if len(rest) == 1:
            rest[0].give(error)
        elif len(by_shards) > 1:
            self._commits_several = self._commits_several and not isinstance(error, Unsupported)
            for operations in by_shards.values():
                await self._carry_out(operations)
        else:
            for operation in rest:
                await self._carry_out([operation])

    def _set_plan(self, group: Sequence[PendingOperation], plan: Plan | None) -> None:
        """The group has this plan, or none yet."""
        self._next_group = group if plan is None else plan.rest
        self.speculation.planned({} if plan is None else plan.overlays)

    async def _in_rounds(self, group: Sequence[PendingOperation]) -> None:
        checked: set[Participant] = set()
        while group := [operation for operation in group if not operation.answer.done()]:
            self._set_plan(group, None)
            participants = dict.fromkeys([p for operation in group for p in operation.shards])
            if len(participants) > 1:
                if not self._commits_several and len({frozenset(op.shards) for op in group}) > 1:
                    raise Unsupported("the store writes one shard at a time")
                check_distinct(participants)
            registers = [p.register for p in participants]
            if waited_s := await fairness.yield_to_others(registers):
                self.stood_back_s += waited_s
                await run_bounded(LOOKS_AT_ONCE, [p.look for p in participants])
            fairness.begin(registers)
            for participant in participants:
                await participant.view.catch_up()
            now = await self._stack.clock.now()
            plan = await self._planned(group, participants, now)
            if plan is None:
                continue
            if parts := plan.parts:
                for planned in parts:
                    planned.check()
                try:
                    time = await self._commit(parts, plan.acks, now)
                except UpperMismatch as error:  # raised after a read of the head of its shard
                    checked.update(p.participant for p in parts if p.participant.shard.id == error.shard_id)
                    continue
                except RepeatedMark:  # another client recorded one of the ids meanwhile
                    continue
                except (InvalidUsage, OpaqueMismatch, SubscriptionExpired):
                    if plan.acks.refusal() is not None:  # the next plan tells its operation
                        continue
                    raise
                await self._done(group, parts, time)
            else:
                await self._answer([op for op in group if len(op.participants) == 1], checked)
                await self._answer(group, await self._unmoved(group, plan, checked))

    async def _planned(
        self, group: Sequence[PendingOperation], participants: Iterable[Participant], now: float
    ) -> Plan | None:
        """The plan of the group, made in several turns of the loop; `None` if a view changed meanwhile."""
        kept: ExitStack | None = None
        try:
            if not all(p.view.is_resident for p in participants):
                await self._fetch_keys(group, kept := ExitStack())
            plan, began_at = Plan(group, now), {p.register: p.register.seqno for p in participants}
            for _ in plan.steps():
                await self._stack.runtime.sleep(0)
            if plan.is_current:
                self._set_plan(group, plan)
                return plan
        finally:
            if kept is not None:
                kept.close()
        if races := {register: seqno for register, seqno in began_at.items() if register.seqno != seqno}:
            await fairness.lost(races)  # another client came meanwhile
        return None

    async def _fetch_keys(self, group: Sequence[PendingOperation], kept: ExitStack) -> None:
        """Look up the keys of the group that views do not have, until none is missing. All keys of the group
        are kept, so this ends, and the plan finds them. A resident view may cease to be one meanwhile."""
        named = [(p.view, keys) for op in group for p, keys in zip(op.participants, op.keys, strict=True)]
        keeping = set[View]()
        while True:
            partial_views = {view for view, _ in named if not view.is_resident} - keeping
            to_keep: dict[View, dict[str, None]] = {view: {} for view in partial_views}
            missing: dict[View, dict[str, None]] = {}
            for view, keys in named:
                if view in partial_views and len(keys) > SLICE_KEYS:
                    kept.enter_context(view.keeping(keys))
                elif view in partial_views:
                    to_keep[view].update(dict.fromkeys(keys))
                unknown = dict.fromkeys(view.contents.unknown(keys))
                if unknown and missing.setdefault(view, unknown) is not unknown:
                    missing[view].update(unknown)
            for view, keys_of_view in to_keep.items():
                kept.enter_context(view.keeping(keys_of_view))
            keeping |= partial_views
            if not missing:
                return
            await run_bounded(LOOKS_AT_ONCE, [partial(view.fetch, keys) for view, keys in missing.items()])

    async def _done(self, group: Sequence[PendingOperation], parts: Sequence[ShardPlan], time: int) -> None:
        """The commit at `time` has these. Apply them to all views in one turn of the loop, since bodies read
        several views as of one moment (`transaction/consistent_read.py`), and answer."""
        upper = successor(time)
        tables = [(p.participant.view, p) for p in parts if isinstance(p.participant, TableParticipant)]
        try:
            if all(len(p.writes.changes) <= SLICE_KEYS for _, p in tables):
                for view, p in tables:
                    view.apply(p.lower, upper, p.writes.changes)
                if tidying := [view.tidying for view, _ in tables if view.tidying]:
                    await asyncio.wait(tidying)
            else:  # it takes long
                commits = [view.own_commit(p.lower, upper, p.writes.changes) for view, p in tables]
                async with AsyncExitStack() as prepared:
                    for apply in [await prepared.enter_async_context(commit) for commit in commits]:
                        apply()
        finally:  # it is durable, whatever happens to the views
            await self._answer(group, {planned.participant for planned in parts}, time)

    async def _answer(
        self, group: Iterable[PendingOperation], unmoved: set[Participant], time: int | None = None
    ) -> None:
        """Answer the operations whose tables have not moved since the plan, until `time`, or until now."""
        answers = [
            partial(operation.give_outcome, _time_of(operation) if time is None else time)
            for operation in group
            if unmoved.issuperset(operation.participants)
        ]
        await for_each(answers, call, ANSWERS_AT_ONCE, self._stack.runtime)

    async def _unmoved(
        self, group: Iterable[PendingOperation], plan: Plan, checked: set[Participant]
    ) -> set[Participant]:
        """Read the heads of tables of operations without an answer; returns the tables that have not moved
        since the plan: every change of a table moves its upper."""
        open_ones = (op for op in group if not op.answer.done())
        tables = dict.fromkeys(table for operation in open_ones for table in operation.participants)
        await run_bounded(LOOKS_AT_ONCE, [table.look for table in tables])
        checked.update(tables)
        return {table for table in tables if table.state.upper == plan.shards[table].lower}

    async def _commit(self, parts: Sequence[ShardPlan], acks: JointAcks, now: float) -> int:
        """Write these shards at one time, with `acks`, and return it."""
        least = [time for planned in parts for time in planned.lower.elements if isinstance(time, int)]
        time = max(micros(now), self._stack.clock.seen, *least)
        appends: list[PendingAppend] = []
        records: list[ShardPlan] = []
        has_acks = bool(acks)
        for planned in parts:
            if isinstance(planned.participant, WrittenParticipant):
                to = acks.to(planned.participant.shard) if has_acks else ()
                appends.append(await self._append(planned, planned.participant, to, time))
            else:
                records.append(planned)
        if not records and not has_acks:
            await append_all(appends, own_task=False)
            return time
        try:
            joined = [await self._remembered(planned, time) for planned in records]
            if has_acks:
                joined += await acks.attempts({planned.participant.shard for planned in parts}, self._slots)
            with acks.sending() if has_acks else NOTHING:
                await append_all(appends, joined, own_task=False)
        finally:  # keep only shards whose attempts are to be settled
            busy = {shard: slot for shard, slot in self._slots.items() if slot.busy}
            self._slots = defaultdict(Slot, busy)
        return time

    async def _remembered(self, planned: ShardPlan, time: int) -> Attempt:
        """The attempt that records the ids of the group in a shard to which it does not append, once the
        attempt before it is settled."""
        shard, settings = planned.participant.shard, self._stack.settings
        await settle(self._slots[shard])
        once = Once(tuple(planned.hashes), settings.once_keep_s)
        command = Remember(planned.transactions, once, time, settings.txn_ids_max)
        return Attempt(shard.register, command, self._slots[shard])

    async def outcome_known(self, shard: Shard) -> None:
        """Return once no commit of ids to `shard` is under way, and each outcome is known."""
        async with self.turn:
            if shard in self._slots:
                await settle(self._slots[shard])

    async def _append(
        self, planned: ShardPlan, participant: WrittenParticipant, acks: tuple[Ack, ...], time: int
    ) -> PendingAppend:
        once = Once(tuple(planned.hashes), self._stack.settings.once_keep_s)
        writes, updates = planned.writes, None
        if writes.changes or writes.rows:
            updates = await self._stack.compute_few(writes.size, participant.updates, writes, time)
        bounds, marks = (planned.lower, successor(time)), (planned.transactions, once)
        return PendingAppend(participant.writer, *bounds, updates, *marks, is_of_a_table=True, acks=acks)


def _time_of(operation: PendingOperation) -> int:
    """The last complete time of its tables in their views."""
    uppers = (last_complete(participant.view.upper) for participant in operation.participants)
    return max(uppers, default=0)  # a body may raise before it touches a table
