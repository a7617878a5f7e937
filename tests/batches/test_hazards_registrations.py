"""Registrations; see `test_hazards.py`."""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.shard import registration
from tests.batches.hazards_kit import another, rig
from tests.support.internals import session_of, shard_of, staged_of
from tests.support.schemas import ROWS, SCHEMA
from tests.support.shards import rows


class Clock(Runtime):
    """Time stands still until it is told to pass. Whoever sleeps lets others run, and looks again."""

    def __init__(self) -> None:
        self.now = SYSTEM.wall()

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        await asyncio.sleep(0)
        while self.now < until:
            await asyncio.sleep(0.001)

    async def passes(self, seconds: float) -> None:
        """In steps of a twentieth, so that every sleeping task does its due work."""
        for _ in range(20):
            self.now += seconds / 20
            await asyncio.sleep(0.005)


async def test_a_batch_in_the_making_keeps_a_registration_that_is_rotated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: its iterator waits while the handle registers anew and many leases pass; it is appended."""
    monkeypatch.setattr(registration, "BATCHES_MAX", 3)
    clock = Clock()
    async with rig(clock, writer_lease_s=100.0, blob_target_size=1) as r:
        w, other = await r.writer(), await r.writer()
        go_on = asyncio.Event()

        async def updates() -> AsyncIterator[Any]:
            yield ("a", 1, 9, 1)
            await go_on.wait()
            yield ("b", 1, 9, 1)

        making = asyncio.create_task(w.batch(updates(), 0, 10))
        await asyncio.sleep(0)
        registered = w.writer_id
        for _ in range(4):
            data = (await w.batch([], 0, 10)).to_transmittable()
            await (await other.batch_from_transmittable(data)).delete()
        assert w.writer_id != registered
        for time in range(3):
            await clock.passes(90.0)
            await other.compare_and_append([], time, time + 1)
        go_on.set()
        batch = await making
        assert all(registered in str(part.key) for part in batch.parts)
        await w.compare_and_append_batch([batch], 3, 10)
        assert await rows(r.client, 9) == [("a", 1, 1), ("b", 1, 1)]


async def test_a_rotated_registration_ends_when_all_it_handed_over_is_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: at its next heartbeat, not when its lease has run out."""
    monkeypatch.setattr(registration, "BATCHES_MAX", 3)
    clock = Clock()
    async with rig(clock, writer_lease_s=100.0) as r:
        w, other = await r.writer(), await r.writer()
        registered = w.writer_id
        for _ in range(4):
            data = (await w.batch([], 0, 10)).to_transmittable()
            await (await other.batch_from_transmittable(data)).delete()
        assert w.writer_id != registered
        await clock.passes(60.0)
        state = await shard_of(other).open()
        assert set(state.writers) == {w.writer_id, other.writer_id}


async def test_rotated_registrations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "BATCHES_MAX", 3)
    clock = Clock()
    async with rig(clock, writer_lease_s=100.0) as r:
        w = await r.writer()
        for _ in range(20):
            await (await w.batch([], 0, 10)).delete()
        await clock.passes(300.0)
        assert len(session_of(w)._others) <= 1


async def test_no_record_keeps_many_spent_ids() -> None:
    """Goal: hundreds of batches are built first and handed over afterwards; still no registration has built
    more than its record may keep."""
    async with rig(inline_writes_total_max_bytes=2**26) as r:
        w, other, count = await r.writer(), await r.writer(), 600
        batches = [await w.batch([("k", i, 0, 1)], 0, 10**6) for i in range(count)]
        time, waiting = 0, []
        for batch in batches:
            waiting.append(await other.batch_from_transmittable(batch.to_transmittable()))
            if len(waiting) == 100:
                await other.compare_and_append_batch(waiting, time, time + 1)
                time, waiting = time + 1, []
        consumed = [len(ids) for ids in (await shard_of(other).open()).consumed.values()]
        assert sum(consumed) == count
        assert max(consumed) <= 256


@pytest.mark.parametrize("how", ["batches", "builders"])
async def test_batches_that_are_built_at_once_rotate_too(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the bound holds as well where many uploads run at the same moment."""
    monkeypatch.setattr(registration, "BATCHES_MAX", 3)
    async with rig(inline_writes_single_max_bytes=0) as r:
        w = await r.writer()
        if how == "batches":
            batches = await asyncio.gather(*(w.batch(ROWS, 0, 1) for _ in range(12)))
        else:
            builders = [await w.builder(0) for _ in range(12)]
            for builder in builders:
                await builder.add(*ROWS[0])
            batches = [await builder.finish(1) for builder in builders]
        built = Counter(staged_of(batch).registration.writer for batch in batches)
        for batch in batches:
            await batch.delete()
        assert max(built.values()) <= 3


async def test_a_restored_batch_without_parts_that_is_dropped_releases_its_registration() -> None:
    """Goal: no warning is about it, and no task sends heartbeats for it."""
    async with rig() as r:
        w = await r.writer()
        async with (await another(r)).writer("t", SCHEMA) as there:
            data = (await there.batch([], 0, 1)).to_transmittable()
        batch = await w.batch_from_transmittable(data)
        registration: Any = staged_of(batch).registration
        assert registration._beating is not None
        assert session_of(w)._others
        del batch
        gc.collect()
        await asyncio.sleep(0.01)
        assert registration._users == 0
        assert registration._beating is None
        assert session_of(w)._others == {}


@pytest.mark.parametrize("use", ["append", "delete", "hand_over"])
async def test_registrations_of_others_are_forgotten_with_their_last_batch(use: str) -> None:
    async with rig() as r:
        w = await r.writer()
        for n in range(5):
            async with (await another(r)).writer("t", SCHEMA) as there:
                datas = [(await there.batch([("k", 1, 0, 1)], 0, 100)).to_transmittable() for _ in "ab"]
            first, second = [await w.batch_from_transmittable(data) for data in datas]
            assert len(session_of(w)._others) == 1
            await first.delete()
            assert len(session_of(w)._others) == 1
            if use == "append":
                await w.compare_and_append_batch([second], n, n + 1)
            elif use == "delete":
                await second.delete()
            else:
                second.to_transmittable()
            assert session_of(w)._others == {}


async def test_registrations_that_are_gone_are_not_remembered() -> None:
    async with rig() as r:
        w = await r.writer()
        async with (await another(r)).writer("t", SCHEMA) as there:
            data = (await there.batch(ROWS, 0, 1)).to_transmittable()
            await session_of(there).registration.expire()
        with pytest.raises(ap.BatchExpired):
            await w.batch_from_transmittable(data)
        assert session_of(w)._others == {}
