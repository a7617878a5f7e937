"""Helpers that the tests of snapshots share."""

import random

import aiopersist as ap
from aiopersist.testing.model import Model
from tests.support.schemas import SCHEMA

KEYS = [letter * n for letter in "abcdefg" for n in (1, 2)]


BOUNDS = {
    "inline": {},
    "blobs": {"inline_writes_single_max_bytes": 0},
    "tiny parts": {"inline_writes_single_max_bytes": 0, "blob_target_size": 10},
    "tiny row groups": {"inline_writes_single_max_bytes": 0, "row_group_bytes": 16},
    "flushed": {"inline_writes_single_max_bytes": 200, "inline_writes_total_max_bytes": 500},
}


async def filled(client: ap.Client, upper: int = 5) -> ap.WriteHandle[str, int]:
    """A shard with one row more at each complete time."""
    writer: ap.WriteHandle[str, int] = await client.writer("s", SCHEMA)
    for t in range(upper):
        await writer.compare_and_append([("k", t, t, 1)], t, t + 1)
    return writer


async def random_history(client: ap.Client, rng: random.Random, name: str = "s") -> Model:
    """Appends of all sizes, with many keys that meet again."""
    writer = await client.writer(name, SCHEMA)
    model, lower = Model(), 0
    for size in (3, 0, 20, 7, 70, 1, 10):
        upper = lower + rng.choice([1, 2, 5])
        rows = [
            (rng.choice(KEYS), rng.randrange(4), rng.randrange(lower, upper), rng.choice([-1, 1, 2]))
            for _ in range(size)
        ]
        await writer.compare_and_append(rows, lower, upper)
        model.append(rows, [lower], [upper])
        lower = upper
    await writer.aclose()
    return model
