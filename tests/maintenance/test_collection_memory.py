"""More runs than the memory allows, the whole life of a shard; see `test_collection.py`."""

import asyncio
import random
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.model import gathered, summed
from tests.support.location import (
    NAME,
    SCHEMA,
    Place,
    Way,
    append,
    both,
    contents,
    expire_writers,
    move_since,
    prepared,
    sound,
)


async def many_runs(place: Place, w: Any, rng: random.Random) -> None:
    """One batch of many runs of several parts each."""
    rows = [
        (f"{key:02}", 1, 0, run + 1)
        for run in range(5)
        for key in sorted(rng.sample(range(30), rng.choice([2, 3, 5])))
    ]
    async with w.builder(0) as builder:
        for row in rows:
            await builder.add(*row)
        batch = await builder.finish(1)
    assert len(batch.runs) >= 2
    await w.compare_and_append_batch([batch], 0, 1)
    place.model.append(rows, [0], [1])


def is_part_of_compaction(op: str, what: Any) -> bool:
    return op == "get"


class Life:
    """One shard, its clients, and what they do next, from a seed."""

    def __init__(self, seed: int, memory: int) -> None:
        self.memory = memory
        self.rng, self.place, self.now = random.Random(seed), Place(), 0
        self.background = seed % 3 == 2
        self.since = 0
        self.open: list[tuple[Any, list[Any]]] = []
        self.seen: list[Any] = []
        self.cursor: str | None = None

    def client(self) -> Any:
        rng = self.rng
        return self.place.open(
            maintenance=self.background,
            rollup_every=rng.choice([3, 8]),
            compaction_inputs_min=rng.choice([2, 4]),
            compaction_idle_s=0.05,
            compaction_memory_bytes=self.memory,
            blob_target_size=rng.choice([0, 60, 400]),
            row_group_bytes=rng.choice([30, 100, 2**20]),
            inline_writes_single_max_bytes=rng.choice([0, 100, 16384]),
            inline_writes_total_max_bytes=rng.choice([600, 2**20]),
            blob_cache_bytes=rng.choice([0, 2**20]),
            retry_timeout_s=None,
        )

    async def sit(self, steps: int) -> None:
        """One process, for some time."""
        async with self.client() as client, client.writer(NAME, SCHEMA) as w, client.reader(NAME) as r:
            for _ in range(steps):
                await self.step(client, w, r)
            for s, expected in self.open:
                assert await s.rows() == expected
                await s.aclose()
            self.open.clear()
            report = await client.admin.fsck(NAME)
            continued = "it does not continue its run"  # test_fsck_of_a_run_that_goes_on_with_an_equal_row
            assert self.background or all(continued in problem for problem in report.problems), report

    async def step(self, client: Any, w: Any, r: Any) -> None:
        rng, place = self.rng, self.place
        upper = place.model.upper[0]
        match rng.choices(range(9), [8, 1, 2, 2, 2, 1, 4, 2, 1])[0]:
            case 0:
                await append(place, w, rng, rng.choice([0, 1, 3, 12, 40]))
            case 1:
                await self.builder(w)
            case 2 if upper:
                to = max(rng.randrange(upper), upper - 6)
                await move_since(client, to)
                self.since = max(self.since, to)
            case 3:
                await client.admin.force_compaction(NAME)
            case 4:
                await client.admin.force_gc(NAME)
            case 5:
                if rng.random() < 0.5:
                    await client.admin.retain(NAME, rng.choice([None, 0, 3]))
                else:
                    await client.admin.sweep_leaked_blobs(dry_run=False)
            case 6 if upper:
                try:
                    s = await r.snapshot(rng.choice([None, rng.randrange(upper)]))
                except ap.SinceViolation as error:
                    assert not error.since.less_equal(error.as_of)  # noqa: PT017  # no refusal is due either
                else:
                    self.open.append((s, place.model.contents(s.as_of)))
            case 7 if self.open:
                s, expected = self.open.pop(rng.randrange(len(self.open)))
                assert await s.rows() == expected
                await s.aclose()
            case 8 if upper:
                await self.follow(r, upper)

    async def builder(self, w: Any) -> None:
        lower = w.upper.time
        rows = [(self.rng.choice("abc"), 1, lower, 1) for _ in range(9)]
        async with w.builder(lower) as builder:
            for row in rows:
                await builder.add(*row)
            batch = await builder.finish(lower + 1)
        moved = lower + self.rng.choice([0, 3])
        if moved > lower:
            batch.rewrite_ts(moved, moved + 1)
        await w.compare_and_append_batch([batch], lower, moved + 1)
        self.place.model.append([(k, v, moved, d) for k, v, _, d in rows], [lower], [moved + 1])

    async def follow(self, r: Any, upper: int) -> None:
        """From the greatest time, or all that is held, on: what was, and what a listen tells of it."""
        begin = r.since.time if self.rng.random() < 0.5 else upper - 1
        try:
            subscribe = await r.subscribe(begin)
        except ap.SinceViolation:
            return
        seen: list[Any] = []
        async for item in subscribe:
            if isinstance(item, ap.Progress):
                if item.upper == ap.Antichain(upper):
                    break
            else:
                seen += item
        await subscribe.aclose()
        at_first = summed((k, v, d) for k, v, t, d in seen if t == begin)
        assert at_first == self.place.model.contents(begin)
        assert gathered(u for u in seen if u[2] > begin) == self.place.model.changes(begin)


