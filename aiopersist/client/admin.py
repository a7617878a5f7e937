"""`client.admin`: the calls of operators. They look at shards, maintain, copy, erase and drop them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from aiopersist.client.services import BaseClient, Services
from aiopersist.shard import catalog

if TYPE_CHECKING:
    from aiopersist.backup.copy import Copied
    from aiopersist.erase.erasure import Erasure
    from aiopersist.gc.collect import Collected
    from aiopersist.gc.sweep import Sweep, Usage
    from aiopersist.maintenance.fsck import FsckReport
    from aiopersist.maintenance.inspect import ShardView
    from aiopersist.maintenance.overview import ShardSummary
    from aiopersist.maintenance.rounds import MaintenanceRound
    from aiopersist.subscription.view import SubscriptionView
    from aiopersist.table.table import Table

K = TypeVar("K")


class Admin:
    """The calls of operators on the location of one client."""

    def __init__(self, services: Services) -> None:
        self._services, self._shards, self._stack = services, services.shards, services.stack

    async def overview(self, prefix: str = "") -> list[ShardSummary]:
        """A line for each shard, table and `Indexed` whose name begins with `prefix`, sorted by name: kind,
        frontiers, sizes, last version, holds, the lag of subscriptions. A shard whose state cannot be read is
        in it, with the problem. Four requests, two more for every few hundred names, and for each shard a
        read of the head, of the rollup and of the diffs since then; 16 shards at a time."""
        async with self._services.calling("aiopersist.maintenance.overview"):
            from aiopersist.maintenance.overview import overview

            return await overview(self._stack, prefix)

    async def inspect(self, shard: str) -> ShardView:
        """The batches, frontiers and registrations of the shard, table or `Indexed`, at its newest version.
        Three requests, one more for an `Indexed` by its name."""
        async with self._services.calling("aiopersist.maintenance.inspect"):
            from aiopersist.maintenance.inspect import inspect

            shard_id = await catalog.resolve_any(self._stack, shard)
            return await inspect(self._shards.at(shard_id, shard))

    async def retain(self, shard: str, keep: int | timedelta | None) -> None:
        """Set how much history maintenance keeps, from now on and for every client. Maintenance moves since
        to `upper - keep` at most, and no further than holds allow: once no more appends come, to within
        `1.125 * keep` of upper; while they come some 100 times may be kept in addition. For a table, and any
        shard with a wall clock, give a `timedelta`: a time there is a microsecond, so 5 keeps 5 microseconds.
        A `timedelta`: to the upper that the shard had that long ago, at most a quarter earlier; on a wall
        clock, to the time of that long ago, at most an eighth earlier. Since never passes the last complete
        time, so the current contents stay readable. `None`: maintenance does not move since. One commit."""
        async with self._services.calling("aiopersist.maintenance.on_demand"):
            from aiopersist.maintenance.on_demand import retain

            await retain(self._shards, self._services.maintenance, shard, keep)

    async def maintain(self) -> MaintenanceRound:
        """One round of maintenance over *all* shards of the location, for a process that does nothing else.
        It moves since as the policies say, compacts, collects garbage, and removes finalized shards. Any
        number of processes may do it: claims in the states of the shards divide the work. A shard that fails
        is named in the result and logged. A share of a request for a shard that has not changed since the
        round before; a few requests for a shard with nothing to do."""
        async with self._services.calling("aiopersist.maintenance.rounds"):
            return await self._services.rounds.once()

    async def force_compaction(self, shard: str) -> None:
        """Apply `retain`, as far as holds allow, merge the whole shard into one batch, sorted, consolidated,
        with times advanced to since, and return once that is applied. Clients tell by their heartbeats what
        they hold no more; `force_gc` sends that of this client. In memory are
        `settings.compaction_memory_bytes`, whatever the size of the shard."""
        async with self._services.calling("aiopersist.maintenance.background"):
            await self._services.maintenance.force_compaction(await self._shards.existing(shard))

    async def force_gc(self, shard: str) -> Collected:
        """Write a rollup, then delete the blobs and versions that no reader's hold can reach. Returns a count
        of both. A heartbeat before it releases the versions that closed snapshots of this client held; a
        reader with a hold of its own releases its history with its next heartbeat."""
        async with self._services.calling("aiopersist.maintenance.on_demand"):
            from aiopersist.maintenance.on_demand import force_gc

            return await force_gc(self._shards, self._services.maintenance, shard)

    async def subscriptions(self, shard: str) -> dict[str, SubscriptionView]:
        """The subscriptions of the shard by name, shares as `name[i/n]`. Linearizable: one request."""
        async with self._services.calling("aiopersist.subscription.open"):
            from aiopersist.subscription.open import subscriptions

            return await subscriptions(self._shards, shard)

    async def drop_subscription(self, shard: str, name: str) -> None:
        """End the subscription of that name, with all its shares: its position is forgotten, and it holds
        nothing. `LookupError` if there is none. One commit."""
        async with self._services.calling("aiopersist.subscription.open"):
            from aiopersist.subscription.open import drop_subscription

            await drop_subscription(self._shards, shard, name)

    async def drop(self, name: str) -> None:
        """Finalize the shard and free its name: both frontiers become empty, every handle is fenced, and
        calls that wait end with `ShardFinalized`. A shard that has a name but was not created yet never will
        be. Repeating it after a crash finishes the work. A tombstone tells handles of other processes that
        the shard is finalized; `maintain` removes it after `settings.tombstone_retention_s`."""
        async with self._services.calling("aiopersist.gc.drop"):
            from aiopersist.gc.drop import drop

            await drop(self._shards, name)

    async def finalize(self, shard: str) -> None:
        """Delete the data of a shard that can no longer be read or written: its since and upper are empty,
        else `FINALIZATION_ERROR`. A tombstone stays for as long as the shard has a name, and then for
        `settings.tombstone_retention_s`. Repeating it after a crash finishes the work."""
        async with self._services.calling("aiopersist.gc.drop"):
            from aiopersist.gc.drop import finalize

            await finalize(self._shards, shard)

    async def erase(
        self,
        table: Table[K, Any],
        keys: Iterable[K] | None = None,
        where: Any = None,
        *,
        wait: timedelta = timedelta(minutes=10),
        end_holds: Iterable[str] = (),
        dry_run: bool = False,
    ) -> Erasure:
        """Erase rows of a table from its stores: those of `keys`, and those for which `where`, as in
        `Snapshot.to_arrow`, is true, now or in the history. It deletes them, gives up the history up to then,
        compacts, collects garbage, and reads all that the stores have of the table: `done` is true only if
        no version, part or rollup, and no tag, has any of these rows, and no file of a published version may
        have them.

        It waits for those who hold history or old versions, and for tags that have such rows, for as long as
        `wait`, and then names them (`holders`) and what is left (`remnants`). `end_holds`: the names of
        holds, critical sinces, subscriptions and tags that it ends if they keep the rows; no other is ended.
        A row that is put again meanwhile stays: `present`. The policy of `retain` stays, too. Repeated, it
        goes on.

        `dry_run`: change nothing, and say what there is. The stores may keep the bytes of deleted records for
        a while, and so do copies and backups: see "Erase personal data" in the documentation. Reads all
        versions and blobs of the table at least twice."""
        async with self._services.calling("aiopersist.erase.erasure", "aiopersist.table.table"):
            from aiopersist.erase.erasure import EraseOptions, erase

            options = EraseOptions(wait, end_holds, dry_run)
            return await erase(self._services.tables, self._services.maintenance, table, keys, where, options)

    async def copy_shard(
        self,
        shard: str,
        target: BaseClient,
        *,
        name: str | None = None,
        verify: bool = False,
        detach: bool = False,
    ) -> Copied:
        """Copy the shard or table to the location of `target`, under `name` or its own name: a backup, and
        the way back. The copy has the history from since on with times as they are, the schemas, the clock
        and the policy of retention; subscriptions, holds, and the ids of `txn=` and `once=` stay behind. It
        reads as the source at each time that both hold.

        Repeated, it brings what is new. A call that was killed leaves a copy that can be read, and is
        repeated; two at once do no harm. The copy has a hold, by which it is known again: it keeps the
        copy's history, and the next call moves it to the source's since. `detach=True` ends the hold: then
        the copy is a shard of its own, and no call follows up on it.

        `verify=True` compares the contents of both at up to nine times: `differing` is empty if they are
        the same. `track` shows how far it has come.

        `InvalidUsage` of kind `INVALID_COPY` if the name is taken by another shard, if someone has written
        the copy, or if it is ahead of the source; `Unsupported` for an `Indexed`. In memory are some row
        groups of each sorted run of parts, and the parts of a builder. It reads each part that has something
        new once, by a lease that holds the source's history meanwhile, and makes one commit for about eight
        parts that it writes."""
        async with self._services.calling("aiopersist.backup.copy"), target._services.calling():
            from aiopersist.backup.copy import CopyOptions, copy_shard

            await target._services.stack.ready_to_convert()
            options = CopyOptions(verify, detach)
            return await copy_shard(self._shards, shard, target._services.shards, name, options)

    async def fsck(self, shard: str) -> FsckReport:
        """Read the whole shard, table or `Indexed` and report damage; `ok` is false only for damage.
        `StorageUnavailable` if a store does not answer. Changes nothing."""
        async with self._services.calling("aiopersist.maintenance.fsck"):
            from aiopersist.maintenance.fsck import fsck

            return await fsck(self._shards.at(await catalog.resolve_any(self._stack, shard), shard))

    async def sweep_leaked_blobs(self, dry_run: bool = True) -> Sweep:
        """Find the blobs that crashed or cancelled writers left behind: no state names them, and none can any
        more. `dry_run=False` deletes them. Safe at any time, whatever else goes on."""
        async with self._services.calling("aiopersist.gc.sweep"):
            from aiopersist.gc.sweep import sweep

            return await sweep(self._stack, dry_run=dry_run)

    async def usage(self) -> Usage:
        """Bytes in the blob store: all, those that a live version references, current, live."""
        async with self._services.calling("aiopersist.gc.sweep"):
            from aiopersist.gc.sweep import usage

            return await usage(self._stack)
