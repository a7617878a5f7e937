"""What the actors of a game share: the shard, its schema, the processes they live in, and what was seen."""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiopersist as ap
from aiopersist.testing.faults import Faults
from tests.simulation.verdict import Seen
from tests.simulation.world import World, kill
from tests.support.shards import RATES

KEYS = ["", "a", "b", "ab", "é", "zz" * 40]
Act = Callable[..., Awaitable[None]]
ENDLESS_S = 1e9  # a lease that no jump of the clock ends


class Game:
    """One shard, its actors, and what they saw."""

    def __init__(self, seed: int, blob: str, consensus: str) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.product = self.rng.random() < 0.3
        self.definite = not self.product and self.rng.random() < 0.4  # all writers are replicas of one
        self.schema = ap.Schema(key=str, val=int, time=2 if self.product else 1)
        self.name = f"game {uuid.uuid4()}"
        self.faults = Faults(seed, RATES if self.rng.random() < 0.7 else {})
        self.faults.losing_hints = self.rng.random() < 0.2
        self.world = World(self.faults, blob, consensus)
        self.deadly = self.rng.random() < 0.4
        self.seen = Seen()
        self.counts: Counter[str] = Counter()
        self.writing = True

    @property
    def least(self) -> ap.Antichain:
        return ap.Antichain((0, 0) if self.product else 0)

    def rows(self, rng: random.Random, times: list[Any]) -> list[Any]:
        """Updates at some of `times`; in a game of replicas the same for all writers."""
        if self.definite:
            return [row for time in times for row in self.definite_rows(time)]
        many = rng.choice([0, 1, 2, 5, 40])
        return [
            (rng.choice(KEYS), rng.randrange(3), rng.choice(times), rng.choice([-2, -1, 1, 1, 3]))
            for _ in range(many if times else 0)
        ]

    def definite_rows(self, time: Any) -> list[Any]:
        rng = random.Random(f"{self.seed} {time}")
        return [
            (rng.choice(KEYS), rng.randrange(3), time, rng.choice([-1, 1, 2]))
            for _ in range(rng.randrange(4))
        ]

    def after(self, rng: random.Random, upper: ap.Antichain) -> ap.Antichain:
        """A frontier at or beyond `upper`, not far."""
        if not self.product:
            (time,) = upper.elements
            return ap.Antichain(time + rng.choice([0, 1, 1, 2, 5]))  # type: ignore[operator]
        moved = [
            tuple(c + rng.choice([0, 1, 2]) for c in rng.choice(upper.elements))  # type: ignore[union-attr]
            for _ in range(rng.choice([1, 2]))
        ]
        return upper.join(ap.Antichain(*moved))

    def within(self, lower: ap.Antichain, upper: ap.Antichain) -> list[Any]:
        """The times in `[lower, upper)`, a few of them where they are without end."""
        if not self.product:
            return list(range(lower.elements[0], upper.elements[0]))  # type: ignore[arg-type]
        top = 2 + max(c for e in (*lower.elements, *upper.elements) for c in e)  # type: ignore[union-attr]
        grid = [(a, b) for a in range(top) for b in range(top)]
        return [t for t in grid if lower.less_equal(t) and not upper.less_equal(t)]

    def settings(self, rng: random.Random) -> ap.Settings:
        return ap.Settings(
            rollup_every=rng.choice([3, 3, 20]),
            watch_timeout_s=0.02,
            blob_target_size=rng.choice([10, 200, 2**20]),
            row_group_bytes=rng.choice([16, 100, 2**20]),
            inline_writes_single_max_bytes=rng.choice([0, 60, 300, 16384]),
            inline_writes_total_max_bytes=rng.choice([400, 2000, 2**20]),
            blob_cache_bytes=rng.choice([0, 2**20]),
            compaction_inputs_min=rng.choice([2, 2, 8]),
            compaction_idle_s=rng.choice([0.02, 0.1, 10]),
            compaction_memory_bytes=rng.choice([1, 4000, 2**28]),
            compactions_max=rng.choice([1, 2]),
        )

    @asynccontextmanager
    async def client(self, rng: random.Random) -> AsyncIterator[ap.Client]:
        opening = self.world.open(self.world.line(), self.settings(rng), maintenance=rng.random() < 0.8)
        async with opening as client:
            yield client

    async def process(self, rng: random.Random, act: Act, *args: Any) -> None:
        """`act` by a client of its own; in a deadly game it may be killed, twice at most, and begun anew."""
        for _ in range(rng.choice([0, 1, 2]) if self.deadly else 0):
            if await self.life(rng, act, *args):
                return
        async with self.client(rng) as client:
            await act(self, rng, client, *args)

    async def life(self, rng: random.Random, act: Act, *args: Any) -> bool:
        """Whether it came to its end before it was killed; then its leases run out a moment later, since some
        wait for that."""
        line, born = self.world.line(), []

        async def live() -> None:
            client = await self.world.open(line, self.settings(rng), maintenance=rng.random() < 0.8)
            born.append(client)
            await act(self, rng, client, *args)
            await client.aclose()

        running = asyncio.create_task(live())
        try:
            await asyncio.wait([running], timeout=rng.choice([0.01, 0.03, 0.1, 0.3]))
            if running.done():
                await running
                return True
        finally:
            await kill(line, born[0] if born else None, running)
        self.counts["killed"] += 1
        asyncio.get_running_loop().call_later(rng.choice([0.05, 0.5]), self.world.clock.jump, 4000)
        return False


async def give_up(game: Game, rng: random.Random, handle: ap.ReadHandle[str, int]) -> None:
    """Some of the history that the handle holds."""
    kept = handle.upper.elements
    targets = [t for t in game.within(handle.since, handle.upper) if t not in kept]
    if targets:
        await handle.downgrade_since(ap.Antichain(*rng.choices(targets, k=rng.choice([1, 2]))))


async def pause(rng: random.Random) -> None:
    for _ in range(rng.choice([0, 0, 1, 3])):
        await asyncio.sleep(0)
    if rng.random() < 0.05:
        await asyncio.sleep(0.002)


async def nap(rng: random.Random) -> None:
    """Long enough for others to compact, to collect, and to let a lease run out."""
    await asyncio.sleep(rng.choice([0.02, 0.1]))


async def patient(rng: random.Random, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """All items, by waits some of which are given up and repeated."""
    while True:
        try:
            item = await asyncio.wait_for(anext(items), rng.choice([0, 0.0005, 1]))
        except TimeoutError:
            continue
        except StopAsyncIteration:
            return
        yield item
