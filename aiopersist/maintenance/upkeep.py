"""What a client can be asked to do for a shard beside reading and writing it."""

from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta

from aiopersist.errors import InvalidUsage, LeaseExpired, UnknownShard, UsageKind, shown
from aiopersist.gc.collect import Collected, bury
from aiopersist.gc.sweep import Sweep, Usage, sweep, usage
from aiopersist.maintenance.background import Maintenance
from aiopersist.maintenance.fsck import FsckReport, fsck
from aiopersist.maintenance.inspect import ShardView, inspect
from aiopersist.maintenance.rounds import MaintenanceRound, Rounds
from aiopersist.resource import Scope
from aiopersist.shard.attempt import Slot
from aiopersist.shard.catalog import ShardId, resolve
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.lifecycle import Finalize
from aiopersist.state.retention import SetRetention


class Upkeep(ABC):
    """A part of the client."""

    _calls: Scope
    _stack: Stack
    _maintenance: Maintenance
    _rounds: Rounds

    @abstractmethod
    def _shard(self, shard_id: ShardId, name: str | None = None) -> Shard:
        """The shard of that id, be it there or not; `name` is what the user calls it."""

    @abstractmethod
    async def _existing(self, name: str) -> Shard:
        """The shard of that name or id, as it is now; `UnknownShard`."""

    async def retain(self, shard: str, keep: int | timedelta | None) -> None:
        """How much history maintenance keeps, from now on and for every client: it moves since to
        `upper - keep`, never nearer, at rest within `2 * keep`, and no further than holds allow. A
        `timedelta`: to the upper that the shard had that long ago. It never passes the last complete time, so
        the current contents stay readable. `None`: maintenance does not move since. One commit."""
        with self._calls.call():
            command = SetRetention(*_kept(keep))
            found = await self._existing(shard)
            await commit(found.register, command, Slot())
            self._maintenance.keep(found, retained=keep is not None)

    async def maintain(self) -> MaintenanceRound:
        """One round of upkeep over *all* shards of the location, for a process that does nothing else: moves
        since where a policy says so, compacts what the spines ask for, collects what nobody needs, ends what
        was finalized. Any number of processes may do it: claims in the shards' states share the work out. A
        shard that fails is told in the result and logged. A share of a request for a shard that has not
        changed since the round before; a few for one with nothing to do."""
        with self._calls.call():
            return await self._rounds.once()

    async def force_compaction(self, shard: str) -> None:
        """Apply `retain`, merge all that is there into one batch, sorted, consolidated, with times advanced
        to since, and return when that is applied. In memory are `settings.compaction_memory_bytes`, at any
        size."""
        with self._calls.call():
            await self._maintenance.of(await self._existing(shard)).force_compaction()

    async def force_gc(self, shard: str) -> Collected:
        """Write a rollup, then delete the blobs and versions that no reader's hold can reach. Says what was
        removed. What the snapshots of this client have let go of is told first; a reader with a hold of its
        own tells with its next heartbeat."""
        with self._calls.call():
            found = await self._existing(shard)
            with suppress(LeaseExpired):  # then it holds nothing back
                if found.hold.reader:
                    await found.hold.heartbeat()
            return await self._maintenance.of(found).force_collection()

    async def finalize(self, shard: str) -> None:
        """Delete the data of a shard that nobody can read or write any more: since and upper are both empty,
        else `FINALIZATION_ERROR`. A tombstone stays for as long as the shard has a name, and then for
        `settings.tombstone_retention_s`. Repeating it after a crash finishes the work."""
        with self._calls.call():
            found = self._shard(await resolve(self._stack, shard), shard)
            state = await found.register.refresh()
            if state is None:
                raise UnknownShard(f"there is no {found.label}", shard_id=found.id)
            if not state.finalized and (state.since.elements or state.upper.elements):
                message = f"since {state.since} and upper {state.upper} are not both empty"
                kind, ends = UsageKind.FINALIZATION_ERROR, (state.since, state.upper)
                raise InvalidUsage(kind, message, shard_id=found.id, since=ends[0], upper=ends[1])
            await commit(found.register, Finalize(found.id), Slot())
            await bury(found)

    async def inspect(self, shard: str) -> ShardView:
        """The shard from within, at its newest version. Two requests."""
        with self._calls.call():
            return await inspect(await self._existing(shard))

    async def fsck(self, shard: str) -> FsckReport:
        """Read everything and say what is not as it must be: `ok` is false for damage only, a store that is
        away is `StorageUnavailable`. Changes nothing."""
        with self._calls.call():
            return await fsck(self._shard(await resolve(self._stack, shard), shard))

    async def sweep_leaked_blobs(self, dry_run: bool = True) -> Sweep:
        """Find the blobs that crashed or cancelled writers left, which no state names and none can name any
        more; with `dry_run=False` delete them. Safe beside everything else that goes on."""
        with self._calls.call():
            return await sweep(self._stack, dry_run=dry_run)

    async def usage(self) -> Usage:
        """Bytes in the blob store: all, referenced by some live version, current, live."""
        with self._calls.call():
            return await usage(self._stack)


def _kept(keep: object) -> tuple[int | None, float | None]:
    if keep is None:
        return None, None
    if type(keep) is int and 0 <= keep < 2**63:
        return keep, None
    if isinstance(keep, timedelta) and keep >= timedelta(0):
        return None, keep.total_seconds()
    text = f"{shown(keep)} is not how much to keep: an int of times, a timedelta, or None"
    raise InvalidUsage(UsageKind.INVALID_TIME, text, time=keep)
