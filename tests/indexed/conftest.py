"""An `Indexed` in memory that is maintained by hand."""

from collections.abc import AsyncIterator

import pytest

import aiopersist as ap
from aiopersist.indexed.indexed import Indexed


@pytest.fixture
async def ix(mem: ap.Client) -> AsyncIterator[Indexed]:
    async with mem.indexed("ix", background=False) as ix:
        yield ix
