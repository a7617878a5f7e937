"""Goal: races and failures around a client leave no shard without a name, no registration, no task."""

import asyncio
import gc
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.base.runtime import Runtime
from aiopersist.base.supervisor import Supervisor
from aiopersist.shard import catalog, log
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from aiopersist.web.census import Census
from tests.support.internals import shards_of, stack_of
from tests.support.schemas import SCHEMA
from tests.support.virtual import in_virtual_time


class Gate(MemoryConsensus):
    """The first version 0 of a shard waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        if key.startswith(("shard/", "indexed/")) and expected is None and not self.reached.is_set():
            self.reached.set()
            await self.open.wait()
        return await super().compare_and_set(key, expected, data)


async def test_a_shard_that_is_dropped_before_it_is_made_is_never_made() -> None:
    """Goal: its writer is told so; the name is free, an id that was never used stays unknown."""
    blob, gate = MemoryBlob(), Gate()
    async with (
        ap.open(blob=blob, consensus=gate) as client,
        ap.open(blob=blob, consensus=gate) as other,
        asyncio.timeout(50),
    ):
        opening = asyncio.ensure_future(_writer(client))
        await gate.reached.wait()
        assert await other.list_shards() == {}
        shard = await catalog.resolve(stack_of(other), "t")
        await other.drop("t")
        gate.open.set()
        with pytest.raises(ap.ShardFinalized):
            await opening
        assert await other.list_shards() == {}
        with pytest.raises(ap.ShardFinalized):
            await client.reader(shard)
        async with client.writer("t", SCHEMA) as w:
            assert w.shard_id != shard
        with pytest.raises(ap.UnknownShard):
            await other.drop(ap.ShardId.new())


async def test_a_shard_whose_drop_broke_off_is_refused() -> None:
    """Goal: after a crash before the name was freed the shard is finalized for every client, and can be
    dropped again."""
    from aiopersist.shard.attempt import Slot
    from aiopersist.shard.commit import commit
    from aiopersist.state.lifecycle import Finalize

    async with ap.open("mem://") as client:
        shard_id = await catalog.resolve_or_create(stack_of(client), "t", catalog.ShardId)
        shard = shards_of(client).at(shard_id)
        await commit(shard.register, Finalize(shard_id), Slot())
        other = ap.Schema(key=int, val=int)
        for call in (
            lambda: client.writer("t", other),
            lambda: client.reader("t"),
            lambda: client.reader("t", other, create=True),
            lambda: client.schema("t"),
        ):
            with pytest.raises(ap.ShardFinalized):
                await call()
        await client.admin.drop("t")
        assert await client.list_shards() == {}


async def _writer(client: ap.Client) -> Any:
    return await client.writer("t", SCHEMA)


async def test_a_handle_whose_opening_ends_while_its_client_closes_is_released() -> None:
    blob, gate = MemoryBlob(), Gate()
    client = await ap.open(blob=blob, consensus=gate)
    opening = asyncio.ensure_future(_writer(client))
    await gate.reached.wait()
    closing = asyncio.ensure_future(client.aclose())
    await asyncio.sleep(0.05)
    with pytest.raises(ap.InvalidUsage):  # nothing new begins
        await client.writer("u", SCHEMA)
    gate.open.set()
    async with asyncio.timeout(30):
        await closing
    with pytest.raises(ap.InvalidUsage) as caught:
        await opening
    assert caught.value.kind is ap.UsageKind.CLOSED
    async with ap.open(blob=blob, consensus=gate, maintenance=False) as later:
        found = await shards_of(later).existing("t")
        assert found.state.writers == {}


@pytest.mark.parametrize("kind", ["shard", "table", "indexed"])
async def test_a_creation_that_stopped_between_its_two_steps_names_nothing(kind: str) -> None:
    """Goal: neither lists nor the inspector show the name, readers know no shard, and whoever creates it
    later does so under that name."""
    blob, gate = MemoryBlob(), Gate()
    async with (
        ap.open(blob=blob, consensus=gate) as client,
        ap.open(blob=blob, consensus=gate) as other,
        asyncio.timeout(50),
    ):
        opens = {
            "shard": lambda client: client.writer("t", SCHEMA),
            "table": lambda client: client.table("t", str, int).put("a", 1),
            "indexed": lambda client: client.indexed("t"),
        }[kind]
        opening = asyncio.ensure_future(opens(client))
        await gate.reached.wait()
        census = Census(other)
        await census.look()
        await census.read([shard for _, shard in census._all_names])
        assert await other.list_shards() == {}
        assert await other.overview() == []
        assert (len(census._all_names), census.names) == (1, [])
        with pytest.raises(ap.UnknownShard):
            await other.reader("t")
        opening.cancel()
        await asyncio.wait([opening])
        resource = await opens(other)
        assert [summary.name for summary in await other.overview()] == ["t"]
        await census.look()
        assert [name for name, _ in census.names] == ["t"]
        if kind != "table":
            await resource.aclose()


async def test_no_task_outlives_its_supervisor() -> None:
    supervisor = Supervisor()
    late: list[asyncio.Task[None]] = []

    async def forever() -> None:
        await asyncio.sleep(60)

    async def stubborn() -> None:
        try:
            await forever()
        finally:
            late.append(supervisor.background(forever(), "late"))

    supervisor.background(stubborn(), "stubborn")
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await supervisor.aclose()
    await asyncio.sleep(0)
    assert [task.cancelled() for task in late] == [True]


@in_virtual_time
async def test_failing_rollups_register_one_writer_and_come_rarely() -> None:
    class NoRollups(MemoryBlob):
        tries = 0

        async def set(self, key: str, data: bytes | memoryview) -> None:
            if key.endswith(".rollup"):
                self.tries += 1
                raise StorageUnavailable("no rollup today")
            await super().set(key, data)

    blob = NoRollups()
    settings = ap.Settings(rollup_every=16, retry_timeout_s=0.0)
    async with ap.open(blob=blob, consensus=MemoryConsensus(), settings=settings) as client:
        async with client.writer("t", SCHEMA) as w:
            for n in range(60):
                await w.compare_and_append([], n, n + 1)
                await asyncio.sleep(0.005)
            (shard,) = shards_of(client)._open.values()
            assert len(shard.state.writers) <= 2
        assert 1 <= blob.tries <= 3


async def test_a_state_is_read_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: of a rollup and of many versions; the loop goes on."""
    threads: list[tuple[str, bool]] = []
    for name, work in (("_decode_rollup", log._decode_rollup), ("replayed", log.replayed)):

        def seen(*args: Any, name: str = name, work: Any = work) -> Any:
            threads.append((name, threading.current_thread() is threading.main_thread()))
            return work(*args)

        monkeypatch.setattr(log, name, seen)
    from aiopersist.maintenance.shard import ShardMaintenance

    blob, consensus = MemoryBlob(), MemoryConsensus()
    async with (
        ap.open(blob=blob, consensus=consensus, maintenance=False) as client,
        client.writer("t", SCHEMA) as w,
    ):
        (shard,) = shards_of(client)._open.values()
        await ShardMaintenance(shard).roll_up()
        for n in range(20):
            await w.compare_and_append([], n, n + 1)
        async with ap.open(blob=blob, consensus=consensus) as other:
            await other.schema("t")
    assert ("_decode_rollup", False) in threads
    assert ("replayed", False) in threads


