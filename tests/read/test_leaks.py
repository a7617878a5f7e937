"""Goal: a read gives back all its resources, however it ends: dropped without a close, cancelled halfway,
or closed while the store fails."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import UsageKind
from aiopersist.testing.faults import Faults, FaultyBlob
from tests.support.internals import session_of, shard_of
from tests.support.schemas import SCHEMA


@pytest.fixture
async def client() -> AsyncIterator[ap.Client]:
    async with ap.open("mem://") as client:
        yield client


async def filled(client: ap.Client) -> ap.WriteHandle[str, int]:
    writer: ap.WriteHandle[str, int] = await client.writer("s", SCHEMA)
    await writer.compare_and_append([("k", t, t, 1) for t in range(5)], 0, 5)
    return writer


async def waiting(task: asyncio.Task[Any]) -> None:
    """Let `task` run until it waits for good."""
    await asyncio.sleep(0.05)
    assert not task.done()


async def test_what_was_dropped_without_a_close_is_released_with_its_handle(client: ap.Client) -> None:
    await filled(client)
    keeper = await client.reader("s", SCHEMA)  # so that the process's reader stays
    shard = shard_of(keeper)
    reader = await client.reader("s", SCHEMA)
    snapshot = await reader.snapshot()
    listen = await reader.listen(as_of=2)
    del snapshot, listen
    gc.collect()
    assert shard.register.pins and shard.hold._pins
    await reader.aclose()
    assert not shard.register.pins
    assert not shard.hold._pins
    assert not reader._scope._children


async def test_a_handle_forgets_what_was_closed(client: ap.Client) -> None:
    await filled(client)
    reader = await client.reader("s", SCHEMA)
    async with reader.snapshot(), reader.listen(as_of=2), reader.subscribe(as_of=2) as subscription:
        while not isinstance(await anext(subscription), ap.Progress):
            pass
        assert session_of(reader).opened
    assert not session_of(reader).opened


async def test_a_snapshot_cancelled_after_its_wait_needs_nothing(
    client: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = await filled(client)
    reader = await client.reader("s", SCHEMA)
    hold = shard_of(reader).hold
    opening = asyncio.create_task(session_of(reader).snapshot(6, True))
    await waiting(opening)
    assert hold._pins
    reached = asyncio.Event()

    async def ensure() -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(hold, "ensure", ensure)
    await writer.compare_and_append([], 5, 7)
    async with asyncio.timeout(50):
        await reached.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not hold._pins


@pytest.mark.parametrize("failing", ["own", "opened"])
async def test_closing_lets_go_of_everything_whatever_fails(
    client: ap.Client, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    await filled(client)
    reader = await client.reader("s", SCHEMA, hold=0)
    first, second = await reader.snapshot(), await reader.snapshot()
    shard, own = shard_of(reader), session_of(reader).own
    assert own is not None

    async def fail() -> None:
        raise ap.StorageUnavailable("gone")

    if failing == "own":
        monkeypatch.setattr(own, "release", fail)
    else:
        iterations = [snapshot.batches() for snapshot in (first, second)]
        for iteration in iterations:
            monkeypatch.setattr(iteration, "aclose", fail)
    await reader.aclose()
    assert not shard.hold._users
    assert not shard.hold.reader
    assert not shard.register.pins
    assert (own.reader in shard.state.readers) == (failing == "own")


async def test_a_wait_for_an_iteration_that_is_closed_is_told_so() -> None:
    faults = Faults()
    blob = FaultyBlob(ap.open_blob("mem://leaks"), faults)
    settings = ap.Settings(inline_writes_single_max_bytes=0)
    async with ap.open(blob=blob, consensus=ap.open_consensus("mem://leaks"), settings=settings) as client:
        await filled(client)
        async with client.reader("s", SCHEMA) as reader, reader.snapshot() as snapshot:
            faults.latency_s = (30.0, 30.0)
            batches = snapshot.batches()
            closed, cancelled = (asyncio.create_task(_next(batches)) for _ in range(2))
            await waiting(closed)
            cancelled.cancel()
            await batches.aclose()
            faults.latency_s = (0.0, 0.0)
            with pytest.raises(ap.InvalidUsage) as told:
                await closed
            assert told.value.kind is UsageKind.CLOSED
            assert told.value.shard_id == reader.shard_id
            with pytest.raises(asyncio.CancelledError):
                await cancelled


async def _next(items: Any) -> Any:
    return await anext(items)
