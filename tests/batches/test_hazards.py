"""Goal: the known hazards of staged batches, each made to happen by hand: a deletion that ends half-way,
inline parts that are gathered, callers that are cancelled while others tidy up, registrations that are
rotated under a builder, and data that would grow without bounds."""

import asyncio
import gc
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs
import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.batches.hazards_kit import Gate, another, rig
from tests.support.cancelling import cancelled_after
from tests.support.internals import session_of, shard_of, staged_of
from tests.support.schemas import ROWS, SCHEMA
from tests.support.shards import becomes, refused, rows

PENDING, CONSUMED = ap.UsageKind.OUTCOME_PENDING, ap.UsageKind.CONSUMED


async def cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


# --- deletions that end half-way ----------------------------------------------------------------------


async def half_deleted(r: Any, w: Any) -> ap.Batch:
    """A batch of two parts whose deletion failed after one of them."""
    batch: ap.Batch = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
    r.blob.deletes_half = True
    with pytest.raises(ap.StorageUnavailable):
        await batch.delete()
    return batch


@pytest.mark.parametrize("shared", [False, True], ids=["own", "handed_over"])
async def test_a_half_deleted_batch_can_only_be_deleted(shared: bool) -> None:
    """Goal: some of its blobs are gone, so it cannot be appended, flushed or handed over; the deletion is
    repeated, and consumes."""
    async with rig(blob_target_size=1, inline_writes_single_max_bytes=0, retry_timeout_s=0.0) as r:
        w, other = await r.writer(), await r.writer()
        batch = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1), ("c", 1, 0, 1)], 0, 1)
        data = b""
        if shared:
            data = batch.to_transmittable()
            batch = await w.batch_from_transmittable(data)
        for left in (2, 2):  # what is gone is deleted again
            r.blob.deletes_half = True
            with pytest.raises(ap.StorageUnavailable):
                await batch.delete()
            r.blob.deletes_half = False
            assert len(await r.parts()) == left
            uses = [
                w.compare_and_append_batch([batch], 0, 1),
                other.compare_and_append_batch([batch], 0, 1),
                w.append_batch(batch, 0, 1),
                r.client.compare_and_append_many([ap.Append(w, batch, 0, 1)]),
                batch.flush_to_blob(),
            ]
            assert [await refused(use) for use in uses] == [CONSUMED] * 5
            for use in (batch.to_transmittable, lambda: batch.rewrite_ts(0, 1)):
                with pytest.raises(ap.InvalidUsage) as caught:
                    use()
                assert caught.value.kind == CONSUMED
        if shared:
            copy = await other.batch_from_transmittable(data)
            with pytest.raises(ap.AlreadyAppended):
                await other.compare_and_append_batch([copy], 0, 1)
            staged_of(copy).consumed_elsewhere()
        await batch.delete()
        assert await r.parts() == []
        assert await refused(batch.delete()) == CONSUMED
        assert w.upper == ap.Antichain(0)


async def test_one_deletion_of_a_half_deleted_batch_at_a_time() -> None:
    async with rig(blob_target_size=1, inline_writes_single_max_bytes=0, retry_timeout_s=0.0) as r:
        w = await r.writer()
        batch = await half_deleted(r, w)
        r.blob.deletes_half = False
        r.blob.before_delete.shut()
        first = asyncio.create_task(batch.delete())
        await r.blob.before_delete.reached.wait()
        assert await refused(batch.delete()) == PENDING
        r.blob.before_delete.open()
        await first
        assert await r.parts() == []


async def test_a_half_deleted_batch_that_is_dropped_releases_its_registration() -> None:
    async with rig(blob_target_size=1, inline_writes_single_max_bytes=0, retry_timeout_s=0.0) as r:
        w = await r.writer()
        batch = await half_deleted(r, w)
        with pytest.warns(ResourceWarning, match="with 2 parts"):  # noqa: PT031  # whenever it is collected
            del batch
            for _ in range(3):  # the traceback of the failure goes first
                await asyncio.sleep(0.005)
                gc.collect()
        await asyncio.sleep(0.005)
        assert session_of(w).registration._users == 1  # the handle


