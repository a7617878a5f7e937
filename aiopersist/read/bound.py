"""Bounds the steps of a listen: a consumer that comes back after a week must not get the week at once.

An interval ends between two batches, if there are some before that are small enough. Of a large batch nothing
says where in time its updates lie: there the interval is tried, given up once it has too much, and cut by the
times that were seen until then. The updates of one time stay together. Int times only.
"""

from collections.abc import Sequence

from aiopersist.data.lazy import pa, pc
from aiopersist.frontier import Antichain, int_time
from aiopersist.read.interval import batches_of
from aiopersist.state.model import HollowBatch, State


class IntervalTooLong(Exception):  # never leaves the package
    """The interval has more updates than it should, and can be cut."""


class StepBound:
    """See the header."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._part: float | None = None
        """The part of a large batch that the interval should have; `None`: it is small."""
        self._end: int | None = None
        """Where the interval within a large batch ends."""
        self._cut: int | None = None
        """Where it must end: it was tried before."""
        self._looked_at = 0

    def reach(self, state: State, lower: Antichain, upper: Antichain) -> Antichain:
        """The frontier where the interval from `lower` ends: at most `upper`."""
        self._part, self._looked_at, total = None, 0, 0
        for batch in batches_of(state, lower, upper, None):
            size = _bytes_of(batch)
            if total + size > self._bytes_max:
                if lower < batch.lower:
                    return batch.lower
                return self._within(self._bytes_max / size, min(upper, batch.upper))
            total += size
        return upper

    def _within(self, part: float, upper: Antichain) -> Antichain:
        self._end = int_time(upper) if self._cut is None else self._cut
        self._part = part
        return upper if self._cut is None else Antichain(self._cut)

    def is_due(self, size: int) -> bool:
        """Whether updates of so many bytes are to be looked at: too many, and twice as many as the last
        time."""
        if self._part is None or size <= self._bytes_max or size < 2 * self._looked_at:
            return False
        self._looked_at = size
        return True

    def times(self, tables: "Sequence[pa.Table]") -> tuple[int, int]:
        """The first of their times, and that up to which they are as many as wanted."""
        column = pa.chunked_array([chunk for table in tables for chunk in table.column("time").chunks])
        first, wanted = pc.quantile(column, [0.0, self._part], interpolation="lower").to_pylist()
        return first, wanted

    def cut(self, first: int, wanted: int) -> None:
        """`IntervalTooLong` if the interval can end behind one of these times, and is shorter then."""
        for end in (wanted + 1, first + 1):
            if self._end is None or end < self._end:
                self._cut = end
                raise IntervalTooLong

    def end(self) -> None:
        """The interval is whole."""
        self._cut = None


def _bytes_of(batch: HollowBatch) -> int:
    return sum(part.size if part.goodbytes is None else part.goodbytes for part in batch.parts)
