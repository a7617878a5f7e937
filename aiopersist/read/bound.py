"""Bounds the steps of a listen: a consumer that returns after a week must not get the week at once.

An interval ends between two batches, as long as the batches are small. A large batch is sorted by key, and no
index tells which parts have the next times. So the listen reads all of it, keeps the *earliest* updates that
fit into memory, and delivers them in steps by time. The later updates need another pass over the batch.
Updates of one time stay together. Int times only.
"""

from math import ceil

from aiopersist.base.frontier import Antichain, successor
from aiopersist.data.lazy import pa, pc
from aiopersist.data.updates.times import filter_times
from aiopersist.read.interval import batches_of
from aiopersist.state.model import HollowBatch, State

KEPT = 0.75  # share of the updates that stay when memory is full: room for the next ones, yet few passes


class StepBound:
    """About how many bytes a step has, and a pass keeps. One time is never divided."""

    def __init__(self, step_bytes: int, memory_bytes: int) -> None:
        self._step_bytes = step_bytes
        self._memory_bytes = memory_bytes

    def reach(self, state: State, lower: Antichain, upper: Antichain) -> Antichain:
        """The frontier where the interval from `lower` ends: at most `upper`."""
        total = 0
        for batch in batches_of(state, lower, upper, None):
            total += _bytes_of(batch)
            if total > self._step_bytes:
                return batch.lower if lower < batch.lower else min(upper, batch.upper)
        return upper

    def earliest(self, upper: Antichain) -> "EarliestUpdates":
        """For the updates of the interval that ends at `upper`."""
        return EarliestUpdates(upper, self._step_bytes, self._memory_bytes)


class EarliestUpdates:
    """Collects the earliest updates of an interval, which come in any order, then makes steps of them."""

    def __init__(self, upper: Antichain, step_bytes: int, memory_bytes: int) -> None:
        self.upper = upper
        """Updates before it are kept."""
        self._step_bytes = step_bytes
        self._memory_bytes = self._bytes_max = memory_bytes
        self._tables: list[pa.Table] = []
        self.size = 0
        """Their bytes."""

    def add(self, updates: "pa.Table") -> None:
        """Add more updates, and drop late ones if memory is full."""
        self._keep([*self._tables, filter_times(updates, upper=self.upper)])
        if self.size > self._bytes_max:
            self._drop_late()
            self._bytes_max = max(self._memory_bytes, ceil(self.size / KEPT))  # one time may be larger

    def _keep(self, tables: "list[pa.Table]") -> None:
        self._tables = [table for table in tables if table.num_rows]
        self.size = sum(table.nbytes for table in self._tables)

    def _drop_late(self) -> None:
        first, last = self._times_at([0.0, KEPT])
        upper = Antichain(last) if first < last else successor(last)
        if upper < self.upper:
            self.upper = upper
            self._keep([filter_times(table, upper=upper) for table in self._tables])

    def _times_at(self, shares: list[float]) -> list[int]:
        """The times at these quantiles."""
        column = pa.chunked_array([chunk for table in self._tables for chunk in table.column("time").chunks])
        return pc.quantile(column, shares, interpolation="lower").to_pylist()  # type: ignore[no-any-return]

    def ends(self) -> list[Antichain]:
        """Where the steps end."""
        steps = ceil(self.size / self._step_bytes)
        shares = [number / steps for number in range(1, steps)]
        ends = [successor(time) for time in sorted(set(self._times_at(shares)))] if shares else []
        return [*(end for end in ends if end < self.upper), self.upper]

    def take(self, end: Antichain) -> "list[pa.Table]":
        """Remove and return the updates before `end`."""
        tables = [filter_times(table, upper=end) for table in self._tables]
        self._keep([filter_times(table, lower=end) for table in self._tables])
        return [table for table in tables if table.num_rows]


def _bytes_of(batch: HollowBatch) -> int:
    return sum(part.size if part.goodbytes is None else part.goodbytes for part in batch.parts)
