"""Goal: maintenance survives a pause longer than its lease, and idle shards do not stay claimed by dead
processes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.runtime import Runtime
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.keys import writer_of
from aiopersist.state.writing import ExpireWriter
from tests.support.internals import shard_of, stack_of
from tests.support.schemas import SCHEMA

BLOBS = ap.Settings(inline_writes_single_max_bytes=0, rollup_every=4, compaction_idle_s=0.05)


class Blobs(ap.Blob):
    """Calls `after_set(key)` when a blob is there, before its writer hears of it."""

    def __init__(self, url: str) -> None:
        self._inner = ap.open_blob(url)
        self.after_set: Callable[[str], Awaitable[None]] | None = None

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await self._inner.set(key, data)
        if self.after_set is not None:
            await self.after_set(key)

    async def get(self, key: str) -> bytes | None:
        return await self._inner.get(key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return await self._inner.get_range(key, offset, length)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._inner.delete(keys)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async for item in self._inner.list(prefix):
            yield item

    async def aclose(self) -> None:
        await self._inner.aclose()


class Clock(Runtime):
    """The clock of the host."""

    ahead_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead_s


MAINTENANCE: dict[str, Callable[[ap.Client], Awaitable[Any]]] = {
    "force_gc": lambda client: client.admin.force_gc("t"),
    "force_compaction": lambda client: client.admin.force_compaction("t"),
    "maintain": lambda client: client.admin.maintain(),
}


@pytest.mark.parametrize("work", MAINTENANCE)
@pytest.mark.parametrize("pauses", [1, 3])
async def test_a_pause_costs_an_attempt(caplog: Any, tmp_path: Any, work: str, pauses: int) -> None:
    """Goal: a registration that others have ended meanwhile is no failure: the work is done under another."""
    caplog.set_level(logging.INFO, "aiopersist")
    name = f"mem://{tmp_path.name}"
    blobs = Blobs(name)
    left = pauses
    async with (
        ap.open(name, maintenance=False) as other,
        ap.open(blob=blobs, consensus=name, settings=BLOBS, maintenance=False) as client,
    ):
        async with client.writer("t", SCHEMA) as w, other.writer("t", SCHEMA) as elsewhere:
            for time in range(20):
                await w.compare_and_append([(f"k{time}", time, time, 1)], time, time + 1)

            async def others_end_it(key: str) -> None:
                nonlocal left
                if left and writer_of(key) != w.writer_id:
                    left -= 1
                    await shard_of(elsewhere).open()
                    await commit(shard_of(elsewhere).register, ExpireWriter(writer_of(key)), Slot())

            blobs.after_set = others_end_it
            done = await MAINTENANCE[work](client)
            assert left == 0
            assert work != "maintain" or done.failures == {}
            assert not [record for record in caplog.records if record.exc_info]
            async with client.reader("t", SCHEMA) as r, r.snapshot() as s:
                assert len(await s.rows()) == 20
            if work == "force_compaction":
                assert len((await client.admin.inspect("t")).batches) == 1
            if work == "force_gc":
                assert (await client.admin.inspect("t")).live_diffs < 10
        await client.admin.sweep_leaked_blobs(dry_run=False)
        usage = await client.admin.usage()
        assert usage.total == usage.referenced and (await client.admin.fsck("t")).ok
    await blobs.aclose()


async def test_the_background_collects_after_a_pause(caplog: Any, tmp_path: Any) -> None:
    name = f"mem://{tmp_path.name}"
    blobs, ended = Blobs(name), 0
    async with (
        ap.open(name, maintenance=False) as other,
        ap.open(blob=blobs, consensus=name, settings=BLOBS) as client,
    ):
        async with client.writer("t", SCHEMA) as w, other.writer("t", SCHEMA) as elsewhere:

            async def others_end_it(key: str) -> None:
                nonlocal ended
                if ended < 3 and key.endswith(".rollup"):
                    ended += 1
                    await shard_of(elsewhere).open()
                    await commit(shard_of(elsewhere).register, ExpireWriter(writer_of(key)), Slot())

            blobs.after_set = others_end_it
            for time in range(20):
                await w.compare_and_append([(f"k{time}", time, time, 1)], time, time + 1)
            async with asyncio.timeout(50):
                while ended < 3 or (await client.admin.inspect("t")).live_diffs > 10:
                    await asyncio.sleep(0.02)
        assert [record.getMessage() for record in caplog.records if record.exc_info] == []
        assert stack_of(client).supervisor.failures.count == 0
    await blobs.aclose()


# --- idle shards -----------------------------------------------------------------------------------


async def leaking(place: Any, clock: Clock) -> None:
    """A process that is killed with a staged batch and a hold, in a shard without further appends."""
    client = await ap.open(place, settings=BLOBS, runtime=clock, maintenance=False)
    w = await client.writer("t", SCHEMA)
    await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
    await client.reader("t", SCHEMA, hold=0)
    await (await w.batch([("b", 1, 1, 1)], 1, 2)).flush_to_blob()
    stack_of(client).supervisor._closed = True
    for task in list(stack_of(client).supervisor._loops):
        task.cancel()
    clock.ahead_s += 2 * BLOBS.writer_lease_s


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_sweep_takes_the_leaks_of_an_idle_shard(tmp_path: Any) -> None:
    """Goal: a dry run tells them and writes nothing; a sweep ends the writers that left them, and deletes
    them."""
    clock, place = Clock(), f"mem://{tmp_path.name}"
    await leaking(place, clock)
    async with ap.open(place, runtime=clock, maintenance=False) as client:
        before = await client.admin.inspect("t")
        told = await client.admin.sweep_leaked_blobs()
        assert len(told.keys) == 1 and not told.deleted
        assert (await client.admin.inspect("t")).seqno == before.seqno
        swept = await client.admin.sweep_leaked_blobs(dry_run=False)
        assert swept.keys == told.keys and swept.deleted
        usage = await client.admin.usage()
        assert usage.total == usage.referenced
        assert (await client.admin.sweep_leaked_blobs(dry_run=False)).keys == ()
        assert (await client.admin.fsck("t")).ok


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_round_ends_what_is_overdue(tmp_path: Any) -> None:
    """Goal: also in a shard that had not changed since the round before; and then it rests again."""
    clock, place = Clock(), f"mem://{tmp_path.name}"
    await leaking(place, clock)
    clock.ahead_s = 0.0
    async with ap.open(place, runtime=clock, maintenance=False) as client:
        await client.admin.maintain()
        assert (await client.admin.maintain()).looked_at == 0
        assert (await client.admin.inspect("t")).readers
        clock.ahead_s = 2 * BLOBS.writer_lease_s
        assert (await client.admin.maintain()).looked_at == 1
        view = await client.admin.inspect("t")
        assert (view.readers, view.writers) == ({}, {})
        rounds = [(await client.admin.maintain()).looked_at for _ in range(3)]
        assert rounds[-1] == 0


async def test_a_live_lease_is_left_alone(tmp_path: Any) -> None:
    """Goal: blobs that are staged under a live lease are neither reported nor deleted."""
    place = f"mem://{tmp_path.name}"
    async with ap.open(place, settings=BLOBS) as one, ap.open(place, maintenance=False) as two:
        async with one.writer("t", SCHEMA) as w:
            await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
            batch = await w.batch([("b", 1, 1, 1)], 1, 2)
            await two.maintain()
            assert (await two.sweep_leaked_blobs(dry_run=False)).keys == ()
            await w.compare_and_append_batch([batch], 1, 2)
            assert (await two.fsck("t")).ok


async def test_a_shared_compaction_claims_after_a_pause(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a registration that was ended before it claimed anything is made anew."""
    from aiopersist.shard.registration import Registration

    name, fresh, ended = f"mem://{tmp_path.name}", Registration.fresh, []
    async with (
        ap.open(name, maintenance=False) as other,
        ap.open(name, settings=BLOBS, maintenance=False) as client,
    ):
        async with client.writer("t", SCHEMA) as w, other.writer("t", SCHEMA) as elsewhere:
            for time in range(3):
                await w.compare_and_append([("k", time, time, 1)], time, time + 1)

            async def ended_at_once(*args: Any, **kwargs: Any) -> Registration:
                registration = await fresh(*args, **kwargs)
                if len(ended) < 2:
                    ended.append(registration.writer)
                    await shard_of(elsewhere).open()
                    await commit(shard_of(elsewhere).register, ExpireWriter(registration.writer), Slot())
                return registration

            monkeypatch.setattr(Registration, "fresh", ended_at_once)
            async with client.workers.shared_compaction("t") as shared:
                results = [await client.workers.compact_piece(piece) for piece in await shared.pieces(1)]
                await shared.apply(results)
            assert len(ended) == 2
            assert len((await client.admin.inspect("t")).batches) == 1


