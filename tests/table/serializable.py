"""A checker of strict serializability: what operations were told, against the updates of the shards and one
serial order. It shares nothing with the library.

1. *The updates* give the contents at each time. Every version is what one run of one operation wrote; no
   operation wrote at two times, or what it was not told; what was refused wrote nothing.
2. *Each commit time*: the operations of that time, in some order, read what those before them left, and make
   of the contents before it those at it. So all of an operation is there, or nothing of it. Operations of one
   time shared a commit. One that was not answered takes part if it explains what is there.
3. *Real time*: sweep over begins and ends. What has ended is known by a *cut*: how many versions of each
   table it has seen or made. It begins with the join of all cuts of what ended before. Cuts are closed: a
   writer is before the cut in all tables that it read or wrote, or behind it in all of them. A read gets the
   least closed cut whose contents it saw; such cuts are a lattice, so the least one is best for all that
   follow. No cut has what began later, and no writer is in the cut with which it began.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations
from math import inf
from typing import Any, NamedTuple

from tests.table.history import Key, Op, Run
from tests.table.versions import Updates, Versions

ConsistentRead = dict[str, int]
"""By table: the number of its versions."""

GROUPED = ("insert", "update", "transact", "transfer", "look")  # those that wait with others for a commit
HELPERS_MAX = 3  # unanswered operations that may explain one commit
STALE, AS_OF = "stale", ("as_of", "at_instant")


def check(ops: Sequence[Op], updates: Updates) -> list[str]:
    """What is wrong with the history; nothing if it is strictly serializable."""
    versions = Versions(updates)
    wrong = [*versions.wrong, *(f"{text}: {op}" for op in ops for text in op.wrong)]
    commits = Commits(ops, versions)
    wrong += commits.wrong
    for op in ops:
        if op.kind in AS_OF and op.time is not None and not versions.sees(op.runs[0], op.time, {}):
            wrong.append(f"a read at a time saw others: {op}")
    return wrong or list(_against_real_time(ops, versions, commits))


# --- 2. each commit time ------------------------------------------------------------------------------


class Commits:
    """At which time each operation happened."""

    def __init__(self, ops: Sequence[Op], versions: Versions) -> None:
        self.wrong: list[str] = []
        self.time: dict[Op, int] = {}
        """Of those that wrote, or took part in a commit."""
        self.visible: set[Op] = set()
        """Those of which a version is there."""
        self._versions = versions
        self._writers = {(key, val): op for op in ops for run in op.runs for key, val in run.writes.items()}
        self._find()
        for op in ops:
            if _takes_part(op) and op.time is not None and not op.did_nothing:
                self._place(op, op.time)
        self._by_time: dict[int, list[Op]] = defaultdict(list)
        for op, time in self.time.items():
            self._by_time[time].append(op)
        self._doubtful = {op for op in ops if _is_doubtful(op) and op not in self.time}
        for time in sorted({*versions.at, *self._by_time}):
            self._explain(time)
        for op in [op for op in ops if op.answered and op in self._doubtful]:
            self._find_place(op)
        for time, changes in versions.at.items():
            self._find_deletes(time, [key for key, val in changes.items() if val is None])

    def _find(self) -> None:
        """The operation of each version."""
        for time, changes in self._versions.at.items():
            for key, val in changes.items():
                op = self._writers.get((key, val))
                if val is None:
                    continue
                if op is None:
                    self.wrong.append(f"nobody wrote {key}: {val!r} at {time}")
                    continue
                if op.did_nothing:
                    self.wrong.append(f"what did nothing wrote {key}: {val!r} at {time}: {op}")
                self._place(op, time)
                self.visible.add(op)

    def _find_deletes(self, time: int, keys: Iterable[Key]) -> None:
        """Who deleted these keys, where only one can have. Others that were told that time saw none."""
        for key in keys:
            able = [op for op in {*self._by_time[time], *self._doubtful} if key in _deleted(op)]
            if len(able) == 1:
                self.visible.update(able)

    def _place(self, op: Op, time: int) -> None:
        known = self.time.setdefault(op, time)
        if time != known or op.time not in (None, time):
            self.wrong.append(f"it is in at {known}, and at {time}: {op}")

    def _explain(self, time: int) -> None:
        there = self._by_time[time]
        read = {(key, val) for op in there for run in op.runs for key, val in run.reads.items()}
        changed = set(self._versions.at.get(time, ()))
        helpers = [
            op
            for op in self._doubtful
            if any(key in changed or (key, val) in read for run in op.runs for key, val in run.writes.items())
        ]
        for count in range(min(HELPERS_MAX, len(helpers)) + 1):
            for some in combinations(helpers, count):
                if self._has_order([*there, *some], time):
                    for op in some:
                        self._join(op, time)
                    return
        self.wrong.append(f"no order explains {time}: {self._versions.at.get(time)} by {there}")

    def _may_join(self, op: Op, time: int) -> bool:
        """Whether real time leaves that time to it, by what is known of others. One that changed nothing is
        told the time of what it saw, which may be that one."""
        others = [(o, t) for o, t in self.time.items() if o is not op and o.tables & op.tables]
        return all(t <= time for o, t in others if o.ended < op.began) and all(
            time < t + (o not in self.visible) for o, t in others if o.began > op.ended
        )

    def _join(self, op: Op, time: int) -> None:
        self._doubtful.discard(op)
        self.time[op] = time
        self._by_time[time].append(op)

    def _find_place(self, op: Op) -> None:
        """Of one that was answered, and that others of its commit have replaced."""
        for time, there in list(self._by_time.items()):
            is_hidden = any(_written(op) & _written(other) and _together(op, [other]) for other in there)
            if is_hidden and self._may_join(op, time) and self._has_order([*there, op], time):
                self._join(op, time)
                return
        self.wrong.append(f"answered, and not there: {op}")

    def within(self, op: Op) -> Iterator[int]:
        """The times of commits of several operations, between which it may have read."""
        keys = {key for run in op.runs for key in run.reads}
        tables = {found.table for run in op.runs for found in run.ranges}
        for time, there in self._by_time.items():
            others = [other for other in there if other in self.visible or other.began <= op.ended]
            near = any(key in keys or key[0] in tables for other in others for key in _written(other))
            if near and _together(op, others) and self._has_order([*others, op], time):
                yield time

    def _has_order(self, ops: Sequence[Op], time: int) -> bool:
        """Whether these make of the contents before that time those at it."""
        before, changes = time - 1, self._versions.at.get(time, {})
        versions, failed = self._versions, set[Any]()

        def go_on(rest: frozenset[Op], written: dict[Key, Any]) -> bool:
            if not rest:
                return all(
                    written.get(key, versions.val(key, before)) == versions.val(key, time)
                    for key in {*written, *changes}
                )
            state = rest, frozenset(written.items())
            if state in failed:
                return False
            for op in rest:
                for run in op.runs:
                    if versions.sees(run, before, written) and go_on(rest - {op}, {**written, **run.writes}):
                        return True
            failed.add(state)
            return False

        return go_on(frozenset(ops), {})


def _takes_part(op: Op) -> bool:
    """Whether the time that it was told is that of a commit, or as good as one."""
    return op.kind not in (STALE, *AS_OF)


def _written(op: Op) -> set[Key]:
    return {key for run in op.runs for key in run.writes}


def _deleted(op: Op) -> set[Key]:
    return {key for run in op.runs for key, val in run.writes.items() if val is None}


def _together(op: Op, others: Iterable[Op]) -> bool:
    """Whether they may have waited at one moment: then they may share a commit."""
    return all(op.began <= other.ended and other.began <= op.ended for other in others)


def _is_doubtful(op: Op) -> bool:
    """Whether it may have written, or has, at an unknown time."""
    return op.may_write and not op.did_nothing and op.time is None


# --- 3. real time -------------------------------------------------------------------------------------


def _against_real_time(ops: Sequence[Op], versions: Versions, commits: Commits) -> Iterator[str]:
    cuts = Cuts(versions, commits)
    ended = [op for op in ops if op.answered and op.kind not in AS_OF and not op.did_nothing]
    moments = [(op.began, 0, op) for op in ops] + [(op.ended, 1, op) for op in ended]
    known: ConsistentRead = {}
    own: dict[str, ConsistentRead] = defaultdict(dict)
    """What each client has seen of a table itself."""
    before: dict[Op, ConsistentRead] = {}
    for _, has_ended, op in sorted(moments, key=lambda moment: moment[:2]):
        if not has_ended:
            before[op] = own[op.client] if op.kind == STALE else known
            yield from cuts.begin(op, known)
            continue
        found = cuts.of(op, before[op])
        if isinstance(found, str):
            yield found
            continue
        if late := cuts.began_later(found, op):
            yield late
        if op.client:
            own[op.client] = joined(own[op.client], {table: found.get(table, 0) for table in op.tables})
        if op.kind != STALE:
            known = joined(known, found)


def joined(one: ConsistentRead, other: ConsistentRead) -> ConsistentRead:
    return {table: max(one.get(table, 0), other.get(table, 0)) for table in {*one, *other}}


class Bound(NamedTuple):
    """Of one operation: who has more of a table than `most` is behind it, and has `least`."""

    most: ConsistentRead
    least: ConsistentRead

    def close(self, cut: ConsistentRead) -> None:
        if any(cut.get(table, 0) > number for table, number in self.most.items()):
            for table, number in self.least.items():
                cut[table] = max(cut.get(table, 0), number)


class Cuts:
    """Closed cuts."""

    def __init__(self, versions: Versions, commits: Commits) -> None:
        self._versions = versions
        self._commits = commits
        writers = sorted(((time, self._bound(op)) for op, time in commits.time.items()), key=_first)
        self._writers = [bound for _, bound in writers]
        self._times = [time for time, _ in writers]
        self._others: list[tuple[float, Bound]] = []
        """By the last time of the versions in `least`: of reads, and of writers that began after others with
        later times had ended."""
        self._began = {table: self._begins(table) for table in versions.times}

    def _bound(self, op: Op) -> Bound:
        time, written = self._commits.time[op], self._written(op)
        before, until = self._versions.before, self._versions.until
        return Bound(
            {table: (before if table in written else until)(table, time) for table in op.tables},
            {table: (until if table in written else before)(table, time) for table in op.tables},
        )

    def _written(self, op: Op) -> set[str]:
        """The tables of which it made a version."""
        if op not in self._commits.visible:
            return set()
        changes = self._versions.at.get(self._commits.time[op], {})
        mine = {key for run in op.runs for key in run.writes}
        return {table for table, key in mine & changes.keys()}

    def _begins(self, table: str) -> list[float]:
        """By number of versions: when the last of them began, at the earliest."""
        first: dict[int, float] = {}
        for op in self._commits.visible:
            if table in self._written(op):
                time = self._commits.time[op]
                first[time] = min(first.get(time, inf), op.began)
        return list(accumulate((first.get(t, -inf) for t in self._versions.times[table]), max, initial=-inf))

    def _last(self, cut: ConsistentRead) -> float:
        return max((self._versions.last(table, number) for table, number in cut.items()), default=-inf)

    def _missing(self, cut: ConsistentRead) -> float:
        """The time of the first version that it has not."""
        times = self._versions.times.items()
        return min((some[cut.get(t, 0)] for t, some in times if cut.get(t, 0) < len(some)), default=inf)

    def closed(self, cut: ConsistentRead) -> ConsistentRead:
        """The least closed cut with all of this one."""
        found = dict(cut)
        while True:
            before, first, last = dict(found), self._missing(found), self._last(found)
            for bound in self._writers[bisect_left(self._times, first) : bisect_right(self._times, last)]:
                bound.close(found)
            for _, bound in self._others[bisect_left(self._others, first, key=_first) :]:
                bound.close(found)
            if found == before:
                return found

    def begin(self, op: Op, known: ConsistentRead) -> Iterator[str]:
        """That much had ended when it began: it is behind that."""
        time = self._commits.time.get(op)
        if time is None:
            return
        most = self._bound(op).most
        if any(known.get(table, 0) > number for table, number in most.items()):
            yield f"its time {time} is before what had ended when it began, {most} {known}: {op}"
        insort(self._others, (self._last(known), Bound(most, known)), key=_first)

    def of(self, op: Op, known: ConsistentRead) -> ConsistentRead | str:
        """What is known once it has ended."""
        if op not in self._commits.time:
            return self._of_read(op, known)
        return self.closed(joined(known, self._bound(op).least))

    def _of_read(self, op: Op, known: ConsistentRead) -> ConsistentRead | str:
        """The same of one that wrote nothing: it was between two commits, or within one."""
        fits = {table: self._fits(op, table, known.get(table, 0)) for table in op.tables}
        between = self._between(op, known, fits)
        within = [(cut, self.closed(joined(known, cut))) for cut in self._within(op, known)]
        found = [cut for _, cut in within] + [between] * (between is not None)
        if not found:
            return f"saw no moment of its call, after {known}: {op}"
        least = min(found, key=lambda cut: sum(cut.values()))
        if op.kind != STALE:
            most = {table: max(numbers, default=0) for table, numbers in fits.items()}
            for cut, _ in within:
                most = joined(most, cut)
            insort(self._others, (self._last(least), Bound(most, least)), key=_first)
        return least

    def _within(self, op: Op, known: ConsistentRead) -> Iterator[ConsistentRead]:
        for time in self._commits.within(op) if op.kind in GROUPED else ():
            cut = {table: self._versions.until(table, time) for table in op.tables}
            if all(known.get(table, 0) <= number for table, number in cut.items()):
                yield cut

    def _between(self, op: Op, known: ConsistentRead, fits: Mapping[str, list[int]]) -> ConsistentRead | None:
        """The least closed cut whose contents it saw."""
        cut = dict(known)
        while True:
            before = dict(cut)
            for table, numbers in fits.items():
                number = next((n for n in numbers if n >= cut.get(table, 0)), None)
                if number is None:
                    return None
                cut[table] = number
            if op.kind != STALE:
                cut = self.closed(cut)
            if cut == before:
                return cut

    def _fits(self, op: Op, table: str, least: int) -> list[int]:
        """After how many versions of the table it may have read, of those that began before its end."""
        part = _part(op.runs[-1], table)
        numbers = range(least, bisect_right(self._began.get(table, [-inf]), op.ended))
        return [n for n in numbers if self._versions.sees(part, self._versions.last(table, n), {})]

    def began_later(self, cut: ConsistentRead, op: Op) -> str | None:
        """Whether that cut has what began after `op` had ended."""
        for table, number in cut.items():
            if self._began[table][number] > op.ended:
                return f"it has seen what began later, {table}[{number}]: {op}"
        return None


def _first(pair: tuple[float, Bound]) -> float:
    return pair[0]


def _part(run: Run, table: str) -> Run:
    return Run(
        {key: val for key, val in run.reads.items() if key[0] == table},
        tuple(found for found in run.ranges if found.table == table),
    )
