"""Maintenance of all shards of a location in rounds, for a process that does nothing else.

A shard that was dropped, or has not changed since the last round, costs a share of one request for some
hundred shards. Claims let several processes share the work: a process that sees a claim continues with the
next shard. An idle shard gets another look when one of its leases ends.
"""

from collections.abc import Callable
from functools import partial, reduce
from math import inf
from typing import NamedTuple

from pydantic import BaseModel

from aiopersist.base.errors import ShardFinalized, Unsupported
from aiopersist.base.resource import run_bounded
from aiopersist.gc.collect import can_collect, delete_data
from aiopersist.gc.tombstones import Tombstone, read_heads, remove_tombstone
from aiopersist.maintenance.shard import ShardMaintenance
from aiopersist.shard.catalog import Naming, forget_names
from aiopersist.shard.log import consensus_key, list_shards
from aiopersist.shard.resting import add_resting, read_resting
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import plan
from aiopersist.state.lifecycle import first_expiry
from aiopersist.state.seal import decode_version
from aiopersist.storage.consensus import Versioned


class MaintenanceRound(BaseModel, frozen=True):
    """The work of one round."""

    shards: int = 0
    """Shards of the location, without finalized ones."""
    looked_at: int = 0
    """Shards that had changed."""
    compactions: int = 0
    """Compactions that were applied."""
    collections: int = 0
    """Shards in which versions and blobs were collected."""
    parts: int = 0
    """Blobs of parts that were deleted."""
    versions: int = 0
    """Versions that were deleted from the consensus store."""
    failures: dict[str, str] = {}
    """By shard; the other shards were maintained."""

    def plus(self, other: "MaintenanceRound") -> "MaintenanceRound":
        """The sum of both."""
        own, failures = self.model_dump(exclude={"failures"}), {**self.failures, **other.failures}
        sums = {name: count + getattr(other, name) for name, count in own.items()}
        return MaintenanceRound(**sums, failures=failures)

    @property
    def did_something(self) -> bool:
        return bool(self.compactions or self.collections or self.failures)


class Idle(NamedTuple):
    """A shard without due work, until it changes or one of its leases ends."""

    seqno: int
    """Its newest version."""
    until: float
    """When the first lease ends, by the store's clock."""


