"""Group commit of tables: operations of one client that wait at the same moment share one commit, over all
their tables, at one time.

A task of the client, the *leader*, takes all operations that wait. It applies them to the views in their
order: each sees what those before it did, and one that raises fails alone. Then it writes the net changes of
each table by one commit.

- The commit wins only if every table is as its view has it. So a win proves, to each operation on these
  tables, that what it read was so at the moment of the commit.
- If another client came first, the views catch up, and the operations whose reads changed run again.
- An operation that wrote nothing, and one that raised, is answered only after a look at the head that was
  sent after it began.

So no answer rests on a state older than the call.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiopersist.errors import Error, InvalidUsage, ShardFinalized, Unsupported, UpperMismatch
from aiopersist.frontier import Antichain, successor
from aiopersist.shard.stack import Stack
from aiopersist.state.command import micros
from aiopersist.state.once import Once
from aiopersist.state.writing import last_complete, repeat_of
from aiopersist.table.operation import Action, Outcome, Overlay, run
from aiopersist.table.view import View
from aiopersist.write.append import ColumnsAppend, append_all
from aiopersist.write.session import Session

OPERATIONS_MAX = 4096  # in a group: bounds how long the loop is busy with one


class Repeated(NamedTuple):
    """The operation was done before, by a call with the same `once=`; `time` is the time of its commit."""

    time: int


class Done(NamedTuple):
    """The operation is in at `time`."""

    time: int
    result: Any


@dataclass(eq=False)
class Member:
    """One table, as the group commit writes it."""

    view: View
    writer: Session

    @property
    def id(self) -> str:
        return str(self.writer.shard.id)


@dataclass(eq=False)
class Waiting:
    """One operation that waits for its answer."""

    member: Member
    action: Action
    transactions: Mapping[str, int]
    once: Once
    answer: "asyncio.Future[Done | Repeated]"
    outcome: Outcome | None = None


@dataclass
class Planned:
    """What a group makes of one table."""

    member: Member
    overlay: Overlay
    lower: Antichain
    hashes: dict[str, None] = field(default_factory=dict)
    transactions: dict[str, int] = field(default_factory=dict)
    changes: dict[str, str | None] = field(default_factory=dict)

    def is_repeated(self, waiting: Waiting) -> bool:
        """Whether the group has an operation of the same id or application."""
        ids, apps = self.hashes.keys(), self.transactions.keys()
        return not (ids.isdisjoint(waiting.once.hashes) and apps.isdisjoint(waiting.transactions))

    @property
    def writes(self) -> bool:
        """Whether a commit is needed."""
        return bool(self.changes or self.hashes or self.transactions)


class GroupCommit:
    """The queue of one client. See the header."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._waiting: dict[Waiting, None] = {}
        """In the order of the calls."""
        self._leader: asyncio.Task[None] | None = None
        self._together = True
        """Whether the store writes several tables at one moment, as far as is known."""

    async def do(
        self, member: Member, action: Action, transactions: Mapping[str, int], once: Once
    ) -> Done | Repeated:
        """Carry out `action`, and return once it is durable. A call that is cancelled before its group was
        taken does nothing; later it may happen."""
        waiting = Waiting(member, action, transactions, once, asyncio.get_running_loop().create_future())
        self._waiting[waiting] = None
        if self._leader is None or self._leader.done():
            self._leader = self._stack.supervisor.spawn(self._lead(), "commit the operations of tables")
        try:
            return await waiting.answer
        finally:
            self._waiting.pop(waiting, None)

    async def _lead(self) -> None:
        while self._waiting:
            group = list(self._waiting)[:OPERATIONS_MAX]
            for waiting in group:
                del self._waiting[waiting]
            await self._answered(group)

    async def _answered(self, group: Sequence[Waiting]) -> None:
        """Carry them out; each gets an answer, or the error."""
        try:
            await self._carry_out(group)
        except (InvalidUsage, ShardFinalized, Unsupported) as error:  # of one of them: the others go on
            await self._apart(group, error)
        except BaseException as error:
            for waiting in group:
                _answer(waiting, error)
            if not isinstance(error, Exception):
                raise

    async def _apart(self, group: Sequence[Waiting], error: Error) -> None:
        """Nothing was written because of `error`: carry them out in smaller groups, by table, then one by
        one."""
        left = [waiting for waiting in group if not waiting.answer.done()]
        members = dict.fromkeys(waiting.member for waiting in left)
        if len(left) == 1:
            _answer(left[0], error)
        elif len(members) > 1:
            self._together = self._together and not isinstance(error, Unsupported)
            for member in members:
                await self._answered([waiting for waiting in left if waiting.member is member])
        else:
            for waiting in left:
                await self._answered([waiting])

    async def _carry_out(self, group: Sequence[Waiting]) -> None:
        """Answer all of them."""
        looked: set[Member] = set()
        while group := [waiting for waiting in group if not waiting.answer.done()]:
            members = dict.fromkeys(waiting.member for waiting in group)
            if len(members) > 1 and not self._together:
                raise Unsupported("the store writes one table at a time")
            for member in members:
                await member.view.catch_up()
            now = await self._stack.clock.now()
            planned = _plan(group, now)
            writing = [plan for plan in planned.values() if plan.writes]
            if writing:
                try:
                    time = await self._commit(writing, now)
                except UpperMismatch:
                    looked.update(plan.member for plan in writing)  # it follows a look at each of them
                    continue
                for plan in writing:
                    _answer_all(group, plan.member, time)
            written = {plan.member for plan in writing}
            for member in members.keys() - written:
                if member not in looked:
                    await member.writer.shard.open()
                    looked.add(member)
                elif not writing:
                    _answer_all(group, member, last_complete(member.view.upper))

    async def _commit(self, writing: Sequence[Planned], now: float) -> int:
        """Write these tables at one time, and return it."""
        least = (plan.lower.time for plan in writing)
        time = max(micros(now), self._stack.clock.seen, *(t for t in least if isinstance(t, int)))
        upper = successor(time)
        appends = [_append(plan, upper, time, self._stack.settings.once_keep_s) for plan in writing]
        await append_all(appends)
        for plan in writing:
            plan.member.view.committed(plan.lower, upper, plan.changes)
        return time


