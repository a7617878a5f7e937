"""Times and durations in arguments: `17`, `2026-01-31T12:00Z`, `now-5min`; `90s`, `7d`."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import TypeVar

from aiopersist.base.errors import NotReadable, SinceViolation
from aiopersist.base.frontier import Antichain
from aiopersist.base.runtime import SYSTEM
from aiopersist.cli.command import CannotBegin, Invocation, Problems
from aiopersist.cli.shown import shown_frontier, shown_time
from aiopersist.client.client import Client
from aiopersist.shard import instant
from aiopersist.state.model import Clock

T = TypeVar("T")


def duration_of(text: str) -> timedelta | None:
    """The duration in a text; `None` if it is none. `CannotBegin` if it is longer than a clock counts."""
    try:
        return instant.duration_of(text)
    except OverflowError:
        raise CannotBegin(f"{text!r} is longer than the clock counts") from None


def time_of(argument: str, text: str) -> int | datetime:
    """The time in a text: an int, an instant with a zone, or `now-5min` by this machine's clock. Otherwise
    `CannotBegin`, with the name of the argument."""
    with suppress(ValueError):
        return int(text)
    try:
        if (moment := instant.ago_of(text, SYSTEM.wall())) is not None:
            return moment
    except OverflowError:
        raise CannotBegin(f"{argument}: {text!r} is before the year 1") from None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        hint = "an int, an instant such as 2026-01-31T12:00Z, or now-5min"
        raise CannotBegin(f"{argument}: {text!r} is none of {hint}; s, min, h, d, w") from None
    if moment.tzinfo is None:
        at = moment.isoformat()
        raise CannotBegin(f"{argument}: {text!r} has no zone: write {at}Z or {at}+01:00")
    return moment


def as_of_option(text: str | None) -> int | datetime | None:
    """The time in the text of `--as-of`."""
    return None if text is None else time_of("--as-of", text)


async def read_time(run: Invocation, client: Client, name: str, time: T) -> T | int:
    """The time to read for `time`. For an instant after the last write it is the last complete time, with a
    message, since reading commands append nothing."""
    if not isinstance(time, datetime):
        return time
    shard = await client._shards.existing(name)
    at = instant.as_int(instant.time_of(time, shard))
    last = instant.at_rest(shard.state.upper, at, await instant.now_for(client._stack.clock, at))
    if last is None:
        return time
    run.say(f"{name!r}: nobody has written since {shown_time(last, Clock.WALL)}: these are its contents then")
    return last


@contextmanager
def complete_times(shard: str, *times: object) -> Iterator[None]:
    """Errors of a read at a time that is not complete, or whose history is gone, in words: on a wall clock
    with instants."""
    clock = Clock.WALL if any(isinstance(time, datetime) for time in times) else Clock.LOGICAL
    try:
        yield
    except SinceViolation as error:
        if not isinstance(error.since, Antichain) or not isinstance(error.as_of, int | tuple):
            raise
        time, since = shown_time(error.as_of, clock), shown_frontier(error.since, clock)
        raise Problems(f"{shard!r}: the history at {time} is gone: read at or after {since}") from error
    except NotReadable as error:
        if not isinstance(error.upper, Antichain) or not isinstance(error.as_of, int | tuple):
            raise
        upper, time = shown_frontier(error.upper, clock), shown_time(error.as_of, clock)
        text = f"{shard!r} is not complete at {time}: its upper is {upper}, and nobody has written since then"
        raise Problems(text) from error
