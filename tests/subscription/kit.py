"""Steps of subscriptions."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiopersist as ap
from tests.support.schemas import SCHEMA

SMALL = {"row_group_bytes": 400, "inline_writes_single_max_bytes": 0, "blob_target_size": 800}


async def in_time(work: Any) -> Any:
    """Its result; a test that hangs fails."""
    async with asyncio.timeout(50):
        return await work


async def write(client: ap.Client, *rows: Any, name: str = "s") -> int:
    """Append rows to a shard at one time, and return it."""
    async with client.writer(name, SCHEMA) as writer:
        return int(await writer.write(rows))


async def steps_until(sub: Any, done: Callable[[list[Any]], bool]) -> list[Any]:
    """The steps of a subscription until they are `done`."""
    found: list[Any] = []
    async with asyncio.timeout(50):
        while not done(found):
            found.append(await anext(sub))
    return found


async def contents_of(sub: Any) -> list[Any]:
    """The steps of the contents; it reads no further."""
    steps = [await in_time(anext(sub))]
    while steps[-1].upper <= steps[0].updates.rows()[0].time:
        steps.append(await in_time(anext(sub)))
    assert all(step.contents for step in steps)
    return steps


def rows_of(steps: list[Any]) -> list[tuple[Any, Any]]:
    """Keys and vals of the updates, in their order."""
    return [(key, val) for step in steps for key, val, _, _ in step.updates.rows()]


async def rows(sub: Any, count: int) -> list[tuple[Any, Any]]:
    """So many keys and vals, and no more."""
    found = rows_of(await steps_until(sub, lambda steps: len(rows_of(steps)) >= count))
    assert len(found) == count
    return found


async def acked(sub: Any, count: int) -> list[tuple[Any, Any]]:
    """So many keys and vals; all of them are acknowledged, durably."""
    steps = await steps_until(sub, lambda found: len(rows_of(found)) >= count)
    await in_time(sub.ack(steps[-1], durable=True))
    return rows_of(steps)
