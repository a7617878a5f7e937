"""A place in memory, with parts in the state or in blobs."""

from collections.abc import AsyncIterator

import pytest

from tests.batches.shared_kit import World, world
from tests.support.shards import SIZES


@pytest.fixture(params=SIZES)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with world(inline_writes_single_max_bytes=request.param) as w:
        yield w
