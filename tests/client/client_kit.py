"""Helpers that the tests of the client share."""

from collections.abc import AsyncIterator

import pytest

import aiopersist as ap
from tests.conftest import StoreUrls
from tests.support.schemas import SCHEMA


@pytest.fixture
async def client(location: StoreUrls) -> AsyncIterator[ap.Client]:
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        yield client


async def is_used(client: ap.Client) -> None:
    """It can be written and read."""
    async with client.writer("used", SCHEMA) as w:
        await w.write([("a", 1)])
    async with client.reader("used", SCHEMA) as r, r.snapshot() as s:
        assert await s.rows() == [("a", 1, 1)]
