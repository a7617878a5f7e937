"""What failed rests, longer each time, whatever it failed with; what somebody else was at rests for a moment.
So a blob that is lost, or a value that nobody foresaw, keeps nothing else from being tended, and nobody asks
without a pause for what he does not get."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

REST_MIN_S = 0.5
REST_MAX_S = 300.0


class Rest(NamedTuple):
    """Until when something is not tried again, and how long it rests if it fails then."""

    until: float
    next_s: float


class Try:
    """One attempt. Whoever makes it says if it was `done`."""

    done = False


class Rests:
    """By what was tried: the ordinal that a compaction begins with, or the name of a job."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._rests: dict[Hashable, Rest] = {}

    def __contains__(self, key: Hashable) -> bool:
        rest = self._rests.get(key)
        return rest is not None and self._monotonic() < rest.until

    def until(self, key: Hashable) -> float:
        """Until when it rests."""
        return self._rests[key].until if key in self._rests else 0.0

    def __bool__(self) -> bool:
        return bool(self._rests)

    @contextmanager
    def trying(self, key: Hashable) -> Iterator[Try]:
        """Around an attempt: it rests unless it was done, and longer each time if it failed."""
        attempt = Try()
        try:
            yield attempt
        except Exception:
            rest_s = self._rests[key].next_s if key in self._rests else REST_MIN_S
            self._rests[key] = Rest(self._monotonic() + rest_s, min(2 * rest_s, REST_MAX_S))
            raise
        if attempt.done:
            self._rests.pop(key, None)
        else:
            next_s = self._rests[key].next_s if key in self._rests else REST_MIN_S
            self._rests[key] = Rest(self._monotonic() + REST_MIN_S, next_s)

    def forget(self, kept: Callable[[Hashable], bool]) -> None:
        """Keep only what is still there."""
        self._rests = {key: rest for key, rest in self._rests.items() if kept(key)}
