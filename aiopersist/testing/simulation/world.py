"""One world: its scenario is played to the end, and repeats exactly by its seed.

1. `simulate` makes the loop, the stores in memory and the network, all from the seed.
2. The scenario starts work on machines, crashes them, and checks what should hold.
3. At its end all machines crash, and what they left behind is taken down outside of the play: nothing of it
   reaches a store.
"""

import asyncio
import gc
import random  # noqa: TID251  # everything here comes from a seed
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from aiopersist.base.resource import Opening
from aiopersist.base.settings import Settings
from aiopersist.client.client import Client
from aiopersist.client.open import open as open_client
from aiopersist.data.lazy import import_all, import_arrow, import_polars, warm_up
from aiopersist.stash.memory import StashTables
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.table.open import FILTERS
from aiopersist.testing.simulation.between import Between
from aiopersist.testing.simulation.loop import SimulatedLoop, import_library, threads_inline
from aiopersist.testing.simulation.machine import Machine, SimulatedRuntime, Surroundings
from aiopersist.testing.simulation.network import BLOB, CONSENSUS, FAR, STORMY, Network, Weather
from aiopersist.testing.simulation.stash import copied

T = TypeVar("T")
Scenario = Callable[["World"], Awaitable[Any]]
WORLD_S = 30 * 86400.0  # a scenario that is not over by then never ends
_CUT_OFF = ((BLOB, CONSENSUS), (BLOB,), (CONSENSUS,))
TAKING_DOWN_MAX = 1000  # cancellations of one task


@dataclass(frozen=True)
class Played:
    """What happened in a world."""

    seed: int
    digest: str
    """Of every request, its time and its answer: two runs of a seed have the same."""
    seconds: float
    """Of the world's clock."""
    turns: int
    counts: Counter[str]
    """Requests, faults by kind, crashes, and what the scenario counted."""
    sizes: dict[str, int]
    """What `World.size` drew."""


@dataclass(frozen=True)
class Backup:
    """A copy of the stores of a world. `World.restore` puts it back."""

    blobs: dict[str, bytes]
    logs: dict[str, Any]
    stashes: dict[str, StashTables]


class WorldBlob(MemoryBlob):
    """The blobs of a world. Shards can be published there, though no other program reads them."""

    @property
    def uri(self) -> str:
        return "mem://world"


class World:
    """The argument of a scenario. All its stores, clocks and dice come from `seed`."""

    def __init__(self, seed: int, weather: Weather, sizes: Mapping[str, int], loop: SimulatedLoop) -> None:
        self.seed = seed
        self.weather = weather
        self.dice = random.Random(f"scenario {seed}")
        """For the scenario's own draws."""
        self.runtime = SimulatedRuntime(random.Random(f"stores {seed}"), "stores")
        between = Between(random.Random(f"between {seed}"), self.runtime)
        self.network = Network(random.Random(f"network {seed}"), weather, loop, between)
        self.blob = WorldBlob()
        self.consensus = MemoryConsensus(runtime=self.runtime)
        self.machines: dict[str, Machine] = {}
        self.sizes: dict[str, int] = {}
        self._sizes = dict(sizes)
        self._context = Context()
        self._around = Surroundings(self.network, self.blob, self.consensus, self._outside)
        self._loop = loop

    @property
    def counts(self) -> Counter[str]:
        """Count here what happens, to see that a scenario does what it should."""
        return self.network.counts

    @property
    def now_s(self) -> float:
        """Seconds since the world began."""
        return self._loop.time()

    def machine(self, name: str, distance: float | None = None) -> Machine:
        """The machine of that name. Its clock is up to 30 s wrong, and drifts. Its requests take `distance`
        times as long as usual; without one the weather decides."""
        if name not in self.machines:
            if distance is None:
                is_far = random.Random(f"distance {name} {self.seed}").random() < self.network.weather.far
                self.counts["far"] += is_far
                distance = FAR if is_far else 1
            dice = random.Random(f"machine {name} {self.seed}")
            self.machines[name] = Machine(self._around, name, dice, distance)
        return self.machines[name]

    def size(self, name: str, low: int, high: int) -> int:
        """Draw how many there are of something, `low` to `high`. `search` tries a world with fewer."""
        drawn = self.dice.randint(low, high)
        self.sizes[name] = max(low, min(high, self._sizes.get(name, drawn)))
        return self.sizes[name]

    def open(self, *, settings: Settings | None = None, maintenance: bool = False) -> Opening[Client]:
        """A client without faults, for checks."""
        return open_client(
            blob=self.blob,
            consensus=self.consensus,
            settings=settings or Settings(),
            maintenance=maintenance,
            runtime=self.runtime,
        )

    async def sleep(self, seconds: float) -> None:
        """Let time pass; no real time does."""
        await asyncio.sleep(seconds)  # noqa: TID251  # of the virtual clock

    async def heal(self) -> None:
        """From now on nothing fails, and all requests that were under way have landed."""
        self.network.weather = Weather(latency_s=self.weather.latency_s)
        self.network.full_until = 0.0
        for machine in self.machines.values():
            machine._line.cut_off_until = dict.fromkeys((BLOB, CONSENSUS), 0.0)
        await self.network.settle()

    def backup(self) -> "Backup":
        """A copy of both stores, and of the stashes, at this moment."""
        shared = self.consensus._shared
        return Backup(self.blob._shared.blobs.copy(), deepcopy(shared.logs), copied(shared.others))

    def restore(self, backup: "Backup") -> None:
        """Put the stores back to what they had at that moment. All machines crash, and no request that is
        under way happens any more: a client that goes on would find another history than the one it knows."""
        self.counts["restored"] += 1
        for machine in self.machines.values():
            machine.crash()
        self.network.drop_all()
        self.blob._shared.blobs = backup.blobs.copy()
        self.consensus._shared.logs = deepcopy(backup.logs)
        self.consensus._shared.others = copied(backup.stashes)

    def _outside(self, call: Callable[..., T], *args: Any) -> T:
        """Call on behalf of no machine."""
        return self._context.run(call, *args)

    # --- how it is played ------------------------------------------------------------------------

    async def _play(self, scenario: Scenario) -> None:
        """Play the scenario, with the troubles of the weather."""
        troubles = self._loop.create_task(self._troubles())
        try:
            async with asyncio.timeout(WORLD_S):
                await scenario(self)
        finally:
            troubles.cancel()

    async def _troubles(self) -> None:
        """Draw troubles each second, until the weather clears up."""
        dice = random.Random(f"troubles {self.seed}")
        while self.network.weather.full or self.network.weather.cut_off:
            await self.sleep(1.0)
            if self.network.happens("full"):
                self.network.full_until = self.now_s + dice.uniform(0, self.weather.slow_s)
            for machine in list(self.machines.values()):
                if self.network.happens("cut_off"):
                    machine.cut_off(dice.uniform(0, self.weather.slow_s), dice.choice(_CUT_OFF))

    async def _take_down(self) -> None:
        """End the tasks that machines left behind, which reach no store any more. Those of the scenario end
        first: they would start machines again."""
        lives, mine = [machine._life for machine in self.machines.values()], asyncio.current_task()
        owned = {task for life in (*lives, *self._around.ended) for task in life.tasks}
        await self._end(lambda: sorted(asyncio.all_tasks(self._loop) - owned - {mine}, key=hash))
        for machine in self.machines.values():
            machine._life.is_over = True
            self._around.ended.append(machine._life)
        await self.heal()
        for life in self._around.ended:
            life.is_over = False
            for handle in life.frozen:
                self._loop._ready.append(handle)
            life.frozen.clear()
        await self._end(lambda: [task for life in self._around.ended for task in life.tasks])

    async def _end(self, running: "Callable[[], list[asyncio.Task[Any]]]") -> None:
        """Cancel tasks until none is left, though one of them may begin others."""
        for _ in range(TAKING_DOWN_MAX):
            tasks = [task for task in running() if not task.done() and task not in self.network._under_way]
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.01)


