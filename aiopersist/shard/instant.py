"""Instants: aware datetimes in the place of times, on shards with a wall clock.

An instant is complete once the upper has passed it. If there are no writes, a reader that asks for a past
instant moves the upper itself (`CloseTo`). From then on it is fixed for all readers that there were no writes
before. So no reader hangs on an idle shard.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from typing import TypeVar

from aiopersist.base.errors import InvalidUsage, ShardFinalized, UsageKind, shown
from aiopersist.base.failures import Backoff
from aiopersist.base.frontier import Antichain, check_time, int_time, successor
from aiopersist.shard.clock import StoreClock
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.command import micros

T = TypeVar("T")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
LOOK_S = 60.0  # somebody may set the clock meanwhile
UNITS_S = {"s": 1, "min": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)", re.ASCII)
_AGO = "now-"
NEW = Antichain(0)  # the upper of an empty shard
DAYS_BEGIN, DAYS_END = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (2000, 2100))
MICROS = 1_000_000
UNITS = (1, 1_000, 1_000_000_000)
"""Units per second of other clocks: seconds, milliseconds and nanoseconds. If their numbers were
microseconds, they would be in 1970, or after the year 30,000."""
NEAR_S = 60.0  # longer than the wait for the answer of a statement


def time_of(value: T | datetime, shard: Shard) -> T | int:
    """`value`, or the time of that instant; `INVALID_TIME` for a naive datetime, for a datetime on a logical
    clock, and for an int that is an instant in another unit than microseconds."""
    state = shard.state
    if state.is_wall:
        return wall_time(value, state.upper)
    if not isinstance(value, datetime):
        return value
    text = f"{shown(value)}: {shard.label} has a logical clock, whose times are not instants"
    raise _invalid(value, _fault(value) or text)


def wall_time(value: T | datetime, upper: Antichain = NEW) -> T | int:
    """`time_of` on a wall clock, for a shard with that upper."""
    if isinstance(value, datetime):
        if (fault := _fault(value)) is not None:
            raise _invalid(value, fault)
        time = (value - EPOCH) // MICROSECOND
        check_time(time)
        return time
    if isinstance(value, str | float | date):
        text = f"{shown(value)} is no time: give an aware datetime, or an int, microseconds since 1970"
        raise _invalid(value, text)
    if isinstance(value, int) and (meant := _meant(value)) is not None and _counts_instants(upper):
        text = (
            f"{value} is {at_text(value)}: times count microseconds. If you mean {meant}, give an aware "
            f"datetime: datetime.fromisoformat('{meant}')"
        )
        raise _invalid(value, text)
    return value


def _invalid(value: object, text: str) -> InvalidUsage:
    return InvalidUsage(UsageKind.INVALID_TIME, text, time=value)


def _fault(value: datetime) -> str | None:
    """The error for a datetime that is no instant."""
    if value != value:  # pandas.NaT
        return f"{value!r} is no instant"
    if value.utcoffset() is None:
        return f"{value!r} is naive: give an aware datetime, as datetime.now(UTC) is"
    return None


def _meant(time: int) -> str | None:
    """The present-day instant of the number in seconds, milliseconds or nanoseconds, if there is one."""
    for per_s in UNITS:
        if DAYS_BEGIN <= time // per_s < DAYS_END:
            return datetime.fromtimestamp(time // per_s, UTC).isoformat()
    return None


def at_text(time: int) -> str:
    """A time of a wall clock, as text."""
    try:
        return (EPOCH + time * MICROSECOND).isoformat()
    except OverflowError:
        return "beyond the year 9999"


def _counts_instants(upper: Antichain) -> bool:
    """Whether the times of a shard with that upper seem to be present-day instants. Appends with explicit
    times may bring others."""
    time = upper.time
    return time == 0 or (isinstance(time, int) and time >= DAYS_BEGIN * MICROS)


def duration_of(text: str) -> timedelta | None:
    """The duration of a text like `90s` or `7d`; `None` for other texts; `OverflowError` if too long."""
    match = _DURATION.fullmatch(text)
    return None if match is None else timedelta(seconds=float(match[1]) * UNITS_S[match[2]])


def ago_of(text: str, now: float) -> datetime | None:
    """The instant of a text like `now-5min`; `None` for other texts. `OverflowError` before the year 1."""
    ago = duration_of(text.removeprefix(_AGO)) if text.startswith(_AGO) else None
    return None if ago is None else EPOCH + micros(now) * MICROSECOND - ago


def at_rest(upper: Antichain, time: int, now: float) -> int | None:
    """The last complete time, if `time` has passed and there were no writes in between, as far as is known:
    then it has the same contents as `time`. `None` if `time` is complete, is in the future, or nothing was
    ever written. Only a commit makes this certain (`close_if_passed`)."""
    first = int_time(upper)
    return first - 1 if first and first <= time <= micros(now) else None


def as_int(time: object) -> int:
    """The time of an instant."""
    assert isinstance(time, int)
    return time


async def close_if_passed(shard: Shard, time: int) -> bool:
    """Make `time` complete if it has passed, by a commit if necessary. A readonly client cannot do that."""
    if not shard.state.upper.less_equal(time):
        return True
    if shard.stack.readonly or not await has_passed(shard.stack.clock, time):
        return False
    if shard.state.upper.less_equal(time):
        await _close_to(shard, successor(time))
    return True


async def _close_to(shard: Shard, frontier: Antichain) -> None:
    await shard.stack.imported("aiopersist.state.writing")
    from aiopersist.state.writing import CloseTo

    await commit(shard.register, CloseTo(frontier))


async def has_passed(clock: StoreClock, time: int) -> bool:
    """Whether `time` has passed."""
    return time < micros(await now_for(clock, time))


async def now_for(clock: StoreClock, time: int) -> float:
    """The clock, for a comparison with `time`. If `time` is near, the store is asked: its latest answer is
    usually some milliseconds old."""
    now = await clock.now()
    if 0 <= time - micros(now) < micros(NEAR_S):
        await clock.measure()
        now = clock.read()[0]
    return now


@asynccontextmanager
async def closed_when_passed(shard: Shard, time: int | None) -> AsyncIterator[None]:
    """A scope in which `time` is made complete as soon as it has passed; `None`: no time."""
    if time is None or shard.stack.readonly:
        yield
        return
    task = shard.stack.supervisor.background(close_when_passed(shard, time), f"close {shard.label}")
    try:
        yield
    finally:
        task.cancel()


async def close_when_passed(shard: Shard, time: int) -> None:
    """Wait until `time` has passed, and make it complete."""
    stack = shard.stack
    backoff = Backoff(stack.supervisor.failures, f"closing {shard.label}")
    while shard.state.upper.less_equal(time):
        try:
            now = micros(await stack.clock.now())
            if now <= time:
                await stack.runtime.sleep(min((time + 1 - now) / 1e6, LOOK_S))
            else:
                await _close_to(shard, Antichain(time + 1))
        except ShardFinalized:
            return
        except Exception as error:
            await backoff.failed(error)
