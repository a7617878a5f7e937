"""Helpers that the tests of builders in other processes share."""

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiopersist as ap
from tests.support.processes import Place, place_in_memory
from tests.support.schemas import SCHEMA

BLOBS: dict[str, Any] = {"inline_writes_single_max_bytes": 0, "blob_target_size": 400, "blob_cache_bytes": 0}


Rows = list[tuple[str, int, int, int]]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with place_in_memory(**BLOBS) as place:
        yield place


def some_rows(seed: int, time: int = 0, count: int = 30) -> Rows:
    chance = random.Random(seed)
    return [
        (f"k{chance.randrange(20):02}", chance.randrange(3), time, chance.choice([1, 1, 2, -1]))
        for _ in range(count)
    ]


async def built(client: ap.Client, writer: bytes, rows: Rows, lower: int, upper: int) -> bytes:
    async with client.workers.builder_from_transmittable(writer, lower) as builder:
        await builder.extend(rows)
        batch = await builder.finish(upper)
    return batch.to_transmittable()


async def contents(client: ap.Client, as_of: int | None = None) -> list[Any]:
    async with client.reader("t", SCHEMA) as r, r.snapshot(as_of) as s:
        return await s.rows()


async def swept(client: ap.Client) -> set[str]:
    """What a sweep deletes, now."""
    return {
        key for key in (await client.admin.sweep_leaked_blobs(dry_run=False)).keys if key.endswith(".parquet")
    }
