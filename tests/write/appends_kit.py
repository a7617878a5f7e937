"""Helpers that the tests of appends share."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiopersist as ap
from tests.conftest import StoreUrls
from tests.support.internals import stack_of
from tests.support.schemas import SCHEMA
from tests.support.shards import open_at, shard_of


@pytest.fixture
async def client(location: StoreUrls) -> AsyncIterator[ap.Client]:
    async with open_at(location) as client:
        yield client


async def history(client: ap.Client, schema: Any = SCHEMA) -> list[Any]:
    """All updates of the shard, from its since on."""
    async with client.reader("t", schema) as r:
        upper = (await r.fetch_recent_upper()).time
        async with r.subscribe(0) as updates:
            found: list[Any] = []
            async for step in updates.steps():
                found += [tuple(u) for u in step.updates]
                if step.upper.time is None or step.upper.time >= upper:
                    break
    return sorted(found)


async def left_behind(client: ap.Client) -> tuple[Any, ...]:
    """What a refused call must not change."""
    state = await shard_of(client).open()
    blobs = [key async for key, _ in stack_of(client).blob.list("") if key.endswith(".parquet")]
    return state.seqno, state.upper, sorted(blobs)