# --- inline parts that are gathered -------------------------------------------------------------------


async def test_inline_batches_gathered_into_one_blob_are_read_alike() -> None:
    """Goal: more than the target size, of the same keys: one part in order, whichever way it is read."""
    async with rig(inline_writes_total_max_bytes=4000, blob_target_size=2000) as r:
        w = await r.writer()
        keys = [f"{k:05}" for k in range(40)]
        batches = [await w.batch([(key, 1, 0, 1) for key in keys], 0, 1) for _ in range(6)]
        assert [part.key for batch in batches for part in batch.parts] == [None] * 6
        assert sum(part.encoded_size_bytes for batch in batches for part in batch.parts) > 4000
        await w.compare_and_append_batch(batches, 0, 1)
        (batch,) = shard_of(w).state.batches.values()
        assert [bool(part.key) for part in batch.parts] == [True]
        assert batch.runs == ()
        expected = [(key, 1, 6) for key in keys]
        assert await rows(r.client, 0) == expected
        async with r.client.reader("t", SCHEMA) as reader, reader.snapshot(0) as s:
            assert [row async for row in s] == expected
            tables = [pa.Table.from_batches([one]) async for one in s.batches()]
        columns = pa.concat_tables(tables).select(["key", "val", "diff"]).to_pydict().values()
        assert list(zip(*columns, strict=True)) == expected


async def test_an_inline_batch_is_flushed_to_one_blob_by_a_client_of_small_blobs() -> None:
    """Goal: restored where parts are smaller than it is: one part all the same, and its rewrite stays."""
    async with rig() as r:
        w, other = await r.writer(), await r.writer(await another(r, blob_target_size=100))
        keys = [f"{k:05}" for k in range(40)]
        made = await w.batch([(key, 1, 0, 1) for key in keys], 0, 1)
        made.rewrite_ts(3, 4)
        batch = await other.batch_from_transmittable(made.to_transmittable())
        await batch.flush_to_blob()
        (part,) = batch.parts
        assert part.key is not None
        assert part.rewrite == ap.Antichain(3)
        assert (batch.len, batch.runs) == (40, ())
        assert await r.parts() == [part.key]
        await other.compare_and_append_batch([batch], 0, 4)
        assert await rows(r.client, 2) == []
        assert await rows(r.client, 3) == [(key, 1, 1) for key in keys]


@pytest.mark.parametrize("where", ["before_set", "after_set", "commit"])
async def test_cancelled_while_inline_parts_are_gathered(where: str) -> None:
    """Goal: the blob of what is gathered goes when the append is settled as not committed."""
    async with rig(inline_writes_total_max_bytes=2000) as r:
        w = await r.writer()
        rows = [(f"{k:05}", 1, 0, 1) for k in range(40)]
        batches = [await w.batch(rows, 0, 1) for _ in range(3)]
        if where == "commit":
            r.faults.fail_next("compare_and_set", Outcome.DROPPED)
            r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
            scans = r.faults.calls["scan"]
            call = asyncio.create_task(w.compare_and_append_batch(batches, 0, 1))
            async with asyncio.timeout(50):
                while r.faults.calls["scan"] == scans:
                    await asyncio.sleep(0.001)
        else:
            gate: Gate = getattr(r.blob, where)
            gate.shut()
            call = asyncio.create_task(w.compare_and_append_batch(batches, 0, 1))
            async with asyncio.timeout(50):
                await gate.reached.wait()
            asyncio.get_running_loop().call_later(0.01, gate.open)
        await cancelled(call)
        r.faults.heal()
        assert await w.settle() == ap.NotCommitted()
        await becomes(r.parts, [])
        for batch in batches:
            await batch.delete()


