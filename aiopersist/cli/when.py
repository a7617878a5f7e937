"""Times and durations as people write them in a shell: `17`, `2026-01-31T12:00Z`, `now-5min`; `90s`, `7d`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from aiopersist.cli.command import CannotBegin, Problems
from aiopersist.cli.shown import shown_frontier, shown_time
from aiopersist.errors import NotReadable
from aiopersist.frontier import Antichain
from aiopersist.runtime import SYSTEM
from aiopersist.state.model import Clock

UNITS_S = {"s": 1, "min": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)", re.ASCII)


def duration_of(text: str) -> timedelta | None:
    """The duration that a text says; `None` for others. `CannotBegin` beyond what a clock counts."""
    found = DURATION.fullmatch(text)
    if found is None:
        return None
    try:
        return timedelta(seconds=float(found[1]) * UNITS_S[found[2]])
    except OverflowError:
        raise CannotBegin(f"{text!r} is longer than the clock counts") from None


def time_of(what: str, text: str) -> int | datetime:
    """The time that a text says: an int, an instant with its zone, or an instant that was so long ago by this
    machine's clock. `CannotBegin`, with the name of the argument, for others."""
    try:
        return int(text)
    except ValueError:
        pass
    if text.startswith("now-") and (ago := duration_of(text.removeprefix("now-"))) is not None:
        try:
            return datetime.fromtimestamp(SYSTEM.wall(), UTC) - ago
        except OverflowError:
            raise CannotBegin(f"{what}: {text!r} is before the year 1") from None
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        hint = "an int, an instant such as 2026-01-31T12:00Z, or now-5min"
        raise CannotBegin(f"{what}: {text!r} is none of {hint}; s, min, h, d, w") from None
    if instant.tzinfo is None:
        at = instant.isoformat()
        raise CannotBegin(f"{what}: {text!r} has no zone: say {at}Z, or {at}+01:00")
    return instant


def as_of_option(text: str | None) -> int | datetime | None:
    """The time that `--as-of` says."""
    return None if text is None else time_of("--as-of", text)


@contextmanager
def complete_times(shard: str, *asked: object) -> Iterator[None]:
    """A read within, at a time that is not complete, says up to when the shard is."""
    try:
        yield
    except NotReadable as error:
        if not isinstance(error.upper, Antichain) or not isinstance(error.as_of, int | tuple):
            raise
        clock = Clock.WALL if any(isinstance(time, datetime) for time in asked) else Clock.LOGICAL
        upper, time = shown_frontier(error.upper, clock), shown_time(error.as_of, clock)
        text = f"{shard!r} is not complete at {time}: its upper is {upper}, and nobody has written since then"
        raise Problems(text) from error
