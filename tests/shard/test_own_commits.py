"""Goal: what a client commits itself it knows: no look at the head follows, and no hint to itself."""

import asyncio
import uuid
from typing import Any

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.wrapper import WrappedConsensus
from aiopersist.write.handle import session_of
from tests.support.internals import shard_of
from tests.support.schemas import SCHEMA


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_put_is_followed_by_no_read() -> None:
    async with ap.open(f"mem://{uuid.uuid4().hex}", maintenance=False) as client:
        table = client.table("t", key=str, val=int)
        await table.put("k", 0)
        await asyncio.sleep(0.05)
        before = client.metrics["consensus.head"].count
        for number in range(100):
            await table.put("k", number)
        assert await table.get("k", stale=True) == 99
        assert client.metrics["consensus.head"].count <= before + 2  # of the watch, which looks now and then


async def test_another_client_still_hears_of_it() -> None:
    location = f"mem://{uuid.uuid4().hex}"
    patient = ap.Settings(watch_timeout_s=3600)
    async with (
        ap.open(location, maintenance=False, settings=patient) as one,
        ap.open(location, maintenance=False, settings=patient) as other,
    ):
        mine, theirs = (client.table("t", key=str, val=int) for client in (one, other))
        for number in range(5):
            await mine.put("k", number)
            await theirs.put("other", number)
            async with asyncio.timeout(10):
                while await theirs.get("k", stale=True) != number:
                    await asyncio.sleep(0.001)
                while await mine.get("other", stale=True) != number:
                    await asyncio.sleep(0.001)


async def test_who_waits_is_woken_by_the_commits_of_others_alone() -> None:
    async with (
        ap.open(f"mem://{uuid.uuid4().hex}", maintenance=False) as client,
        client.writer("s", SCHEMA) as one,
        client.writer("s", SCHEMA) as other,
    ):
        register, seen = session_of(one).shard.register, list[int]()
        waiting = asyncio.create_task(
            register.wait(lambda state: seen.append(state.seqno), own=session_of(one).slot)
        )
        await turns()
        before = len(seen)
        await one.compare_and_append([], 0, 1)
        await turns()
        assert len(seen) == before
        await other.compare_and_append([], 1, 2)
        await turns()
        assert len(seen) == before + 1
        waiting.cancel()


class Slow(WrappedConsensus):
    """Commits take a while."""

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        await asyncio.sleep(0.1)
        return await super().compare_and_set(key, expected, data)


async def test_a_commit_whose_caller_is_gone_is_heard_of() -> None:
    """Goal: its hint is left out only while somebody waits for its answer."""
    patient, name = ap.Settings(watch_timeout_s=3600), uuid.uuid4().hex
    stores: Any = {"blob": MemoryBlob(name), "consensus": Slow(MemoryConsensus(name))}
    async with (
        ap.open(**stores, maintenance=False, settings=patient) as client,
        client.writer("s", SCHEMA) as one,
        client.reader("s", SCHEMA) as reader,
    ):
        register = shard_of(reader).register
        waiting = asyncio.create_task(register.wait(lambda state: state.upper == ap.Antichain(2) or None))
        await asyncio.sleep(0.05)
        appending = asyncio.create_task(one.compare_and_append([], 0, 2))
        while not session_of(one).slot.busy:
            await asyncio.sleep(0)
        appending.cancel()
        async with asyncio.timeout(10):
            await waiting
