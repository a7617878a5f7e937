"""Decides when the maintenance of a client's shards runs, and runs it.

After each commit of this process, `due.py` says from the state alone which work the shard owes. Each task
does one kind of work for one shard and ends. Work that failed, with whatever exception, is reported and backs
off (`backoff.py`); a later commit that owes the same tries again. Idle shards are looked at every
`settings.compaction_idle_s`: first the rest of their merges is done, then the garbage of these is collected.
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
from aiopersist.maintenance.due import (
    Weights,
    commits_between,
    due,
    rollup_is_late,
    rollup_is_near,
)
from aiopersist.maintenance.shard import LOOK, SINCE, ShardMaintenance
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import ANY
from aiopersist.state.model import COLLECTION, State
from aiopersist.state.retention import MARKS_PER_KEEP

PAUSE_MIN_S = 0.05  # between two looks
PAUSE_MAX_S = 1.0  # so that a new policy is seen
LOOKS_AT_ONCE = 8
GATHER = 0.25  # of the time between looks: a shard due within it is looked at together with those due now
COMPACTIONS = ("compact little of", "compact")  # the small ones, and the large ones
SMALL_AT_ONCE = 4  # as many as there are worker threads


class CompactionLimits(NamedTuple):
    """How many compactions of a client run at once: large ones, which take the memory of a compaction, and
    small ones."""

    large: asyncio.Semaphore
    small: asyncio.Semaphore


class Maintenance:
    """The maintenance of the shards of one client. `background=False`: only on demand."""

    def __init__(self, stack: Stack, *, background: bool) -> None:
        self._stack = stack
        self._background = background
        self._shards: WeakValueDictionary[str, ShardTasks] = WeakValueDictionary()
        # Shards whose policy was set here: maintained also while no handle is open.
        self._retained: dict[str, ShardTasks] = {}
        self._limits = CompactionLimits(
            asyncio.Semaphore(stack.settings.compactions_max), asyncio.Semaphore(SMALL_AT_ONCE)
        )
        self._looking: asyncio.Task[None] | None = None

    def add(self, shard: Shard) -> None:
        """Be ready to maintain `shard`, and do the maintenance that its commits owe in the background. The
        shard keeps its tasks alive."""
        tasks = self._shards[shard.id] = ShardTasks(shard, self._limits)
        shard.register.on_commit = tasks.begin_due if self._background else tasks.ignore
        if self._background and self._looking is None:
            self._looking = self._stack.supervisor.background(self._look_at_idle_shards(), "look at shards")

    def of(self, shard: Shard) -> ShardMaintenance:
        """Its maintenance, for work on demand."""
        return self._shards[shard.id].maintenance

    async def force_compaction(self, shard: Shard) -> None:
        """Make all batches one. What compacts the shard in the background ends before, and begins no more
        until then: both would read and write the same updates."""
        tasks = self._shards[shard.id]
        async with tasks.without_compactions():
            await tasks.maintenance.force_compaction()

    def keep(self, shard: Shard, *, retained: bool) -> None:
        """Maintain a shard whose policy was set here also while no handle is open; `retained=False`: no
        longer."""
        self._retained.pop(shard.id, None)
        if retained:
            tasks = self._retained[shard.id] = self._shards[shard.id]
            tasks.due_at = tasks.next_look()

    async def aclose(self) -> None:
        """End the registrations, and so the claims of the work that is cut off."""
        every = list(self._shards.values())
        if self._looking is not None:
            self._looking.cancel()
        for tasks in every:
            tasks.end()
        await run_bounded(LOOKS_AT_ONCE, [tasks.maintenance.registration.release for tasks in every])

    async def _look_at_idle_shards(self) -> None:
        backoff = Backoff(self._stack.supervisor.failures, "looking at shards")
        while True:  # while it sleeps no variable refers to a shard, which would keep that alive
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
        """Look at the shards that are due: one request for all of them, and the new versions."""
        due = self._due()
        failures = await self._stack.follower.look([t.shard.register for t in due if t.is_known])
        looks = [partial(tasks.look, failures.get(tasks.shard.register.key)) for tasks in due]
        await run_bounded(LOOKS_AT_ONCE, looks)

    def _due(self) -> list["ShardTasks"]:
        """The shards that are due; if there are any, also those that soon will be, so that one request serves
        all."""
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
        self._seen: object = None  # differs once anything was written since the last look
        self._ended = False
        self._weights = Weights()
        self._looked_at = 0  # the version
        self._pace = 0  # commits from that version on that no look follows, while each adds to:
        self._inline_bytes = 0
        self._forced = 0  # compactions on demand, which do all that is due
        self.due_at = self.next_look()

    @property
    def running(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks.values() if not task.done()]

    def begin_due(self, state: State) -> None:
        """Begin the work that is due after a commit of this process."""
        is_small, self._inline_bytes = state.inline_bytes > self._inline_bytes, state.inline_bytes
        behind, settings = state.seqno - self._looked_at, self.shard.stack.settings
        if not is_small:
            self._pace = commits_between(state, settings)
        if 0 < behind < self._pace:
            return  # the look at idle shards finds what the last commits owe
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
        """No compaction of the background runs within."""
        self._forced += 1
        try:
            running = [task for what in COMPACTIONS if (task := self._tasks.get(what)) is not None]
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
            yield
        finally:
            self._forced -= 1

    @property
    def is_known(self) -> bool:
        """Whether there is a state to bring up to date."""
        state = self.shard.register.state
        return state is not None and not state.finalized

    @property
    def may_look(self) -> bool:
        """Whether no look has failed lately."""
        return LOOK not in self.maintenance.backoffs

    async def look(self, failure: Exception | None) -> None:
        """Look at a shard whose state was just brought up to date, unless that ended in `failure`. Begins
        due work if nothing was written since the last look. Raises nothing, so that the other shards are
        looked at."""
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
            for large in (False, True):  # side by side: small ones must not wait for large ones
                self._compact(ANY, large=large, claims_all=True)
        elif self.maintenance.owes_collection:
            self._begin_collecting()

    def next_look(self) -> float:
        """When it is looked at again: soon enough for a policy by age."""
        stack, state = self.shard.stack, self.shard.register.state
        kept = [] if state is None else [p.seconds for p in state.retention.values() if p.seconds is not None]
        looks = (max(seconds / MARKS_PER_KEEP, PAUSE_MIN_S) for seconds in kept)
        return stack.runtime.monotonic() + min([stack.settings.compaction_idle_s, *looks])

    def _begin(self, what: str, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        task = self._tasks.get(what)
        if not self._ended and (task is None or task.done()):
            supervisor = self.shard.stack.supervisor
            self._tasks[what] = supervisor.background(work(), f"{what} {self.shard.label}")

    def _move_since(self) -> None:
        if SINCE not in self.maintenance.backoffs:
            self._begin("move since of", partial(self.maintenance.move_since, exact=False))

    def _compact(self, inputs_min: float, *, large: bool, claims_all: bool = False) -> None:
        """Begin the large compactions, or the small ones."""
        if self._forced:
            return
        what, limit = COMPACTIONS[large], self._limits.large if large else self._limits.small
        work = partial(self.maintenance.compact, inputs_min, large=large, claims_all=claims_all)
        self._begin(what, partial(self._compact_then_collect, limit, work))

    async def _compact_then_collect(
        self, limit: asyncio.Semaphore, compact: Callable[[], Coroutine[Any, Any, int]]
    ) -> None:
        """Compact, and begin to collect if that leaves much garbage, or the next rollup is near: it is small
        now."""
        async with limit:
            done = await compact()
        if not done:
            return
        state = self.shard.state
        has_much = self.maintenance.has_replaced_much and can_collect(state)
        if has_much or rollup_is_near(state, self.shard.stack.settings):
            self._begin_collecting()

    def _will_collect(self, state: State) -> bool:
        """Whether a small compaction runs, after which the rollup that is due will be smaller. Not for long:
        it may fail."""
        task = self._tasks.get(COMPACTIONS[0])
        return task is not None and not task.done() and not rollup_is_late(state, self.shard.stack.settings)

    def _begin_collecting(self) -> None:
        if COLLECTION not in self.maintenance.backoffs:
            self._begin("collect", self.maintenance.collect)
