"""Decides when the upkeep of a client's shards runs, and runs it.

Each commit of this process is looked at, without any I/O: what does the shard owe (`due.py`)? Each task
does one kind of thing for one shard and ends; a failure is logged, and a later commit that owes the same
tries again. Shards that nobody appends to are looked at every `settings.compaction_idle_s`: what is left
of their merges is done then, and then what that leaves is collected.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from aiopersist.errors import Error, ShardFinalized
from aiopersist.gc.collect import can_collect
from aiopersist.maintenance.due import all_inputs, due, has_long_tail, inputs_wanted
from aiopersist.maintenance.shard import ShardUpkeep
from aiopersist.resource import run_bounded
from aiopersist.settings import Settings
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import plan
from aiopersist.state.model import COLLECTION, State
from aiopersist.state.retention import MARKS_PER_KEEP

log = logging.getLogger("aiopersist")

PAUSE_MIN_S = 0.05
LOOKS_AT_ONCE = 8
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
    """The upkeep of the shards of one client. `background=False`: only what it is asked for."""

    def __init__(self, stack: Stack, *, background: bool) -> None:
        self._stack = stack
        self._background = background
        self._tended: WeakValueDictionary[str, Tended] = WeakValueDictionary()
        self._retained: dict[str, Tended] = {}  # whose policy was set here: tended without any handle
        self._gates = Gates.of(stack.settings)
        self._looking: asyncio.Task[None] | None = None

    def tend(self, shard: Shard) -> None:
        """Be ready for the upkeep of `shard`, which keeps it alive, and do in the background what its commits
        owe."""
        tended = self._tended[shard.id] = Tended(shard, self._gates)
        shard.register.on_commit = tended.owed if self._background else tended.ignored
        if self._background and self._looking is None:
            self._looking = self._stack.supervisor.background(self._look_at_idle_shards(), "look at shards")

    def of(self, shard: Shard) -> ShardUpkeep:
        """Its upkeep, to be asked for."""
        return self._tended[shard.id].upkeep

    def keep(self, shard: Shard, *, retained: bool) -> None:
        """Tend a shard, whose policy was set here, also while no handle is open; or no longer."""
        self._retained.pop(shard.id, None)
        if retained:
            self._retained[shard.id] = self._tended[shard.id]

    async def aclose(self) -> None:
        """End the registrations, and with them the claims of what was cut off."""
        every = list(self._tended.values())
        for task in [t for tended in every for t in tended.running] + [self._looking] * bool(self._looking):
            assert task is not None
            task.cancel()
        await run_bounded(LOOKS_AT_ONCE, [tended.upkeep.release for tended in every])

    async def _look_at_idle_shards(self) -> None:
        while True:
            await self._stack.runtime.sleep(self._pause_s())
            await run_bounded(LOOKS_AT_ONCE, [tended.look for tended in list(self._tended.values())])

    def _pause_s(self) -> float:
        """Between two looks: often enough for what is kept the shortest."""
        states = [state for t in self._tended.values() if (state := t.shard.register.state) is not None]
        kept = [p.seconds for state in states for p in state.retention.values() if p.seconds is not None]
        looks = [max(seconds / MARKS_PER_KEEP, PAUSE_MIN_S) for seconds in kept]
        return min([self._stack.settings.compaction_idle_s, *looks])


class Tended:
    """A shard, its upkeep, and the tasks that run for it: of each kind one at a time."""

    def __init__(self, shard: Shard, gates: Gates) -> None:
        self.shard = shard
        self.upkeep = ShardUpkeep(shard)
        self._gates = gates
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._seen = -1  # the version at the last look

    @property
    def running(self) -> list[asyncio.Task[None]]:
        return [task for task in self._tasks.values() if not task.done()]

    def owed(self, state: State) -> None:
        """Begin what is due after a commit of this process."""
        settings = self.shard.stack.settings
        owes = due(state, settings)
        if owes.since:
            self._begin("move since of", partial(self.upkeep.move_since, exact=False))
        if owes.collection:
            self._begin_collecting()
        if owes.compaction:
            self._compact(inputs_wanted)

    def ignored(self, state: State) -> None:
        """Somebody else tends it."""

    async def look(self) -> None:
        """At a shard that may be idle; one request. Begins what is due if nothing happened since the last
        look."""
        known = self.shard.register.state
        if known is None or known.finalized:
            return
        try:
            state = await self.shard.open()
        except ShardFinalized:
            return
        except Error as error:
            log.warning("a shard could not be looked at: %s", error)
            return
        idle, self._seen = self._seen == state.seqno, state.seqno
        if state.retention:
            self._begin("move since of", partial(self.upkeep.move_since, exact=False))
        if not idle:
            return
        collectable = can_collect(state) or has_long_tail(state, self.shard.stack.settings)
        if plan(state, 2, await self.shard.stack.consensus.now()) is not None:
            self._compact(all_inputs, claims_all=True)
        elif collectable:
            self._begin_collecting()

    def _begin(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._tasks.get(what)
        if task is None or task.done():
            supervisor = self.shard.stack.supervisor
            self._tasks[what] = supervisor.background(work(), f"{what} {self.shard.id}")

    def _compact(self, wanted: Callable[[State, Settings], int], *, claims_all: bool = False) -> None:
        """What is much goes beside what is little, which must not wait for it."""
        gates = (("compact little of", self._gates.little, False), ("compact", self._gates.much, True))
        for what, gate, much in gates:
            work = partial(self.upkeep.compact, wanted, much=much, claims_all=claims_all)
            self._begin(what, partial(self._compacting, gate, work))

    async def _compacting(
        self, gate: asyncio.Semaphore, compact: Callable[[], Coroutine[Any, Any, int]]
    ) -> None:
        """Compact, and begin to collect if that leaves much behind."""
        async with gate:
            done = await compact()
        if done and self.upkeep.has_replaced_much and can_collect(self.shard.state):
            self._begin_collecting()

    def _begin_collecting(self) -> None:
        if COLLECTION not in self.upkeep.rests:
            self._begin("collect", self._collect)

    async def _collect(self) -> None:
        await self.upkeep.collect()
