"""Group commit of tables: operations of one client that wait at the same moment share one commit, over all
their shards, at one time.

A task of the client, the *leader*, takes all operations that wait. It applies them to the views in their
order (`plan.py`): each sees what those before it did, and one that raises fails alone. Then it writes what
that makes of each shard by one commit.

- The commit wins only if every shard is as it was planned. So a win proves, to each operation whose tables
  take part, that what it read was so at the moment of the commit.
- If another client came first, the views catch up, and the operations whose reads changed run again.
- An operation that wrote nothing, and one that raised, is answered only after a look at the head that was
  sent after it began. One that read several tables needs a look at all of them which finds none moved: then
  each was as it was read at the moment at which the look began.

So no answer rests on a state older than the call.
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
from aiopersist.base.frontier import Antichain, successor
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
from aiopersist.table.commit.participant import Participant, WrittenParticipant, check_distinct
from aiopersist.table.commit.plan import Done, PendingOperation, Plan, Planned, Repeated, Speculation
from aiopersist.table.view.contents import SLICE_KEYS
from aiopersist.write.append import append_all
from aiopersist.write.pending import PendingAppend

OPERATIONS_MAX = 4096  # in a group: bounds how long the loop is busy with one
LOOKS_AT_ONCE = 16  # heads read at the same time
ANSWERS_AT_ONCE = 256  # calls that go on in one turn of the loop
NOTHING: nullcontext[None] = nullcontext()
ALONE_S = 1.0  # how long others wait for a transaction that runs alone


class TableCommits:
    """The queue of one client. See the header."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._queue = GroupQueue[PendingOperation](
            stack.supervisor, "commit the operations of tables", self._carry_out_next
        )
        self._taken: Sequence[PendingOperation] = ()
        """They are about to be planned."""
        self.ahead = Speculation(lambda: (*self._taken, *self._queue.waiting))
        self._held: dict[PendingOperation, None] = {}
        """They go once that which runs alone waits, too."""
        self._alone = asyncio.Lock()
        self._free = asyncio.Event()
        """Whether nothing runs alone."""
        self._free.set()
        self.turn = asyncio.Lock()
        """Held while operations are carried out: a group, or a large put."""
        self._slots: defaultdict[Shard, Slot] = defaultdict(Slot)
        """Of commits that move subscriptions, or record ids, in shards which they do not append to."""
        self.stood_back_s = 0.0
        """For how long it has let other clients go first, in all."""
        self._together = True
        """Whether the store writes several shards at one moment, as far as is known."""

    @property
    def queueing(self) -> int:
        """How many operations wait for the next group."""
        return len(self._queue.waiting) + len(self._held)

    def do(self, waiting: PendingOperation) -> Awaitable[Done | Repeated]:
        """Carry it out, and return once it is durable. A call that is cancelled before its group was taken
        does nothing; later it may happen."""
        self.add(waiting)
        return self.answer(waiting)

    def add(self, waiting: PendingOperation, *, alone: bool = False) -> None:
        """Let it wait for the next group. `answer` must follow."""
        waiting.origin = self._stack.tracing.origin()
        if alone or self._free.is_set():
            self._enqueue(waiting)
        else:
            self._held[waiting] = None

    async def answer(self, waiting: PendingOperation) -> Done | Repeated:
        """Return once it is durable."""
        try:
            return await waiting.answer
        except BaseException:  # perhaps it is cancelled, and waits still
            self._held.pop(waiting, None)
            if self._queue.withdraw(waiting):
                self.ahead.begin_anew()
            raise

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Within it the operations of others of this client do not go before that of the caller; for
        `ALONE_S` at most, as it may wait for them, also for one that is to run alone next. What waits already
        goes first."""
        await self._alone.acquire()
        with ExitStack() as turn:
            turn.callback(self._let_go)
            self._free.clear()
            limit = asyncio.get_running_loop().call_later(ALONE_S, turn.close)
            turn.callback(limit.cancel)
            yield

    async def quiet(self) -> None:
        """Within `alone`: wait until what waited before is decided, for `ALONE_S` at most."""
        await self._queue.idle(ALONE_S)

    async def free(self) -> None:
        """Return once nothing runs alone, or that has taken its time."""
        await self._free.wait()

    def _let_go(self) -> None:
        held, self._held = self._held, {}
        for waiting in held:
            self._enqueue(waiting)
        self._free.set()
        self._alone.release()

    def _enqueue(self, waiting: PendingOperation) -> None:
        self._queue.add(waiting)
        self.ahead.came(waiting)

    async def _carry_out_next(self) -> None:
        async with self.turn:
            await self._answered(self._queue.take(OPERATIONS_MAX))

    async def decided(self) -> None:
        """Return once the operations that were taken before this call have happened, or never will."""
        async with self.turn:
            return

    async def _answered(self, group: Sequence[PendingOperation]) -> None:
        """Carry them out; each gets an answer, or the error."""
        try:
            tracing = self._stack.tracing
            with tracing.group(waiting.origin for waiting in group) if tracing.on else NOTHING:
                try:
                    await self._in_rounds(group)
                finally:
                    self._plans((), None)
        except (
            CodecMismatch,
            Corruption,
            InvalidUsage,
            ShardFinalized,
            Unsupported,
            UpperMismatch,  # one that is closed
        ) as error:  # of one of them: the others go on
            await self._apart(group, error)
        except BaseException as error:
            for waiting in group:
                waiting.give(error)
            if not isinstance(error, Exception):
                raise

    async def _apart(self, group: Sequence[PendingOperation], error: Error) -> None:
        """A command was refused, so nothing was written: carry them out in smaller groups, by their shards,
        then one by one."""
        left = [waiting for waiting in group if not waiting.answer.done()]
        by_shards: dict[frozenset[Participant], list[PendingOperation]] = {}
        for waiting in left:
            by_shards.setdefault(frozenset(waiting.shards), []).append(waiting)
        if len(left) == 1:
            left[0].give(error)
        elif len(by_shards) > 1:
            self._together = self._together and not isinstance(error, Unsupported)
            for some in by_shards.values():
                await self._answered(some)
        else:
            for waiting in left:
                await self._answered([waiting])

    def _plans(self, group: Sequence[PendingOperation], plan: Plan | None) -> None:
        """This group has that plan, or none yet."""
        self._taken = group if plan is None else plan.left
        self.ahead.planned({} if plan is None else plan.overlays)

    async def _in_rounds(self, group: Sequence[PendingOperation]) -> None:
        looked: set[Participant] = set()
        while group := [waiting for waiting in group if not waiting.answer.done()]:
            self._plans(group, None)
            members = dict.fromkeys([member for waiting in group for member in waiting.shards])
            if len(members) > 1:
                if not self._together and len({frozenset(w.shards) for w in group}) > 1:
                    raise Unsupported("the store writes one shard at a time")
                check_distinct(members)
            registers = [member.register for member in members]
            if waited_s := await fairness.yield_to_others(registers):
                self.stood_back_s += waited_s
                await run_bounded(LOOKS_AT_ONCE, [member.look for member in members])
            fairness.begin(registers)
            for member in members:
                await member.catch_up()
            now = await self._stack.clock.now()
            plan = await self._planned(group, members, now)
            if plan is None:
                continue
            if parts := plan.parts:
                for planned in parts:
                    planned.check()
                try:
                    time = await self._commit(parts, plan.acks, now)
                except UpperMismatch as error:  # it follows a look at its shard
                    looked.update(p.member for p in parts if p.member.shard.id == error.shard_id)
                    continue
                except RepeatedMark:  # another client has recorded one of the ids meanwhile
                    continue
                except (InvalidUsage, OpaqueMismatch, SubscriptionExpired):
                    if plan.acks.refusal() is not None:  # by now: then its operation is told by the next plan
                        continue
                    raise
                await self._done(group, parts, time)
            else:
                await self._answer([waiting for waiting in group if len(waiting.members) == 1], looked)
                await self._answer(group, await self._settled(group, plan, looked))

    async def _planned(
        self, group: Sequence[PendingOperation], members: Iterable[Participant], now: float
    ) -> Plan | None:
        """The plan of the group, made in several turns of the loop; `None` if a view has moved meanwhile."""
        kept: ExitStack | None = None
        try:
            if [member for member in members if not member.knows_all]:
                await self._know(group, kept := ExitStack())
            plan, began_at = Plan(group, now), {m.register: m.register.seqno for m in members}
            for _ in plan.steps():
                await self._stack.runtime.sleep(0)
            if plan.is_current:
                self._plans(group, plan)
                return plan
        finally:
            if kept is not None:
                kept.close()
        if races := {register: seqno for register, seqno in began_at.items() if register.seqno != seqno}:
            await fairness.lost(races)  # another client came meanwhile
        return None

    async def _know(self, group: Sequence[PendingOperation], kept: ExitStack) -> None:
        """Look up the keys that the group names and that views do not know, until no view has one. All of
        them are kept, so this ends, and the plan finds them; a view may cease to have all meanwhile."""
        keeping = set[Participant]()
        while True:
            parted = {m for waiting in group for m in waiting.members if not m.knows_all} - keeping
            together: dict[Participant, dict[str, None]] = {member: {} for member in parted}
            unknown: dict[Participant, dict[str, None]] = {}
            for waiting in group:
                for member, keys in zip(waiting.members, waiting.keys, strict=True):
                    if member in parted and len(keys) > SLICE_KEYS:
                        kept.enter_context(member.keeping(keys))
                    elif member in parted:
                        together[member].update(dict.fromkeys(keys))
                    found = dict.fromkeys(member.unknown(keys))
                    if found and unknown.setdefault(member, found) is not found:
                        unknown[member].update(found)
            for member, some in together.items():
                kept.enter_context(member.keeping(some))
            keeping |= parted
            if not unknown:
                return
            jobs = [partial(member.know, keys) for member, keys in unknown.items()]
            await run_bounded(LOOKS_AT_ONCE, jobs)

    async def _done(self, group: Sequence[PendingOperation], parts: Sequence[Planned], time: int) -> None:
        """The commit at `time` has these: let their views have it, all in one turn of the loop, since bodies
        read them together (`transaction/consistent_read.py`), and answer."""
        upper = successor(time)
        try:
            if max([len(planned.made.changes) for planned in parts]) <= SLICE_KEYS:
                for planned in parts:
                    planned.member.take(planned.lower, upper, planned.made.changes)
                if settling := [task for planned in parts if (task := planned.member.settling)]:
                    await asyncio.wait(settling)
            else:
                await self._take_many(parts, upper)
        finally:  # it is durable, whatever becomes of the views
            await self._answer(group, {planned.member for planned in parts}, time)

    async def _take_many(self, parts: Sequence[Planned], upper: Antichain) -> None:
        """The same where it takes long."""
        async with AsyncExitStack() as prepared:
            taking = [
                planned.member.committed(planned.lower, upper, planned.made.changes) for planned in parts
            ]
            for take in [await prepared.enter_async_context(each) for each in taking]:
                if take is not None:
                    take()

    async def _answer(
        self, group: Iterable[PendingOperation], known: set[Participant], time: int | None = None
    ) -> None:
        """Answer those whose tables are known to be as they saw them, at `time`, or up to now."""
        answers = [
            partial(waiting.give_outcome, _time_of(waiting) if time is None else time)
            for waiting in group
            if known.issuperset(waiting.members)
        ]
        await for_each(answers, call, ANSWERS_AT_ONCE, self._stack.runtime)

    async def _settled(
        self, group: Iterable[PendingOperation], plan: Plan, looked: set[Participant]
    ) -> set[Participant]:
        """Look at the tables of those that have no answer yet; returns those that are as they were planned:
        every change of a table moves its upper."""
        left = dict.fromkeys(m for waiting in group if not waiting.answer.done() for m in waiting.members)
        await run_bounded(LOOKS_AT_ONCE, [member.look for member in left])
        looked.update(left)
        return {member for member in left if member.state.upper == plan.shards[member].lower}

    async def _commit(self, parts: Sequence[Planned], acks: JointAcks, now: float) -> int:
        """Write these shards at one time, with `acks`, and return it."""
        least = [time for planned in parts for time in planned.lower.elements if isinstance(time, int)]
        time = max(micros(now), self._stack.clock.seen, *least)
        appends: list[PendingAppend] = []
        records: list[Planned] = []
        has_acks = bool(acks)
        for planned in parts:
            if isinstance(planned.member, WrittenParticipant):
                to = acks.to(planned.member.shard) if has_acks else ()
                appends.append(await self._append(planned, planned.member, to, time))
            else:
                records.append(planned)
        if not records and not has_acks:
            await append_all(appends, own_task=False)
            return time
        try:
            joined = [await self._remembered(planned, time) for planned in records]
            if has_acks:
                joined += await acks.attempts({planned.member.shard for planned in parts}, self._slots)
            with acks.sending() if has_acks else NOTHING:
                await append_all(appends, joined, own_task=False)
        finally:  # keep no shard but those whose attempts are to be settled
            busy = {shard: slot for shard, slot in self._slots.items() if slot.busy}
            self._slots = defaultdict(Slot, busy)
        return time

    async def _remembered(self, planned: Planned, time: int) -> Attempt:
        """What records the ids of the group in a shard that it does not append to, once an earlier such
        commit is settled."""
        shard, settings = planned.member.shard, self._stack.settings
        await settle(self._slots[shard])
        once = Once(tuple(planned.hashes), settings.once_keep_s)
        command = Remember(planned.transactions, once, time, settings.txn_ids_max)
        return Attempt(shard.register, command, self._slots[shard])

    async def settled(self, shard: Shard) -> None:
        """Return once no commit of ids to `shard` is under way, and no outcome unknown."""
        async with self.turn:
            if shard in self._slots:
                await settle(self._slots[shard])

    async def _append(
        self, planned: Planned, member: WrittenParticipant, acks: tuple[Ack, ...], time: int
    ) -> PendingAppend:
        once = Once(tuple(planned.hashes), self._stack.settings.once_keep_s)
        made, updates = planned.made, None
        if made.changes or made.rows:
            updates = await self._stack.compute_few(made.size, member.updates, made, time)
        bounds, marks = (planned.lower, successor(time)), (planned.transactions, once)
        return PendingAppend(member.writer, *bounds, updates, *marks, is_of_a_table=True, acks=acks)


def _time_of(waiting: PendingOperation) -> int:
    """The last moment of which its tables are known."""
    uppers = (last_complete(member.upper) for member in waiting.members)
    return max(uppers, default=0)  # a body may raise before it touches a table
