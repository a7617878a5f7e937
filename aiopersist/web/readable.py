"""Which times of a shard, or of a stream, can be read, and how people write them. Pure."""

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
    """The times that a slider chooses from: from the first to the last readable one, at equal distances."""

    first: int
    last: int

    @property
    def steps(self) -> int:
        """The number of the last position; that of the first is 0."""
        return min(self.last - self.first, STEPS)

    def time(self, step: int) -> int:
        """The time of a position."""
        return self.first + (self.last - self.first) * min(max(step, 0), self.steps) // max(self.steps, 1)

    def step(self, time: int) -> int:
        """The position that is nearest at or after a time."""
        span = max(self.last - self.first, 1)
        return min(max(ceil((time - self.first) * self.steps / span), 0), self.steps)


class Readable(NamedTuple):
    """The times at which contents can be read: from since on, and not beyond the upper."""

    since: Antichain
    upper: Antichain
    clock: Clock
    scale: Scale | None
    """The slider; `None` where times are tuples."""
    late: Time
    """What is shown unless another time is asked for: the newest; of tuples one that is late."""


def readable(state: State) -> Readable | None:
    """Of a shard; `None` where nothing can be read yet."""
    scale = _scale(state)
    late = _late(state) if scale is None else scale.last
    if late is None or any(state.upper == minimum(length) for length in time_lengths(state)):
        return None
    return Readable(state.since, state.upper, state.clock, scale, late)


def readable_stream(arrangement: Arrangement) -> Readable:
    """Of a stream: from its since to the newest time that it has, or that is sealed. Its upper is the empty
    frontier, since it takes updates at any time that is not sealed: what they are by now can be read."""
    times = [batch.time_greatest for batch in arrangement.unsealed.values()]
    last = max([*times, arrangement.seal - 1, arrangement.since])
    scale = Scale(arrangement.since, last)
    return Readable(Antichain(arrangement.since), Antichain(), STREAM_CLOCK, scale, last)


def time_lengths(state: State) -> set[int | None]:
    """The lengths of times of the upper; `None` stands for ints."""
    return {len(time) if isinstance(time, tuple) else None for time in state.upper.elements}


def _scale(state: State) -> Scale | None:
    """The slider of a shard; `None` where there is nothing to choose. On a wall clock it begins no earlier
    than what is known of the first append, since the least time is 1970."""
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
    """A product time that can be read: just before the upper in each of its numbers, or else since; `None` if
    there is none."""
    ends = [batch.upper for batch in state.batches.values()]
    elements = state.upper.elements or tuple(time for end in ends for time in end.elements)
    tuples = [time for time in elements if isinstance(time, tuple)]
    late = tuple(max(max(numbers) - 1, 0) for numbers in zip(*tuples, strict=True))
    for time in (*filter(None, [late]), *state.since.elements):
        if state.since.less_equal(time) and not state.upper.less_equal(time):
            return time
    return None


def time_given(text: str, readable: Readable, now: float) -> Time:
    """The time that people write: an int, ints with commas between them, or on a wall clock an instant, in
    UTC unless it says another zone, or how long ago. `InvalidUsage` for others."""
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
    what = "an int, an instant such as 2026-01-31 12:00, or now-5min" if is_wall else "an int"
    what = what if _is_int(readable.since) else "ints with commas between them, as 3,7"
    raise InvalidUsage(UsageKind.INVALID_TIME, f"{shown(text)} is no time of this shard: {what}")


def time_known(time: Time, readable: Readable, now: float) -> Time:
    """The time whose contents answer for `time`: on a wall clock at rest, the last complete one."""
    if readable.clock is not Clock.WALL or not isinstance(time, int):
        return time
    last = at_rest(readable.upper, time, now)
    return time if last is None else last
