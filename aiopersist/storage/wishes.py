"""Wishes to go first: when a client that loses races leaves one, for how long, and what it has heard of those
of others. `shard/fairness.py` tells the whole story; see also `Consensus.wish`."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from aiopersist.base.runtime import SYSTEM, Runtime

WISHES_AFTER = 2
SELDOM = 8  # losses; from then on one of so many
MARGIN = 1.5  # of a slot: a try does not always take the same time
MOST_S = 5.0  # of a slot, and of a wait: whoever left the wish may be gone
LEAST_S = 0.02  # of a slot: a turn begins with what the others have written, which takes some ms
WISH_MAX_S = 3600.0  # none lasts so long: a clock was set


class Wish(NamedTuple):
    """All clients but `who`, which has lost races for `waited_s`, are asked to commit nothing to `key` for
    `left_s`."""

    key: str
    who: str
    left_s: float
    waited_s: float


class _Heard(NamedTuple):
    """A wish, in the moments of this process."""

    who: str
    since: float
    until: float


class HeardWishes:
    """What one handle has heard, by key. One thread writes, any may read."""

    def __init__(self, runtime: Runtime = SYSTEM) -> None:
        self._runtime = runtime
        self._heard: dict[str, list[_Heard]] = {}

    def hear(self, keys: Iterable[str], wishes: Sequence[Wish] = ()) -> None:
        """The answer to a compare-and-set of these keys shows these wishes, and no others."""
        if not wishes and not self._heard:
            return
        now = self._runtime.monotonic()
        lasting: dict[str, list[_Heard]] = {}
        for key, who, left_s, waited_s in wishes:
            if 0 < left_s < WISH_MAX_S:
                lasting.setdefault(key, []).append(_Heard(who, now - waited_s, now + left_s))
        for key in keys:
            if key in lasting:
                self._heard[key] = lasting[key]
            else:
                self._heard.pop(key, None)

    def stand_back_s(self, key: str, who: str, waited_s: float) -> float:
        """See `Consensus.stand_back_s`."""
        heard = self._heard.get(key)
        if heard is None:
            return 0.0
        now = self._runtime.monotonic()
        first = [wish.until for wish in heard if wish.who != who and wish.since < now - waited_s]
        return max([until - now for until in first if until > now], default=0.0)


class Losses:
    """The races for one thing that one client has lost since it last won one, and its wish."""

    __slots__ = (
        "in_a_row",
        "losing_since",
        "lost_at",
        "needs_s",
        "planned",
        "slot_from",
        "slot_until",
        "tried_at",
        "wished_since",
    )

    def __init__(self) -> None:
        self.in_a_row = 0
        self.losing_since = self.lost_at = 0.0
        self.planned = -1
        """The version on which the last lost commit was planned."""
        self.tried_at = 0.0
        """When the last try began, where that is known: it may have come long after a loss."""
        self.needs_s = 0.0
        """The longest time that a try took, or from one loss to the next."""
        self.wished_since = self.slot_from = self.slot_until = 0.0
        """Since when it waits, by its wish, and the slot that this asks for; 0 if it has none."""

    def lost(self, planned: int | None, now: float) -> bool:
        """Another client was first. Returns whether this counts: once for each version on which a commit was
        planned."""
        version = -1 if planned is None else planned
        if self.in_a_row and version <= self.planned:
            return False
        if not self.in_a_row or now - self.lost_at > MOST_S:  # another story
            self.in_a_row, self.needs_s, self.losing_since = 0, 0.0, now
        else:
            self.needs_s = max(self.needs_s, now - max(self.lost_at, self.tried_at))
        self.in_a_row, self.planned, self.lost_at = self.in_a_row + 1, version, now
        return True

    def waited_s(self, now: float) -> float:
        """For how long it has lost races, or has waited for its slot."""
        since = self.losing_since if self.in_a_row else now
        return now - (min(since, self.wished_since) if now < self.slot_until else since)

    def wished(self, now: float, waited_s: float, from_s: float, for_s: float) -> None:
        """It has a slot, as far as the others hear of its wish."""
        self.wished_since = now - waited_s
        self.slot_from, self.slot_until = now + from_s, max(self.slot_until, now + for_s)

    def has_turn(self, now: float) -> bool:
        """Whether it wins races in its slot."""
        return not self.in_a_row and self.slot_from <= now < self.slot_until

    @property
    def slot_s(self) -> float:
        """How long a slot it wishes now; 0 for none."""
        if self.in_a_row < WISHES_AFTER or (self.in_a_row > SELDOM and self.in_a_row % SELDOM):
            return 0.0
        return MARGIN * self.needs_s

    def wait_s(self, stand_back_s: Callable[[float], float], now: float) -> float:
        """How long to stand back before the next try. `stand_back_s(s)` tells how long others wish it that
        have waited for longer than `s`."""
        wait_s = min(stand_back_s(self.waited_s(now)), MOST_S)
        return wait_s if self.in_a_row or now >= self.slot_until else 0.0

    def waited(self, wait_s: float) -> None:
        """It has stood back for so long, which is no part of what a try needs."""
        self.lost_at += wait_s


def slot_after(ahead_s: float, slot_s: float) -> float:
    """When a slot ends that begins in `ahead_s`."""
    return min(ahead_s, MOST_S) + min(slot_s, MOST_S) + LEAST_S
