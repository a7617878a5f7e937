"""A checker of strict serializability: what each operation saw and did, against one serial order.

It knows nothing of the library. Operations that wrote are ordered by their commit times; those of one time
shared a commit, so any order of them will do. Each must have read what the ones before it left, and have
found the range that it read as they left it. One that wrote nothing must fit somewhere between the operations
that had ended before it began, and those that began after it had ended.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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
    wrong = [f"{b} ended before {a} began, and has a later time" for a, b in _pairs(writers)]
    states: list[State] = [dict(begin or {})]
    order: list[Op] = []
    for _, some in groupby(writers, key=lambda op: op.time):
        found = _ordered(list(some), states[-1])
        if found is None:
            return [*wrong, f"no order explains the operations of one commit, on {states[-1]}"]
        for op in found:
            order.append(op)
            states.append(op.after(states[-1]))
    for op in ops:
        if op.time is None:
            first = max((n + 1 for n, w in enumerate(order) if w.ended < op.began), default=0)
            last = min((n for n, w in enumerate(order) if w.began > op.ended), default=len(order))
            if not any(op.fits(state) for state in states[first : last + 1]):
                wrong.append(f"{op} fits none of the states {first} to {last}: {states[first : last + 1]}")
    return wrong


def _pairs(writers: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """Two operations whose times are not in the order in which they happened."""
    for number, earlier in enumerate(writers):
        for later in writers[number + 1 :]:
            if later.ended < earlier.began:
                yield earlier, later


def _ordered(ops: list[Op], state: State) -> list[Op] | None:
    """An order in which each of these may have run."""
    if not ops:
        return []
    for op in ops:
        if op.fits(state):
            rest = _ordered([other for other in ops if other is not op], op.after(state))
            if rest is not None:
                return [op, *rest]
    return None
