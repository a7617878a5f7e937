"""Deleting and flushing, use once; see `test_batches.py`."""

import asyncio

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.batches.batches_kit import BLOB, EVERYWHERE, PARTS, STAGED, Recorded, refused
from tests.conftest import StoreUrls
from tests.support.internals import stack_of
from tests.support.rigs import rig
from tests.support.schemas import KIND, SCHEMA
from tests.support.shards import f, history, open_at, open_mem, parquet, rows, summed, until

# --- deleting and flushing ----------------------------------------------------------------------------


@EVERYWHERE
async def test_a_deleted_batch_leaves_no_blob(location: StoreUrls, limits: dict[str, int]) -> None:
    async with open_at(location, **limits) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([(key, 1, 0, 1) for key in "abcde"], 0, 1)
        await b.delete()
        assert await parquet(client) == []
        await refused(b.delete(), KIND.CONSUMED)
        await w.compare_and_append([], 0, 1)
        assert await rows(client) == []


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.REFUSED, Outcome.DROPPED, Outcome.LOST])
async def test_a_deletion_names_each_key_once_and_is_retried(outcome: Outcome) -> None:
    async with rig(blob=Recorded, **PARTS) as r, r.client.writer("t", SCHEMA) as w:
        b = await w.batch([(key, 1, 0, 1) for key in "abcde"], 0, 1)
        keys = sorted(part.key for part in b.parts)
        assert (len(keys), await r.parts()) == (5, keys)
        r.faults.fail_next("delete", outcome, 2 if outcome is not Outcome.LOST else 1)
        await b.delete()
        assert await r.parts() == []
        assert sorted(r.blob.deleted) == sorted(keys * (2 if outcome is Outcome.LOST else 1))
        await refused(b.delete(), KIND.CONSUMED)


async def test_a_deletion_that_failed_may_be_repeated() -> None:
    async with rig(retry_timeout_s=0, **PARTS) as r, r.client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
        r.faults.fail_next("delete", Outcome.REFUSED)
        with pytest.raises(ap.StorageUnavailable):
            await b.delete()
        assert len(await r.parts()) == 2
        await b.delete()
        assert await r.parts() == []


async def test_a_cancelled_deletion_goes_on() -> None:
    async with rig(**PARTS) as r, r.client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
        r.faults.latency_s = (0.03, 0.03)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await b.delete()
        await refused(b.delete(), KIND.OUTCOME_PENDING)
        await until(lambda: "consumed" in repr(b))
        assert await r.parts() == []
        await refused(b.delete(), KIND.CONSUMED)


@pytest.mark.parametrize("rewritten", [False, True])
async def test_an_inline_part_becomes_a_blob(location: StoreUrls, rewritten: bool) -> None:
    """Goal: with its rewrite frontier, its statistics and its updates; once it is one nothing is done."""
    updates = [("b", 1, 4, 1), ("a", 2, 2, 1), ("a", 2, 2, 1)]
    async with open_at(location) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch(updates, 0, 5)
        if rewritten:
            b.rewrite_ts(3, 9)
        (part,) = b.parts
        was = b.id, b.lower, b.upper, b.len, b.runs
        assert (part.key, await parquet(client)) == (None, [])
        await b.flush_to_blob()
        (flushed,) = b.parts
        assert (b.id, b.lower, b.upper, b.len, b.runs) == was
        assert flushed.rewrite == part.rewrite == (f(3) if rewritten else None)
        assert (flushed.key_lower, flushed.stats) == (part.key_lower, part.stats)
        assert await parquet(client) == [flushed.key]
        assert ap.BlobKey.parse(flushed.key).shard == w.shard_id
        await b.flush_to_blob()
        assert await parquet(client) == [flushed.key]
        await w.compare_and_append_batch([b], 0, 9 if rewritten else 5)
        floor = 3 if rewritten else 0
        assert await history(client) == summed((k, v, max(t, floor), d) for k, v, t, d in updates)
        await refused(b.flush_to_blob(), KIND.CONSUMED)


async def test_flushing_without_an_inline_part_is_nothing() -> None:
    async with rig(**PARTS) as r, r.client.writer("t", SCHEMA) as w:
        b, hollow = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1), await w.batch([], 0, 1)
        keys = [part.key for part in b.parts]
        r.faults.calls.clear()
        await b.flush_to_blob()
        await hollow.flush_to_blob()
        assert not r.faults.calls
        assert ([part.key for part in b.parts], hollow.parts) == (keys, ())
        await b.delete()


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.LOST, Outcome.DROPPED])
async def test_a_flush_that_fails_changes_nothing(outcome: Outcome) -> None:
    async with rig(retry_timeout_s=0) as r, r.client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        b.rewrite_ts(2, 5)
        r.faults.fail_next("set", outcome)
        with pytest.raises(ap.StorageUnavailable):
            await b.flush_to_blob()
        await until(lambda: not stack_of(r.client).supervisor._tasks)
        assert ([part.key for part in b.parts], await r.parts()) == ([None], [])
        await b.flush_to_blob()
        assert [part.key for part in b.parts] == await r.parts()
        await w.compare_and_append_batch([b], 0, 5)
        assert await history(r.honest) == {("a", 1, 2): 1}


async def test_what_is_flushed_is_deleted_with_the_batch() -> None:
    async with open_mem() as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        await b.flush_to_blob()
        assert len(await parquet(client)) == 1
        await b.delete()
        assert await parquet(client) == []


