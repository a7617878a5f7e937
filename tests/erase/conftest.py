"""A location whose clients are like processes of their own: in memory, in the long run on every store."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.conftest import StoreUrls
from tests.support.processes import Place


@pytest.fixture
async def place(elsewhere: StoreUrls) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(stack, {"watch_timeout_s": 0.02}, elsewhere)
