"""Decides when the background work of a client runs, and runs it.

Each commit of this process is looked at, without any I/O: does the shard owe a rollup, does its spine ask
for a compaction? Each task does one thing and ends; a failure is logged, and a later commit that owes the
same tries again. Shards that nobody appends to are looked at every `settings.compaction_idle_s`: what is
left of their merges is done then.
"""

import asyncio
import logging
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

from aiopersist.compact import compact, compact_all
from aiopersist.errors import Error
from aiopersist.gc.collect import Collected, collect
from aiopersist.rollup import due, write_rollup
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.registration import Registration
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import plan
from aiopersist.state.model import Retention, State
from aiopersist.state.retention import MARKS_PER_KEEP, ApplyRetention

log = logging.getLogger("aiopersist")

PAUSE_MIN_S = 0.05


class Maintenance:
    """The upkeep of the shards of one client. `background=False`: only what it is asked for."""

    def __init__(self, stack: Stack, *, background: bool) -> None:
        self._stack = stack
        self._background = background
        self._writers: WeakKeyDictionary[Shard, str] = WeakKeyDictionary()
        self._not_before: WeakKeyDictionary[Shard, int] = WeakKeyDictionary()  # versions, after a failure
        self._running: WeakKeyDictionary[Shard, asyncio.Task[None]] = WeakKeyDictionary()
        self._retaining: WeakKeyDictionary[Shard, asyncio.Task[None]] = WeakKeyDictionary()
        self._compacting: WeakKeyDictionary[Shard, asyncio.Task[None]] = WeakKeyDictionary()
        self._registrations: WeakKeyDictionary[Shard, Registration] = WeakKeyDictionary()
        self._compactions = asyncio.Semaphore(stack.settings.compactions_max)
        self._tended: WeakSet[Shard] = WeakSet()
        self._idle: asyncio.Task[None] | None = None

    def tend(self, shard: Shard) -> None:
        """From now on do what the commits of `shard` owe."""
        if not self._background:
            return
        self._tended.add(shard)
        shard.register.on_commit = partial(self._owed, shard)
        if self._idle is None:
            self._idle = self._stack.supervisor.background(self._look_at_idle_shards(), "look at idle shards")

    async def force_compaction(self, shard: Shard) -> None:
        """Make everything that is there one batch, and return when that is applied."""
        await shard.open()
        await commit(shard.register, ApplyRetention(exact=True), Slot())
        state = shard.state
        if not state.batches:
            return
        registration = await self._registration(shard)
        registration.hold()
        try:
            await compact_all(shard, registration, next(reversed(state.batches)))
        finally:
            registration.release()

    async def force_gc(self, shard: Shard) -> Collected:
        """Write a rollup of now, and collect what nobody needs any more."""
        if (state := await shard.register.refresh()) is not None and not state.finalized:
            await self._roll_up(shard)
        return await collect(shard)

    # --- what commits owe ------------------------------------------------------------------------

    def _owed(self, shard: Shard, state: State) -> None:
        settings = self._stack.settings
        running = self._running.get(shard)
        if (
            state.seqno >= self._not_before.get(shard, 0)
            and due(state, settings.rollup_every)
            and (running is None or running.done())
        ):
            work = self._upkeep(shard)
            self._running[shard] = self._stack.supervisor.background(work, f"roll up {shard.id}")
        if (policy := state.retention.get(0)) is not None and _is_overdue(policy, state):
            self._begin_retention(shard)
        spine_batches = sum(len(level.batches) for level in state.levels.values())
        if len(state.batches) - spine_batches >= settings.compaction_inputs_min - 1:
            self._begin_compacting(shard, settings.compaction_inputs_min)

    async def _upkeep(self, shard: Shard) -> None:
        await self._roll_up(shard)
        await collect(shard)

    async def _roll_up(self, shard: Shard) -> None:
        try:
            await write_rollup(shard, self._writers.get(shard), partial(self._writers.__setitem__, shard))
        except Exception:
            pause = max(1, self._stack.settings.rollup_every // 4)
            self._not_before[shard] = shard.state.seqno + pause
            raise

    # --- retention -------------------------------------------------------------------------------

    def _begin_retention(self, shard: Shard) -> None:
        running = self._retaining.get(shard)
        if running is None or running.done():
            work = commit(shard.register, ApplyRetention(exact=False), Slot())
            self._retaining[shard] = self._stack.supervisor.background(work, f"move since of {shard.id}")

    # --- compaction ------------------------------------------------------------------------------

    def _begin_compacting(self, shard: Shard, inputs_min: int) -> None:
        running = self._compacting.get(shard)
        if running is None or running.done():
            work = self._compact(shard, inputs_min)
            self._compacting[shard] = self._stack.supervisor.background(work, f"compact {shard.id}")

    async def _compact(self, shard: Shard, inputs_min: int) -> None:
        """Do what the spine asks for, until nothing is left or somebody else does it."""
        async with self._compactions:
            if shard.state.finalized or plan(shard.state, inputs_min) is None:
                return
            registration = await self._registration(shard)
            registration.hold()
            try:
                while (spec := plan(shard.state, inputs_min)) is not None:
                    if not await compact(shard, spec, registration):
                        return
            finally:
                registration.release()

    async def _registration(self, shard: Shard) -> Registration:
        found = self._registrations.get(shard)
        if found is None or not found.alive:
            found = self._registrations[shard] = await Registration.fresh(shard)
        return found

    async def _look_at_idle_shards(self) -> None:
        seen: WeakKeyDictionary[Shard, int] = WeakKeyDictionary()
        while True:
            await self._stack.runtime.sleep(self._pause_s())
            for shard in list(self._tended):
                state = shard.register.state
                if state is None or state.finalized:
                    continue
                try:
                    state = await shard.open()
                except Error as error:
                    log.warning("an idle shard could not be looked at: %s", error)
                    continue
                if state.retention:
                    self._begin_retention(shard)
                if seen.get(shard) == state.seqno and plan(state, 2) is not None:
                    self._begin_compacting(shard, 2)
                seen[shard] = state.seqno

    def _pause_s(self) -> float:
        """Between two looks: often enough for what is kept the shortest."""
        states = [state for shard in self._tended if (state := shard.register.state) is not None]
        kept = [p.seconds for state in states for p in state.retention.values() if p.seconds is not None]
        looks = [max(seconds / MARKS_PER_KEEP, PAUSE_MIN_S) for seconds in kept]
        return min([self._stack.settings.compaction_idle_s, *looks])


def _is_overdue(policy: Retention, state: State) -> bool:
    """Whether a commit's own look says that much more is kept than must be."""
    upper, hold = state.upper.elements, policy.hold.elements
    if policy.times is None or not upper or not hold:
        return False
    return isinstance(upper[0], int) and upper[0] - hold[0] > 2 * policy.times  # type: ignore[operator]