# --- use once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["append", "append_batch", "delete", "hand_over"])
@STAGED
async def test_a_consumed_batch_is_not_used_again(end: str, limits: dict[str, int]) -> None:
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        b, other = await w.batch([("a", 1, 0, 1)], 0, 9), await w.batch([("b", 1, 1, 1)], 0, 9)
        match end:
            case "append":
                await w.compare_and_append_batch([b], 0, 1)
            case "append_batch":
                await w.append_batch(b, 0, 1)
            case "delete":
                await b.delete()
            case "hand_over":
                b.to_transmittable()
        upper, blobs = await w.fetch_recent_upper(), await parquet(client)
        for call in (
            lambda: b.rewrite_ts(3, 9),
            b.to_transmittable,
            b.delete(),
            b.flush_to_blob(),
            w.compare_and_append_batch([b], upper, 9),
            w.compare_and_append_batch([other, b], upper, 9),
            w.compare_and_append_batch([b], 0, 1, txn=("app", 1)),
            w.append_batch(b, upper, 9),
        ):
            await refused(call, KIND.CONSUMED)
        assert (await w.fetch_recent_upper(), await parquet(client)) == (upper, blobs)
        assert (b.lower, b.len, b.shard_id, len(b.parts)) == (f(0), 1, w.shard_id, 1)  # what it says stays
        await w.compare_and_append_batch([other], upper, 9)


async def test_one_batch_twice_in_an_append() -> None:
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        await refused(w.compare_and_append_batch([b, b], 0, 1), KIND.CONSUMED)
        assert w.upper == f(0)
        await w.compare_and_append_batch([b], 0, 1)  # it was not consumed by that
        assert await rows(client) == [("a", 1, 1)]


@STAGED
async def test_a_batch_of_another_shard(limits: dict[str, int]) -> None:
    async with open_mem(**limits) as client:
        async with client.writer("t", SCHEMA) as w, client.writer("u", SCHEMA) as other:
            b, good = await other.batch([("a", 1, 0, 1)], 0, 1), await w.batch([("g", 1, 0, 1)], 0, 1)
            for call in (
                w.compare_and_append_batch([b], 0, 1),
                w.compare_and_append_batch([good, b], 0, 1),
                w.append_batch(b, 0, 1),
            ):
                await refused(call, KIND.BATCH_NOT_FROM_THIS_SHARD)
            assert w.upper == f(0)
            await other.compare_and_append_batch([b], 0, 1)
            await good.delete()


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("settled_by", ["settle", "next_call"])
@STAGED
async def test_an_append_of_unknown_outcome_keeps_its_batches(
    happens: bool, settled_by: str, limits: dict[str, int]
) -> None:
    """Goal: neither appended nor deleted until it is settled: then consumed, or the caller's again."""
    async with rig(**limits) as r, r.client.writer("t", SCHEMA) as w, r.client.writer("t", SCHEMA) as other:
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        keys = await r.parts()
        r.faults.fail_next("compare_and_set", Outcome.LOST if happens else Outcome.DROPPED)
        r.faults.fail_next("scan", Outcome.DROPPED, 1000)  # what came of it cannot be looked at
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await w.compare_and_append_batch([b], 0, 1)
        for call in (
            b.delete(),
            b.flush_to_blob(),
            lambda: b.rewrite_ts(0, 5),
            b.to_transmittable,
            other.compare_and_append_batch([b], 0, 1),
            other.append_batch(b, 0, 1),
        ):
            await refused(call, KIND.OUTCOME_PENDING)
        r.faults.heal()
        assert await r.parts() == keys
        upper = int(happens)
        if settled_by == "settle":
            assert await w.settle() == (ap.Committed(f(1)) if happens else ap.NotCommitted())
        else:
            await w.compare_and_append([], upper, upper)
            assert await w.settle() is None
        if happens:
            await refused(b.delete(), KIND.CONSUMED)
        else:
            await w.compare_and_append_batch([b], 0, 1)
        assert await r.parts() == keys
        assert await rows(r.honest) == [("a", 1, 1)]


async def test_while_an_append_runs_its_batches_are_busy() -> None:
    async with rig(**BLOB) as r, r.client.writer("t", SCHEMA) as w, r.client.writer("t", SCHEMA) as other:
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        r.faults.latency_s = (0.05, 0.05)
        append = asyncio.create_task(w.compare_and_append_batch([b], 0, 1))
        await until(lambda: "busy" in repr(b))
        for call in (
            w.compare_and_append_batch([b], 0, 1),
            other.append_batch(b, 0, 1),
            b.delete(),
        ):
            await refused(call, KIND.OUTCOME_PENDING)
        await append
        r.faults.latency_s = (0.0, 0.0)
        await refused(b.delete(), KIND.CONSUMED)
        assert await rows(r.honest) == [("a", 1, 1)]


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.REFUSED, Outcome.LATE])
async def test_an_append_of_batches_whose_answer_is_lost_lands_once(outcome: Outcome) -> None:
    async with rig(**PARTS) as r, r.client.writer("t", SCHEMA) as w:
        batches = [await w.batch([(key, 1, 0, 1), ("x", 1, 0, 1)], 0, 1) for key in "ab"]
        r.faults.fail_next("compare_and_set", outcome)
        await w.compare_and_append_batch(batches, 0, 1)
        await r.faults.land()
        for b in batches:
            await refused(b.delete(), KIND.CONSUMED)
        assert await rows(r.honest) == [("a", 1, 1), ("b", 1, 1), ("x", 1, 2)]
        assert len(await r.parts()) == 4