class Rounds:
    """Runs rounds, and remembers the shards that have not changed since."""

    def __init__(self, stack: Stack, maintenance_of: Callable[[str], ShardMaintenance]) -> None:
        self._stack = stack
        self._maintenance_of = maintenance_of
        self._idle: dict[str, Idle] = {}
        self._tombstones: dict[str, Tombstone] = {}
        self._keeps_tombstones = False  # true if the store cannot remove keys
        self._resting: dict[str, int] | None = None  # the record of tombstones that stay; `None`: not read
        self._names: dict[str, Naming] = {}  # names in use
        self._began_at = inf  # start of the last round, by the store's clock
        self._backing_off: dict[str, ShardMaintenance] = {}  # keeps their backoffs alive

    async def once(self) -> MaintenanceRound:
        """Look at every shard, and do the due work."""
        shards = await list_shards(self._stack)
        for remembered in (self._idle, self._tombstones):
            for shard in remembered.keys() - {*shards}:
                del remembered[shard]
        now = await self._stack.consensus.now()
        self._forget_old_rounds(now)
        unchanged = {shard: idle.seqno for shard, idle in self._idle.items() if now <= idle.until}
        unchanged |= {shard: tombstone.seqno for shard, tombstone in self._tombstones.items()}
        resting = self._resting = await read_resting(self._stack) if self._resting is None else self._resting
        unchanged |= {shard: resting[key] for shard in shards if (key := consensus_key(shard)) in resting}
        rounds = [MaintenanceRound(shards=len(self._idle))]
        async for heads in read_heads(self._stack, shards, unchanged):
            self._tombstones |= heads.tombstones
            counted = len(self._idle.keys() & heads.moved.keys())
            jobs = [partial(self._maintain_or_report, *moved) for moved in heads.moved.items()]
            rounds.append(MaintenanceRound(shards=-counted))  # the jobs count these again
            rounds += await run_bounded(self._stack.settings.compactions_max, jobs)
        await self._remove_tombstones(resting)
        return reduce(MaintenanceRound.plus, rounds, MaintenanceRound())

    def _forget_old_rounds(self, now: float) -> None:
        """Forget everything if the last round is longer ago than tombstones stay. After a tombstone is
        removed, a new shard may have the same version numbers, and would look unchanged."""
        if now - self._began_at > self._stack.settings.tombstone_retention_s:
            for remembered in (self._idle, self._tombstones, self._names):
                remembered.clear()
        self._began_at = now

    async def _remove_tombstones(self, resting: dict[str, int]) -> None:
        """Remove unused old names, and old tombstones. A tombstone with a name stays, since a shard could be
        created under that name. After a failure the next round tries again."""
        if self._keeps_tombstones:
            return
        oldest = await self._stack.consensus.now() - self._stack.settings.tombstone_retention_s
        try:
            before = dict(resting)
            await forget_names(self._stack, self._names, resting)
            if self._stack.consensus.keeps_keys:
                resting |= {consensus_key(shard): old.seqno for shard, old in self._tombstones.items()}
                if resting != before:
                    await add_resting(self._stack, resting)
                return
            named = {naming.shard for naming in self._names.values()}
            old = [(s, t) for s, t in self._tombstones.items() if t.at < oldest and s not in named]
            jobs = [partial(remove_tombstone, self._stack, *tombstone) for tombstone in old]
            await run_bounded(self._stack.settings.compactions_max, jobs)
        except Unsupported:
            self._keeps_tombstones = True
        except Exception as error:
            self._stack.supervisor.failures.report("the removal of old tombstones and names", error)

    async def _maintain_or_report(self, shard: str, head: Versioned) -> MaintenanceRound:
        try:
            return await self._maintain(shard, head)
        except ShardFinalized:
            return MaintenanceRound(shards=1)  # the next round deletes its data
        except Exception as error:  # any error: continue with the other shards
            maintenance = self._maintenance_of(shard)
            if maintenance.backoffs:
                self._backing_off[shard] = maintenance
            self._stack.supervisor.failures.report(f"maintenance of {shard}", error)
            failures = {shard: f"{type(error).__name__}: {error}"}
            return MaintenanceRound(shards=1, looked_at=1, failures=failures)

    async def _maintain(self, shard: str, head: Versioned) -> MaintenanceRound:
        maintenance = self._maintenance_of(shard)
        if decode_version(head.data, shard).changes.finalized:
            deleted = await delete_data(maintenance.shard)
            return MaintenanceRound(looked_at=1, parts=deleted.parts, versions=deleted.versions)
        await maintenance.shard.open()
        await maintenance.expire_overdue()
        if maintenance.shard.state.retention:
            await maintenance.move_since(exact=False)
        compactions = await maintenance.compact(claims_all=True)
        collected = await maintenance.collect() if maintenance.owes_collection else None
        await maintenance.registration.release()
        await self._remember(shard, maintenance)
        return MaintenanceRound(
            shards=1,
            looked_at=1,
            compactions=compactions,
            collections=collected is not None,
            parts=collected.parts if collected else 0,
            versions=collected.versions if collected else 0,
        )

    async def _remember(self, shard: str, maintenance: ShardMaintenance) -> None:
        """Note whether the shard is idle. A claim may become void, and a policy by age may become due,
        without a new version; such a shard is not idle."""
        state = maintenance.shard.state
        by_age = any(policy.seconds is not None for policy in state.retention.values())
        has_work = plan(state, 2, await self._stack.consensus.now()) is not None or can_collect(state)
        if not has_work and not by_age and not state.claims:
            self._idle[shard] = Idle(state.seqno, first_expiry(state))
        self._backing_off.pop(shard, None)
        if has_work and maintenance.backoffs:
            self._backing_off[shard] = maintenance
