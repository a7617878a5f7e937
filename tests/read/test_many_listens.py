"""Goal: thousands of waits for one shard are served in turns, which let other tasks run, and the updates
that they take are decoded once."""

import asyncio
from typing import Any

import aiopersist as ap
from aiopersist.data.part.inline import decode_inline_parts
from tests.support.internals import shard_of
from tests.support.schemas import SCHEMA

LISTENS = 400


async def all_wait(handle: Any) -> None:
    """Until so many wait for the handle's shard."""
    async with asyncio.timeout(50):
        while len(shard_of(handle).register._waiters) < LISTENS:
            await asyncio.sleep(0.001)


async def test_many_listens_of_one_shard(monkeypatch: Any) -> None:
    """A commit: the loop turns often while they hear of it, each turn for a few of them; all hear all."""
    decoded: list[int] = []

    def counted(*args: Any) -> Any:
        decoded.append(1)
        return decode_inline_parts(*args)

    monkeypatch.setattr("aiopersist.parts.fetch.decode_inline_parts", counted)
    async with (
        ap.open("mem://", maintenance=False) as client,
        client.writer("s", SCHEMA) as writer,
        client.reader("s", SCHEMA) as reader,
    ):
        await writer.compare_and_append([("a", 1, 0, 1)], 0, 1)
        steps = [(await reader.listen(0)).steps() for _ in range(LISTENS)]
        heard: list[ap.Updates] = []

        async def hear(one: Any) -> None:
            heard.append((await anext(one)).updates)

        tasks = [asyncio.create_task(hear(one)) for one in steps]
        await all_wait(reader)
        await writer.compare_and_append([("b", 2, 1, 1), ("c", 3, 1, 1)], 1, 2)
        most, before = 0, len(heard)
        async with asyncio.timeout(50):
            while len(heard) < LISTENS:
                await asyncio.sleep(0)
                most, before = max(most, len(heard) - before), len(heard)
        await asyncio.gather(*tasks)
        assert most <= LISTENS // 8
        assert all(len(updates) == 2 for updates in heard)
        assert len(decoded) <= 2


async def test_all_who_wait_hear_of_a_failure() -> None:
    """In turns, too."""
    async with ap.open("mem://", maintenance=False) as client, client.writer("s", SCHEMA) as writer:
        waiting = [asyncio.create_task(writer.wait_for_upper_past(5)) for _ in range(LISTENS)]
        await all_wait(writer)
        await client.admin.drop("s")
        async with asyncio.timeout(50):
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ap.ShardFinalized}
