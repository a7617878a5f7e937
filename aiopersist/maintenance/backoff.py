"""How long each job of maintenance backs off: longer after each failure, a moment after another process had
claimed its work.

So a lost blob, or an unforeseen value, stops no other job, and no job asks without a pause for work
that another process has claimed.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

WAIT_MIN_S = 0.5
WAIT_MAX_S = 300.0


class Wait(NamedTuple):
    """Until when a job is not tried again, and how long it waits if it fails then."""

    until: float
    next_s: float


class Trial:
    """One try at a job, which sets `done` unless another process had claimed its work."""

    done = False


class Backoffs:
    """Jobs that back off, by key: the ordinal that a compaction begins with, or the name of the job."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._waits: dict[Hashable, Wait] = {}

    def __contains__(self, key: Hashable) -> bool:
        return self._monotonic() < self.until(key)

    def until(self, key: Hashable) -> float:
        """Until when it waits."""
        return self._of(key).until

    def _of(self, key: Hashable) -> Wait:
        return self._waits.get(key, Wait(until=-inf, next_s=WAIT_MIN_S))

    def __bool__(self) -> bool:
        return bool(self._waits)

    @contextmanager
    def trying(self, key: Hashable) -> Iterator[Trial]:
        """Around one try: afterwards the job backs off unless it was done, and longer after each failure."""
        trial = Trial()
        try:
            yield trial
        except Exception:
            wait_s = self._of(key).next_s
            self._waits[key] = Wait(self._monotonic() + wait_s, min(2 * wait_s, WAIT_MAX_S))
            raise
        if trial.done:
            self._waits.pop(key, None)
        else:
            self._waits[key] = Wait(self._monotonic() + WAIT_MIN_S, self._of(key).next_s)

    def forget(self, kept: Callable[[Hashable], bool]) -> None:
        """Keep only the keys that are `kept`."""
        self._waits = {key: wait for key, wait in self._waits.items() if kept(key)}
