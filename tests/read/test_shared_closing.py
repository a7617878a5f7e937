"""Goal: closing a shared read or compaction gives back its lease or claim, also when the closing is cut
off."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from tests.support.cancelling import cancelled_after
from tests.support.schemas import SCHEMA

TURNS = range(1, 6)  # of the loop, after which closing is cut off


@pytest.mark.parametrize("what", ["shared_read", "shared_compaction"])
@pytest.mark.parametrize("turns", TURNS)
async def test_closing_that_is_cut_off_gives_it_back(what: str, turns: int) -> None:
    async with ap.open("mem://", maintenance=False) as client, client.writer("t", SCHEMA) as w:
        for time in range(2):
            await w.compare_and_append([("a", time, time, 1)], time, time + 1)
        shared: Any = await getattr(client, what)("t")
        await cancelled_after(shared.aclose(), turns)
        async with asyncio.timeout(50):
            while (view := await client.admin.inspect("t")).readers or view.writers.keys() != {w.writer_id}:
                await asyncio.sleep(0.01)
        assert not view.claims
