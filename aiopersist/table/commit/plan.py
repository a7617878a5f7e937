"""The plan of a group commit: operations applied to views, in their order. And the speculation: the contents
of tables if all undecided operations of this client succeed. Pure.

Transactions read the speculation. Each sees the writes of those before it, so many transactions on the same
keys share one commit. It has two layers over the views: the plan that is being committed, and the operations
that wait for the next group, in their order.

It may be wrong: another client may come first, and an operation may be cancelled, or fail. The group commit
compares the reads of a transaction with the views, so a wrong speculation costs only an attempt.

No body may see values that never existed at one moment. Therefore

- an operation whose own reads differ in the speculation adds nothing to it;
- it begins anew when a view below it changes: by a commit of another process, or a large put;
- a transaction reads it only if its views and those of the transaction show one moment together
  (`transaction/consistent_read.py`).

Operations that read ranges add nothing: their reads are compared by the changes of views.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, field

from aiopersist.base.errors import ShardFinalized, UpperMismatch
from aiopersist.base.frontier import Antichain
from aiopersist.shard.stack import SLICE_BYTES
from aiopersist.state.once import UNMARKED, Once
from aiopersist.state.writing import repeat_of
from aiopersist.subscription.joint import JointAck, JointAcks, refusal
from aiopersist.subscription.order import Acknowledging
from aiopersist.table.commit.operation import Action, Conflicted, Overlay, RunOutcome, run
from aiopersist.table.commit.participant import Participant, ShardWrites, TableParticipant
from aiopersist.table.view.contents import SLICE_KEYS

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

PLAN_BYTES = 16 * 1024 * 1024  # of the operations of one commit
OPERATION_BYTES = 160  # the cost of an operation beside its texts, as bytes


class Repeated(NamedTuple):
    """The operation was done before, by a call with the same `once=` or `txn=`; `time` is the time of its
    commit (for `txn=`, a time at which it was in)."""

    time: int


class Done(NamedTuple):
    """The operation is durable, at `time`."""

    time: int
    result: Any


class PendingOperation(Struct, eq=False):
    """One operation that waits for its answer."""

    participants: tuple[TableParticipant, ...]
    """The tables that it reads or writes, in the order of the cells of `action`."""
    action: Action
    keys: Sequence[Collection[str]]
    """For each table, the keys that it may read or write."""
    marked_in: Participant
    """The shard that remembers its `transactions` and `once`."""
    transactions: Mapping[str, int] = {}
    once: Once = UNMARKED
    rows: "Mapping[Participant, Sequence[pa.Table]]" = {}
    """The rows that it appends to shards."""
    acks: tuple[JointAck, ...] = ()
    """The positions of subscriptions that move in the same commit."""
    acknowledging: Acknowledging | None = None
    """The call with these."""
    binds: bool = False
    """Whether all its tables take part in the commit, also those that it only reads."""
    reruns: bool = False
    """Whether `action` depends on more than the keys that it reads, so that each plan runs it."""
    outcome: RunOutcome | None = None
    """Of its last run, in a plan or in the speculation."""
    planned: RunOutcome | None = None
    """Of its run in the current plan."""
    origin: Any = None
    """The place of its caller in a trace."""
    answer: "asyncio.Future[Done | Repeated]" = None  # type: ignore[assignment]  # made with it

    def __post_init__(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        """The bytes that it reads and writes in the plan, an estimate."""
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
        return dict.fromkeys([*self.participants, *self.rows, *marks])

    def run_on(self, overlays: Sequence[Overlay]) -> RunOutcome:
        """Its outcome on these values. It runs only if it has not run yet, or its reads have changed."""
        outcome = self.outcome
        if outcome is None or self.reruns or not outcome.is_valid_for(overlays):
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
        """Return or raise its planned outcome in its call."""
        if self.planned is not None:
            error = self.planned.error
            self.give(Done(time, self.planned.result) if error is None else error)


class ShardPlan(Struct, eq=False):
    """The part of a plan for one shard."""

    participant: Participant
    overlay: Overlay
    lower: Antichain
    joins: bool = False
    """Whether it takes part even without changes."""
    hashes: dict[str, None] = {}
    transactions: dict[str, int] = {}
    writes: ShardWrites = field(default_factory=ShardWrites)

    def consolidate(self) -> Iterator[None]:
        """Compute the net changes, a slice at a time: without keys whose value is the old one again."""
        before, written = self.overlay.before, self.overlay.written
        changes: dict[str, str | None] = {}
        old: dict[str, str | None] = {}
        for number, (key, val) in enumerate(written.items(), 1):
            if (old_val := before(key)) != val:
                changes[key], old[key] = val, old_val
                self.writes.size += len(key) + len(val or "") + len(old_val or "")
            if number % SLICE_KEYS == 0:
                yield
        self.writes.changes, self.writes.old = changes, old
        self.writes.size += sum([rows.nbytes for rows in self.writes.rows])

    @property
    def takes_part(self) -> bool:
        """Whether the commit writes a version of this shard."""
        writes = self.writes
        return bool(self.joins or writes.changes or self.hashes or self.transactions or writes.rows)

    def check(self) -> None:
        """Raise if the shard cannot take the commit: it is closed or dropped, or has a newer schema."""
        if not self.lower.elements:
            shard_id = self.participant.shard.id
            if self.participant.state.finalized:
                raise ShardFinalized("it is finalized", shard_id=shard_id)
            raise UpperMismatch(Antichain(0), self.lower, shard_id=shard_id)  # any int was expected
        if self.writes.changes:
            self.participant.check_schema()

    def has_marks_of(self, operation: PendingOperation) -> bool:
        """Whether the plan has an operation with the same id, or of its application with at least its
        number."""
        planned = self.transactions
        return not self.hashes.keys().isdisjoint(operation.once.hashes) or any(
            number <= planned[app] for app, number in operation.transactions.items() if app in planned
        )


class Plan:
    """The writes of a group to all shards: of as many operations as take `PLAN_BYTES`. The others are
    `rest`."""

    def __init__(self, group: Iterable[PendingOperation], now: float) -> None:
        self.rest = [operation for operation in group if not operation.answer.done()]
        self.shards: dict[Participant, ShardPlan] = {}
        self.acks = JointAcks()
        self._now = now
        for operation in self.rest:  # the views as of one moment, also if one changes meanwhile
            operation.planned = None
            for participant in operation.shards:
                self._of(participant)
        self._versions = self._view_versions()

    def steps(self) -> Iterator[None]:
        """Apply the operations in their order, a slice at a time. Repeats, and transactions whose reads
        changed, are answered."""
        group, self.rest = self.rest, []
        size = done = 0
        for number, operation in enumerate(group):
            if size > PLAN_BYTES:
                self.rest = group[number:]
                break
            self._add(operation)
            size += OPERATION_BYTES + operation.size
            if size - done > SLICE_BYTES:
                done = size
                yield
        for planned in self.shards.values():
            yield from planned.consolidate()

    @property
    def is_current(self) -> bool:
        """Whether no view has changed since the plan began."""
        return self._versions == self._view_versions()

    def _view_versions(self) -> dict[Participant, tuple[Antichain, int]]:
        return {p: (p.view.upper, p.view.version) for p in self.shards}

    @property
    def parts(self) -> list[ShardPlan]:
        """The shards that take part in the commit."""
        return [planned for planned in self.shards.values() if planned.takes_part]

    @property
    def overlays(self) -> dict[Participant, Overlay]:
        """The values of each shard after the plan."""
        return {participant: planned.overlay for participant, planned in self.shards.items()}

    def _of(self, participant: Participant) -> ShardPlan:
        if participant not in self.shards:
            self.shards[participant] = ShardPlan(
                participant, Overlay(participant.view.contents.val_of), participant.view.upper
            )
        return self.shards[participant]

    def _add(self, operation: PendingOperation) -> None:
        if operation.answer.done():
            return
        if operation.transactions or operation.once.hashes:
            repeat = repeat_of(operation.marked_in.state, self._now, operation)
            if repeat is not None:
                operation.give(Repeated(repeat.time))
                return
            if self.shards[operation.marked_in].has_marks_of(
                operation
            ):  # it waits until the other is decided
                return
        if operation.acks or operation.acknowledging is not None:
            if (error := self._refusal(operation)) is not None:
                operation.give(error)
                return
            if self.acks.passes(operation.acks):  # it waits, too
                return
        self._apply(operation, [self.shards[participant] for participant in operation.participants])

    def _refusal(self, operation: PendingOperation) -> Exception | None:
        """The error of its subscriptions; a conflict if the turn of its acknowledgements comes later."""
        if (error := refusal(operation.acks)) is not None:
            return error
        call = operation.acknowledging
        if call is None or (call.refusal is None and not self.acks.lacks(call)):
            return None
        return call.refusal or Conflicted(())

    def _apply(self, operation: PendingOperation, tables: Sequence[ShardPlan]) -> None:
        outcome = operation.planned = operation.run_on([planned.overlay for planned in tables])
        if outcome.error is not None:
            if isinstance(outcome.error, Conflicted):
                operation.give(outcome.error)
            return
        for planned, cells in zip(tables, outcome.cells, strict=True):
            planned.overlay.written.update(cells.written)
            planned.joins |= operation.binds
        if operation.acks or operation.acknowledging is not None:
            self.acks.take(operation.acks, operation.acknowledging)
        for participant, rows in operation.rows.items():
            self.shards[participant].writes.rows.extend(rows)
        if operation.transactions or operation.once.hashes:
            planned = self.shards[operation.marked_in]
            planned.hashes.update(dict.fromkeys(operation.once.hashes))
            planned.transactions.update(operation.transactions)


TABLES_MAX = 8  # below the speculation: each read compares them
SPECULATED_MAX = 512  # operations in the speculation: bounds the time for which it keeps the loop busy


class Speculation:
    """See the header. One per client. `undecided` gives the operations that no plan has, in order."""

    def __init__(self, undecided: Callable[[], Iterable[PendingOperation]]) -> None:
        self._undecided = undecided
        self.version = 0
        """Rises with every change."""
        self._planned: Mapping[Participant, Overlay] = {}
        self._planned_versions: dict[TableParticipant, int] = {}
        self._overlays: dict[Participant, Overlay] = {}
        self._versions_below: dict[TableParticipant, int] = {}
        """The tables below it, and the version of each view."""
        self._new: list[PendingOperation] = []
        """Operations that came last, and are not applied yet."""
        self._room = SPECULATED_MAX
        self._is_stale = False

    def planned(self, overlays: Mapping[Participant, Overlay]) -> None:
        """A plan with these values, made on the current views, is being committed. Empty: there is none."""
        tables = [p for p in overlays if isinstance(p, TableParticipant)]
        self._planned = overlays if len(tables) <= TABLES_MAX else {}
        self._planned_versions = {
            participant: participant.view.version for participant in tables if self._planned
        }
        self._versions_below = dict(self._planned_versions)
        self._is_stale = True
        self._new.clear()

    def begin_anew(self) -> None:
        """The undecided operations, or their order, have changed."""
        self._is_stale = True
        self._new.clear()

    def enqueue(self, operation: PendingOperation) -> None:
        """The operation has joined the queue."""
        if not self._is_stale and self._room > len(self._new):
            self._new.append(operation)

    def refresh(self) -> Collection[TableParticipant]:
        """Bring it up to date, and return the tables below it."""
        for participant, version in self._versions_below.items():
            if participant.view.version != version:
                self.planned({})
                break
        if self._is_stale:
            self._is_stale = False
            self._begin()
        if self._new:
            operations, self._new = self._new, []
            self._room -= len(operations)
            for operation in operations:
                self._add(operation)
            self.version += 1
        return self._versions_below.keys()

    def val_of(self, participant: TableParticipant, key: str) -> str | None:
        """The value of a key that the view has in memory, after `refresh`."""
        overlay = self._overlays.get(participant) or self._planned.get(participant)
        return participant.view.contents.val_of(key) if overlay is None else overlay.val_of(key)

    def _begin(self) -> None:
        self._versions_below = dict(self._planned_versions)
        self._overlays = {}
        self._new = list(islice(self._undecided(), SPECULATED_MAX))
        self._room = SPECULATED_MAX
        self.version += 1

    def _add(self, operation: PendingOperation) -> None:
        """Let it run, and add its writes."""
        participants = operation.participants
        tables = self._versions_below.keys() | participants
        if operation.reruns or operation.answer.done() or len(tables) > TABLES_MAX:
            return
        if any(p.view.contents.unknown(keys) for p, keys in zip(participants, operation.keys, strict=True)):
            return
        outcome = operation.run_on([self._of(participant) for participant in participants])
        if outcome.error is None and any(cells.written for cells in outcome.cells):
            for participant, cells in zip(participants, outcome.cells, strict=True):
                self._overlays[participant].written.update(cells.written)
            for participant in participants:
                self._versions_below.setdefault(participant, participant.view.version)

    def _of(self, participant: Participant) -> Overlay:
        if participant not in self._overlays:
            plan = self._planned.get(participant)
            self._overlays[participant] = Overlay(
                partial(_val_now, participant) if plan is None else plan.val_of
            )
        return self._overlays[participant]


def _val_now(participant: Participant, key: str) -> str | None:
    """The value of a key in the current contents of the view."""
    return participant.view.contents.val_of(key)
