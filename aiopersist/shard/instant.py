"""Instants: aware datetimes in the place of times, on shards with a wall clock.

An instant is complete once the upper has passed it. If nobody writes, a reader that asks for an instant that
has passed moves the upper (`CloseTo`): nothing was written until then, for all readers and for ever. So no
reader hangs on a shard at rest.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from typing import TypeVar

from aiopersist.errors import InvalidUsage, ShardFinalized, UsageKind, shown
from aiopersist.failures import Backoff
from aiopersist.frontier import Antichain, check_time, successor
from aiopersist.shard.clock import StoreClock
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.command import micros

T = TypeVar("T")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
LOOK_S = 60.0  # the clock may be set meanwhile
NEAR_S = 60.0  # longer than a statement waits for its answer


def time_of(value: T | datetime, shard: Shard) -> T | int:
    """`value`, or the time of that instant: `INVALID_TIME` for a naive datetime, and on a logical clock."""
    if not isinstance(value, datetime):
        if shard.state.is_wall and isinstance(value, str | float | date):
            text = f"{shown(value)} is no time: give an aware datetime, or an int, microseconds since 1970"
            raise InvalidUsage(UsageKind.INVALID_TIME, text, time=value)
        return value
    if value != value:  # pandas.NaT
        text = f"{value!r} is no instant"
    elif value.utcoffset() is None:
        text = f"{value!r} is naive: give an aware datetime, as datetime.now(UTC) is"
    elif not shard.state.is_wall:
        text = f"{shown(value)}: {shard.label} has a logical clock, whose times are not instants"
    else:
        time = (value - EPOCH) // MICROSECOND
        check_time(time)
        return time
    raise InvalidUsage(UsageKind.INVALID_TIME, text, time=value)


def as_int(time: object) -> int:
    """The time of an instant."""
    assert isinstance(time, int)
    return time


async def close_if_passed(shard: Shard, time: int) -> bool:
    """Make `time` complete if it has passed: by a commit, unless it is. A readonly client cannot."""
    if not shard.state.upper.less_equal(time):
        return True
    if shard.stack.readonly or not await _has_passed(shard.stack.clock, time):
        return False
    if shard.state.upper.less_equal(time):
        await _close_to(shard, successor(time))
    return True


async def _close_to(shard: Shard, frontier: Antichain) -> None:
    await shard.stack.imported("aiopersist.state.writing")
    from aiopersist.state.writing import CloseTo

    await commit(shard.register, CloseTo(frontier))


async def _has_passed(clock: StoreClock, time: int) -> bool:
    """Whether `time` has passed. If that is near, the store is asked, since its latest answer was late: as a
    rule by milliseconds, which the caller's clock has seen pass."""
    behind = time - micros(await clock.now())
    if 0 <= behind < micros(NEAR_S):
        await clock.measure()
        behind = time - micros(clock.read()[0])
    return behind < 0


@asynccontextmanager
async def closed_when_passed(shard: Shard, time: int | None) -> AsyncIterator[None]:
    """Within it, `time` is made complete as soon as it has passed; `None`: nothing is."""
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
