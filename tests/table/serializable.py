"""A checker of strict serializability: what each operation saw and did, against one serial order.

It knows nothing of the library. Operations that wrote are ordered by their commit times; those of one time
shared a commit, so any order of them will do. Each must have read what the ones before it left, and have
found the range that it read as they left it. One that wrote nothing saw one moment between its begin and its
end: clients that share no table may commit in another order than that of their times.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

Key = tuple[str, Any]
State = Mapping[Key, Any]


@dataclass(eq=False)
class Op:
    """One operation that was answered."""

    name: str
    began: float
    ended: float
    reads: dict[Key, Any] = field(default_factory=dict)
    ranges: list[tuple[str, Any, Any, dict[Any, Any]]] = field(default_factory=list)
    """Table, start, stop, and the entries that it found."""
    writes: dict[Key, Any] = field(default_factory=dict)
    """`None`: deleted."""
    time: int | None = None
    """Of its commit; `None` if it wrote nothing."""

    def fits(self, state: State) -> bool:
        """Whether it may have run on this state."""
        return all(state.get(key) == val for key, val in self.reads.items()) and all(
            _range(state, table, start, stop) == found for table, start, stop, found in self.ranges
        )

    def after(self, state: State) -> State:
        new = {**state, **self.writes}
        return {key: val for key, val in new.items() if val is not None}

    def __repr__(self) -> str:
        return f"{self.name} at {self.time}: read {self.reads} {self.ranges}, wrote {self.writes}"


def _range(state: State, table: str, start: Any, stop: Any) -> dict[Any, Any]:
    return {
        key: val
        for (name, key), val in state.items()
        if name == table and (start is None or start <= key) and (stop is None or key < stop)
    }


def check(ops: Sequence[Op], begin: State | None = None) -> list[str]:
    """What is wrong with the history; nothing if it is strictly serializable."""
    writers = sorted((op for op in ops if op.time is not None), key=lambda op: op.time or 0)
    readers = [op for op in ops if op.time is None]
    if wrong := [f"{b} ended before {a} began, and has a later time" for a, b in _pairs(writers)]:
        return wrong
    furthest: list[Op] = []
    for order in _orders(writers, dict(begin or {}), furthest):
        wrong = [
            f"{op} saw no moment of its call" for op in readers if not _saw_a_moment(op, order, begin or {})
        ]
        if not wrong:
            return []
    left = [op for op in writers if op not in furthest]
    return wrong or [f"no order explains {left[:8]}, after {furthest[-3:]}"]


def _saw_a_moment(op: Op, order: Sequence[Op], begin: State) -> bool:
    """Whether there is a moment of each table that it read, within its call, such that each writer is before
    all of these moments or after all of them."""
    tables = {table for table, _ in op.reads} | {table for table, *_ in op.ranges}
    writers = {t: [w for w in order if any(table == t for table, _ in w.writes)] for t in tables}
    return any(
        all(
            (w in writers[a][:m]) == (w in writers[b][:n])
            for (a, m), (b, n) in combinations(moment.items(), 2)
            for w in writers[a]
            if w in writers[b]
        )
        for choice in product(*(_moments(op, t, writers[t], begin) for t in tables))
        if (moment := dict(zip(tables, choice, strict=True))) is not None
    )


def _moments(op: Op, table: str, writers: Sequence[Op], begin: State) -> list[int]:
    """After how many of the writers of that table it may have read what it read there."""
    states = [begin]
    for writer in writers:
        states.append(writer.after(states[-1]))
    first = max((n + 1 for n, w in enumerate(writers) if w.ended < op.began), default=0)
    last = min((n for n, w in enumerate(writers) if w.began > op.ended), default=len(writers))
    mine = replace(
        op,
        reads={key: val for key, val in op.reads.items() if key[0] == table},
        ranges=[found for found in op.ranges if found[0] == table],
    )
    return [n for n in range(first, last + 1) if mine.fits(states[n])]


def _pairs(writers: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """Two operations whose times are not in the order in which they happened."""
    for number, earlier in enumerate(writers):
        for later in writers[number + 1 :]:
            if later.ended < earlier.began and later.time != earlier.time:
                yield earlier, later


def _orders(writers: Sequence[Op], state: State, furthest: list[Op]) -> Iterator[list[Op]]:
    """All orders by time in which each of these may have run. The longest beginning of one is left in
    `furthest`."""
    order: list[Op] = []
    states: list[State] = [state]

    def go_on(rest: Sequence[Op]) -> Iterator[list[Op]]:
        if len(order) > len(furthest):
            furthest[:] = order
        if not rest:
            yield order
        for op in (op for op in rest if op.time == rest[0].time):
            if op.fits(states[-1]):
                order.append(op)
                states.append(op.after(states[-1]))
                yield from go_on([other for other in rest if other is not op])
                order.pop()
                states.pop()

    yield from go_on(writers)
