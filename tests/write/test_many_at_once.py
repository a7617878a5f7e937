"""Goal: thousands of writes that wait at one moment share a commit, and no single callback of the loop works
for all of them."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import aiopersist as ap
from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.memory import MemoryConsensus
from tests.support.callbacks import steps
from tests.support.schemas import SCHEMA

FEW, MANY = 600, 2_400


class Gate(MemoryConsensus):
    """Versions wait until it is open; some are refused for good."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.open = asyncio.Event()
        self.open.set()
        self.sent = 0
        self.refuses = False

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        self.sent += 1
        await self.open.wait()
        if self.refuses:
            raise StorageUnavailable("the disk is full", retry=False)
        return await super().compare_and_set(key, expected, data)


@asynccontextmanager
async def writes(n: int, *, txn: bool = False) -> AsyncIterator[tuple[Gate, list[asyncio.Task[int]]]]:
    """So many writes that wait for the answer to one before."""
    gate = Gate(uuid.uuid4().hex)
    url = f"mem://{uuid.uuid4().hex}"
    async with (
        ap.open(blob=url, consensus=gate, maintenance=False) as client,
        client.writer("t", SCHEMA) as w,
    ):
        gate.open.clear()
        sent, first = gate.sent, asyncio.ensure_future(w.write([("first", 0)]))
        while gate.sent == sent:
            await asyncio.sleep(0)
        tasks = []
        for number in range(n):
            once = (f"app{number}", 1) if txn else None
            tasks.append(asyncio.ensure_future(w.write([(f"k{number}", number)], txn=once)))
        for _ in range(3):  # until all of them wait
            await asyncio.sleep(0)
        yield gate, tasks
        gate.open.set()
        await asyncio.wait([first, *tasks])
        first.exception()  # seen
    await gate.aclose()


async def most_steps(n: int, *, txn: bool = False, refused: bool = False) -> int:
    async with writes(n, txn=txn) as (gate, tasks):
        gate.refuses = refused
        with steps() as found:
            gate.open.set()
            for task in tasks:
                try:
                    await task
                except StorageUnavailable:
                    assert refused
    return found.most


@pytest.mark.parametrize("refused", [False, True], ids=["committed", "refused"])
@pytest.mark.parametrize("txn", [False, True], ids=["", "txn"])
async def test_no_callback_grows_with_the_writes_that_wait(txn: bool, refused: bool) -> None:
    """Goal: four times as many writes make more callbacks, hardly longer ones."""
    few = await most_steps(FEW, txn=txn, refused=refused)
    many = await most_steps(MANY, txn=txn, refused=refused)
    assert many < 2 * few, (few, many)


async def test_they_share_one_commit() -> None:
    """Goal: though the work is done in slices, all are in the shard at one time, by one version."""
    async with writes(FEW) as (gate, tasks):
        sent = gate.sent
        gate.open.set()
        assert len(set(await asyncio.gather(*tasks))) == 1
        assert gate.sent == sent + 1


async def test_transactions_share_a_few_commits() -> None:
    """Goal: the records that a version can have bound what is in it; each transaction is in once."""
    async with writes(FEW, txn=True) as (gate, tasks):
        gate.open.set()
        times = await asyncio.gather(*tasks)
        assert times == sorted(times)
        assert 2 <= len(set(times)) <= 4


@pytest.mark.blocks_loop  # it counts what a callback does; how long the first kernels take is not its goal
async def test_no_callback_of_an_indexed_works_for_all_its_commands() -> None:
    """Goal: the same of commands that are applied and answered together: a callback that is about all of them
    makes a few calls for each."""
    async with ap.open("mem://", maintenance=False) as client, client.indexed("ix", background=False) as ix:
        stream = await ix.register("a", str, int)
        writes = [asyncio.ensure_future(ix.write([(stream, [("k", k, 0, 1)])])) for k in range(2 * FEW)]
        for _ in range(2):  # all of them are called, and none is committed
            await asyncio.sleep(0)
        with steps() as found:
            for write in writes:
                await write
    assert found.most < 14 * 2 * FEW