def _append(plan: Planned, upper: Antichain, time: int, keep_s: float) -> ColumnsAppend:
    kind, once = plan.member.view.kind, Once(tuple(plan.hashes), keep_s)
    updates = kind.updates(plan.changes, plan.overlay.old(plan.changes), time)
    return ColumnsAppend(plan.member.writer, plan.lower, upper, plan.transactions, once, updates=updates)


def _plan(group: Sequence[Waiting], now: float) -> dict[Member, Planned]:
    """Apply the operations to the views, in their order. Those that were done before are answered."""
    planned: dict[Member, Planned] = {}
    for waiting in group:
        member = waiting.member
        plan = planned.get(member)
        if plan is None:
            view = member.view
            plan = planned[member] = Planned(member, Overlay(view.vals), view.upper)
        repeat = repeat_of(member.writer.shard.state, now, waiting)
        if repeat is not None:
            time = last_complete(repeat.upper) if repeat.done_at is None else repeat.done_at
            _answer(waiting, Repeated(time))
        elif plan.is_repeated(waiting):  # it waits until the first one is decided
            waiting.outcome = None
        else:
            _apply(waiting, plan)
    for plan in planned.values():
        plan.changes = plan.overlay.changes()
    return planned


def _apply(waiting: Waiting, plan: Planned) -> None:
    outcome = waiting.outcome
    if outcome is None or not outcome.is_still_so(plan.overlay.val_of):
        outcome = waiting.outcome = run(waiting.action, plan.overlay.val_of)
    plan.overlay.written.update(outcome.cells.written)
    if outcome.error is None:
        plan.hashes.update(dict.fromkeys(waiting.once.hashes))
        plan.transactions.update(waiting.transactions)


def _answer_all(group: Iterable[Waiting], member: Member, time: int) -> None:
    """Answer the operations on one table, which is known to be as they saw it."""
    for waiting in group:
        if waiting.member is member and waiting.outcome is not None:
            _answer(waiting, waiting.outcome.error or Done(time, waiting.outcome.result))


def _answer(waiting: Waiting, outcome: Done | Repeated | BaseException) -> None:
    if waiting.answer.done():
        return
    if isinstance(outcome, BaseException):
        waiting.answer.set_exception(outcome)
    else:
        waiting.answer.set_result(outcome)
