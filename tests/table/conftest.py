"""A location whose clients are like processes of their own: in memory, in the long run on every store."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

import aiopersist as ap
from tests.conftest import StoreUrls
from tests.support.processes import Place
from tests.support.shards import open_at


@pytest.fixture
async def place(elsewhere: StoreUrls) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(stack, {"watch_timeout_s": 0.02}, elsewhere)


@pytest.fixture
async def two(location: StoreUrls) -> AsyncIterator[tuple[ap.Client, ap.Client]]:
    """Two clients of one location."""
    async with open_at(location) as one, open_at(location) as other:
        yield one, other
