"""What a handle knows of the heads of keys: versions that it has seen to be one."""

from typing import NamedTuple

from aiopersist.base.runtime import Runtime

KNOWN_MAX = 65_536  # keys whose heads are remembered
FRESH_S = 10.0  # what is known of a head; truncations keep versions for longer as a rule
NOTHING = -1  # instead of a seqno: the key has no version


class _HeadSeen(NamedTuple):
    """A version that was the head at a moment."""

    seqno: int
    at: float
    floor: int | None
    """The greatest floor that was seen."""


class KnownHeads:
    """By key, the greatest seqno that was the head once, as far as one handle knows."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._seen: dict[str, _HeadSeen] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, key: str, seqno: int, floor: int | None = None) -> None:
        """`seqno` was a head of the key, now, and this the greatest floor, if it is known."""
        before = self._seen.pop(key, None)
        if floor is None and before is not None:
            floor = before.floor
        now = _HeadSeen(seqno, self._runtime.monotonic(), floor)
        self._seen[key] = now if before is None or before.seqno <= seqno else before
        if len(self._seen) > KNOWN_MAX:
            self._seen.pop(next(iter(self._seen)))

    def forget(self, key: str) -> None:
        """The bucket went back to an earlier head."""
        self._seen.pop(key, None)

    def seqno(self, key: str) -> int | None:
        """The greatest that is known; `None`: nothing is."""
        seen = self._seen.get(key)
        return None if seen is None else seen.seqno

    def live(self, key: str) -> int | None:
        """How many versions were there when it was seen, about; `None`: unknown."""
        seen = self._seen.get(key)
        return None if seen is None or seen.floor is None else seen.seqno + 1 - seen.floor

    def is_fresh(self, key: str, seqno: int) -> bool:
        """Whether it was the head a few seconds ago, and nothing newer is known."""
        seen = self._seen.get(key)
        return seen is not None and seen.seqno == seqno and self._runtime.monotonic() - seen.at < FRESH_S
