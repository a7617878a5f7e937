"""Times and durations as people write them in a shell: `17`, `2026-01-31T12:00Z`, `now-5min`; `90s`, `7d`."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import TypeVar

from aiopersist.base.errors import NotReadable
from aiopersist.base.frontier import Antichain
from aiopersist.base.runtime import SYSTEM
from aiopersist.cli.command import CannotBegin, Invocation, Problems
from aiopersist.cli.shown import shown_frontier, shown_time
from aiopersist.client.client import Client
from aiopersist.shard import instant
from aiopersist.state.model import Clock

T = TypeVar("T")


def duration_of(text: str) -> timedelta | None:
    """The duration that a text says; `None` for others. `CannotBegin` beyond what a clock counts."""
    try:
        return instant.duration_of(text)
    except OverflowError:
        raise CannotBegin(f"{text!r} is longer than the clock counts") from None


def time_of(what: str, text: str) -> int | datetime:
    """The time that a text says: an int, an instant with its zone, or an instant that was so long ago by this
    machine's clock. `CannotBegin`, with the name of the argument, for others."""
    with suppress(ValueError):
        return int(text)
    try:
        if (found := instant.ago_of(text, SYSTEM.wall())) is not None:
            return found
    except OverflowError:
        raise CannotBegin(f"{what}: {text!r} is before the year 1") from None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        hint = "an int, an instant such as 2026-01-31T12:00Z, or now-5min"
        raise CannotBegin(f"{what}: {text!r} is none of {hint}; s, min, h, d, w") from None
    if found.tzinfo is None:
        at = found.isoformat()
        raise CannotBegin(f"{what}: {text!r} has no zone: say {at}Z, or {at}+01:00")
    return found


def as_of_option(text: str | None) -> int | datetime | None:
    """The time that `--as-of` says."""
    return None if text is None else time_of("--as-of", text)


async def known_time(run: Invocation, client: Client, name: str, time: T) -> T | int:
    """The time whose contents answer for `time`: of an instant at which nobody had written for a while, and
    nobody has since, the last complete time, and a message says so. Reading commands append nothing."""
    if not isinstance(time, datetime):
        return time
    shard = await client._shards.existing(name)
    at = instant.as_int(instant.time_of(time, shard))
    last = instant.at_rest(shard.state.upper, at, await instant.now_for(client._stack.clock, at))
    if last is None:
        return time
    run.say(
        f"{name!r}: nobody has written since {shown_time(last, Clock.WALL)}: these are the contents of then"
    )
    return last


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
