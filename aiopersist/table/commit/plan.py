"""What one commit of a group makes of each shard: operations applied to views, in their order. Pure.

What tables hold once the operations of this client that are undecided have happened.

Transactions read it: each sees what those before it make, so that many which want the same keys share one
commit. It lies on the views in two layers: the plan of the group that is being committed, and on top the
operations that wait for the next one, in their order, each as it would run by now.

It is a guess. Another client may come first, and an operation may be cancelled, or fail. The group commit
compares what a transaction read with what is so, so a wrong guess costs an attempt, and is never an answer.

No body may see what never could be so at one moment. Therefore

- an operation whose own reads do not fit into the guess adds nothing to it;
- the guess begins anew once a view that it rests on changes: by a commit of another process, or a large put;
- it serves a transaction only if all views that it rests on show one moment with those that the transaction
  reads (`transaction/consistent_read.py`).

Operations that read ranges add nothing: they are compared by the changes of views.
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
from aiopersist.table.commit.participant import Made, Participant, TableParticipant
from aiopersist.table.view.contents import SLICE_KEYS

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


TABLES_MAX = 8  # that it rests on: each read compares them
OPERATIONS_MAX = 512  # in it: bounds how long the loop is busy with it


class Speculation:
    """See the header. One per client. `undecided` gives the operations that no plan has, in their order."""

    def __init__(self, undecided: Callable[[], Iterable[PendingOperation]]) -> None:
        self._undecided = undecided
        self.version = 0
        """Rises with every change of the guess."""
        self._planned: Mapping[Participant, Overlay] = {}
        self._planned_on: dict[TableParticipant, int] = {}
        self._overlays: dict[Participant, Overlay] = {}
        self._rests_on: dict[TableParticipant, int] = {}
        """The tables, and the version of each view."""
        self._new: list[PendingOperation] = []
        """They came after the others, and are not in the guess yet."""
        self._room = OPERATIONS_MAX
        self._is_stale = False

    def planned(self, overlays: Mapping[Participant, Overlay]) -> None:
        """A plan with these changes, of the views as they are now, is being committed; or there is none."""
        tables = [member for member in overlays if isinstance(member, TableParticipant)]
        self._planned = overlays if len(tables) <= TABLES_MAX else {}
        self._planned_on = {member: member.view.version for member in tables if self._planned}
        self._rests_on = dict(self._planned_on)
        self._is_stale = True
        self._new.clear()

    def begin_anew(self) -> None:
        """What is undecided, or its order, has changed."""
        self._is_stale = True
        self._new.clear()

    def came(self, waiting: PendingOperation) -> None:
        """This operation came after the others."""
        if not self._is_stale and self._room > len(self._new):
            self._new.append(waiting)

    def refresh(self) -> Collection[TableParticipant]:
        """Bring the guess up to date, and return the tables that it rests on."""
        for member, version in self._rests_on.items():
            if member.view.version != version:
                self.planned({})
                break
        if self._is_stale:
            self._is_stale = False
            self._begin()
        if self._new:
            new, self._new = self._new, []
            self._room -= len(new)
            for waiting in new:
                self._add(waiting)
            self.version += 1
        return self._rests_on.keys()

    def val_of(self, member: TableParticipant, key: str) -> str | None:
        """The value of a key that is known in the view, after `refresh`."""
        overlay = self._overlays.get(member) or self._planned.get(member)
        return member.view.val_of(key) if overlay is None else overlay.val_of(key)

    def _begin(self) -> None:
        self._rests_on = dict(self._planned_on)
        self._overlays = {}
        self._new = list(islice(self._undecided(), OPERATIONS_MAX))
        self._room = OPERATIONS_MAX
        self.version += 1

    def _add(self, waiting: PendingOperation) -> None:
        """Let it run, and add what it writes."""
        members = [member for member in waiting.members if isinstance(member, TableParticipant)]
        if waiting.reruns or waiting.answer.done() or len(self._rests_on.keys() | members) > TABLES_MAX:
            return
        if any(member.unknown(keys) for member, keys in zip(waiting.members, waiting.keys, strict=True)):
            return
        outcome = waiting.run_on([self._of(member) for member in waiting.members])
        if outcome.error is None and any(cells.written for cells in outcome.cells):
            for member, cells in zip(waiting.members, outcome.cells, strict=True):
                self._overlays[member].written.update(cells.written)
            for member in members:
                self._rests_on.setdefault(member, member.view.version)

    def _of(self, member: Participant) -> Overlay:
        if member not in self._overlays:
            under = self._planned.get(member)
            self._overlays[member] = Overlay(partial(_val_now, member) if under is None else under.val_of)
        return self._overlays[member]


def _val_now(member: Participant, key: str) -> str | None:
    """The value of a key, whatever the view holds by now."""
    return member.val_of(key)
