"""Helpers that the tests of shared compactions share."""

import asyncio
import itertools
import random
from typing import Any

import aiopersist as ap
from aiopersist.testing.model import Model, comparable
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import is_sound, state_of

MAINTENANCE_LEASE_S = 60.0


TINY: dict[str, Any] = {"blob_target_size": 1500, "row_group_bytes": 400, "blob_cache_bytes": 0}


LAYOUTS: dict[str, dict[str, Any]] = {
    "inline": {},
    "blobs": {**TINY, "inline_writes_single_max_bytes": 0},
    "both": {**TINY, "inline_writes_single_max_bytes": 900},
}


BLOBS = LAYOUTS["blobs"]


def some_rows(chance: random.Random, model: Model, time: int, count: int = 25) -> list[Any]:
    """Updates that meet and cancel."""
    rows = [
        (f"k{chance.randrange(30):02}", chance.randrange(3), time, chance.choice([1, 1, 2, -1]))
        for _ in range(count)
    ]
    return rows + [(k, v, time, -d) for k, v, _, d in chance.sample(model.updates, len(model.updates) // 5)]


async def append(w: Any, model: Model, rows: list[Any], upper: int) -> None:
    lower: Any = model.upper[0]
    await w.compare_and_append(rows, lower, upper)
    model.append(rows, [lower], [upper])


async def filled(client: ap.Client, seed: int = 0, appends: int = 5) -> Model:
    chance, model = random.Random(seed), Model()
    async with client.writer("t", SCHEMA) as w:
        for time in range(appends):
            await append(w, model, some_rows(chance, model, time), time + 1)
    return model


async def move_since(client: ap.Client, to: Any) -> None:
    async with client.critical_since("t", "c") as since:
        await since.compare_and_downgrade_since(0, 0, to)


async def is_the_model(client: ap.Client, model: Model, since: int = 0, schema: Any = SCHEMA) -> None:
    """At every time that can be read; and the shard is sound."""
    async with client.reader("t", schema) as r:
        for as_of in range(since, model.upper[0]):
            async with r.snapshot(as_of) as s:
                found = [(comparable(k), comparable(v), d) for k, v, d in await s.rows()]
            expected = [(comparable(k), comparable(v), d) for k, v, d in model.contents(as_of)]
            assert found == expected, as_of
    if schema is SCHEMA:
        await is_sound(client)


async def is_one_run(client: ap.Client) -> None:
    (batch,) = (await state_of(client)).batches.values()
    assert batch.runs == ()
    assert sum(part.inline is not None for part in batch.parts) <= 1


async def nothing_is_left(place: Place, client: ap.Client) -> None:
    """No claim, no writer; after collection and a sweep no blob that is not needed."""
    state = await state_of(client)
    assert not state.claims
    assert all(writer.lease_s == MAINTENANCE_LEASE_S for writer in state.writers.values())
    await client.admin.force_gc("t")
    await client.admin.sweep_leaked_blobs(dry_run=False)
    state = await state_of(client)
    assert await place.parts() == {p.key for b in state.batches.values() for p in b.parts if p.key}


async def done(workers: list[ap.Client], pieces: list[bytes]) -> list[bytes]:
    """All pieces, by all of them, at the same time, in any order."""
    order = random.Random(len(pieces)).sample(range(len(pieces)), len(pieces))
    found = await asyncio.gather(
        *(worker.compact_piece(pieces[n]) for worker, n in zip(itertools.cycle(workers), order))
    )
    return list(found)


async def compacted(client: ap.Client, workers: list[ap.Client], tasks: int = 4) -> bool:
    async with client.workers.shared_compaction("t") as compaction:
        return await compaction.apply(await done(workers, await compaction.pieces(tasks)))
