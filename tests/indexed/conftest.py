"""An `Indexed` in memory that is maintained by hand."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed.indexed import Indexed
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.indexed.indexed_calls_kit import Faulty
from tests.indexed.indexed_reading_kit import TINY


@pytest.fixture
async def ix(mem: ap.Client) -> AsyncIterator[Indexed]:
    async with mem.indexed("ix", background=False) as ix:
        yield ix


@pytest.fixture(params=["inline", "tiny parts"])
async def either(request: Any) -> AsyncIterator[Indexed]:
    """With updates in the state, and with many small blobs."""
    options = ap.Settings(**(TINY if request.param == "tiny parts" else {}))
    async with ap.open("mem://", settings=options) as client:
        async with client.indexed("ix", background=False) as ix:
            yield ix


@pytest.fixture
async def faulty() -> AsyncIterator[Faulty]:
    """A client whose store fails when told to, and that gives up soon."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    blob = FaultyBlob(ap.open_blob(url), faults)
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    options = ap.Settings(retry_timeout_s=0.02, watch_timeout_s=0.1)
    async with ap.open(url), ap.open(blob=blob, consensus=consensus, settings=options) as client:
        yield Faulty(client, faults, url)
        faults.heal()
