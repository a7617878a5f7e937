"""A location in memory whose clients are like processes of their own."""

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.conftest import StoreUrls
from tests.support.processes import Place


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        url = f"mem://{uuid.uuid4().hex}"
        yield Place(stack, {"watch_timeout_s": 0.02}, StoreUrls(url, url))