async def test_a_compaction_on_demand_does_not_wait_for_one_in_the_background() -> None:
    """Goal: the one in the background ends, and its work is part of the other; later ones begin as usual."""
    settings = ap.Settings(inline_writes_single_max_bytes=0, compaction_inputs_min=2)
    blobs, name = Blobs("mem://on-demand"), "mem://on-demand"
    begun, goes_on = asyncio.Event(), asyncio.Event()
    async with (
        ap.open(blob=blobs, consensus=name, settings=settings) as client,
        client.writer("t", SCHEMA) as w,
        asyncio.timeout(50),
    ):

        async def hang(key: str) -> None:
            if writer_of(key) != w.writer_id and not begun.is_set():
                begun.set()
                await goes_on.wait()

        async def append(time: int) -> None:
            await w.compare_and_append([(f"k{time}", time, time, 1)], time, time + 1)

        blobs.after_set, time = hang, 0
        while not begun.is_set():
            await append(time)
            time += 1
        await client.admin.force_compaction("t")
        assert len((await client.admin.inspect("t")).batches) == 1
        goes_on.set()
        compactions = client.metrics().compactions.duration.count
        while client.metrics().compactions.duration.count == compactions:
            await append(time)
            time += 1
        async with client.reader("t", SCHEMA) as r, r.snapshot() as s:
            assert len(await s.rows()) == time
    await blobs.aclose()
