"""Heartbeats: they keep a registration alive.

A heartbeat is due after a quarter of the lease, so three may fail before the lease runs out. If the process
was suspended, or the loop was busy, the late heartbeat is sent at once. A failed heartbeat is reported and
repeated, whatever the error. If the lease is lost, the next use of the handle raises."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiopersist.base.errors import LeaseExpired, OpaqueMismatch, ShardFinalized
from aiopersist.base.failures import named
from aiopersist.base.settings import SECONDS_MAX
from aiopersist.shard.stack import Stack

log = logging.getLogger("aiopersist").getChild("leases")

HEARTBEATS_PER_LEASE = 4
TICKS_PER_HEARTBEAT = 4  # looks at the clock, since sleep does not count suspended time


def check_lease_s(lease_s: float) -> None:
    """`ValueError` unless `lease_s` is positive, finite, and a century at most."""
    if type(lease_s) not in (int, float) or not 0 < lease_s <= SECONDS_MAX:
        raise ValueError(f"lease_s={lease_s!r} is not a positive number of seconds, a century at most")


class Heartbeat:
    """The moments of the heartbeats of a lease. Pure: callers pass the time."""

    def __init__(self, lease_s: float, now: float) -> None:
        self.every_s = lease_s / HEARTBEATS_PER_LEASE
        self._due = now + self.every_s

    def due(self, now: float) -> bool:
        return now >= self._due

    def is_late(self, now: float) -> bool:
        """Whether one more delay as long as this one would cost a heartbeat."""
        return now - self._due > self.every_s / 2

    def beat(self, now: float) -> None:
        self._due = now + self.every_s


def heartbeats(
    stack: Stack, lease_s: float, renew: Callable[[], Awaitable[None]], name: str
) -> asyncio.Task[None]:
    """`keep_alive` in the background."""
    return stack.supervisor.background(keep_alive(stack, lease_s, renew), name)


async def keep_alive(stack: Stack, lease_s: float, renew: Callable[[], Awaitable[None]]) -> None:
    """Call `renew` whenever a heartbeat is due, until the registration has ended."""
    heartbeat = Heartbeat(lease_s, stack.runtime.monotonic())
    while True:
        await stack.runtime.sleep(heartbeat.every_s / TICKS_PER_HEARTBEAT)
        if not heartbeat.due(now := stack.runtime.monotonic()):
            continue
        late = heartbeat.is_late(now)
        try:
            await renew()
        except (LeaseExpired, OpaqueMismatch, ShardFinalized) as error:
            stack.metrics.lease_lost()
            labelled = stack.supervisor.failures.labelled(error)
            extra = {"shard": named(labelled.label), "error": type(labelled).__name__}
            log.warning("a heartbeat found that its registration is gone: %s", labelled, extra=extra)
            return
        except Exception as error:
            stack.metrics.heartbeat_failed()
            stack.supervisor.failures.report("a heartbeat, which is repeated,", error)
            continue
        stack.metrics.heartbeat(late=late)
        heartbeat.beat(stack.runtime.monotonic())
