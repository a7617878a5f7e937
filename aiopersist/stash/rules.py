"""What each call may do to a collection: pure, and decided only here.

Each function gets the collection's name and its frontiers as they are now, and returns its new frontiers, or
raises `StashError`.
"""

from collections.abc import Sequence

from aiopersist.base.frontier import TIME_MAX, Antichain, int_time, last_before
from aiopersist.stash.errors import NothingSealed, StaleLower, StashError
from aiopersist.stash.model import Frontiers


def sealed(name: str, now: Frontiers, upper: Antichain) -> Frontiers:
    """Upper may stay; it may not go back."""
    if not now.upper <= upper:
        raise _refusal(name, now, f"cannot seal at {upper}")
    return Frontiers(now.since, upper)


def compacted(name: str, now: Frontiers, since: Antichain) -> Frontiers:
    """Since may stay; it may not go back, or beyond upper."""
    if not now.since <= since <= now.upper:
        raise _refusal(name, now, f"cannot compact to {since}")
    return Frontiers(since, now.upper)


def updated(name: str, now: Frontiers, times: Sequence[int]) -> Frontiers:
    """Every time must be at or beyond upper: sealed contents do not change."""
    if times and not now.upper.less_equal(least := min(times)):
        raise _refusal(name, now, f"time {least} is not at or beyond upper")
    return now


def appended(
    name: str, now: Frontiers, lower: Antichain, upper: Antichain, compact: Antichain, times: Sequence[int]
) -> Frontiers:
    """An update, a seal and a compaction, of a collection whose upper is still `lower`."""
    if lower != now.upper:
        raise StaleLower(name, lower, now.upper)
    return compacted(name, sealed(name, updated(name, now, times), upper), compact)


def last_sealed(name: str, now: Frontiers) -> int:
    """The greatest time that is complete."""
    if now.upper <= now.since:
        raise NothingSealed(name, now.since, now.upper)
    return last_before(now.upper)


def readable_since(name: str, now: Frontiers) -> int:
    """The time to which earlier times are forwarded; refused once since is empty."""
    since = int_time(now.since)
    if since is None:
        raise _refusal(name, now, "its contents are gone")
    return since


def next_time(name: str, now: Frontiers) -> int:
    """The time of a batch at the current upper."""
    upper = int_time(now.upper)
    if upper is None or upper == TIME_MAX:
        raise _refusal(name, now, "no time is left for a batch")
    return upper


def _refusal(name: str, now: Frontiers, reason: str) -> StashError:
    return StashError(f"collection {name!r}: {reason}: since is {now.since}, upper is {now.upper}")