@pytest.mark.parametrize("where", ["before_set", "after_set", "commit"])
async def test_cancelled_while_the_state_is_flushed(where: str) -> None:
    """Goal: the same where an append makes room first: the blob is named, or is gone."""
    async with rig(inline_writes_single_max_bytes=1000, inline_writes_total_max_bytes=2500) as r:
        w = await r.writer()
        time = 0
        while shard_of(w).state.inline_bytes <= 500:
            await w.compare_and_append([(f"{k:05}", 1, time, 1) for k in range(8)], time, time + 1)
            time += 1
        if where == "commit":
            scans = r.faults.calls["scan"]
            r.faults.fail_next("compare_and_set", Outcome.DROPPED)
            r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
            call = asyncio.create_task(w.compare_and_append([("x", 1, time, 1)], time, time + 1))
            async with asyncio.timeout(50):
                while r.faults.calls["scan"] == scans:
                    await asyncio.sleep(0.001)
            assert len(await r.parts()) == 1  # what was in doubt is the flush
        else:
            gate: Gate = getattr(r.blob, where)
            gate.shut()
            call = asyncio.create_task(w.compare_and_append([("x", 1, time, 1)], time, time + 1))
            async with asyncio.timeout(50):
                await gate.reached.wait()
            asyncio.get_running_loop().call_later(0.01, gate.open)
        await cancelled(call)
        r.faults.heal()
        assert await w.settle() == ap.NotCommitted()
        await becomes(r.parts, [])


# --- cancelled callers --------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["append", "delete"])
async def test_a_group_whose_caller_leaves_while_it_tidies_up_frees_its_batches(use: str) -> None:
    """Goal: the blobs of the rows are being deleted, slowly: the batch that mismatched is free at once."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        wa, wb = await r.writer(name="a"), await r.writer(name="b")
        batch = await wb.batch([("k", 1, 5, 1)], 0, 6)
        await wb.compare_and_append([], 0, 5)
        r.blob.before_delete.shut()
        appends = [ap.Append(wa, ROWS, 0, 1), ap.Append(wb, batch, 0, 6)]
        call = asyncio.create_task(r.client.compare_and_append_many(appends))
        async with asyncio.timeout(50):
            await r.blob.before_delete.reached.wait()
        await cancelled(call)
        assert [await wa.settle(), await wb.settle()] == [ap.NotCommitted()] * 2
        if use == "append":
            await wb.compare_and_append_batch([batch], 5, 6)
        r.blob.before_delete.open()
        if use == "delete":
            await batch.delete()
        assert await refused(batch.delete()) == CONSUMED
        await becomes(r.parts, sorted(await r.named("a") + await r.named("b")))
        assert len(await r.parts()) == (1 if use == "append" else 0)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "handed_over"])
@pytest.mark.parametrize("single", [pytest.param(16384, id="inline"), pytest.param(0, id="blob")])
async def test_a_covered_append_that_is_cancelled_is_committed_iff_it_consumed(
    single: int, shared: bool
) -> None:
    """Goal: at any step, also while unused blobs are deleted."""
    async with rig(inline_writes_single_max_bytes=single) as r:
        w = await r.writer()
        r.blob.deletion_turns = 5
        await w.compare_and_append([], 0, 5)
        answers = set()
        for steps in range(1, 80):
            batch = await w.batch(ROWS, 0, 1)
            if shared:
                batch = await w.batch_from_transmittable(batch.to_transmittable())
            if not await cancelled_after(w.append_batch(batch, 0, 1), steps):
                assert await w.settle() is None
                assert await refused(batch.delete()) == CONSUMED
                break
            answer = await w.settle()
            assert answer in (ap.Committed(ap.Antichain(5)), ap.NotCommitted())
            assert staged_of(batch).use.value == ("free" if answer == ap.NotCommitted() else "consumed")
            answers.add(type(answer))
            if answer == ap.NotCommitted():
                await batch.delete()
        else:
            pytest.fail("no append ended by itself")
        assert answers == {ap.Committed, ap.NotCommitted}
        await becomes(r.parts, [])
        assert await r.named() == []
