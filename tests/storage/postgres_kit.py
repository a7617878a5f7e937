"""Helpers that the tests of the store in Postgres share."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from aiopersist.storage.postgres.consensus import PostgresConsensus

Admin = "asyncpg.Connection[asyncpg.Record]"


@pytest.fixture
async def consensus(postgres_url: str) -> AsyncIterator[PostgresConsensus]:
    consensus = PostgresConsensus(postgres_url)
    yield consensus
    await consensus.aclose()


async def make_keys(consensus: PostgresConsensus, count: int) -> list[str]:
    keys = [f"k{i:02}" for i in range(count)]
    assert all(await asyncio.gather(*(consensus.compare_and_set(key, None, b"0") for key in keys)))
    return keys
