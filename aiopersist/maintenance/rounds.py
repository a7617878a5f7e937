"""Maintenance of all shards of a location, for a process that does nothing else: one round after the other.

A shard that has not changed since the round before, or was dropped, costs a share of one request for some
hundred shards. Work that is due in a shard is done under claims, so that several processes share the work: a
process that finds a claim goes on to the next shard. An idle shard is looked at again when a lease in it
ends."""

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
    """How often several batches became one."""
    collections: int = 0
    """Shards in which versions and blobs were collected."""
    parts: int = 0
    """Blobs of parts that were deleted."""
    versions: int = 0
    """Versions that were dropped from the consensus store."""
    failures: dict[str, str] = {}
    """The failures, by shard; the other shards were maintained."""

    def plus(self, other: "MaintenanceRound") -> "MaintenanceRound":
        """The sum of both."""
        mine, failures = self.model_dump(exclude={"failures"}), {**self.failures, **other.failures}
        sums = {name: count + getattr(other, name) for name, count in mine.items()}
        return MaintenanceRound(**sums, failures=failures)

    @property
    def did_something(self) -> bool:
        return bool(self.compactions or self.collections or self.failures)


class Idle(NamedTuple):
    """A shard in which nothing is left to do, as long as it does not change and no lease in it ends."""

    seqno: int
    """Its newest version."""
    until: float
    """When the first lease ends, by the store's clock."""


class Rounds:
    """Remembers which shards have not changed since they were maintained."""

    def __init__(self, stack: Stack, maintenance_of: Callable[[str], ShardMaintenance]) -> None:
        self._stack = stack
        self._maintenance_of = maintenance_of
        self._idle: dict[str, Idle] = {}
        self._tombstones: dict[str, Tombstone] = {}
        self._keeps_tombstones = False  # true where the store cannot remove keys
        self._resting: dict[str, int] | None = None  # the record of those that stay; `None`: not read yet
        self._names: dict[str, Naming] = {}  # those in use
        self._began_at = inf  # the round before, by the store's clock
        self._backing_off: dict[str, ShardMaintenance] = {}  # kept alive with their memory of failures

    async def once(self) -> MaintenanceRound:
        """Look at every shard, and do the work that is due."""
        shards = await list_shards(self._stack)
        for remembered in (self._idle, self._tombstones):
            for shard in remembered.keys() - {*shards}:
                del remembered[shard]
        now = await self._stack.consensus.now()
        self._forget_old_rounds(now)
        known = {shard: idle.seqno for shard, idle in self._idle.items() if now <= idle.until}
        known |= {shard: tombstone.seqno for shard, tombstone in self._tombstones.items()}
        resting = self._resting = await read_resting(self._stack) if self._resting is None else self._resting
        known |= {shard: resting[key] for shard in shards if (key := consensus_key(shard)) in resting}
        rounds = [MaintenanceRound(shards=len(self._idle))]
        async for heads in read_heads(self._stack, shards, known):
            self._tombstones |= heads.tombstones
            counted = len(self._idle.keys() & heads.moved.keys())
            jobs = [partial(self._maintain_or_report, *moved) for moved in heads.moved.items()]
            rounds.append(MaintenanceRound(shards=-counted))  # the jobs count these again
            rounds += await run_bounded(self._stack.settings.compactions_max, jobs)
        await self._remove_tombstones(resting)
        return reduce(MaintenanceRound.plus, rounds, MaintenanceRound())

    def _forget_old_rounds(self, now: float) -> None:
        """Forget everything if the round before is longer ago than tombstones stay: once a tombstone is
        removed, numbers of versions come again, and a shard that moved looks as if it had not."""
        if now - self._began_at > self._stack.settings.tombstone_retention_s:
            for remembered in (self._idle, self._tombstones, self._names):
                remembered.clear()
        self._began_at = now

    async def _remove_tombstones(self, resting: dict[str, int]) -> None:
        """Remove old names that name nothing, and old tombstones. A tombstone that has a name yet stays,
        since a shard could be created under that name. After a failure the next round tries again."""
        if self._keeps_tombstones:
            return
        oldest = await self._stack.consensus.now() - self._stack.settings.tombstone_retention_s
        try:
            before = dict(resting)
            await forget_names(self._stack, self._names, resting)
            if self._stack.consensus.keeps_keys:
                resting |= {consensus_key(shard): found.seqno for shard, found in self._tombstones.items()}
                if resting != before:
                    await add_resting(self._stack, resting)
                return
            named = {naming.shard for naming in self._names.values()}
            old = [(s, t) for s, t in self._tombstones.items() if t.at < oldest and s not in named]
            jobs = [partial(remove_tombstone, self._stack, *found) for found in old]
            await run_bounded(self._stack.settings.compactions_max, jobs)
        except Unsupported:
            self._keeps_tombstones = True
        except Exception as error:
            self._stack.supervisor.failures.report("the removal of old tombstones and names", error)

    async def _maintain_or_report(self, shard: str, head: Versioned) -> MaintenanceRound:
        try:
            return await self._maintain(shard, head)
        except ShardFinalized:
            return MaintenanceRound(shards=1)  # finalized meanwhile: the next round deletes its data
        except Exception as error:  # any error: the other shards are maintained
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
        """Note whether the shard is idle. It is not while it has a claim, which may become void without a new
        version, or a policy by age, which falls due without one."""
        state = maintenance.shard.state
        by_age = any(policy.seconds is not None for policy in state.retention.values())
        left = plan(state, 2, await self._stack.consensus.now()) is not None or can_collect(state)
        if not left and not by_age and not state.claims:
            self._idle[shard] = Idle(state.seqno, first_expiry(state))
        self._backing_off.pop(shard, None)
        if left and maintenance.backoffs:
            self._backing_off[shard] = maintenance
