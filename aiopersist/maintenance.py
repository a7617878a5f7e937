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
from aiopersist.shard.registration import Registration
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import plan
from aiopersist.state.model import State

log = logging.getLogger("aiopersist")


class Maintenance:
    """The upkeep of the shards of one client. `background=False`: only what it is asked for."""

    def __init__(self, stack: Stack, *, background: bool) -> None:
        self._stack = stack
        self._background = background
        self._writers: WeakKeyDictionary[Shard, str] = WeakKeyDictionary()
        self._not_before: WeakKeyDictionary[Shard, int] = WeakKeyDictionary()  # versions, after a failure
        self._running: WeakKeyDictionary[Shard, asyncio.Task[None]] = WeakKeyDictionary()
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
        state = await shard.open()
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
            await self._stack.runtime.sleep(self._stack.settings.compaction_idle_s)
            for shard in list(self._tended):
                state = shard.register.state
                if state is None or state.finalized:
                    continue
                try:
                    state = await shard.open()
                except Error as error:
                    log.warning("an idle shard could not be looked at: %s", error)
                    continue
                if seen.get(shard) == state.seqno and plan(state, 2) is not None:
                    self._begin_compacting(shard, 2)
                seen[shard] = state.seqno
