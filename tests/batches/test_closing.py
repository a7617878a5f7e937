"""Goal: leases that run out and handles that close leave every batch with one outcome."""

import asyncio
import gc
import warnings

import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from aiopersist.testing.faults import Outcome
from tests.batches.cancelled_kit import rewritten
from tests.batches.outcomes_kit import CONSUMED, by_compare, by_replica, doubtful, rig, staged
from tests.support.internals import shard_of
from tests.support.rigs import Rig
from tests.support.schemas import ROWS, SCHEMA, Writer
from tests.support.shards import SIZES, refused


async def expire(r: Rig, w: Writer) -> None:
    other = await r.writer(r.honest)
    await commit(shard_of(other).register, ExpireWriter(w.writer_id), Slot())


@pytest.mark.parametrize("single", SIZES)
async def test_a_lease_that_ran_out_with_batches_staged(single: int) -> None:
    """Goal: the batches are refused, direct appends go on under a new registration, new batches too."""
    async with rig(inline_writes_single_max_bytes=single) as r:
        w, batch = await staged(r)
        old = w.writer_id
        await expire(r, w)
        for append in (by_compare, by_replica):
            with pytest.raises(ap.BatchExpired):
                await append(r, w, batch)
        await w.compare_and_append(ROWS, 0, 1)
        assert w.writer_id != old
        with pytest.raises(ap.BatchExpired):
            await w.compare_and_append_batch([await rewritten(batch, 1)], 1, 2)
        fresh = await w.batch([("b", 1, 1, 1)], 1, 2)
        await w.compare_and_append_batch([fresh], 1, 2)
        await batch.delete()
        assert await r.history() == [*ROWS, ("b", 1, 1, 1)]
        assert await r.parts() == await r.named()


async def test_a_lease_that_ran_out_while_building() -> None:
    async with rig(blob_target_size=0) as r:
        w = await r.writer()
        async with w.builder(0) as builder:
            await builder.add("a", 1, 0, 1)
            await expire(r, w)
            await w.compare_and_append([], 0, 1)
            await builder.add("b", 1, 1, 1)
            batch = await builder.finish(2)
        with pytest.raises(ap.BatchExpired):
            await w.compare_and_append_batch([batch], 1, 2)
        await batch.delete()
        assert await r.parts() == []
        await w.compare_and_append([("c", 1, 1, 1)], 1, 2)
        assert await r.history() == [("c", 1, 1, 1)]


async def test_expired_while_in_doubt() -> None:
    """Goal: the lease ends between the statement and its settling: the version itself still tells."""
    for outcome in (Outcome.LOST, Outcome.DROPPED, Outcome.LATE):
        async with rig(inline_writes_single_max_bytes=0) as r:
            w, batch = await staged(r)
            await doubtful(r, w, by_compare(r, w, batch), outcome)
            await expire(r, w)
            await r.faults.land()
            r.faults.heal()
            if outcome is Outcome.LOST:
                assert await w.settle() == ap.Committed(ap.Antichain(1))
                assert await refused(batch.delete()) == CONSUMED
                assert await r.history() == ROWS
            else:
                assert await w.settle() == ap.NotCommitted()
                with pytest.raises(ap.BatchExpired):
                    await by_compare(r, w, batch)
                await batch.delete()
            assert await r.parts() == await r.named()


async def test_a_closed_handle_with_batches_outstanding() -> None:
    """Goal: its registration is not ended, so for the length of the lease others append or delete them."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        async with r.client.writer("t", SCHEMA) as w:
            one, two = [await w.batch(ROWS, 0, 1) for _ in range(2)]
            builder = w.writer_id
        other = await r.writer()
        assert builder in (await shard_of(other).open()).writers
        await other.compare_and_append_batch([one], 0, 1)
        await two.delete()
        assert await r.history() == ROWS
        assert await r.parts() == await r.named()


async def test_a_closed_handle_without_batches_ends_its_registration() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        async with r.client.writer("t", SCHEMA) as w:
            for batch in [await w.batch(ROWS, 0, 1) for _ in range(2)]:
                await batch.delete()
            writer = w.writer_id
        other = await r.writer()
        assert writer not in (await shard_of(other).open()).writers


async def test_a_closed_client_with_batches_and_builders_outstanding() -> None:
    """Goal: the uploads of a builder are deleted, staged batches stay; no call hangs, every use says why."""
    async with rig(blob_target_size=0) as r:
        w = await r.writer()
        batch = await w.batch(ROWS, 0, 1)
        staged_blobs = await r.parts()
        builder = await w.builder(0)
        await builder.add("b", 1, 0, 1)
        await builder.add("c", 1, 0, 1)
        async with asyncio.timeout(50):
            await r.client.aclose()
        assert await r.parts() == staged_blobs
        uses = [batch.delete(), batch.flush_to_blob(), builder.add("d", 1, 0, 1), builder.finish(1)]
        assert {await refused(use) for use in uses} == {ap.UsageKind.CLOSED}
        other = await r.writer(r.honest)
        restored = await other.batch_from_transmittable(batch.to_transmittable())
        await other.compare_and_append_batch([restored], 0, 1)
        assert await r.history() == ROWS


async def test_a_client_closed_during_an_append_of_batches() -> None:
    """Goal: closed at any step: the batch is in the shard or not, its blob is there if it is."""
    for steps in range(1, 30, 2):
        async with rig(inline_writes_single_max_bytes=0) as r:
            w, batch = await staged(r)
            task = asyncio.create_task(by_compare(r, w, batch))
            for _ in range(steps):
                await asyncio.sleep(0)
            await r.client.aclose()
            await asyncio.wait([task])
            assert set(await r.named()) <= set(await r.parts())
            history = await r.history()
            assert history == ROWS or (history == [] and task.exception() is not None)


async def test_a_dropped_batch_is_warned_of_only_if_nobody_used_it() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        w = await r.writer()
        batches = [await w.batch([(key, 1, 0, 1)], 0, 1) for key in "abcd"]
        await w.compare_and_append_batch(batches[:1], 0, 1)
        await batches[1].delete()
        data = batches[2].to_transmittable()
        (key,) = [part.key for part in batches[3].parts]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            batches.clear()
            gc.collect()
        assert [str(key) in str(one.message) for one in warned] == [True]
        await (await w.batch_from_transmittable(data)).delete()
