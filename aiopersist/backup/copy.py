"""A copy of a shard, step by step.

1. Find the copy, or create it: with the source's schemas, clock, kind and retention, and the mark of a copy.
2. Pin the newest state of the source, and hold its history. All later steps read this state.
3. Plan (`plan.py`), and append step by step (`copier.py`). Updates stream from merged runs into parts, so
   memory does not grow with the shard. A killed copier leaves whole steps; a repeated call continues.
4. If another copier was first, plan again from the copy's upper. Each append names its expected upper, so no
   update comes twice.
5. Move the copy's since to the source's.
6. With `verify`, compare the two (`compare.py`) while the history is held.
"""

from dataclasses import dataclass
from typing import NamedTuple

from aiopersist.backup.compare import compare, times_between
from aiopersist.backup.copier import Copier
from aiopersist.backup.reading import PinnedState, pinned
from aiopersist.backup.target import detach, open_copy
from aiopersist.base.errors import InvalidUsage, Unsupported, UsageKind
from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.progress import progress
from aiopersist.shard.catalog import IndexedId, ShardId, resolve_any
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards


class Copied(NamedTuple):
    """A copy that has reached the state of its source at the begin of the call, or a later one."""

    shard_id: ShardId
    """The id of the copy."""
    since: Antichain
    upper: Antichain
    updates: int
    """Updates that this call appended."""
    compared: tuple[Time, ...]
    """Times at which the contents of both were compared."""
    differing: tuple[Time, ...]
    """The compared times at which they differ."""


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """The options of a copy."""

    verify: bool
    detach: bool


async def copy_shard(
    source: Shards, shard: str, target: Shards, name: str | None, options: CopyOptions
) -> Copied:
    """See `Admin.copy_shard`."""
    original = await _source(source, shard)
    if name is None and shard == original.id:
        raise InvalidUsage(UsageKind.INVALID_NAME, f"{shard} is an id: give the name of its copy", name=name)
    copy = await open_copy(target, shard if name is None else name, original)
    upper = copy.state.upper
    compared: tuple[Time, ...] = ()
    differing: tuple[Time, ...] = ()
    async with pinned(original, source, holds=True) as pin:
        if not upper <= pin.state.upper:
            text = f"it is at {upper}, ahead of {original.label}: was the source restored from a backup?"
            raise InvalidUsage(UsageKind.INVALID_COPY, text, shard_id=copy.id, upper=upper)
        with progress("copy", None, "updates") as step:
            copier = Copier(pin, copy, target, step)
            await copier.run()
        if options.verify:
            compared, differing = await _compared(pin, copy, target)
    if options.detach:
        await detach(copy, original.id)
    since, upper = copy.state.since, copy.state.upper
    return Copied(copy.id, since, upper, copier.updates, compared, differing)


async def _source(shards: Shards, name: str) -> Shard:
    shard_id = await resolve_any(shards.stack, name)
    if isinstance(shard_id, IndexedId):
        raise Unsupported(f"{name!r} is an Indexed: only shards and tables can be copied", shard_id=shard_id)
    return await shards.existing(name)


async def _compared(
    source: PinnedState, copy: Shard, shards: Shards
) -> tuple[tuple[Time, ...], tuple[Time, ...]]:
    """The compared times, and those at which the contents differ."""
    async with pinned(copy, shards, holds=False) as own:  # a hold would outlive a killed call
        since = source.state.since.join(own.state.since)
        times = times_between(since, source.state.upper, source.state)  # the copy may be further
        same = {}
        with progress("comparison", len(times), "times") as step:
            for time in times:
                same[time] = await compare(source.session, own.session, time)
                step.advance(1)
    compared = tuple(time for time, equal in same.items() if equal is not None)
    return compared, tuple(time for time in compared if not same[time])
