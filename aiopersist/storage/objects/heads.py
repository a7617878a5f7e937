"""The versions that a handle has seen to be heads of keys."""

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
        self._heads: dict[str, _HeadSeen] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def saw(self, key: str, seqno: int, floor: int | None = None) -> None:
        """`seqno` is the head of the key now, and `floor` the greatest floor, if it is known."""
        before = self._heads.pop(key, None)
        if floor is None and before is not None:
            floor = before.floor
        now = _HeadSeen(seqno, self._runtime.monotonic(), floor)
        self._heads[key] = now if before is None or before.seqno <= seqno else before
        if len(self._heads) > KNOWN_MAX:
            self._heads.pop(next(iter(self._heads)))

    def forget(self, key: str) -> None:
        """The bucket went back to an earlier head."""
        self._heads.pop(key, None)

    def seqno(self, key: str) -> int | None:
        """The greatest that is known, or `None`."""
        seen = self._heads.get(key)
        return None if seen is None else seen.seqno

    def live(self, key: str) -> int | None:
        """About how many versions the key had when its head was seen; `None`: unknown."""
        seen = self._heads.get(key)
        return None if seen is None or seen.floor is None else seen.seqno + 1 - seen.floor

    def is_fresh(self, key: str, seqno: int) -> bool:
        """Whether it was the head a few seconds ago, and nothing newer is known."""
        seen = self._heads.get(key)
        return seen is not None and seen.seqno == seqno and self._runtime.monotonic() - seen.at < FRESH_S
