"""What tables hold once the operations of this client that are undecided have happened.

Transactions read it: each sees what those before it make, so that many which want the same keys share one
commit. It lies on the views in two layers: the plan of the group that is being committed, and on top the
operations that wait for the next one, in their order, each as it would run by now.

It is a guess. Another client may come first, and an operation may be cancelled, or fail. The group commit
compares what a transaction read with what is so, so a wrong guess costs an attempt, and is never an answer.

No body may see what never could be so at one moment. Therefore

- an operation whose own reads do not fit into the guess adds nothing to it;
- the guess begins anew once a view that it rests on changes: by a commit of another process, or a large put;
- it serves a transaction only if all views that it rests on show one moment with those that the transaction
  reads (`consistent_read.py`).

Operations that read ranges add nothing: they are compared by the changes of views.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice

from aiopersist.table.operation import Overlay
from aiopersist.table.participant import Participant, TableParticipant
from aiopersist.table.plan import PendingOperation

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
