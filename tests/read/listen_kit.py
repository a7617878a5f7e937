"""Helpers that the tests of listens share."""

import asyncio
from typing import Any

import aiopersist as ap
from tests.support.schemas import SCHEMA


async def filled(client: ap.Client, upper: int = 5, name: str = "s") -> ap.WriteHandle[str, int]:
    """A shard with one update at each complete time."""
    writer: ap.WriteHandle[str, int] = await client.writer(name, SCHEMA)
    for t in range(upper):
        await writer.compare_and_append([("k", t, t, 1)], t, t + 1)
    return writer


async def add(writer: ap.WriteHandle[str, int], *at: int) -> None:
    for t in at:
        await writer.compare_and_append([("k", t, t, 1)], t, t + 1)


async def until(listen: ap.Listen, upper: Any) -> tuple[list[Any], list[ap.Antichain]]:
    """All updates up to the progress to `upper`, and every progress."""
    seen, told = [], []
    async with asyncio.timeout(50):
        async for item in listen:
            if isinstance(item, ap.Progress):
                told.append(item.upper)
                assert item.upper == listen.frontier
                if item.upper == ap.Antichain(upper):
                    break
            else:
                seen += item.rows()
    return seen, told
