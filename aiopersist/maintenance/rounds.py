"""Upkeep of all shards of a location, for a process that does nothing else: one round after the other.

A shard that has not changed since the round before costs one request. What is due in one is done under
claims, so that several processes share the work: whoever comes second goes on to the next shard.
"""

from collections.abc import Callable
from functools import partial, reduce

from pydantic import BaseModel, ConfigDict

from aiopersist.errors import ShardFinalized
from aiopersist.gc.collect import bury, can_collect
from aiopersist.maintenance.shard import ShardUpkeep
from aiopersist.resource import run_bounded
from aiopersist.shard.log import consensus_key, list_shards
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import plan
from aiopersist.state.diff import decode_diff


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
    """What failed, by shard; the others were tended."""

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


class Rounds:
    """Remembers which shards have not changed since they were tended."""

    def __init__(self, stack: Stack, upkeep_of: Callable[[str], ShardUpkeep]) -> None:
        self._stack = stack
        self._upkeep_of = upkeep_of
        self._ended: set[str] = set()  # of these a tombstone is left, for ever
        self._rested: dict[str, int] = {}  # the version at which nothing was left to do
        self._resting: dict[str, ShardUpkeep] = {}  # they know what failed there, and how often

    async def once(self) -> MaintenanceRound:
        """Look at every shard, and do what is due."""
        shards = await list_shards(self._stack)
        for shard in self._rested.keys() - {*shards}:
            del self._rested[shard]
        left = [shard for shard in shards if shard not in self._ended]
        jobs = [partial(self._try, shard) for shard in left]
        rounds = await run_bounded(self._stack.settings.compactions_max, jobs)
        return reduce(MaintenanceRound.plus, rounds, MaintenanceRound())

    async def _try(self, shard: str) -> MaintenanceRound:
        try:
            return await self._tend(shard)
        except ShardFinalized:
            return MaintenanceRound(shards=1)  # meanwhile: the next round ends it
        except Exception as error:  # also one that nobody foresaw keeps nobody from the other shards
            if (found := self._upkeep_of(shard)).rests:
                self._resting[shard] = found
            self._stack.supervisor.failures.tell(f"upkeep of {shard}", error)
            return MaintenanceRound(
                shards=1, looked_at=1, failures={shard: f"{type(error).__name__}: {error}"}
            )

    async def _tend(self, shard: str) -> MaintenanceRound:
        head = await self._stack.consensus.head(consensus_key(shard))
        if head is None or self._rested.get(shard) == head.seqno:
            return MaintenanceRound(shards=1)
        if decode_diff(head.data).changes.finalized:
            buried = await bury(self._upkeep_of(shard).shard)
            if buried is None:
                return MaintenanceRound(looked_at=1)
            self._ended.add(shard)
            return MaintenanceRound(looked_at=1, parts=buried.parts, versions=buried.versions)
        upkeep = self._upkeep_of(shard)
        state = await upkeep.shard.open()
        if state.retention:
            await upkeep.move_since(exact=False)
        compactions = await upkeep.compact(claims_all=True)
        collected = await upkeep.collect() if upkeep.owes_collection else None
        await upkeep.registration.release()
        await self._remember(shard, upkeep)
        return MaintenanceRound(
            shards=1,
            looked_at=1,
            compactions=compactions,
            collections=collected is not None,
            parts=collected.parts if collected else 0,
            versions=collected.versions if collected else 0,
        )

    async def _remember(self, shard: str, upkeep: ShardUpkeep) -> None:
        """A claim of somebody else may become void without a new version, and what is kept by age falls due
        without one."""
        state = upkeep.shard.state
        by_age = any(policy.seconds is not None for policy in state.retention.values())
        left = plan(state, 2, await self._stack.consensus.now()) is not None or can_collect(state)
        if not left and not by_age and not state.claims:
            self._rested[shard] = state.seqno
        self._resting.pop(shard, None)
        if left and upkeep.rests:
            self._resting[shard] = upkeep
