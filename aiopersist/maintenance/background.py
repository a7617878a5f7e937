"""Decides when the maintenance of a client's shards runs, and runs it.

Each commit of this process is looked at, without any I/O: what does the shard owe (`due.py`)? Each task
does one kind of thing for one shard and ends. What failed, with whatever exception, is told and waits
(`backoff.py`); a later commit that owes the same tries again. Idle shards are looked at every
`settings.compaction_idle_s`: what is left of their merges is done then, and then what that leaves is
collected.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from aiopersist.data.lazy import import_polars
from aiopersist.errors import ShardFinalized
from aiopersist.failures import Backoff
from aiopersist.gc.collect import can_collect
from aiopersist.maintenance.due import all_inputs, due, inputs_wanted
from aiopersist.maintenance.shard import LOOK, SINCE, ShardMaintenance
from aiopersist.resource import run_bounded
from aiopersist.settings import Settings
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.model import COLLECTION, State
from aiopersist.state.retention import MARKS_PER_KEEP

PAUSE_MIN_S = 0.05  # between two looks
PAUSE_MAX_S = 1.0  # so that a policy that is new is seen
LOOKS_AT_ONCE = 8
GATHER = 0.25  # of the time between looks: what is due within it is looked at with what is due
LITTLE_AT_ONCE = 4  # as many as there are worker threads


class Gates(NamedTuple):
    """How many compactions run at once, of all shards: of those that take the memory of a compaction, and
    of little ones."""

    much: asyncio.Semaphore
    little: asyncio.Semaphore

    @classmethod
    def of(cls, settings: Settings) -> "Gates":
        return cls(asyncio.Semaphore(settings.compactions_max), asyncio.Semaphore(LITTLE_AT_ONCE))


class Maintenance:
    """The maintenance of the shards of one client. `background=False`: only what it is asked for."""

    def __init__(self, stack: Stack, *, background: bool) -> None:
        self._stack = stack
        self._background = background
        self._shards: WeakValueDictionary[str, MaintainedShard] = WeakValueDictionary()
        # Shards whose policy was set here: maintained without any handle.
        self._retained: dict[str, MaintainedShard] = {}
        self._gates = Gates.of(stack.settings)
        self._looking: asyncio.Task[None] | None = None
        self._is_loading = False

    def add(self, shard: Shard) -> None:
        """Be ready to maintain `shard`, which keeps this alive, and do in the background what its commits
        owe."""
        maintained = self._shards[shard.id] = MaintainedShard(shard, self._gates)
        shard.register.on_commit = maintained.owed if self._background else maintained.ignored
        if self._background and self._looking is None:
            self._looking = self._stack.supervisor.background(self._look_at_idle_shards(), "look at shards")

    def expect_writes(self) -> None:
        """There will be something to compact: load what that needs, once, on a thread."""
        if self._background and not self._is_loading:
            self._is_loading = True
            self._stack.supervisor.background(self._stack.compute(import_polars), "import polars")

    def of(self, shard: Shard) -> ShardMaintenance:
        """Its maintenance, to be asked for."""
        return self._shards[shard.id].steps

    def keep(self, shard: Shard, *, retained: bool) -> None:
        """Maintain a shard, whose policy was set here, also while no handle is open; or no longer."""
        self._retained.pop(shard.id, None)
        if retained:
            maintained = self._retained[shard.id] = self._shards[shard.id]
            maintained.due_at = maintained.next_look()

    async def aclose(self) -> None:
        """End the registrations, and with them the claims of what was cut off."""
        every = list(self._shards.values())
        if self._looking is not None:
            self._looking.cancel()
        for maintained in every:
            maintained.end()
        await run_bounded(LOOKS_AT_ONCE, [maintained.steps.registration.release for maintained in every])

    async def _look_at_idle_shards(self) -> None:
        backoff = Backoff(self._stack.supervisor.failures, "looking at shards")
        while True:  # no shard is named here while it sleeps, which would keep it alive
            await self._stack.runtime.sleep(self._pause_s())
            try:
                await self._look_at_due()
            except Exception as error:
                await backoff.failed(error)
            else:
                backoff.succeeded()

    def _pause_s(self) -> float:
        now = self._stack.runtime.monotonic()
        soonest = min((maintained.due_at - now for maintained in self._shards.values()), default=PAUSE_MAX_S)
        return max(min(soonest, PAUSE_MAX_S), PAUSE_MIN_S)

    async def _look_at_due(self) -> None:
        """One request for all of them, and what is new."""
        due = self._due()
        failures = await self._stack.follower.look([t.shard.register for t in due if t.is_known])
        looks = [partial(maintained.look, failures.get(maintained.shard.register.key)) for maintained in due]
        await run_bounded(LOOKS_AT_ONCE, looks)

    def _due(self) -> list["MaintainedShard"]:
        """What is due, and if anything is what soon will be: so that looks come together."""
        now = self._stack.runtime.monotonic()
        if not any(maintained.due_at <= now for maintained in self._shards.values()):
            return []
        soon = now + GATHER * self._stack.settings.compaction_idle_s
        return [
            maintained
            for maintained in self._shards.values()
            if maintained.due_at <= soon and maintained.may_look
        ]


class MaintainedShard:
    """A shard, its maintenance, and the tasks that run for it: of each kind one at a time."""

    def __init__(self, shard: Shard, gates: Gates) -> None:
        self.shard = shard
        self.steps = ShardMaintenance(shard)
        self._gates = gates
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._seen: object = None  # what tells whether anything was written since the last look
        self._ended = False
        self.due_at = self.next_look()

    @property
    def running(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks.values() if not task.done()]

    def owed(self, state: State) -> None:
        """Begin what is due after a commit of this process."""
        settings = self.shard.stack.settings
        owes = due(state, settings)
        if owes.since:
            self._move_since()
        if owes.collection:
            self._begin_collecting()
        if owes.compaction:
            self._compact(inputs_wanted)

    def ignored(self, state: State) -> None:
        """Somebody else maintains it."""

    def end(self) -> None:
        """Cancel what runs, and begin nothing more."""
        self._ended = True
        for task in self.running:
            task.cancel()

    @property
    def is_known(self) -> bool:
        """Whether there is a state to bring up to date."""
        state = self.shard.register.state
        return state is not None and not state.finalized

    @property
    def may_look(self) -> bool:
        """Whether the last look did not fail, or that is long enough ago."""
        return LOOK not in self.steps.backoffs

    async def look(self, failure: Exception | None) -> None:
        """At a shard that may be idle, whose state was just brought up to date, unless that was a `failure`.
        Begins what is due if nothing was written since the last look. A shard that cannot be looked at
        keeps nobody from the others."""
        backoffs = self.steps.backoffs
        try:
            with backoffs.trying(LOOK) as attempt:
                if failure is not None:
                    raise failure
                if self.is_known:
                    await self._look(self.shard.state)
                attempt.done = True
        except ShardFinalized:
            pass
        except Exception as error:
            self.shard.stack.supervisor.failures.tell(f"looking at {self.shard.label}", error)
        finally:
            self.due_at = max(self.next_look(), backoffs.until(LOOK))

    async def _look(self, state: State) -> None:
        written = (state.upper, state.since, state.fuel, tuple(state.batches))
        idle, self._seen = self._seen == written, written
        if state.retention:
            self._move_since()
        if not idle:
            return
        if await self.steps.has_work():
            self._compact(all_inputs, claims_all=True)
        elif self.steps.owes_collection:
            self._begin_collecting()

    def next_look(self) -> float:
        """When it is looked at again: soon enough for what is kept by age."""
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
        if SINCE not in self.steps.backoffs:
            self._begin("move since of", partial(self.steps.move_since, exact=False))

    def _compact(self, wanted: Callable[[State, Settings], int], *, claims_all: bool = False) -> None:
        """What is much goes beside what is little, which must not wait for it."""
        gates = (("compact little of", self._gates.little, False), ("compact", self._gates.much, True))
        for what, gate, much in gates:
            work = partial(self.steps.compact, wanted, much=much, claims_all=claims_all)
            self._begin(what, partial(self._compacting, gate, work))

    async def _compacting(
        self, gate: asyncio.Semaphore, compact: Callable[[], Coroutine[Any, Any, int]]
    ) -> None:
        """Compact, and begin to collect if that leaves much behind."""
        async with gate:
            done = await compact()
        if done and self.steps.has_replaced_much and can_collect(self.shard.state):
            self._begin_collecting()

    def _begin_collecting(self) -> None:
        if COLLECTION not in self.steps.backoffs:
            self._begin("collect", self.steps.collect)