TIGHT = 0, 1


# --- more runs than the memory allows -----------------------------------------------------------------


@pytest.mark.parametrize("seed", [4, 6, 7])
async def test_compaction_of_some_runs_of_a_batch(seed: int) -> None:
    """Goal: those that are read are told apart as they were, though they are fewer and in another order."""
    place, rng = Place(), random.Random(seed)
    limits = {"blob_target_size": 0, "compaction_memory_bytes": 1, "row_group_bytes": 30}
    async with place.open(**limits) as client, client.writer(NAME, SCHEMA) as w:
        await many_runs(place, w, rng)
        await client.admin.force_compaction(NAME)
        async with client.reader(NAME) as r, r.snapshot(0) as snapshot:
            assert [tuple(row) async for row in snapshot] == place.model.contents(0)
        assert await contents(client, 0) == place.model.contents(0)
        await sound(place, client)


async def test_compaction_of_some_runs_of_a_writer_that_is_gone() -> None:
    """Goal: runs that stay as they are need no registered writer: they are no new blobs."""
    place, rng = Place(), random.Random(0)
    async with place.open(blob_target_size=0, compaction_memory_bytes=1) as client:
        async with client.writer(NAME, SCHEMA) as w:
            await many_runs(place, w, rng)
        await client.admin.force_compaction(NAME)


async def test_closing_gives_back_claims() -> None:
    """Goal: a client that is closed in the middle of a compaction blocks no other process for a lease."""
    place, _ = await prepared()
    way = Way()
    async with place.open() as other:
        async with place.open(
            way, maintenance=True, compaction_inputs_min=2, compaction_idle_s=0.02
        ) as client:
            w = await client.writer(NAME, SCHEMA)
            way.holds = is_part_of_compaction
            rng = random.Random(0)
            async with asyncio.timeout(50):
                while not (await other.inspect(NAME)).claims:
                    task = asyncio.create_task(append(place, w, rng))
                    await asyncio.sleep(0.05)
                    del task
            way.holds = lambda op, what: False
            asyncio.get_running_loop().call_later(0.3, way.go.set)
        async with asyncio.timeout(50):
            while (await other.inspect(NAME)).claims:
                await asyncio.sleep(0.01)


# --- a life -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "memory"), [*((seed, 2**28) for seed in range(2)), TIGHT])
async def test_a_life(seed: int, memory: int) -> None:
    """Goal: after any calls on a shard, in any order and by any process, it shows the written updates and
    nothing else."""
    life = Life(seed, memory)
    async with asyncio.timeout(50):
        for _ in range(4):
            await life.sit(25)
        async with life.place.open() as client:
            upper = life.place.model.upper[0]
            assert await contents(client, upper - 1) == life.place.model.contents(upper - 1)
            shard_id = await client.shard_id(NAME)
            await expire_writers(client, shard_id)
            await both(client)
            await expire_writers(client, shard_id)
            await client.admin.sweep_leaked_blobs(dry_run=False)
            assert set(life.place.blobs()) == life.place.named(shard_id)
            await sound(life.place, client)
