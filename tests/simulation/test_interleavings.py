"""Goal: a sweep, at any moment, never deletes a blob that is or may become referenced: beside writers,
batches that are staged, handed over or rewritten, compactions, rollups and collections.

All clients share a *conductor*: each request to a store waits until a seeded choice lets it go, one at a
time. So every seed is another interleaving of the same steps, at the grain of requests."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import aiopersist as ap
from tests.support.location import (
    NAME,
    SCHEMA,
    Place,
    Way,
    append,
    contents,
    expire_writers,
    finished,
    move_since,
    prepared,
)
from tests.support.shards import noted

SEEDS = int(os.environ.get("AIOPERSIST_TEST_INTERLEAVINGS", "2000"))
GONE = (ap.BatchExpired, ap.LeaseExpired)
SETTLE_TURNS = 12  # of the loop, in which a released task makes its next request


class Conductor(Way):
    """Lets requests go one at a time, in an order drawn from a seed."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.waiting: list[asyncio.Future[None]] = []
        self.requests = 0

    async def call(self, op: str, act: Callable[[], Awaitable[Any]], what: Any = None) -> Any:
        if op == "watch":
            return await act()
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        await turn
        self.requests += 1
        return await act()

    @asynccontextmanager
    async def conducting(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._conduct())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            for turn in self.waiting:
                if not turn.done():
                    turn.set_result(None)

    async def _conduct(self) -> None:
        while True:
            for _ in range(SETTLE_TURNS):
                await asyncio.sleep(0)
            self.waiting = [turn for turn in self.waiting if not turn.done()]
            if self.waiting:
                self.rng.choice(self.waiting).set_result(None)
            else:
                await asyncio.sleep(0.0005)  # something is computed on a thread


class Interleaving:
    """A shard with a history, and the tasks that work on it at once."""

    def __init__(self, seed: int, place: Place, shard_id: str) -> None:
        self.rng = random.Random(seed)
        self.conductor = Conductor(self.rng)
        self.place, self.shard_id = place, shard_id
        self.patience = self.rng.choice([0, 20, 200])  # requests of others while a snapshot is open
        self.others = True
        self.expiring = self.rng.random() < 0.5
        self.expired = 0
        self.wrong: list[Any] = []

    async def play(self, clients: list[Any]) -> None:
        one, two, three = clients
        rng = self.rng
        reading = asyncio.ensure_future(self.repeat(lambda: self.read(one), rng.randrange(1, 3)))
        await asyncio.gather(
            self.write(one, two),
            self.repeat(lambda: self.sweep(three), rng.randrange(1, 5)),
            self.repeat(lambda: two.force_compaction(NAME), rng.randrange(1, 3)),
            self.repeat(lambda: rng.choice(clients).force_gc(NAME), rng.randrange(1, 3)),
            self.expire(three),
        )
        self.others = False
        await reading

    async def repeat(self, work: Callable[[], Awaitable[Any]], times: int) -> None:
        for _ in range(times):
            for _ in range(self.rng.randrange(40)):
                await asyncio.sleep(0)
            with suppress(*(GONE if self.expiring else ())):
                await work()

    async def sweep(self, client: Any) -> None:
        await client.sweep_leaked_blobs(dry_run=False)

    async def expire(self, client: Any) -> None:
        """As if leases had run out."""
        if not self.expiring:
            return
        for _ in range(self.rng.randrange(1, 3)):
            for _ in range(self.rng.randrange(60)):
                await asyncio.sleep(0)
            await expire_writers(client, self.shard_id)
            self.expired += 1

    async def read(self, client: Any) -> None:
        """What a snapshot shows is what was there, however long it was open."""
        upper = self.place.model.upper[0]
        async with client.reader(NAME, SCHEMA) as r:
            try:
                s = await r.snapshot(upper - 1)
            except ap.SinceViolation:  # the writer has given that up meanwhile
                return
            expected = self.place.model.contents(upper - 1)
            begun = self.conductor.requests
            while self.conductor.requests < begun + self.patience and self.others:
                await asyncio.sleep(0.001)
            found = await s.rows()
            await s.aclose()
            if found != expected:
                self.wrong.append((upper, found, expected))

    async def write(self, client: Any, other: Any) -> None:
        for _ in range(self.rng.randrange(2, 5)):
            try:
                async with client.writer(NAME, SCHEMA) as w:
                    await self.rng.choice([self.append, self.staged, self.handed_over])(w, other)
                    if self.rng.random() < 0.5:
                        await move_since(client, w.upper.time - 1)
            except GONE:
                assert self.expired

    async def append(self, w: Any, other: Any) -> None:
        await append(self.place, w, self.rng, self.rng.choice([0, 6, 20]))

    async def staged(self, w: Any, other: Any) -> None:
        lower, rows = self.rows(w)
        batch = await w.batch(rows, lower, lower + 1)
        if self.rng.random() < 0.3:
            moved = lower + 2
            batch.rewrite_ts(moved, moved + 1)
            rows = [(k, v, moved, d) for k, v, _, d in rows]
        await self.append_batch(w, batch, rows, lower)

    async def handed_over(self, w: Any, other: Any) -> None:
        lower, rows = self.rows(w)
        data = (await w.batch(rows, lower, lower + 1)).to_transmittable()
        async with other.writer(NAME, SCHEMA) as there:
            batch = await there.batch_from_transmittable(data)
            await self.append_batch(there, batch, rows, lower)

    async def append_batch(self, w: Any, batch: Any, rows: list[Any], lower: int) -> None:
        upper = max(row[2] for row in rows) + 1
        try:
            await w.compare_and_append_batch([batch], lower, upper)
        except GONE:
            await batch.delete()
            raise
        self.place.model.append(rows, [lower], [upper])

    def rows(self, w: Any) -> tuple[int, list[Any]]:
        lower = w.upper.time
        return lower, [(f"{n:03}" * 4, n, lower, 1) for n in range(self.rng.randrange(1, 25))]


async def interleave(seed: int, origin: Place, shard_id: str) -> int:
    """One interleaving; the requests that were made."""
    place = Place(origin)
    game = Interleaving(seed, place, shard_id)
    conductor = game.conductor
    with noted(f"seed {seed}"):
        async with asyncio.timeout(50):
            async with conductor.conducting():
                clients = [await place.open(conductor) for _ in range(3)]
                try:
                    await game.play(clients)
                finally:
                    await asyncio.gather(*(client.aclose() for client in clients))
        assert not game.wrong, game.wrong
        async with place.open() as client:
            upper = place.model.upper[0]
            assert await contents(client, upper - 1) == place.model.contents(upper - 1)
        await finished(place, shard_id)
    return conductor.requests


@pytest.mark.parametrize("start", [0, 10])
async def test_a_sweep_at_any_moment(start: int) -> None:
    origin, shard_id = await prepared(collected=start % 20 == 0)
    counts = [await interleave(seed, origin, shard_id) for seed in range(start, start + 8)]
    assert min(counts) > 30
    assert len(set(counts)) > 1


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, SEEDS, 100))
async def test_a_sweep_at_any_of_many_moments(start: int) -> None:
    origin, shard_id = await prepared(collected=start % 200 == 0)
    for seed in range(start, start + 100):
        await interleave(seed, origin, shard_id)
