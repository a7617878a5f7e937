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
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from itertools import islice

from aiopersist.errors import (
    CodecMismatch,
    Corruption,
    Error,
    InvalidUsage,
    OpaqueMismatch,
    ShardFinalized,
    SubscriptionExpired,
    Unsupported,
    UpperMismatch,
    UsageKind,
)
from aiopersist.frontier import successor
from aiopersist.resource import run_bounded
from aiopersist.shard.attempt import Slot
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.command import micros
from aiopersist.state.once import Once
from aiopersist.state.writing import RepeatedMark, last_complete
from aiopersist.subscription.joint import JointAcks
from aiopersist.table.ahead import Ahead
from aiopersist.table.courtesy import Courtesy
from aiopersist.table.member import Member
from aiopersist.table.plan import Done, PendingOperation, Plan, Planned, Repeated
from aiopersist.write.append import ColumnsAppend, append_all

OPERATIONS_MAX = 4096  # in a group: bounds how long the loop is busy with one
LOOKS_AT_ONCE = 16  # heads read at the same time
ALONE_S = 1.0  # how long others wait for a transaction that runs alone


class TableCommits:
    """The queue of one client. See the header."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._waiting: dict[PendingOperation, None] = {}
        """In the order of the calls."""
        self._taken: Sequence[PendingOperation] = ()
        """They are about to be planned."""
        self.ahead = Ahead(lambda: (*self._taken, *self._waiting))
        self._held: dict[PendingOperation, None] = {}
        """They go once that which runs alone waits, too."""
        self._leader: asyncio.Task[None] | None = None
        self._alone = asyncio.Lock()
        self._free = asyncio.Event()
        """Whether nothing runs alone."""
        self._free.set()
        self.turn = asyncio.Lock()
        """Held while operations are carried out: a group, or a large put."""
        self._slots: defaultdict[Shard, Slot] = defaultdict(Slot)
        """Of commits that move subscriptions to shards which they do not write."""
        self.courtesy = Courtesy(stack)
        self._together = True
        """Whether the store writes several shards at one moment, as far as is known."""

    @property
    def queueing(self) -> int:
        """How many operations wait for the next group."""
        return len(self._waiting) + len(self._held)

    async def do(self, waiting: PendingOperation) -> Done | Repeated:
        """Carry it out, and return once it is durable. A call that is cancelled before its group was taken
        does nothing; later it may happen."""
        self.add(waiting)
        return await self.answer(waiting)

    def add(self, waiting: PendingOperation, *, alone: bool = False) -> None:
        """Let it wait for the next group. `answer` must follow."""
        waiting.origin = self._stack.tracing.origin()
        if alone or self._free.is_set():
            self._queue(waiting)
        else:
            self._held[waiting] = None

    async def answer(self, waiting: PendingOperation) -> Done | Repeated:
        """Return once it is durable."""
        try:
            return await waiting.answer
        finally:
            self._held.pop(waiting, None)
            if waiting in self._waiting:
                del self._waiting[waiting]
                self.ahead.begin_anew()

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
        if self._leader is not None and not self._leader.done():
            await asyncio.wait([self._leader], timeout=ALONE_S)

    async def free(self) -> None:
        """Return once nothing runs alone, or that has taken its time."""
        await self._free.wait()

    def _let_go(self) -> None:
        held, self._held = self._held, {}
        for waiting in held:
            self._queue(waiting)
        self._free.set()
        self._alone.release()

    def _queue(self, waiting: PendingOperation) -> None:
        self._waiting[waiting] = None
        self.ahead.came(waiting)
        if self._leader is None or self._leader.done():
            self._leader = self._stack.supervisor.spawn(self._lead(), "commit the operations of tables")

    async def _lead(self) -> None:
        while self._waiting:
            await self.courtesy.after_you()
            async with self.turn:
                group = list(islice(self._waiting, OPERATIONS_MAX))
                for waiting in group:
                    del self._waiting[waiting]
                await self._answered(group)

    async def decided(self) -> None:
        """Return once the operations that were taken before this call have happened, or never will."""
        async with self.turn:
            return

    async def _answered(self, group: Sequence[PendingOperation]) -> None:
        """Carry them out; each gets an answer, or the error."""
        try:
            with self._stack.tracing.group(waiting.origin for waiting in group):
                await self._carry_out(group)
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
        """Nothing was written because of `error`: carry them out in smaller groups, by their shards, then one
        by one."""
        left = [waiting for waiting in group if not waiting.answer.done()]
        by_shards: dict[frozenset[Member], list[PendingOperation]] = {}
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

    async def _carry_out(self, group: Sequence[PendingOperation]) -> None:
        """Answer all of them."""
        try:
            await self._in_rounds(group)
        finally:
            self._plans((), None)

    def _plans(self, group: Sequence[PendingOperation], plan: Plan | None) -> None:
        """This group has that plan, or none yet."""
        self._taken = group if plan is None else ()
        self.ahead.planned({} if plan is None else plan.overlays)

    async def _in_rounds(self, group: Sequence[PendingOperation]) -> None:
        looked: set[Member] = set()
        while group := [waiting for waiting in group if not waiting.answer.done()]:
            self._plans(group, None)
            members = dict.fromkeys(member for waiting in group for member in waiting.shards)
            if len(members) > 1 and not self._together and len({frozenset(w.shards) for w in group}) > 1:
                raise Unsupported("the store writes one shard at a time")
            _check_distinct(members)
            await self.courtesy.stand_back(member.writer.shard.register for member in members)
            for member in members:
                await member.catch_up()
            now = await self._stack.clock.now()
            with ExitStack() as kept:
                await _know(group, kept)
                plan = Plan((waiting for waiting in group if not waiting.answer.done()), now)
                self._plans(group, plan)
            if parts := plan.parts:
                for planned in parts:
                    planned.check()
                written = {planned.member for planned in parts}
                try:
                    time = await self._commit(parts, plan.acks, now)
                except UpperMismatch:
                    self.courtesy.lost()
                    looked |= written  # it follows a look at each of them
                    continue
                except RepeatedMark:  # another client has recorded one of the ids meanwhile
                    continue
                except (InvalidUsage, OpaqueMismatch, SubscriptionExpired):
                    if plan.acks.is_refused:  # by now: then its operation is told by the next plan
                        continue
                    raise
                for waiting in group:
                    if written.issuperset(waiting.members):
                        waiting.give_outcome(time)
            else:
                _answer(group, looked, together=False)
                _answer(group, await self._settled(group, plan, looked), together=True)

    async def _settled(
        self, group: Iterable[PendingOperation], plan: Plan, looked: set[Member]
    ) -> set[Member]:
        """Look at the tables of those that have no answer yet; returns those that are as they were planned:
        every change of a table moves its upper."""
        left = dict.fromkeys(m for waiting in group if not waiting.answer.done() for m in waiting.members)
        await run_bounded(LOOKS_AT_ONCE, [member.look for member in left])
        looked.update(left)
        return {member for member in left if member.state.upper == plan.shards[member].lower}

    async def _commit(self, parts: Sequence[Planned], acks: JointAcks, now: float) -> int:
        """Write these shards at one time, with `acks`, and return it."""
        least = (planned.lower.time for planned in parts)
        time = max(micros(now), self._stack.clock.seen, *(t for t in least if isinstance(t, int)))
        upper = successor(time)
        joined = await acks.intents({planned.member.writer.shard for planned in parts}, self._slots)
        appends = [_append(planned, acks, time, self._stack.settings.once_keep_s) for planned in parts]
        began = self._stack.runtime.monotonic()
        await append_all(appends, joined)
        took_s = self._stack.runtime.monotonic() - began
        self.courtesy.won((planned.member.writer.shard.register for planned in parts), upper, took_s)
        acks.committed()
        for planned in parts:
            planned.member.committed(planned.lower, upper, planned.made.changes)
        return time


def _check_distinct(members: Collection[Member]) -> None:
    """`InvalidUsage` if two views of one table take part: it has one version in a commit."""
    seen: set[Shard] = set()
    for member in members:
        shard = member.writer.shard
        if shard in seen:
            text = f"{shard.label} takes part twice: by its name and its id, or with two types"
            raise InvalidUsage(UsageKind.INVALID_APPEND, text, shard_id=shard.id)
        seen.add(shard)


async def _know(group: Sequence[PendingOperation], kept: ExitStack) -> None:
    """Look up the keys that the group names and that views do not know, until no view has one. What was
    looked up is kept, so this ends."""
    while True:
        unknown: dict[Member, dict[str, None]] = {}
        for waiting in group:
            for member, keys in zip(waiting.members, waiting.keys, strict=True):
                if found := member.unknown(keys):
                    unknown.setdefault(member, {}).update(dict.fromkeys(found))
        if not unknown:
            return
        for member, keys in unknown.items():
            kept.enter_context(member.keeping(keys))
        await run_bounded(LOOKS_AT_ONCE, [partial(member.know, keys) for member, keys in unknown.items()])


def _append(planned: Planned, acks: JointAcks, time: int, keep_s: float) -> ColumnsAppend:
    member, once = planned.member, Once(tuple(planned.hashes), keep_s)
    updates = member.updates(planned.made, time)
    marks, to = (planned.transactions, once), acks.to(member.writer.shard)
    return ColumnsAppend(member.writer, planned.lower, successor(time), *marks, acks=to, updates=updates)


def _answer(group: Iterable[PendingOperation], known: set[Member], *, together: bool) -> None:
    """Answer those whose tables are known to be as they saw them: all at one moment, or there is only one."""
    for waiting in group:
        if known.issuperset(waiting.members) and (together or len(waiting.members) == 1):
            uppers = [last_complete(member.upper) for member in waiting.members]
            waiting.give_outcome(max(uppers, default=0))  # a body may raise before it touches a table
