"""A place whose clients see one clock."""

from collections.abc import AsyncIterator

import pytest

from tests.leases.leases_kit import World, a_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with a_world() as world:
        yield world
