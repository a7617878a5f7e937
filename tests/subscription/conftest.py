"""A location in memory whose clients are like processes of their own."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.support.processes import Place


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(stack, {"watch_timeout_s": 0.02})
