"""Decides when the background work of a client runs, and runs it.

Each commit of this process is looked at, without any I/O: does the shard owe a rollup, does its policy
ask for a move of since, does its spine ask for a compaction? Each task does one thing and ends; a failure
is logged, and a later commit that owes the same tries again. Shards that nobody appends to are looked at
every `settings.compaction_idle_s`: what is left of their merges is done then.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

from aiopersist.compact import compact, compact_all
from aiopersist.errors import BatchExpired, Error
from aiopersist.gc.collect import Collected, collect
from aiopersist.resource import RELEASE_DEADLINE_S, run_bounded
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
REST_MIN_S = 0.5  # after a compaction that failed, or found that somebody else was at it
REST_MAX_S = 300.0
FORCED_MAX = 5  # registrations that a forced compaction may lose on its way
LOOKS_AT_ONCE = 8


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
        self._maintainers: WeakKeyDictionary[Shard, str] = WeakKeyDictionary()  # registered writers
        self._retained: set[Shard] = set()  # whose policy was set here: tended without any handle
        self._resting: WeakKeyDictionary[Shard, tuple[float, float]] = WeakKeyDictionary()
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
        last, since = next(reversed(state.batches)), state.since
        for attempt in range(FORCED_MAX):
            try:
                async with self._maintaining(shard) as registration:
                    await compact_all(shard, registration, last, since)
                return
            except BatchExpired:  # a registration that was lost on the way: with another one it goes on
                if attempt == FORCED_MAX - 1:
                    raise

    def keep(self, shard: Shard, *, retained: bool) -> None:
        """Tend a shard, whose policy was set here, also while no handle is open."""
        (self._retained.add if retained else self._retained.discard)(shard)
        self.tend(shard)

    async def force_gc(self, shard: Shard) -> Collected:
        """Write a rollup of now, and collect what nobody needs any more."""
        if (state := await shard.register.refresh()) is not None and not state.finalized:
            await self._roll_up(shard)
        return await collect(shard)

    async def aclose(self) -> None:
        """End the registrations, and with them the claims of what was cut off."""
        for task in [*self._compacting.values(), *([self._idle] if self._idle else [])]:
            task.cancel()
        jobs = [partial(self._release, shard, writer) for shard, writer in self._maintainers.items()]
        await run_bounded(LOOKS_AT_ONCE, jobs)

    async def _release(self, shard: Shard, writer: str) -> None:
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await Registration.of_another(shard, writer).expire()
        except (Error, TimeoutError) as error:
            log.warning("a registration is left to its lease: %s", error)

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
        if not settings.background_upkeep:
            return
        spine_batches = sum(len(level.batches) for level in state.levels.values())
        if len(state.batches) - spine_batches >= settings.compaction_inputs_min - 1:
            self._begin_compacting(shard, settings.compaction_inputs_min)

    async def _upkeep(self, shard: Shard) -> None:
        await self._roll_up(shard)
        if self._stack.settings.background_upkeep:
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
        """Do what the spine asks for, until nothing is left or somebody else does it. After a failure it
        rests, longer each time."""
        clock = self._stack.runtime.monotonic
        async with self._compactions:
            if shard.state.finalized or plan(shard.state, inputs_min) is None:
                return
            begin, pause_s = self._resting.get(shard, (0.0, REST_MIN_S))
            if clock() < begin:
                return
            self._resting[shard] = clock() + pause_s, min(2 * pause_s, REST_MAX_S)
            async with self._maintaining(shard) as registration:
                while (spec := plan(shard.state, inputs_min)) is not None:
                    if not await compact(shard, spec, registration):
                        return
            del self._resting[shard]

    @asynccontextmanager
    async def _maintaining(self, shard: Shard) -> AsyncIterator[Registration]:
        """A registration to work under. One that something failed under ends: with it end its claims."""
        writer = self._maintainers.get(shard)
        if writer is None or writer not in shard.state.writers:
            registration = await Registration.fresh(shard)
            self._maintainers[shard] = registration.writer
        else:
            registration = Registration.of_another(shard, writer)
        registration.hold()
        try:
            yield registration
        except BaseException:
            self._maintainers.pop(shard, None)
            self._stack.supervisor.spawn(registration.expire(), "end a registration with its claims")
            raise
        finally:
            registration.release()

    async def _look_at_idle_shards(self) -> None:
        seen: WeakKeyDictionary[Shard, int] = WeakKeyDictionary()
        while True:
            await self._stack.runtime.sleep(self._pause_s())
            await run_bounded(LOOKS_AT_ONCE, [partial(self._look, shard, seen) for shard in self._tended])

    async def _look(self, shard: Shard, seen: WeakKeyDictionary[Shard, int]) -> None:
        state = shard.register.state
        if state is None or state.finalized:
            return
        if not state.retention and not self._stack.settings.background_upkeep:
            return  # nothing to do: not worth a request
        try:
            state = await shard.open()
        except Error as error:
            log.warning("an idle shard could not be looked at: %s", error)
            return
        if state.retention:
            self._begin_retention(shard)
        if not self._stack.settings.background_upkeep:
            return
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
