"""What one commit of a group makes of each shard: operations applied to views, in their order. Pure."""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, field

from aiopersist.base.errors import ShardFinalized, UpperMismatch
from aiopersist.base.frontier import Antichain
from aiopersist.shard.stack import SLICE_BYTES
from aiopersist.state.once import UNMARKED, Once
from aiopersist.state.writing import repeat_of
from aiopersist.subscription.joint import JointAck, JointAcks, refusal
from aiopersist.subscription.order import Acknowledging
from aiopersist.table.held import SLICE_KEYS
from aiopersist.table.operation import Action, Conflicted, Overlay, RunOutcome, run
from aiopersist.table.participant import Made, Participant

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


PLAN_BYTES = 16 * 1024 * 1024  # of the operations of one commit
OPERATION_BYTES = 160  # what an operation costs beside its texts, as bytes


class Repeated(NamedTuple):
    """The operation was done before, by a call with the same `once=` or `txn=`; `time` is the time of its
    commit (for `txn=`, a time at which it was in)."""

    time: int


class Done(NamedTuple):
    """The operation is in at `time`."""

    time: int
    result: Any


class PendingOperation(Struct, eq=False):
    """One operation that waits for its answer."""

    members: tuple[Participant, ...]
    """The tables that it reads or writes, in the order of the cells of `action`."""
    action: Action
    keys: Sequence[Collection[str]]
    """Of each of them, the keys that it may read or write."""
    marked_in: Participant
    """The shard that remembers its `transactions` and `once`."""
    transactions: Mapping[str, int] = {}
    once: Once = UNMARKED
    rows: "Mapping[Participant, Sequence[pa.Table]]" = {}
    """What it appends to plain shards."""
    acks: tuple[JointAck, ...] = ()
    """The positions of subscriptions that move in the same commit."""
    acknowledging: Acknowledging | None = None
    """The call that has these."""
    binds: bool = False
    """Whether all its tables take part in the commit, also those that it only read."""
    reruns: bool = False
    """Whether `action` depends on more than the keys that it reads, so it runs for each plan."""
    outcome: RunOutcome | None = None
    """Of its last run, in a plan or in a guess."""
    planned: RunOutcome | None = None
    """Of its run in the plan that is being made, or committed."""
    origin: Any = None
    """Where its caller stands in its trace."""
    answer: "asyncio.Future[Done | Repeated]" = None  # type: ignore[assignment]  # made with it

    def __post_init__(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        """About the bytes that it reads and writes, as far as it has run."""
        if self.planned is None:
            return 0
        size = sum([cells.size for cells in self.planned.cells])
        if self.rows:
            size += sum([table.nbytes for table in chain.from_iterable(self.rows.values())])
        return size

    @property
    def shards(self) -> dict[Participant, None]:
        """All shards that it may touch."""
        marks = [self.marked_in] if self.transactions or self.once.hashes else []
        return dict.fromkeys([*self.members, *self.rows, *marks])

    def run_on(self, overlays: Sequence[Overlay]) -> RunOutcome:
        """What it does on these values. It runs only if it has not yet, or what it read has changed."""
        outcome = self.outcome
        if outcome is None or self.reruns or not outcome.is_still_so(overlays):
            outcome = self.outcome = run(self.action, overlays)
        return outcome

    def give(self, outcome: Done | Repeated | BaseException) -> None:
        """Return or raise `outcome` in its call."""
        if self.answer.done():
            return
        if isinstance(outcome, BaseException):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)
            if self.acknowledging is not None:
                self.acknowledging.is_decided = True

    def give_outcome(self, time: int) -> None:
        """The same of its own outcome, which is known to be right."""
        if self.planned is not None:
            error = self.planned.error
            self.give(Done(time, self.planned.result) if error is None else error)


