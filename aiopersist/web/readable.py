"""The readable times of a shard or a stream, and how people write times. Pure."""

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import NamedTuple

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import TIME_MAX, Antichain, Time, int_time, last_before, minimum
from aiopersist.shard.instant import ago_of, at_rest
from aiopersist.state.model import Clock, State
from aiopersist.state.streams import Arrangement
from aiopersist.web.words import EPOCH

STEPS = 1000  # of the slider, at most
STREAM_CLOCK = Clock.LOGICAL


class Scale(NamedTuple):
    """The times on a slider: from the first to the last readable one, at equal distances."""

    first: int
    last: int

    @property
    def steps(self) -> int:
        """The number of the last position; the first is 0."""
        return min(self.last - self.first, STEPS)

    def time(self, step: int) -> int:
        """The time of a position."""
        return self.first + (self.last - self.first) * min(max(step, 0), self.steps) // max(self.steps, 1)

    def step(self, time: int) -> int:
        """The first position at or after a time."""
        span = max(self.last - self.first, 1)
        return min(max(ceil((time - self.first) * self.steps / span), 0), self.steps)


class Readable(NamedTuple):
    """The times at which contents can be read: at or after since, and before the upper."""

    since: Antichain
    upper: Antichain
    clock: Clock
    scale: Scale | None
    """The slider; `None` where times are tuples."""
    late: Time
    """The time that is shown by default: the newest one; of tuples a late one."""


def readable(state: State) -> Readable | None:
    """The readable times of a shard; `None` if nothing can be read yet."""
    scale = _scale(state)
    late = _late(state) if scale is None else scale.last
    if late is None or any(state.upper == minimum(length) for length in time_lengths(state)):
        return None
    return Readable(state.since, state.upper, state.clock, scale, late)


def readable_stream(arrangement: Arrangement) -> Readable:
    """The readable times of a stream: from its since to the newest time that has updates or is sealed. Its
    upper is the empty frontier: times that are not sealed can be read, too, with the updates so far."""
    times = [batch.time_greatest for batch in arrangement.unsealed.values()]
    last = max([*times, arrangement.seal - 1, arrangement.since])
    scale = Scale(arrangement.since, last)
    return Readable(Antichain(arrangement.since), Antichain(), STREAM_CLOCK, scale, last)


def time_lengths(state: State) -> set[int | None]:
    """The lengths of times of the upper; `None` stands for ints."""
    return {len(time) if isinstance(time, tuple) else None for time in state.upper.elements}


def _scale(state: State) -> Scale | None:
    """The slider of a shard; `None` if there is nothing to choose. On a wall clock it begins at the end of
    the oldest batch if since is 1970."""
    since, upper = state.since, state.upper
    if upper == minimum(None) or not _is_int(since) or not (_is_int(upper) or not upper.elements):
        return None
    ends = [time for batch in state.batches.values() if (time := int_time(batch.upper)) is not None]
    last = last_before(upper) if upper.elements else max(ends, default=1) - 1
    first = int_time(since) or 0
    if state.clock is Clock.WALL and first == 0:
        first = min((end - 1 for end in ends), default=last)
    return Scale(min(first, last), last)


def _is_int(frontier: Antichain) -> bool:
    return len(frontier.elements) == 1 and isinstance(frontier.elements[0], int)


def _late(state: State) -> Time | None:
    """A readable product time: just before the upper in each number, or else since; or `None`."""
    ends = [batch.upper for batch in state.batches.values()]
    elements = state.upper.elements or tuple(time for end in ends for time in end.elements)
    tuples = [time for time in elements if isinstance(time, tuple)]
    late = tuple(max(max(numbers) - 1, 0) for numbers in zip(*tuples, strict=True))
    for time in (*filter(None, [late]), *state.since.elements):
        if state.since.less_equal(time) and not state.upper.less_equal(time):
            return time
    return None


def parse_time(text: str, readable: Readable, now: float) -> Time:
    """The time in a text: an int, ints with commas between them, or on a wall clock an instant (in UTC unless
    it has a zone) or `now-5min`. Otherwise `InvalidUsage`."""
    numbers = text.strip().strip("()").split(",")
    if all(re.fullmatch(" *[0-9]{1,19} *", number, re.ASCII) for number in numbers):
        times = tuple(map(int, numbers))
        if max(times) <= TIME_MAX and (len(times) > 1) is not _is_int(readable.since):
            return times if len(times) > 1 else times[0]
    elif readable.clock is Clock.WALL:
        with suppress(ValueError, OverflowError):
            instant = ago_of(text.strip(), now) or datetime.fromisoformat(text.strip())
            aware = instant if instant.tzinfo else instant.replace(tzinfo=UTC)
            return max((aware - EPOCH) // timedelta(microseconds=1), 0)
    is_wall = readable.clock is Clock.WALL
    form = "an int, an instant like 2026-01-31 12:00, or now-5min" if is_wall else "an int"
    form = form if _is_int(readable.since) else "ints with commas between them, like 3,7"
    raise InvalidUsage(UsageKind.INVALID_TIME, f"{shown(text)} is no time of this shard: write {form}")


def read_time(time: Time, readable: Readable, now: float) -> Time:
    """The time to read for `time`: on a wall clock where nobody writes, the last complete time."""
    if readable.clock is not Clock.WALL or not isinstance(time, int):
        return time
    last = at_rest(readable.upper, time, now)
    return time if last is None else last
