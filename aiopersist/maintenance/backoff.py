"""How long each job of maintenance backs off: longer after each failure, and a moment if another process has
claimed its work.

So a lost blob or an unexpected error stops no other job, and no job asks without a pause for claimed work.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

WAIT_MIN_S = 0.5
WAIT_MAX_S = 300.0


class Wait(NamedTuple):
    """The end of a job's wait, and the length of the next wait if it fails again."""

    until: float
    next_s: float


class Trial:
    """One try of a job. The job sets `done` unless another process has claimed its work."""

    done = False


class Backoffs:
    """Jobs that back off, by key: the first ordinal of a compaction, or the name of the job."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._waits: dict[Hashable, Wait] = {}

    def __contains__(self, key: Hashable) -> bool:
        return self._monotonic() < self.until(key)

    def until(self, key: Hashable) -> float:
        """The end of its wait."""
        return self._of(key).until

    def _of(self, key: Hashable) -> Wait:
        return self._waits.get(key, Wait(until=-inf, next_s=WAIT_MIN_S))

    def __bool__(self) -> bool:
        return bool(self._waits)

    @contextmanager
    def trying(self, key: Hashable) -> Iterator[Trial]:
        """A context around one try: the job backs off unless it was done, longer after each failure."""
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

    def keep(self, is_current: Callable[[Hashable], bool]) -> None:
        """Forget the keys that are not current."""
        self._waits = {key: wait for key, wait in self._waits.items() if is_current(key)}
