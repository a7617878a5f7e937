"""Goal: an opening that is cancelled at any moment leaves no reader, and no hold of history."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

import aiopersist as ap
from tests.support.schemas import SCHEMA

OPENINGS: dict[str, Callable[[ap.Client], Any]] = {
    "reader": lambda client: client.reader("s"),
    "hold": lambda client: client.reader("s", hold=0),
    "snapshot": lambda client: _snapshot(client),
    "indexed": lambda client: client.indexed("ix", readonly=True),
    "subscribe": lambda client: _subscribe(client),
    "fsck": lambda client: client.admin.fsck("s"),
}


async def _snapshot(client: ap.Client) -> Any:
    async with client.reader("s") as reader, reader.snapshot() as snapshot:
        return await snapshot.rows()


async def _subscribe(client: ap.Client) -> Any:
    async with client.reader("s") as reader, await reader.subscribe(as_of=0) as listen:
        return await anext(listen)


async def written(client: ap.Client) -> None:
    async with client.writer("s", SCHEMA) as writer:
        await writer.compare_and_append([("k", 1, 0, 1)], 0, 1)
    async with client.indexed("ix") as ix:
        await ix.register("stream", str, int)


@pytest.mark.parametrize("kind", OPENINGS)
async def test_a_cancelled_opening_leaves_nothing(kind: str) -> None:
    async with ap.open("mem://", maintenance=False) as client:
        await written(client)
        cut, is_through = 0, False
        for steps in count():  # of the event loop; a call that waits for a thread takes as many as it likes
            task = asyncio.ensure_future(OPENINGS[kind](client))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            try:
                opened = await task
            except asyncio.CancelledError:
                cut += 1
            else:
                is_through = True
                if hasattr(opened, "aclose"):
                    await opened.aclose()
            for name in ("s", "ix"):
                await no_reader_is_left(client, name)
            if is_through:
                break
        assert cut > 0


async def no_reader_is_left(client: ap.Client, name: str) -> None:
    for _ in range(200):
        found = await client.admin.inspect(name)
        if not found.readers:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} has {found.readers}")
