"""The numbers on the ruler of a picture: few, round, evenly spaced. Pure."""

from datetime import timedelta
from math import ceil, floor, log10
from typing import NamedTuple

from aiopersist.state.model import Clock
from aiopersist.web.words import EPOCH, LAST_S

TICKS_MAX = 8
SECOND = 1_000_000  # microseconds
DAY = 86_400 * SECOND
STEPS_OF_CLOCKS = tuple(
    seconds * SECOND
    for seconds in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200)
) + tuple(days * DAY for days in (1, 2, 7, 14, 28, 91, 182, 364, 1820, 3640))


class Tick(NamedTuple):
    """A number on the ruler."""

    x: float
    time: int
    label: str


def ticks(start: int, end: int, clock: Clock) -> list[Tick]:
    """Round times from `start` to `end`, at position 0."""
    step = step_of(end - start, clock)
    times = range(ceil(start / step) * step if start < 2**53 else start, end + 1, step)
    return [Tick(0.0, time, _label(time, step, clock)) for time in times]


def step_of(span: int, clock: Clock) -> int:
    """The least round step that fits into the span at most `TICKS_MAX` times."""
    if clock is Clock.WALL and span > TICKS_MAX * SECOND:
        return next((step for step in STEPS_OF_CLOCKS if span // step <= TICKS_MAX), _decimal(span))
    return _decimal(span)


def _decimal(span: int) -> int:
    power: int = 10 ** max(floor(log10(max(span / TICKS_MAX, 1))), 0)
    return next(factor * power for factor in (1, 2, 5, 10) if span // (factor * power) <= TICKS_MAX)


def _label(time: int, step: int, clock: Clock) -> str:
    if clock is not Clock.WALL or not time or not 0 <= time // SECOND <= LAST_S:
        return f"{time:,}"
    instant = EPOCH + timedelta(microseconds=time)
    if step >= DAY:
        return f"{instant:%Y-%m-%d}"
    if step >= 60 * SECOND:
        return f"{instant:%m-%d %H:%M}" if time % DAY == 0 else f"{instant:%H:%M}"
    return f"{instant:%H:%M:%S}" if step >= SECOND else f"{instant:%H:%M:%S.%f}"