async def test_closing_sqlite_under_cancellation_ends_both_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteConsensus(tmp_path / "state.db")
    await store.compare_and_set("k", None, b"1")
    await store.head("k")
    held = threading.Event()
    release = store._file._close_reading
    monkeypatch.setattr(store._file, "_close_reading", lambda: (held.wait(50), release()))
    closing = asyncio.ensure_future(store.aclose())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert store._file._writer._closed
    held.set()


async def test_a_name_whose_write_is_lost_again_and_again_is_tried_with_pauses() -> None:
    class Sleeps(Runtime):
        slept: tuple[float, ...] = ()

        async def sleep(self, seconds: float) -> None:
            self.slept += (seconds,)
            await super().sleep(seconds)

    class Losing(MemoryConsensus):
        lost = 0

        async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
            if key.startswith("name/") and self.lost < 6:
                self.lost += 1
                raise Indeterminate("lost")
            return await super().compare_and_set(key, expected, data)

    runtime, consensus = Sleeps(), Losing()
    settings = ap.Settings(retry_timeout_s=0.0)
    async with ap.open(blob=MemoryBlob(), consensus=consensus, settings=settings, runtime=runtime) as client:
        name = await catalog.resolve_or_create(stack_of(client), "t", catalog.ShardId)
        pauses = len([pause for pause in runtime.slept if pause > 0])
        assert pauses >= 5
        consensus.lost = 0
        await catalog.free(stack_of(client), "t", name)
        assert len([pause for pause in runtime.slept if pause > 0]) >= pauses + 5
        assert await client.list_shards() == {}


async def test_a_handle_that_nobody_keeps_is_released_with_its_client() -> None:
    """Goal: what it held back is let go of at once, not when its lease has run out."""
    name = uuid.uuid4().hex
    async with ap.open(f"mem://{name}") as watching:
        async with ap.open(f"mem://{name}") as client:
            writer = await client.writer("t", SCHEMA)
            reader = await client.reader("t", hold=0)
            del writer, reader
            gc.collect()
            assert len(shards_of(client)._handles) == 2
        shard = shards_of(watching).at(await watching.shard_id("t"))
        state = await shard.open()
        assert not state.readers
        assert not state.writers
