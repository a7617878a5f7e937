"""The maintenance of one shard by one client, as single steps. `background.py` decides when they run;
`compact/local.py` and `gc/` do the work.

All steps use one *registration* of a writer (`registration.py`), since every blob and claim names a writer.
"""

from functools import partial

from aiopersist.base.settings import MIB
from aiopersist.compact.local import compact, compact_all
from aiopersist.gc.collect import Collected, can_collect, collect
from aiopersist.gc.rollup import write_rollup
from aiopersist.maintenance.backoff import Backoffs
from aiopersist.maintenance.due import has_long_tail
from aiopersist.maintenance.registration import SharedRegistration
from aiopersist.parts.rewrite import whole_bytes
from aiopersist.shard.commit import commit
from aiopersist.shard.registration import Registration
from aiopersist.shard.shard import Shard
from aiopersist.state.compaction import ANY, ClaimCollection, ReleaseClaim, Spec, plan
from aiopersist.state.lifecycle import ExpireOverdue
from aiopersist.state.model import COLLECTION, State
from aiopersist.state.retention import ApplyRetention

GARBAGE_SHARE = 4  # garbage of a quarter of the bytes in use is collected before the next rollup
GARBAGE_BYTES_MIN = MIB // 16  # unless it is less than this
SINCE, PLAN, LOOK = "since", "plan", "look"  # with the collection the jobs that back off
JOBS = (COLLECTION, SINCE, PLAN, LOOK)


class ShardMaintenance:
    """See the header."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.registration = SharedRegistration(shard)
        self.backoffs = Backoffs(shard.stack.runtime.monotonic)
        self._stack = shard.stack
        self._replaced_bytes = 0

    # --- steps -----------------------------------------------------------------------------------

    async def expire_overdue(self) -> None:
        """End the readers and writers whose leases ran out. Any commit does this, but an idle shard has none.
        One commit if a lease ran out."""
        await commit(self.shard.register, ExpireOverdue())

    async def move_since(self, *, exact: bool) -> None:
        """Move since according to the policy. At most one commit."""
        with self.backoffs.trying(SINCE) as trial:
            await commit(self.shard.register, ApplyRetention(exact))
            trial.done = True

    async def compact(
        self, inputs_min: float = ANY, *, large: bool | None = None, claims_all: bool = False
    ) -> int:
        """Do the compactions that the spine asks for, until no spec has `inputs_min` inputs by weight;
        returns how many were applied. `large`: only those that need the memory of a compaction (`True`), or
        only the others (`False`). `claims_all`: take a claim even for work that costs less than a claim. A
        failed compaction backs off."""
        done = 0
        while (spec := await self._next(inputs_min, large)) is not None:
            job = partial(compact, self.shard, spec, claims_all=claims_all)
            with self.backoffs.trying(spec.first) as trial:
                trial.done = await self.registration.under(job)
            if trial.done:
                self._replaced_bytes += spec.blob_bytes
                done += 1
        return done

    async def _next(self, inputs_min: float, large: bool | None) -> Spec | None:
        now = await self._stack.consensus.now()
        if PLAN in self.backoffs:
            return None
        with self.backoffs.trying(PLAN) as trial:
            spec = self._planned(inputs_min, large, now)
            trial.done = True
        return spec

    def _planned(self, inputs_min: float, large: bool | None, now: float) -> Spec | None:
        state, settings = self.shard.state, self._stack.settings
        self.backoffs.keep(lambda key: key in JOBS or key in state.batches)

        def suits(spec: Spec) -> bool:
            is_large = spec.goodbytes > whole_bytes(settings)
            return large in (None, is_large) and spec.first not in self.backoffs

        return plan(state, inputs_min, now, suits)

    async def has_work(self) -> bool:
        """Whether the spine asks for a compaction that does not back off."""
        return await self._next(ANY, None) is not None

    @property
    def owes_collection(self) -> bool:
        """Whether an idle shard has garbage, and the collection does not back off."""
        state = self.shard.state
        owed = can_collect(state) or has_long_tail(state, self._stack.settings)
        return owed and COLLECTION not in self.backoffs

    async def collect(self) -> Collected | None:
        """Write a rollup of the current state if that frees more, and collect the garbage; `None` if another
        process collects, or has collected meanwhile."""
        seen = self.shard.state  # before the registration: a later collection of another process counts
        with self.backoffs.trying(COLLECTION) as trial:
            collected = await self.registration.under(partial(self._collect, seen))
            trial.done = collected is not None
        if collected is not None:
            self._replaced_bytes = 0
        return collected

    async def _collect(self, seen: State, registration: Registration) -> Collected | None:
        register, writer = self.shard.register, registration.writer
        if not await commit(register, ClaimCollection(writer, seen.latest_rollup, seen.collected)):
            return None
        if (seen.latest_rollup or 0) < seen.dropped_at or has_long_tail(seen, self._stack.settings):
            await write_rollup(self.shard, writer)
        collected = await collect(self.shard, writer)
        # a collection without garbage has not ended its claim; after any other this commits nothing
        await commit(register, ReleaseClaim(writer, COLLECTION))
        return collected

    @property
    def has_replaced_much(self) -> bool:
        """Whether compactions of this process left much garbage, compared with the bytes in use."""
        live = sum(part.size for batch in self.shard.state.batches.values() for part in batch.parts)
        return self._replaced_bytes > max(live // GARBAGE_SHARE, GARBAGE_BYTES_MIN)

    # --- on demand -------------------------------------------------------------------------------

    async def force_compaction(self) -> None:
        """Compact all batches to one, and return when that is applied."""
        await self.shard.open()
        await self.move_since(exact=True)
        state = self.shard.state
        if not state.batches:
            return
        last, since = next(reversed(state.batches)), state.since
        await self.registration.under(partial(compact_all, self.shard, last=last, since=since))

    async def roll_up(self) -> None:
        """Write a rollup of the current state, unless there is a newer one."""
        await self.registration.under(lambda registration: write_rollup(self.shard, registration.writer))

    async def force_collection(self) -> Collected:
        """Write a rollup of the current state, and collect the garbage, even if another process does."""
        state = await self.shard.register.refresh()
        if state is not None and not state.finalized:
            await self.roll_up()
        return await collect(self.shard)
