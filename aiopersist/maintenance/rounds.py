"""Maintenance of all shards of a location, for a process that does nothing else: one round after the other.

A shard that has not changed since the round before, or was dropped, costs a share of a request for some
hundred. What is due in one is done under claims, so that several processes share the work: whoever comes
second goes on to the next shard. What an idle shard waits for is a lease that ends: it is looked at again
then.
"""

from collections.abc import Callable
from functools import partial, reduce
from math import inf
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from aiopersist.errors import ShardFinalized, Unsupported
from aiopersist.gc.collect import bury, can_collect
from aiopersist.gc.graves import Grave, forget, look
from aiopersist.maintenance.shard import ShardMaintenance
from aiopersist.resource import run_bounded
from aiopersist.shard.catalog import Naming, forget_names
from aiopersist.shard.log import list_shards
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import plan
from aiopersist.state.diff import decode_diff
from aiopersist.state.lifecycle import first_expiry
from aiopersist.storage.consensus import Versioned


class MaintenanceRound(BaseModel):
    """What one round did."""

    model_config = ConfigDict(frozen=True)

    shards: int = 0
    """Those that there are; finalized ones are no longer."""
    looked_at: int = 0
    """Those of them that had changed."""
    compactions: int = 0
    """How often batches were made one."""
    collections: int = 0
    """Shards in which versions and blobs were collected."""
    parts: int = 0
    """Blobs of parts that were deleted."""
    versions: int = 0
    """Versions that were dropped from the consensus store."""
    failures: dict[str, str] = {}
    """What failed, by shard; the others were maintained."""

    def plus(self, other: "MaintenanceRound") -> "MaintenanceRound":
        """Both together."""
        return MaintenanceRound(
            shards=self.shards + other.shards,
            looked_at=self.looked_at + other.looked_at,
            compactions=self.compactions + other.compactions,
            collections=self.collections + other.collections,
            parts=self.parts + other.parts,
            versions=self.versions + other.versions,
            failures={**self.failures, **other.failures},
        )

    @property
    def did_something(self) -> bool:
        return bool(self.compactions or self.collections or self.failures)


class Rested(NamedTuple):
    """Nothing is left to do in a shard."""

    seqno: int
    """As long as this is its version,"""
    until: float
    """and no lease ends, at this time of the store's clock."""


class Rounds:
    """Remembers which shards have not changed since they were maintained."""

    def __init__(self, stack: Stack, maintenance_of: Callable[[str], ShardMaintenance]) -> None:
        self._stack = stack
        self._steps_of = maintenance_of
        self._rested: dict[str, Rested] = {}
        self._graves: dict[str, Grave] = {}  # what is left of dropped shards
        self._keeps_graves = False  # since the store removes no keys
        self._names: dict[str, Naming] = {}  # those in use
        self._began_at = inf  # of the store's clock, the round before
        self._resting: dict[str, ShardMaintenance] = {}  # they know what failed there, and how often

    async def once(self) -> MaintenanceRound:
        """Look at every shard, and do what is due."""
        shards = await list_shards(self._stack)
        for remembered in (self._rested, self._graves):
            for shard in remembered.keys() - {*shards}:
                del remembered[shard]
        now = await self._stack.consensus.now()
        self._doubt_what_is_old(now)
        known = {shard: rested.seqno for shard, rested in self._rested.items() if now <= rested.until}
        known |= {shard: grave.seqno for shard, grave in self._graves.items()}
        rounds = [MaintenanceRound(shards=len(self._rested))]
        async for some in look(self._stack, shards, known):
            self._graves |= some.graves
            moved = len(self._rested.keys() & some.heads.keys())
            jobs = [partial(self._try, shard, head) for shard, head in some.heads.items()]
            rounds.append(MaintenanceRound(shards=-moved))
            rounds += await run_bounded(self._stack.settings.compactions_max, jobs)
        await self._forget()
        return reduce(MaintenanceRound.plus, rounds, MaintenanceRound())

    def _doubt_what_is_old(self, now: float) -> None:
        """Remember nothing for longer than what a drop leaves stays: once that is removed, numbers of
        versions come again, and what moved looks as if it had not."""
        if now - self._began_at > self._stack.settings.tombstone_retention_s:
            for remembered in (self._rested, self._graves, self._names):
                remembered.clear()
        self._began_at = now

    async def _forget(self) -> None:
        """Remove what is left of dropped shards for long enough; what has a name yet stays, since under that
        it would be made again. What fails is tried in the next round."""
        if self._keeps_graves:
            return
        oldest = await self._stack.consensus.now() - self._stack.settings.tombstone_retention_s
        try:
            await forget_names(self._stack, self._names)
            named = {naming.shard for naming in self._names.values()}
            old = [(s, g) for s, g in self._graves.items() if g.at < oldest and s not in named]
            jobs = [partial(forget, self._stack, shard, grave) for shard, grave in old]
            await run_bounded(self._stack.settings.compactions_max, jobs)
        except Unsupported:
            self._keeps_graves = True
        except Exception as error:
            self._stack.supervisor.failures.tell("the removal of what dropped shards left", error)

    async def _try(self, shard: str, head: Versioned) -> MaintenanceRound:
        try:
            return await self._tend(shard, head)
        except ShardFinalized:
            return MaintenanceRound(shards=1)  # meanwhile: the next round ends it
        except Exception as error:  # also one that nobody foresaw keeps nobody from the other shards
            if (found := self._steps_of(shard)).backoffs:
                self._resting[shard] = found
            self._stack.supervisor.failures.tell(f"steps of {shard}", error)
            return MaintenanceRound(
                shards=1, looked_at=1, failures={shard: f"{type(error).__name__}: {error}"}
            )

    async def _tend(self, shard: str, head: Versioned) -> MaintenanceRound:
        if decode_diff(head.data).changes.finalized:
            buried = await bury(self._steps_of(shard).shard)
            return MaintenanceRound(looked_at=1, parts=buried.parts, versions=buried.versions)
        steps = self._steps_of(shard)
        await steps.shard.open()
        await steps.expire_overdue()
        if steps.shard.state.retention:
            await steps.move_since(exact=False)
        compactions = await steps.compact(claims_all=True)
        collected = await steps.collect() if steps.owes_collection else None
        await steps.registration.release()
        await self._remember(shard, steps)
        return MaintenanceRound(
            shards=1,
            looked_at=1,
            compactions=compactions,
            collections=collected is not None,
            parts=collected.parts if collected else 0,
            versions=collected.versions if collected else 0,
        )

    async def _remember(self, shard: str, steps: ShardMaintenance) -> None:
        """A claim of somebody else may become void without a new version, and what is kept by age falls due
        without one."""
        state = steps.shard.state
        by_age = any(policy.seconds is not None for policy in state.retention.values())
        left = plan(state, 2, await self._stack.consensus.now()) is not None or can_collect(state)
        if not left and not by_age and not state.claims:
            self._rested[shard] = Rested(state.seqno, first_expiry(state))
        self._resting.pop(shard, None)
        if left and steps.backoffs:
            self._resting[shard] = steps
