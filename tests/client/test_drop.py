"""Drop, the common shape of every resource, no resource stays open; see `test_client.py`."""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.client.client_kit import is_used
from tests.conftest import StoreUrls
from tests.support.internals import shard_of, shards_of
from tests.support.schemas import KIND, SCHEMA

pytestmark = pytest.mark.usefixtures("started_postgres")


async def _waiting_snapshot(r: ap.ReadHandle[str, int]) -> None:
    async with r.snapshot(7):
        pass


async def _awaited(opening: Any) -> Any:
    return await opening


def _child(connection: Any, call: Any) -> None:
    try:
        asyncio.run(call())
        connection.send(None)
    except BaseException as error:
        connection.send(getattr(error, "kind", repr(error)))


def open_files(below: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(str(below)):
            found.append(target)
    return found


async def is_used_again(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        await w.write([("a", 1)])


# --- drop ---------------------------------------------------------------------------------------------


async def test_dropping_a_shard(location: StoreUrls) -> None:
    """Goal: fences handles of every client, ends what waits, never tells the empty upper as progress, and
    frees the name."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as client,
        ap.open(blob=location.blob, consensus=location.consensus) as other,
    ):
        w, r = await other.writer("t", SCHEMA), await other.reader("t", SCHEMA)
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
        shard = w.shard_id
        told: list[Any] = []

        async def listening() -> None:
            async with r.listen(as_of=0) as listen:
                async for item in listen:
                    told.append(item)  # noqa: PERF401  # what came before the error

        waiting = [
            asyncio.create_task(w.wait_for_upper_past(9)),
            asyncio.create_task(listening()),
            asyncio.create_task(_waiting_snapshot(r)),
        ]
        await asyncio.sleep(0.1)
        await client.admin.drop("t")
        async with asyncio.timeout(50):
            for task in waiting:
                with pytest.raises(ap.ShardFinalized):
                    await task
        assert not any(isinstance(item, ap.Progress) and item.upper == ap.Antichain() for item in told)
        for call in (
            lambda: w.compare_and_append([], 1, 2),
            lambda: w.append([], 1, 2),
            lambda: w.write([("a", 1)]),
            w.fetch_recent_upper,
            lambda: w.wait_for_upper_past(0),
            lambda: other.writer(shard, SCHEMA),
            lambda: other.reader(shard),
            lambda: other.schema(shard),
        ):
            with pytest.raises(ap.ShardFinalized):
                async with asyncio.timeout(50):
                    await call()
        assert await client.list_shards() == {}
        with pytest.raises(ap.UnknownShard):
            await client.admin.drop("t")
        async with client.writer("t", SCHEMA) as again:
            assert again.shard_id != shard
            assert again.upper == ap.Antichain(0)
        await w.aclose()
        await r.aclose()


class DropsFirst(FaultyBlob):
    """The shard is dropped while its client reads the first part."""

    client: ap.Client

    async def get(self, key: str) -> bytes | None:
        return await self._then_dropped(key, super().get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return await self._then_dropped(key, super().get_range(key, offset, length))

    async def _then_dropped(self, key: str, reading: Awaitable[bytes | None]) -> bytes | None:
        data = await reading
        if key.endswith(".parquet") and await self.client.list_shards():
            await self.client.admin.drop("t")
        return data


async def test_dropping_a_shard_that_is_worked_on(tmp_path: Path) -> None:
    """Goal: maintenance under way says what happened."""
    name, settings = f"mem://{tmp_path.name}", ap.Settings(inline_writes_single_max_bytes=0)
    blob = DropsFirst(ap.open_blob(name), Faults())
    for work in ("fsck", "force_compaction"):
        async with ap.open(blob=blob, consensus=name, settings=settings, maintenance=False) as client:
            blob.client = client
            async with client.writer("t", SCHEMA) as w:
                for time in range(3):
                    await w.compare_and_append([("a", 1, time, 1)], time, time + 1)
                with pytest.raises(ap.ShardFinalized):
                    await getattr(client, work)("t")
                with pytest.raises(ap.ShardFinalized):
                    shard_of(w).schema_id(SCHEMA)
                with pytest.raises(ap.ShardFinalized):
                    shard_of(w).schema(1)


# --- one shape of every resource ----------------------------------------------------------------------


async def test_awaited_or_entered_and_closed_in_another_task(client: ap.Client) -> None:
    for name, opener in (
        ("w", lambda: client.writer("t", SCHEMA)),
        ("r", lambda: client.reader("t", SCHEMA)),
    ):
        async with opener() as entered:
            assert entered.shard_id
        awaited = await asyncio.create_task(_awaited(opener()))
        await asyncio.create_task(awaited.aclose())
        await awaited.aclose()
        await asyncio.gather(awaited.aclose(), awaited.aclose())
        for handle in (entered, awaited):
            with pytest.raises(ap.InvalidUsage) as caught:
                await handle.fetch_recent_upper()
            assert caught.value.kind is KIND.CLOSED, name


async def test_an_exception_of_the_body_leaves_unwrapped(mem: ap.Client) -> None:
    error = KeyError("mine")
    for opener in (lambda: ap.open("mem://"), lambda: mem.writer("t", SCHEMA)):
        with pytest.raises(KeyError) as caught:
            async with opener():
                raise error
        assert caught.value is error


@pytest.mark.parametrize("closed", ["handle", "client"])
async def test_calls_that_wait_are_told_that_it_closed(closed: str) -> None:
    """Goal: not cancelled, but told; also those that wait for the store, and for their turn."""
    faults = Faults()
    stores = FaultyBlob(MemoryBlob(), faults), FaultyConsensus(MemoryConsensus(), faults)
    client = await ap.open(blob=stores[0], consensus=stores[1])
    w = await client.writer("t", SCHEMA)
    faults.latency_s = (0.2, 0.2)
    calls = [
        asyncio.create_task(call)
        for call in (
            w.wait_for_upper_past(5),
            w.compare_and_append([], 0, 1),
            w.compare_and_append([], 0, 2),
            w.write([("a", 1)]),
            w.fetch_recent_upper(),
        )
    ]
    await asyncio.sleep(0.05)
    await (w if closed == "handle" else client).aclose()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, ap.InvalidUsage)
        assert result.kind is KIND.CLOSED
    assert not any(task.cancelling() for task in calls)
    await client.aclose()


async def test_a_client_closes_its_handles_once_for_all(location: StoreUrls) -> None:
    client = await ap.open(blob=location.blob, consensus=location.consensus)
    w, r = await client.writer("t", SCHEMA), await client.reader("t", SCHEMA)
    await asyncio.gather(client.aclose(), client.aclose())
    await client.aclose()
    for call in (
        lambda: w.write([("a", 1)]),
        w.settle,
        r.fetch_recent_upper,
        client.ping,
        client.list_shards,
        lambda: client.writer("t", SCHEMA),
        lambda: client.reader("t"),
        lambda: client.admin.drop("t"),
    ):
        with pytest.raises(ap.InvalidUsage) as caught:
            await call()
        assert caught.value.kind is KIND.CLOSED
    await w.aclose()
    await r.aclose()
    async with (
        ap.open(blob=location.blob, consensus=location.consensus, maintenance=False) as again,
        again.writer("t", SCHEMA) as w,
    ):
        state = shard_of(w).state
        assert list(state.writers) == [w.writer_id]  # the others said good-bye
        assert not state.readers


async def test_closing_under_cancellation_goes_on(tmp_path: Path) -> None:
    """Goal: a caller that is cancelled while closing stops waiting; the client does the release."""
    async with ap.open(tmp_path) as client:
        w = await client.writer("t", SCHEMA)
        closing = asyncio.create_task(w.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        shard = shards_of(client)._open[w.shard_id]
        async with asyncio.timeout(50):
            while w.writer_id in (await shard.open()).writers:
                await asyncio.sleep(0.01)


async def test_a_store_that_is_gone_does_not_keep_from_closing() -> None:
    faults = Faults()
    stores = FaultyBlob(MemoryBlob(), faults), FaultyConsensus(MemoryConsensus(), faults)
    client = await ap.open(blob=stores[0], consensus=stores[1], settings=ap.Settings(retry_timeout_s=0.1))
    await client.writer("t", SCHEMA)
    from aiopersist.testing.faults import Outcome

    faults.rates = {Outcome.REFUSED: 1.0}
    async with asyncio.timeout(50):
        await client.aclose()


async def test_another_loop_is_refused_at_once(mem: ap.Client) -> None:
    """Goal: in another thread every call is `WRONG_LOOP`, closing too; here all goes on."""
    w, r = await mem.writer("t", SCHEMA), await mem.reader("t", SCHEMA)
    found: list[Any] = []

    def elsewhere() -> None:
        for call in (
            lambda: w.write([("a", 1)]),
            w.fetch_recent_upper,
            w.settle,
            w.aclose,
            r.fetch_recent_upper,
            mem.ping,
            mem.aclose,
            lambda: _awaited(mem.writer("t", SCHEMA)),
        ):
            try:
                found.append(asyncio.run(call()))
            except Exception as error:
                found.append(error)

    await asyncio.to_thread(elsewhere)
    assert [getattr(error, "kind", error) for error in found] == [KIND.WRONG_LOOP] * 8
    assert await w.write([("a", 1)]) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_fork_is_refused_at_once(mem: ap.Client) -> None:
    w = await mem.writer("t", SCHEMA)
    here, there = multiprocessing.Pipe()
    threading.Thread(target=lambda: None).start()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(there, w.fetch_recent_upper))
    child.start()
    assert await asyncio.to_thread(here.poll, 20)
    assert here.recv() == KIND.WRONG_LOOP
    await asyncio.to_thread(child.join)
    assert await w.write([("a", 1)]) == 0


# --- nothing is left open -----------------------------------------------------------------------------


async def test_nothing_of_the_location_is_open_afterwards(tmp_path: Path) -> None:
    """Goal: no file, no task, no thread of its lanes, also when calls were cancelled before."""
    tasks = len(asyncio.all_tasks())
    threads = {thread.name for thread in threading.enumerate()}
    client = await ap.open(tmp_path)
    await is_used(client)
    w = await client.writer("t", SCHEMA)
    waiting = asyncio.create_task(w.wait_for_upper_past(9))
    hurried = asyncio.create_task(w.write([("a", 1)]))
    await asyncio.sleep(0.001)
    hurried.cancel()
    assert open_files(tmp_path)
    await client.aclose()
    await asyncio.gather(waiting, hurried, return_exceptions=True)
    assert open_files(tmp_path) == []
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == tasks
    async with asyncio.timeout(50):  # a thread that was told to end ends soon
        while any("sqlite" in name for name in {t.name for t in threading.enumerate()} - threads):
            await asyncio.sleep(0.01)


async def test_maintenance_may_be_left_to_others(tmp_path: Path) -> None:
    async with ap.open(tmp_path, maintenance=False, settings=ap.Settings(rollup_every=2)) as client:
        for _ in range(3):
            await is_used_again(client)
    assert not list(tmp_path.rglob("*.rollup"))
    async with ap.open(tmp_path, settings=ap.Settings(rollup_every=2)) as client:
        for _ in range(3):
            await is_used_again(client)
        async with asyncio.timeout(50):
            while not list(tmp_path.rglob("*.rollup")):
                await asyncio.sleep(0.01)
