"""Helpers that the tests of maintenance and of retention policies share."""

import asyncio
import random
from collections import Counter
from typing import Any

import aiopersist as ap
from tests.support.internals import shards_of


def opened(location: Any, *, maintenance: bool = True, **limits: Any) -> Any:
    settings = ap.Settings(**{"compaction_idle_s": 0.1, "rollup_every": 16, **limits})
    return ap.open(
        blob=location.blob, consensus=location.consensus, settings=settings, maintenance=maintenance
    )


async def grown(w: Any, count: int, seed: int = 0) -> Counter[tuple[str, int]]:
    """Append `count` times; the contents then."""
    chance, contents = random.Random(seed), Counter[tuple[str, int]]()
    for time in range(count):
        rows = [(f"k{chance.randrange(30)}", chance.randrange(3), time, 1) for _ in range(4)]
        contents.update((key, val) for key, val, _, _ in rows)
        await w.compare_and_append(rows, time, time + 1)
    return contents


async def until(holds: Any, deadline_s: float = 100.0) -> Any:
    """The first true result of `holds()`."""
    async with asyncio.timeout(deadline_s):
        while not (found := await holds()):
            await asyncio.sleep(0.02)
    return found


async def state_of(client: Any, name: str = "t") -> Any:
    return await shards_of(client).at(await client.shard_id(name)).open()
