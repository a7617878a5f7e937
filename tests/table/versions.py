"""The contents of tables at each time, from their updates. It shares nothing with the library."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from tests.table.history import THERE, Found, Key, Run

Updates = Mapping[str, Iterable[Sequence[Any]]]
"""By table: key, val, time, diff."""


class Versions:
    """The contents of all tables at each time."""

    def __init__(self, updates: Updates) -> None:
        self.wrong: list[str] = []
        self.at: dict[int, dict[Key, Any]] = defaultdict(dict)
        """The changes of each time."""
        self.times: dict[str, list[int]] = {}
        """Of the versions of each table."""
        self._of: dict[Key, tuple[list[int], list[Any]]] = {}
        self._keys: dict[str, list[Any]] = defaultdict(list)
        for table, some in updates.items():
            self._take(table, some)

    def _take(self, table: str, updates: Iterable[Sequence[Any]]) -> None:
        sides: dict[tuple[int, Any], dict[int, Any]] = defaultdict(dict)
        sums: dict[tuple[Any, Any, int], int] = defaultdict(int)  # several batches may share a commit
        for key, val, time, diff in updates:
            sums[key, val, time] += diff
        for (key, val, time), diff in sums.items():
            if not diff:
                continue
            if diff not in (-1, 1) or diff in sides[time, key]:
                self.wrong.append(f"{table}: {key!r} has two vals, or none, at {time}: {val!r} {diff:+}")
            sides[time, key][diff] = val
        for (time, key), side in sorted(sides.items(), key=lambda item: item[0][0]):
            times, vals = self._of.setdefault((table, key), ([], []))
            before = vals[-1] if vals else None
            if side.get(-1) != before or side.get(1) == before:
                self.wrong.append(f"{table}: {key!r} becomes {side} at {time}, and was {before!r}")
            if not times:
                self._keys[table].append(key)
            times.append(time)
            vals.append(side.get(1))
            self.at[time][table, key] = side.get(1)
        self.times[table] = sorted({time for time, _ in sides})

    def val(self, key: Key, time: float) -> Any:
        """At that time."""
        times, vals = self._of.get(key, ((), ()))
        number = bisect_right(times, time)
        return vals[number - 1] if number else None

    def entries(self, table: str, time: float) -> dict[Any, Any]:
        """The contents at that time."""
        found = {key: self.val((table, key), time) for key in self._keys[table]}
        return {key: val for key, val in found.items() if val is not None}

    def before(self, table: str, time: float) -> int:
        """The number of versions before that time."""
        return bisect_left(self.times.get(table, []), time)

    def until(self, table: str, time: float) -> int:
        """The number of versions until that time."""
        return bisect_right(self.times.get(table, []), time)

    def last(self, table: str, number: int) -> float:
        """The time of the last one of so many versions."""
        return self.times[table][number - 1] if number else -inf

    def sees(self, run: Run, time: float, written: Mapping[Key, Any]) -> bool:
        """Whether these are the contents at that time, with `written` on top."""

        def now(key: Key) -> Any:
            return written[key] if key in written else self.val(key, time)

        return all(_is(val, now(key)) for key, val in run.reads.items()) and all(
            self._finds(found, time, written) for found in run.ranges
        )

    def _finds(self, found: Found, time: float, written: Mapping[Key, Any]) -> bool:
        there = self.entries(found.table, time)
        there.update((key, val) for (table, key), val in written.items() if table == found.table)
        return dict(found.entries) == {
            key: val
            for key, val in there.items()
            if val is not None
            and (found.start is None or found.start <= key)
            and (found.stop is None or key < found.stop)
        }


def _is(seen: Any, val: Any) -> bool:
    return val is not None if seen == THERE else bool(seen == val)