class Planned(Struct, eq=False):
    """What a group makes of one shard."""

    member: Participant
    overlay: Overlay
    lower: Antichain
    joins: bool = False
    """Whether it takes part without changes of its own."""
    hashes: dict[str, None] = {}
    transactions: dict[str, int] = {}
    made: Made = field(default_factory=Made)

    def settle(self) -> Iterator[None]:
        """Make the net changes, some at a time: a key that has its value again is not among them."""
        before, written = self.overlay.before, self.overlay.written
        changes: dict[str, str | None] = {}
        old: dict[str, str | None] = {}
        done = 0
        for number, (key, val) in enumerate(written.items()):
            if (was := before(key)) != val:
                changes[key], old[key] = val, was
                self.made.size += len(key) + len(val or "") + len(was or "")
            if number - done > SLICE_KEYS:
                done = number
                yield
        self.made.changes, self.made.old = changes, old
        self.made.size += sum([rows.nbytes for rows in self.made.rows])

    @property
    def takes_part(self) -> bool:
        """Whether the commit has a version of this shard."""
        made = self.made
        return bool(self.joins or made.changes or self.hashes or self.transactions or made.rows)

    def check(self) -> None:
        """Raise if the shard takes no such commit: it is closed or dropped, or what changes has a newer
        schema."""
        if not self.lower.elements:
            shard_id = self.member.shard.id
            if self.member.state.finalized:
                raise ShardFinalized("it is finalized", shard_id=shard_id)
            raise UpperMismatch(Antichain(0), self.lower, shard_id=shard_id)  # any int was expected
        if self.made.changes:
            self.member.check_schema()

    def knows(self, waiting: PendingOperation) -> bool:
        """Whether the group has an operation of the same id, or of that application with no lesser number."""
        known = self.transactions
        return not self.hashes.keys().isdisjoint(waiting.once.hashes) or any(
            number <= known[app] for app, number in waiting.transactions.items() if app in known
        )


class Plan:
    """What a group makes of all shards: as many of its operations as take `PLAN_BYTES`; the others are
    `left`."""

    def __init__(self, group: Iterable[PendingOperation], now: float) -> None:
        self.left = [waiting for waiting in group if not waiting.answer.done()]
        self.shards: dict[Participant, Planned] = {}
        self.acks = JointAcks()
        self._now = now
        for waiting in self.left:  # all of one moment, whatever changes while the plan is made
            waiting.planned = None
            for member in waiting.shards:
                self._of(member)
        self._versions = {member: member.version for member in self.shards}

    def steps(self) -> Iterator[None]:
        """Apply the operations in their order, a slice at a time. Those that were done before, and
        transactions whose reads changed, are answered."""
        left, self.left = self.left, []
        size = done = 0
        for number, waiting in enumerate(left):
            if size > PLAN_BYTES:
                self.left = left[number:]
                break
            self._add(waiting)
            size += OPERATION_BYTES + waiting.size
            if size - done > SLICE_BYTES:
                done = size
                yield
        for planned in self.shards.values():
            yield from planned.settle()

    @property
    def is_current(self) -> bool:
        """Whether all is as it was when the plan began."""
        return self._versions == {member: member.version for member in self._versions}

    @property
    def parts(self) -> list[Planned]:
        """The shards that take part in the commit."""
        return [planned for planned in self.shards.values() if planned.takes_part]

    @property
    def overlays(self) -> dict[Participant, Overlay]:
        """What it makes of each of them."""
        return {member: planned.overlay for member, planned in self.shards.items()}

    def _of(self, member: Participant) -> Planned:
        if member not in self.shards:
            self.shards[member] = Planned(member, Overlay(member.val_of), member.upper)
        return self.shards[member]

    def _add(self, waiting: PendingOperation) -> None:
        if waiting.answer.done():
            return
        if waiting.transactions or waiting.once.hashes:
            repeat = repeat_of(waiting.marked_in.state, self._now, waiting)
            if repeat is not None:
                waiting.give(Repeated(repeat.time))
                return
            if self.shards[waiting.marked_in].knows(waiting):  # it waits until the first one is decided
                return
        if waiting.acks or waiting.acknowledging is not None:
            if (error := self._refusal(waiting)) is not None:
                waiting.give(error)
                return
            if self.acks.passes(waiting.acks):  # it waits, too
                return
        self._apply(waiting, [self.shards[member] for member in waiting.members])

    def _refusal(self, waiting: PendingOperation) -> Exception | None:
        """Why its subscriptions refuse it; a conflict if the turn of its acknowledgements comes later."""
        if (error := refusal(waiting.acks)) is not None:
            return error
        call = waiting.acknowledging
        if call is None or (call.refusal is None and not self.acks.lacks(call)):
            return None
        return call.refusal or Conflicted(())

    def _apply(self, waiting: PendingOperation, tables: Sequence[Planned]) -> None:
        outcome = waiting.planned = waiting.run_on([planned.overlay for planned in tables])
        if outcome.error is not None:
            if isinstance(outcome.error, Conflicted):
                waiting.give(outcome.error)
            return
        for planned, cells in zip(tables, outcome.cells, strict=True):
            planned.overlay.written.update(cells.written)
            planned.joins |= waiting.binds
        if waiting.acks or waiting.acknowledging is not None:
            self.acks.take(waiting.acks, waiting.acknowledging)
        for member, rows in waiting.rows.items():
            self.shards[member].made.rows.extend(rows)
        if waiting.transactions or waiting.once.hashes:
            marked = self.shards[waiting.marked_in]
            marked.hashes.update(dict.fromkeys(waiting.once.hashes))
            marked.transactions.update(waiting.transactions)
