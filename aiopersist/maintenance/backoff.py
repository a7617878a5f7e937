"""How long each kind of maintenance waits: longer after each failure, a moment after somebody else was at it.

So a blob that is lost, or a value that nobody foresaw, keeps nothing else from being maintained, and nobody
asks without a pause for what another process holds.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

WAIT_MIN_S = 0.5
WAIT_MAX_S = 300.0


class Wait(NamedTuple):
    """Until when something is not tried again, and how long it waits if it fails then."""

    until: float
    next_s: float


class Trial:
    """One attempt. Whoever makes it says if it was `done`."""

    done = False


class Backoffs:
    """By what was tried: the ordinal that a compaction begins with, or the name of a job."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._backoffs: dict[Hashable, Wait] = {}

    def __contains__(self, key: Hashable) -> bool:
        wait = self._backoffs.get(key)
        return wait is not None and self._monotonic() < wait.until

    def until(self, key: Hashable) -> float:
        """Until when it waits."""
        return self._backoffs[key].until if key in self._backoffs else 0.0

    def __bool__(self) -> bool:
        return bool(self._backoffs)

    @contextmanager
    def trying(self, key: Hashable) -> Iterator[Trial]:
        """Around an attempt: it waits unless it was done, and longer each time if it failed."""
        attempt = Trial()
        try:
            yield attempt
        except Exception:
            wait_s = self._backoffs[key].next_s if key in self._backoffs else WAIT_MIN_S
            self._backoffs[key] = Wait(self._monotonic() + wait_s, min(2 * wait_s, WAIT_MAX_S))
            raise
        if attempt.done:
            self._backoffs.pop(key, None)
        else:
            next_s = self._backoffs[key].next_s if key in self._backoffs else WAIT_MIN_S
            self._backoffs[key] = Wait(self._monotonic() + WAIT_MIN_S, next_s)

    def forget(self, kept: Callable[[Hashable], bool]) -> None:
        """Keep only what is still there."""
        self._backoffs = {key: wait for key, wait in self._backoffs.items() if kept(key)}
