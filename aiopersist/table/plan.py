"""What one commit of a group makes of each shard: operations applied to views, in their order. Pure."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aiopersist.errors import ShardFinalized, UpperMismatch
from aiopersist.frontier import Antichain
from aiopersist.state.once import UNMARKED, Once
from aiopersist.state.writing import repeat_of
from aiopersist.subscription.joint import JointAck, JointAcks, refusal
from aiopersist.table.member import Made, Member
from aiopersist.table.operation import Action, Conflicted, Overlay, RunOutcome, run

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


class Repeated(NamedTuple):
    """The operation was done before, by a call with the same `once=` or `txn=`; `time` is the time of its
    commit (for `txn=`, a time at which it was in)."""

    time: int


class Done(NamedTuple):
    """The operation is in at `time`."""

    time: int
    result: Any


@dataclass(eq=False)
class PendingOperation:
    """One operation that waits for its answer."""

    members: tuple[Member, ...]
    """The tables that it reads or writes, in the order of the cells of `action`."""
    action: Action
    keys: Sequence[Collection[str]]
    """Of each of them, the keys that it may read or write."""
    marked_in: Member
    """The shard that remembers its `transactions` and `once`."""
    transactions: Mapping[str, int] = field(default_factory=dict)
    once: Once = UNMARKED
    rows: "Mapping[Member, Sequence[pa.Table]]" = field(default_factory=dict)
    """What it appends to plain shards."""
    acks: tuple[JointAck, ...] = ()
    """The positions of subscriptions that move in the same commit."""
    binds: bool = False
    """Whether all its tables take part in the commit, also those that it only read."""
    reruns: bool = False
    """Whether `action` depends on more than the keys that it reads, so it runs for each plan."""
    outcome: RunOutcome | None = None
    origin: Any = None
    """Where its caller stands in its trace."""
    answer: "asyncio.Future[Done | Repeated]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def is_marked(self) -> bool:
        return bool(self.transactions or self.once.hashes)

    @property
    def shards(self) -> dict[Member, None]:
        """All shards that it may touch."""
        marks = [self.marked_in] if self.is_marked else []
        return dict.fromkeys([*self.members, *self.rows, *marks])

    def run_on(self, overlays: Sequence[Overlay]) -> RunOutcome:
        """What it does on these vals. It runs only if it has not yet, or what it read has changed."""
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

    def give_outcome(self, time: int) -> None:
        """The same of its own outcome, which is known to be right."""
        if self.outcome is not None:
            error = self.outcome.error
            self.give(Done(time, self.outcome.result) if error is None else error)


@dataclass(eq=False)
class Planned:
    """What a group makes of one shard."""

    member: Member
    overlay: Overlay
    lower: Antichain
    joins: bool = False
    """Whether it takes part without changes of its own."""
    hashes: dict[str, None] = field(default_factory=dict)
    transactions: dict[str, int] = field(default_factory=dict)
    made: Made = field(default_factory=Made)

    @property
    def takes_part(self) -> bool:
        """Whether the commit has a version of this shard."""
        made = self.made
        return bool(self.joins or made.changes or self.hashes or self.transactions or made.rows)

    def check(self) -> None:
        """Raise if the shard takes no such commit: it is closed or dropped, or what changes has a newer
        schema."""
        if not self.lower.elements:
            shard_id = self.member.writer.shard.id
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
    """What a group makes of all shards."""

    def __init__(self, group: Iterable[PendingOperation], now: float) -> None:
        """Apply the operations in their order. Those that were done before, and transactions whose reads
        changed, are answered."""
        self.shards: dict[Member, Planned] = {}
        self.acks = JointAcks()
        for waiting in group:
            self._add(waiting, now)
        for planned in self.shards.values():
            changes = planned.made.changes = planned.overlay.changes()
            planned.made.old = {key: planned.overlay.before(key) for key in changes}

    @property
    def parts(self) -> list[Planned]:
        """The shards that take part in the commit."""
        return [planned for planned in self.shards.values() if planned.takes_part]

    @property
    def overlays(self) -> dict[Member, Overlay]:
        """What it makes of each of them."""
        return {member: planned.overlay for member, planned in self.shards.items()}

    def _of(self, member: Member) -> Planned:
        if member not in self.shards:
            self.shards[member] = Planned(member, Overlay(member.val_of), member.upper)
        return self.shards[member]

    def _add(self, waiting: PendingOperation, now: float) -> None:
        for member in waiting.shards:
            self._of(member)
        if waiting.is_marked:
            repeat = repeat_of(waiting.marked_in.state, now, waiting)
            if repeat is not None:
                waiting.give(Repeated(repeat.time))
                return
            if self.shards[waiting.marked_in].knows(waiting):  # it waits until the first one is decided
                waiting.outcome = None
                return
        if (error := refusal(waiting.acks)) is not None:
            waiting.give(error)
            return
        if self.acks.passes(waiting.acks):  # it waits, too
            waiting.outcome = None
            return
        self._apply(waiting, [self.shards[member] for member in waiting.members])

    def _apply(self, waiting: PendingOperation, tables: Sequence[Planned]) -> None:
        outcome = waiting.run_on([planned.overlay for planned in tables])
        if outcome.error is not None:
            if isinstance(outcome.error, Conflicted):
                waiting.give(outcome.error)
            return
        for planned, cells in zip(tables, outcome.cells, strict=True):
            planned.overlay.written.update(cells.written)
            planned.joins |= waiting.binds
        self.acks.take(waiting.acks)
        for member, rows in waiting.rows.items():
            self.shards[member].made.rows.extend(rows)
        if waiting.is_marked:
            marked = self.shards[waiting.marked_in]
            marked.hashes.update(dict.fromkeys(waiting.once.hashes))
            marked.transactions.update(waiting.transactions)
