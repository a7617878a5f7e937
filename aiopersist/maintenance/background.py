"""Decides when the maintenance of a client's shards runs, and runs it.

After commits of this process, `due.py` decides from the state which work the shard needs. Each task does one
kind of work for one shard and ends. Failed work, with any exception, is reported and backs off
(`backoff.py`); a later commit tries again. Every `settings.compaction_idle_s` this looks at idle shards:
first it does their remaining merges, then it collects the garbage.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from aiopersist.base.errors import ShardFinalized
from aiopersist.base.failures import Backoff
from aiopersist.base.resource import run_bounded
from aiopersist.gc.collect import can_collect
from aiopersist.maintenance.due import Weights, commits_between, due, rollup_is_late, rollup_is_near
from aiopersist.maintenance.shard import LOOK, SINCE, ShardMaintenance
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import ANY
from aiopersist.state.model import COLLECTION, State
from aiopersist.state.retention import MARKS_PER_KEEP

PAUSE_MIN_S = 0.05  # between two looks
PAUSE_MAX_S = 1.0  # so that it sees a new policy
LOOKS_AT_ONCE = 8
GATHER = 0.25  # share of the time between looks: a shard due within it joins those due now
COMPACTIONS = ("compact little of", "compact")  # small and large ones
SMALL_AT_ONCE = 4  # as many as there are worker threads


class CompactionLimits(NamedTuple):
    """How many compactions run at once: large ones, which need the memory of a compaction, and small ones."""

    large: asyncio.Semaphore
    small: asyncio.Semaphore


class Maintenance:
    """The maintenance of the shards of one client. `background=False`: only on demand."""

    def __init__(self, stack: Stack, *, background: bool) -> None:
        self._stack = stack
        self._background = background
        self._shards: WeakValueDictionary[str, ShardTasks] = WeakValueDictionary()
        # Shards whose policy was set here: maintained even while no handle is open.
        self._retained: dict[str, ShardTasks] = {}
        self._limits = CompactionLimits(
            asyncio.Semaphore(stack.settings.compactions_max), asyncio.Semaphore(SMALL_AT_ONCE)
        )
        self._looking: asyncio.Task[None] | None = None

    def add(self, shard: Shard) -> None:
        """Be ready to maintain `shard`, in the background after commits. It keeps its tasks alive."""
        tasks = self._shards[shard.id] = ShardTasks(shard, self._limits)
        shard.register.on_commit = tasks.begin_due if self._background else tasks.ignore
        if self._background and self._looking is None:
            self._looking = self._stack.supervisor.background(self._look_at_idle_shards(), "look at shards")

    def of(self, shard: Shard) -> ShardMaintenance:
        """The maintenance of `shard`, for work on demand."""
        return self._shards[shard.id].maintenance

    async def force_compaction(self, shard: Shard) -> None:
        """Compact all batches to one. Stops compactions of the shard in the background until then: they would
        read and write the same updates."""
        tasks = self._shards[shard.id]
        async with tasks.without_compactions():
            await tasks.maintenance.force_compaction()

    def set_retained(self, shard: Shard, *, retained: bool) -> None:
        """Whether to maintain a shard, whose policy was set here, even while no handle is open."""
        self._retained.pop(shard.id, None)
        if retained:
            tasks = self._retained[shard.id] = self._shards[shard.id]
            tasks.due_at = tasks.next_look()

    async def aclose(self) -> None:
        """End the registrations, and with them the claims of cancelled work."""
        every = list(self._shards.values())
        if self._looking is not None:
            self._looking.cancel()
        for tasks in every:
            tasks.end()
        await run_bounded(LOOKS_AT_ONCE, [tasks.maintenance.registration.release for tasks in every])

    async def _look_at_idle_shards(self) -> None:
        backoff = Backoff(self._stack.supervisor.failures, "looking at shards")
        while True:  # no variable may refer to a shard during the sleep: it would keep that alive
            await self._stack.runtime.sleep(self._pause_s())
            try:
                await self._look_at_due()
            except Exception as error:
                await backoff.failed(error)
            else:
                backoff.succeeded()

    def _pause_s(self) -> float:
        now = self._stack.runtime.monotonic()
        soonest = min((tasks.due_at - now for tasks in self._shards.values()), default=PAUSE_MAX_S)
        return max(min(soonest, PAUSE_MAX_S), PAUSE_MIN_S)

    async def _look_at_due(self) -> None:
        """Look at the shards that are due: one request for all, and the new versions."""
        tasks_due = self._due()
        failures = await self._stack.follower.look([t.shard.register for t in tasks_due if t.is_known])
        looks = [partial(tasks.look, failures.get(tasks.shard.register.key)) for tasks in tasks_due]
        await run_bounded(LOOKS_AT_ONCE, looks)

    def _due(self) -> list["ShardTasks"]:
        """The shards that are due, and, if there are any, those that soon will be: one request serves all."""
        now = self._stack.runtime.monotonic()
        if not any(tasks.due_at <= now for tasks in self._shards.values()):
            return []
        soon = now + GATHER * self._stack.settings.compaction_idle_s
        return [tasks for tasks in self._shards.values() if tasks.due_at <= soon and tasks.may_look]


class ShardTasks:
    """A shard, its maintenance, and the tasks that do it: one of each kind at a time."""

    def __init__(self, shard: Shard, limits: CompactionLimits) -> None:
        self.shard = shard
        self.maintenance = ShardMaintenance(shard)
        self._limits = limits
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._seen: object = None  # of the state at the last look: changes with the data
        self._ended = False
        self._weights = Weights()
        self._looked_at = 0  # version of the last call of `due`
        self._pace = 0  # commits after it without another call, while each adds inline bytes
        self._inline_bytes = 0
        self._forced = 0  # running compactions on demand
        self.due_at = self.next_look()

    @property
    def running(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks.values() if not task.done()]

    def begin_due(self, state: State) -> None:
        """Begin the due work after a commit of this process."""
        grew, self._inline_bytes = state.inline_bytes > self._inline_bytes, state.inline_bytes
        behind, settings = state.seqno - self._looked_at, self.shard.stack.settings
        if not grew:
            self._pace = commits_between(state, settings)
        if 0 < behind < self._pace:
            return  # the look at idle shards does the work of the last commits
        self._looked_at, self._pace = state.seqno, commits_between(state, settings)
        owes = due(state, settings, self._weights)
        if owes.since:
            self._move_since()
        if owes.little:
            self._compact(settings.compaction_inputs_min, large=False)
        if owes.collection and not self._will_collect(state):
            self._begin_collecting()
        if owes.large:
            self._compact(settings.compaction_inputs_min, large=True)

    def ignore(self, state: State) -> None:
        """Begin nothing: the background is off."""

    def end(self) -> None:
        """Cancel the tasks, and begin no more."""
        self._ended = True
        for task in self.running:
            task.cancel()

    @asynccontextmanager
    async def without_compactions(self) -> AsyncIterator[None]:
        """A context in which no background compaction runs."""
        self._forced += 1
        try:
            running = [task for job in COMPACTIONS if (task := self._tasks.get(job)) is not None]
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
            yield
        finally:
            self._forced -= 1

    @property
    def is_known(self) -> bool:
        """Whether this process has a state of the shard."""
        state = self.shard.register.state
        return state is not None and not state.finalized

    @property
    def may_look(self) -> bool:
        """Whether no look has failed lately."""
        return LOOK not in self.maintenance.backoffs

    async def look(self, failure: Exception | None) -> None:
        """Look at a shard with a fresh state, unless the read ended in `failure`. Begins due work if nothing
        was written since the last look. Raises nothing, so that the other shards get their look."""
        backoffs = self.maintenance.backoffs
        try:
            with backoffs.trying(LOOK) as trial:
                if failure is not None:
                    raise failure
                if self.is_known:
                    await self._look(self.shard.state)
                trial.done = True
        except ShardFinalized:
            pass
        except Exception as error:
            self.shard.stack.supervisor.failures.report(f"looking at {self.shard.label}", error)
        finally:
            self.due_at = max(self.next_look(), backoffs.until(LOOK))

    async def _look(self, state: State) -> None:
        written = (state.upper, state.since, state.fuel, tuple(state.batches))
        idle, self._seen = self._seen == written, written
        if state.retention:
            self._move_since()
        if not idle:
            return
        if await self.maintenance.has_work():
            for large in (False, True):  # in parallel: small ones must not wait for large ones
                self._compact(ANY, large=large, claims_all=True)
        elif self.maintenance.owes_collection:
            self._begin_collecting()

    def next_look(self) -> float:
        """The time of the next look: soon enough for a policy by age."""
        stack, state = self.shard.stack, self.shard.register.state
        kept = [] if state is None else [p.seconds for p in state.retention.values() if p.seconds is not None]
        looks = (max(seconds / MARKS_PER_KEEP, PAUSE_MIN_S) for seconds in kept)
        return stack.runtime.monotonic() + min([stack.settings.compaction_idle_s, *looks])

    def _begin(self, job: str, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        task = self._tasks.get(job)
        if not self._ended and (task is None or task.done()):
            supervisor = self.shard.stack.supervisor
            self._tasks[job] = supervisor.background(work(), f"{job} {self.shard.label}")

    def _move_since(self) -> None:
        if SINCE not in self.maintenance.backoffs:
            self._begin("move since of", partial(self.maintenance.move_since, exact=False))

    def _compact(self, inputs_min: float, *, large: bool, claims_all: bool = False) -> None:
        """Begin the large compactions, or the small ones."""
        if self._forced:
            return
        limit = self._limits.large if large else self._limits.small
        work = partial(self.maintenance.compact, inputs_min, large=large, claims_all=claims_all)
        self._begin(COMPACTIONS[large], partial(self._compact_then_collect, limit, work))

    async def _compact_then_collect(
        self, limit: asyncio.Semaphore, compact: Callable[[], Coroutine[Any, Any, int]]
    ) -> None:
        """Compact; begin a collection if there is much garbage, or if a rollup is near: now it is small."""
        async with limit:
            done = await compact()
        if not done:
            return
        state = self.shard.state
        has_much = self.maintenance.has_replaced_much and can_collect(state)
        if has_much or rollup_is_near(state, self.shard.stack.settings):
            self._begin_collecting()

    def _will_collect(self, state: State) -> bool:
        """Whether a small compaction runs, which makes the rollup smaller, and the rollup is not late."""
        task = self._tasks.get(COMPACTIONS[0])
        return task is not None and not task.done() and not rollup_is_late(state, self.shard.stack.settings)

    def _begin_collecting(self) -> None:
        if COLLECTION not in self.maintenance.backoffs:
            self._begin("collect", self.maintenance.collect)
