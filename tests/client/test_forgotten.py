"""Goal: a user who forgets an `await`, an `async with` or a close is told so, and what to write instead."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, Stream
from tests.support.schemas import SCHEMA


class World(NamedTuple):
    client: ap.Client
    writer: ap.WriteHandle[str, int]
    reader: ap.ReadHandle[str, int]
    ix: Indexed
    stream: Stream[str, int]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with (
        ap.open("mem://") as client,
        client.writer("a", SCHEMA) as writer,
        client.reader("a", SCHEMA) as reader,
        client.indexed("ix") as ix,
    ):
        await writer.write([("k", 1)])
        yield World(client, writer, reader, ix, await ix.register("s", str, int))


OPENERS: dict[str, Callable[[World], Any]] = {
    "aiopersist.open(": lambda w: ap.open("mem://"),
    "aiopersist.stash.open(": lambda w: ap.stash.open("mem://"),
    "client.writer('a'": lambda w: w.client.writer("a", SCHEMA),
    "client.reader('a'": lambda w: w.client.reader("a"),
    "client.critical_since('a'": lambda w: w.client.critical_since("a", "me"),
    "client.indexed('ix'": lambda w: w.client.indexed("ix", readonly=True),
    "client.stash(": lambda w: w.client.stash(),
    "client.workers.shared_read('a'": lambda w: w.client.workers.shared_read("a"),
    "writer.builder(": lambda w: w.writer.builder(5),
    "reader.snapshot(": lambda w: w.reader.snapshot(),
    "reader.listen(": lambda w: w.reader.listen(),
    "reader.subscribe(": lambda w: w.reader.subscribe(),
    "indexed.snapshot(": lambda w: w.ix.snapshot(w.stream),
    "indexed.listen(": lambda w: w.ix.listen(w.stream),
}


@pytest.mark.parametrize(("call", "opener"), OPENERS.items(), ids=OPENERS)
async def test_every_opener_can_be_awaited_and_entered(
    world: World, call: str, opener: Callable[[World], Any]
) -> None:
    """Goal: one shape for every resource; closing is idempotent; nothing warns."""
    async with opener(world):
        pass
    opened = await opener(world)
    async with opened as same:
        assert same is opened
    await opened.aclose()
    gc.collect()


@pytest.mark.parametrize(("call", "opener"), OPENERS.items(), ids=OPENERS)
async def test_an_opening_used_as_what_it_opens(
    world: World, call: str, opener: Callable[[World], Any]
) -> None:
    opening = opener(world)
    with pytest.raises(AttributeError) as missing:
        opening.write  # noqa: B018  # that is the test
    with pytest.raises(TypeError) as plain, opening:
        pass
    with pytest.raises(TypeError) as iterated:
        async for _ in opening:
            pass
    for caught in (missing, plain, iterated):
        assert str(caught.value).startswith(call)
        assert f"`await {call}" in str(caught.value)
        assert f"`async with {call}" in str(caught.value)
    assert "'write'" in str(missing.value)
    assert not hasattr(opening, "_private")
    await (await opening).aclose()


@pytest.mark.parametrize(("call", "opener"), OPENERS.items(), ids=OPENERS)
async def test_an_opening_that_is_dropped(world: World, call: str, opener: Callable[[World], Any]) -> None:
    with pytest.warns(RuntimeWarning, match="was never awaited") as told:  # noqa: PT031  # dropped, then freed
        opener(world)
        gc.collect()
    assert str(told[0].message).startswith(call)
    opener(world).close()
    gc.collect()


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
async def test_a_task_can_be_made_of_an_opening(world: World, opener: Callable[[World], Any]) -> None:
    """Goal: also one that is cancelled before it begins, which is not forgotten."""
    await (await asyncio.create_task(opener(world))).aclose()
    for opened in await asyncio.gather(opener(world)):
        await opened.aclose()
    task = asyncio.ensure_future(opener(world))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()


async def test_a_client_that_is_dropped(tmp_path: Path) -> None:
    """Goal: a warning once the last reference is gone, with or without open handles; none for one that failed
    to open."""
    client = await ap.open("mem://")
    writer = await client.writer("a", SCHEMA)
    await writer.write([("k", 1)])
    with pytest.warns(ResourceWarning, match="Client was never closed") as told:  # noqa: PT031
        del client, writer
        while not told:  # the task of the write has its last steps yet
            await asyncio.sleep(0)
            gc.collect()
    with pytest.raises(ap.InvalidLocation):
        await ap.open(tmp_path / "none", readonly=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()


async def test_a_stash_that_is_dropped(world: World) -> None:
    """Goal: one of its own is told; one of a client is closed with its client."""
    stash = await ap.stash.open("mem://")
    with pytest.warns(ResourceWarning, match="Stash was never closed"):  # noqa: PT031
        del stash
        gc.collect()
    await world.client.stash()
    gc.collect()
