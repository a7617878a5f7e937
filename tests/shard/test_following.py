"""Goal: the requests of an idle client do not grow with its shards, no behaviour of a store's hints makes
it spin, and a hint still wakes the very shard at once."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.register import Register
from aiopersist.storage.memory import MemoryConsensus
from aiopersist.storage.watch import TaskWatch, Watch
from tests.support.internals import stack_of
from tests.support.schemas import SCHEMA
from tests.support.shards import requests
from tests.support.virtual import in_virtual_time

SHARDS = 60


@asynccontextmanager
async def listening(client: ap.Client, names: list[str]) -> AsyncIterator[dict[str, asyncio.Task[Any]]]:
    """A listen of each shard that waits for its first commit."""
    waiting = {}
    for name in names:
        reader = await client.reader(name, SCHEMA, create=True)
        waiting[name] = asyncio.create_task(anext((await reader.listen()).steps()))
    try:
        yield waiting
    finally:
        for task in waiting.values():
            task.cancel()
        await asyncio.wait(waiting.values())


async def few_requests_at_rest(consensus: str) -> None:
    """Both looks that a shard has at rest, five times and more: each of them is one request for all."""
    names = [f"s{i}" for i in range(SHARDS)]
    settings = ap.Settings(watch_timeout_s=0.2, compaction_idle_s=0.2)
    async with ap.open(blob="mem://", consensus=consensus, settings=settings) as client:
        async with listening(client, names):
            await asyncio.sleep(0.5)
            before = requests(client)
            await asyncio.sleep(1.2)
            assert requests(client) - before < SHARDS
            tasks = Counter(task.get_name() for task in asyncio.all_tasks())
            assert max(count for name, count in tasks.items() if "shard" in name) < 5


@in_virtual_time
async def test_many_shards_at_rest() -> None:
    await few_requests_at_rest("mem://")


async def test_many_shards_at_rest_in_postgres(postgres_url: str) -> None:
    await few_requests_at_rest(postgres_url)


@pytest.mark.parametrize("moving", [1, 40])
async def test_a_hint_wakes_the_shard_at_once(moving: int) -> None:
    """Long before a look without hints; several shards that move at one moment, too."""
    names = [f"s{i}" for i in range(50)]
    name, settings = f"mem://{uuid.uuid4()}", ap.Settings(watch_timeout_s=60)
    async with (
        ap.open(name, settings=settings, maintenance=False) as client,
        ap.open(name, maintenance=False) as other,
    ):
        writers = [await other.writer(name, SCHEMA) for name in names]
        async with listening(client, names) as waiting:
            await asyncio.sleep(0.1)
            for time in range(3):
                heard = [waiting[name] for name in names[:moving]]
                async with asyncio.timeout(50):
                    await asyncio.gather(
                        *(w.compare_and_append([("k", 1, time, 1)], time, time + 1) for w in writers[:moving])
                    )
                    steps = await asyncio.gather(*heard)
                assert [len(step.updates) for step in steps] == [1] * moving
                for name in names[:moving]:
                    reader = await client.reader(name, SCHEMA)
                    waiting[name] = asyncio.create_task(anext((await reader.listen()).steps()))
                await asyncio.sleep(0.05)


class Hasty(MemoryConsensus):
    """Its `watch` ends at once; its requests are counted."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.error = error

    async def watch(self, key: str) -> None:
        self.calls["watch"] += 1
        if self.error is not None:
            raise self.error

    def watch_together(self) -> Watch:
        return TaskWatch(self.watch)

    async def head(self, key: str) -> Any:
        self.calls["head"] += 1
        return await super().head(key)

    async def heads(self, known: Any) -> Any:
        self.calls["heads"] += 1
        return await super().heads(known)


@pytest.mark.parametrize(
    "error",
    [None, ValueError("odd"), ap.StorageUnavailable("no", retry=False), ap.Indeterminate("lost")],
    ids=["returns", "foreign", "refused", "lost"],
)
@in_virtual_time
async def test_a_watch_that_ends_at_once_spins_nobody(error: Exception | None, caplog: Any) -> None:
    """And waiters are served by looks."""
    names = [f"s{i}" for i in range(20)]
    consensus = Hasty(error)
    settings = ap.Settings(watch_timeout_s=0.5)
    async with ap.open(blob="mem://", consensus=consensus, settings=settings, maintenance=False) as client:
        async with listening(client, names) as waiting:
            await asyncio.sleep(0.5)
            consensus.calls.clear()
            await asyncio.sleep(1.0)
            assert consensus.calls["watch"] <= 10 * len(names)
            assert consensus.calls["head"] + consensus.calls["heads"] <= 20
            async with client.writer("s7", SCHEMA) as writer:
                await writer.compare_and_append([("k", 1, 0, 1)], 0, 1)
            async with asyncio.timeout(50):
                assert len((await waiting["s7"]).updates) == 1
    told = [record for record in caplog.records if "hints" in record.getMessage()]
    assert len(told) == (error is not None)


async def test_several_states_of_one_shard_are_followed() -> None:
    """As two readers of one `Indexed` in one client have them: each hears of a commit."""
    place, settings = f"mem://{uuid.uuid4()}", ap.Settings(watch_timeout_s=60)
    async with (
        ap.open(place, settings=settings, maintenance=False) as client,
        ap.open(place, maintenance=False) as other,
        other.writer("s", SCHEMA) as writer,
    ):
        registers = [Register(stack_of(client), writer.shard_id) for _ in range(3)]
        for register in registers:
            await register.refresh()
        waiting = [
            asyncio.create_task(register.wait(lambda state: state.upper.time or None))
            for register in registers
        ]
        await asyncio.sleep(0.1)
        await writer.compare_and_append([], 0, 7)
        async with asyncio.timeout(50):
            assert await asyncio.gather(*waiting) == [7, 7, 7]
