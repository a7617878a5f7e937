"""Maintenance on demand: the retention policy of a shard, and a collection now."""

from contextlib import suppress
from datetime import timedelta

from aiopersist.base.errors import InvalidUsage, LeaseExpired, UsageKind, shown
from aiopersist.gc.collect import Collected
from aiopersist.maintenance.background import Maintenance
from aiopersist.shard.commit import commit
from aiopersist.shard.shards import Shards
from aiopersist.state.retention import SetRetention


async def retain(shards: Shards, maintenance: Maintenance, name: str, keep: int | timedelta | None) -> None:
    """See `Admin.retain`."""
    command = SetRetention(*_retention(keep))
    shard = await shards.existing(name)
    await commit(shard.register, command)
    maintenance.set_retained(shard, retained=keep is not None)


async def force_gc(shards: Shards, maintenance: Maintenance, name: str) -> Collected:
    """See `Admin.force_gc`."""
    shard = await shards.existing(name)
    with suppress(LeaseExpired):  # then the reader holds nothing
        if shard.hold.reader:  # our own hold moves forward before the collection
            await shard.hold.heartbeat()
    return await maintenance.of(shard).force_collection()


def _retention(keep: object) -> tuple[int | None, float | None]:
    """The times and the seconds that the policy keeps."""
    if keep is None:
        return None, None
    if type(keep) is int and 0 <= keep < 2**63:
        return keep, None
    if isinstance(keep, timedelta) and keep >= timedelta(0):
        return None, keep.total_seconds()
    text = f"keep={shown(keep)}: give an int of times, a timedelta, or None"
    raise InvalidUsage(UsageKind.INVALID_TIME, text, time=keep)
