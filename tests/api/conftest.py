"""A location in memory whose clients are like processes of their own."""

from collections.abc import AsyncIterator

import pytest

from tests.support.processes import Place, place_in_memory


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with place_in_memory(watch_timeout_s=0.02) as place:
        yield place
