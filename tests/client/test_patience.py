"""Goal: a call that waits for a failing store says so in the log, once, and names the shard as it was
opened."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.consensus import Entry
from aiopersist.storage.memory import MemoryConsensus
from tests.support.clock import Hurried
from tests.support.schemas import SCHEMA


class Refusing(MemoryConsensus):
    """Loses the answer to one compare-and-set, and refuses those that come then, until it is healed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False
        self.sent = 0
        self.loses_all = False

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        if not self.is_broken:
            return await super().compare_and_set_many(entries)
        self.sent += 1
        if self.sent == 1 or self.loses_all:
            raise ap.Indeterminate("the answer is lost")
        raise ap.StorageUnavailable("it is read-only", retry=False)


async def told_while(
    waits: Callable[[ap.Client], Awaitable[Any]], caplog: pytest.LogCaptureFixture, *, loses_all: bool
) -> list[str]:
    """The warnings while `waits` waits, until some hundred seconds have passed for it; then it goes on."""
    runtime, consensus = Hurried(), Refusing()
    client = await ap.open(blob="mem://", consensus=consensus, runtime=runtime, maintenance=False)
    async with client:
        async with client.writer("orders", SCHEMA) as writer:
            await writer.compare_and_append([("a", 1, 0, 1)], 0, 1)
        with caplog.at_level(logging.WARNING, "aiopersist"):
            consensus.is_broken, consensus.loses_all = True, loses_all
            began = runtime.passed
            waiting = asyncio.ensure_future(waits(client))
            while runtime.passed < began + 200 and not waiting.done():
                await asyncio.sleep(0)
            consensus.is_broken = False
            await asyncio.wait_for(waiting, 30)
            return [record.getMessage() for record in caplog.records if record.name.startswith("aiopersist")]


async def test_an_outcome_that_cannot_be_settled(caplog: pytest.LogCaptureFixture) -> None:
    async def append(client: ap.Client) -> None:
        async with client.writer("orders", SCHEMA) as writer:
            await writer.compare_and_append([("b", 2, 1, 1)], 1, 2)

    told = await told_while(append, caplog, loses_all=False)
    assert len(told) == 1
    assert "commit to shard 'orders' has waited" in told[0] and "read-only" in told[0]


async def test_a_name_that_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    async def create(client: ap.Client) -> None:
        async with client.writer("new", SCHEMA):
            pass

    told = await told_while(create, caplog, loses_all=True)
    assert len(told) == 1
    assert "the creation of shard 'new' has waited" in told[0]