def simulate(
    scenario: Scenario,
    seed: int,
    weather: Weather = STORMY,
    sizes: Mapping[str, int] | None = None,
) -> Played:
    """Play `scenario(world)` in the world of that seed, and return what happened. Raises the scenario's
    error, or that of a task that nobody awaited, with a note that names the seed. Waiting takes no time. The
    same seed, scenario and version of Python and of the library give the same world, step by step."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _simulated(scenario, seed, weather, sizes or {})
    with ThreadPoolExecutor(1) as thread:  # a loop runs here: this one needs a thread of its own
        return thread.submit(_simulated, scenario, seed, weather, sizes or {}).result()


def _simulated(scenario: Scenario, seed: int, weather: Weather, sizes: Mapping[str, int]) -> Played:
    import_arrow()  # else the first world would differ from all others
    import_polars()
    import_all([*FILTERS, "pyarrow.parquet"])
    import_library()
    warm_up()
    with _collecting_by_hand():
        return _within_its_loop(scenario, seed, weather, sizes)


def _within_its_loop(scenario: Scenario, seed: int, weather: Weather, sizes: Mapping[str, int]) -> Played:
    loop = SimulatedLoop(random.Random(f"loop {seed}"))
    asyncio.set_event_loop(loop)
    world = World(seed, weather, sizes, loop)
    try:
        with threads_inline(loop):
            try:
                loop.run_until_complete(world._play(scenario))
                gc.collect()  # a task says that nobody took its error when it goes
                if loop.unhandled:
                    raise loop.unhandled[0]
                return Played(
                    seed, world.network.digest, loop.time(), loop.turns, world.counts.copy(), world.sizes
                )
            finally:
                loop.begin_anew()  # a world that did not end within its turns is taken down, too
                loop.run_until_complete(world._take_down())
                loop.run_until_complete(loop.shutdown_asyncgens())
    except BaseException as error:
        error.add_note(f"seed {seed}, {weather}, sizes {world.sizes}")
        raise
    finally:
        asyncio.set_event_loop(None)
        loop.close()


@contextmanager
def _collecting_by_hand() -> Iterator[None]:
    """Garbage is collected at the same steps in all runs, by the loop (`loop.py`). It warns of no unclosed
    resource: a crashed machine closes nothing."""
    was_enabled, were_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()  # older objects are not looked at again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()  # this world
            if not were_frozen:  # objects that the application has frozen would thaw, too
                gc.unfreeze()
            if was_enabled:
                gc.enable()
