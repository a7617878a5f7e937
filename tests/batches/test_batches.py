"""Goal: every sentence about staged batches: their description, how they are appended, truncated, moved in
time, deleted and flushed, which calls are refused, and which statistics their parts carry."""

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from aiopersist.testing.faults import Outcome
from tests.batches.batches_kit import BLOB, BOTH, EVERYWHERE, INLINE, PARTS, STAGED, refused, summed_at
from tests.conftest import StoreUrls
from tests.support.internals import stack_of
from tests.support.rigs import rig
from tests.support.schemas import KIND, SCHEMA
from tests.support.shards import f, history, open_at, open_mem, parquet, rows, shard_of, summed, until

FINE, BAD, BELOW, BEYOND = ("a", 1, 5, 1), ("a", "text", 5, 1), ("a", 1, 4, 1), ("a", 1, 9, 1)


TWO = [("b", 2, 6, 1), ("a", 1, 5, 3)]


async def _two() -> AsyncIterator[Any]:
    for update in TWO:
        yield update


# --- what a batch says of itself ----------------------------------------------------------------------


@EVERYWHERE
async def test_what_a_batch_says(location: StoreUrls, limits: dict[str, int]) -> None:
    async with open_at(location, **limits) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("b", 2, 3, 1), ("a", 1, 2, 1), ("b", 2, 3, 4)], 2, f(4))
        other = await w.batch([], 2, 4)
        assert (b.lower, b.upper) == (f(2), f(4))
        assert isinstance(b.shard_id, ap.ShardId)
        assert b.shard_id == w.shard_id == await client.shard_id("t")
        assert b.id != other.id
        assert isinstance(b.id, str)
        stored = {key: size async for key, size in stack_of(client).blob.list("") if key.endswith(".parquet")}
        keys = [part.key for part in b.parts]
        if limits is INLINE:
            assert (keys, b.len, b.runs, stored) == ([None], 2, (), {})
            assert b.parts[0].encoded_size_bytes > 0
        elif limits is BLOB:
            assert (len(keys), b.len, b.runs) == (1, 2, ())
        else:
            assert (len(keys), b.len, b.runs) == (3, 3, (1,))
        if limits is not INLINE:
            assert {part.key: part.encoded_size_bytes for part in b.parts} == stored
        assert [part.rewrite for part in b.parts] == [None] * len(keys)
        assert {"inline": ["a"], "blob": ["a"], "parts": ["b", "a", "b"]}[
            {1: "blob", 3: "parts"}[len(keys)]
        ] == [part.key_lower for part in b.parts]
        for part in b.parts:
            assert part.stats["key"].null_count == 0
            assert part.stats["key"].min <= part.stats["key"].max
        assert w.upper == f(0)
        await b.delete()
        assert await parquet(client) == []


@pytest.mark.parametrize("target", [0, 2**27])
async def test_the_key_of_a_blob(target: int) -> None:
    async with open_mem(**BLOB, blob_target_size=target) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
        found = [ap.BlobKey.parse(part.key) for part in b.parts]
        assert {(key.shard, key.writer) for key in found} == {(b.shard_id, w.writer_id)}
        assert len({key.part for key in found}) == len(found) == (2 if target == 0 else 1)
        assert [str(key) for key in found] == [part.key for part in b.parts]
        await b.delete()


@pytest.mark.parametrize(
    "key",
    ["", "x", "a/b/c.parquet", None, 7, f"s{uuid.UUID(int=0)}/w{uuid.UUID(int=1)}/{uuid.UUID(int=2)}.rollup"],
    ids=repr,
)
async def test_what_is_no_key_of_a_part(key: Any) -> None:
    await refused(lambda: ap.BlobKey.parse(key), KIND.INVALID_NAME)


# --- w.batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "lower", "upper", "error", "says"),
    [
        ([BAD], 9, 5, ap.InvalidUsage, {"kind": KIND.INVALID_BOUNDS, "lower": f(9), "upper": f(5)}),
        ([BAD], (1, 1), (2, 2), ap.InvalidUsage, {"kind": KIND.INVALID_TIME}),
        ([BAD], -1, 5, ap.InvalidUsage, {"kind": KIND.INVALID_TIME}),
        ([FINE, BAD, BELOW], 5, 9, ap.InvalidUpdate, {"row": 1}),
        ([BEYOND, BELOW], 5, 9, ap.InvalidUsage, {"kind": KIND.UPDATE_NOT_BEYOND_LOWER, "time": 4}),
        ([FINE, BEYOND], 5, 9, ap.InvalidUsage, {"kind": KIND.UPDATE_BEYOND_UPPER, "time": 9, "upper": f(9)}),
        ([BEYOND, ("a", 1, 9, -1)], 5, 9, ap.InvalidUsage, {"kind": KIND.UPDATE_BEYOND_UPPER}),
        ([FINE], 5, 5, ap.InvalidUsage, {"kind": KIND.UPDATE_BEYOND_UPPER}),
        ([FINE] * 300 + [("x" * 2001, 1, 5, 1)], 5, 9, ap.InvalidUpdate, {"row": 300}),
    ],
    ids=["bounds", "length", "range", "data", "lower", "upper", "cancelled_out", "empty_interval", "size"],
)
@pytest.mark.parametrize("form", [list, iter], ids=["list", "iterator"])
@BOTH
async def test_what_cannot_be_staged_leaves_nothing(
    updates: Any, lower: Any, upper: Any, error: Any, says: dict[str, Any], form: Any, limits: dict[str, int]
) -> None:
    """Goal: the checks of `add` and `finish`, in the order of a direct append."""
    async with open_mem(update_size_max=2000, **limits) as client, client.writer("t", SCHEMA) as w:
        with pytest.raises(error) as caught:
            await w.batch(form(updates), lower, upper)
        assert {name: getattr(caught.value, name) for name in says} == says
        assert await parquet(client) == []


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: list(TWO), id="list"),
        pytest.param(lambda: iter(TWO), id="iterator"),
        pytest.param(_two, id="async_iterator"),
        pytest.param(
            lambda: pa.table({"key": ["b", "a"], "val": [2, 1], "time": [6, 5], "diff": [1, 3]}), id="table"
        ),
    ],
)
@STAGED
async def test_updates_are_staged_in_every_form(make: Callable[[], Any], limits: dict[str, int]) -> None:
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, 5)
        await w.compare_and_append_batch([await w.batch(make(), 5, 7)], 5, 7)
        assert await history(client) == summed(TWO)


async def test_staging_commits_nothing_and_reads_nothing() -> None:
    async with rig(**BLOB) as r, r.client.writer("t", SCHEMA) as w:
        r.faults.calls.clear()
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        b.rewrite_ts(3, 7)
        assert dict(r.faults.calls) == {"set": 1}
        await b.delete()
        assert dict(r.faults.calls) == {"set": 1, "delete": 1}


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.LOST, Outcome.DROPPED])
async def test_a_staging_that_fails_leaves_nothing(outcome: Outcome) -> None:
    async with rig(retry_timeout_s=0, **PARTS) as r, r.client.writer("t", SCHEMA) as w:
        for good in range(3):
            r.faults.fail_next("set", Outcome.DONE, good)
            r.faults.fail_next("set", outcome)
            with pytest.raises(ap.StorageUnavailable):
                await w.batch([(key, 1, 0, 1) for key in "abc"], 0, 1)
            r.faults.heal()
            await until(lambda: not stack_of(r.client).supervisor._tasks)
            assert await r.parts() == []


# --- appending ----------------------------------------------------------------------------------------


@EVERYWHERE
async def test_several_batches_are_one_atomic_append(location: StoreUrls, limits: dict[str, int]) -> None:
    async with open_at(location, **limits) as client, client.writer("t", SCHEMA) as w:
        first = [("b", 1, 0, 1), ("a", 1, 2, 1), ("c", 3, 1, 2)]
        second = [("a", 1, 2, 4), ("b", 1, 1, -1)]
        batches = [await w.batch(first, 0, 3), await w.batch([], 0, 3), await w.batch(second, 0, 3)]
        seqno = (await shard_of(client).open()).seqno
        await w.compare_and_append_batch(batches, 0, 3)
        assert (await shard_of(client).open()).seqno == seqno + 1
        assert w.upper == f(3)
        assert await history(client) == summed(first + second)
        for as_of in range(3):
            assert await rows(client, as_of) == summed_at(first + second, as_of)
        for batch in batches:
            await refused(batch.delete(), KIND.CONSUMED)


@EVERYWHERE
async def test_after_a_mismatch_the_batches_are_the_callers(
    location: StoreUrls, limits: dict[str, int]
) -> None:
    """Goal: to append again, or to delete."""
    async with (
        open_at(location, **limits) as client,
        open_at(location) as elsewhere,
        client.writer("t", SCHEMA) as w,
        elsewhere.writer("t", SCHEMA) as other,
    ):
        one, two = await w.batch([("a", 1, 3, 1)], 0, 9), await w.batch([("b", 1, 4, 1)], 0, 9)
        await other.compare_and_append([("z", 1, 0, 1)], 0, 2)
        with pytest.raises(ap.UpperMismatch) as caught:
            await w.compare_and_append_batch([one, two], 0, 9)
        assert (caught.value.expected, caught.value.current) == (f(0), f(2))
        assert w.upper == f(2)
        with pytest.raises(ap.UpperMismatch):
            await w.append_batch(one, 3, 9)  # there would be a gap
        assert len(await parquet(client)) == sum(p.key is not None for b in (one, two) for p in b.parts)
        await w.compare_and_append_batch([one], 2, 9)
        await two.delete()
        assert await history(client) == {("z", 1, 0): 1, ("a", 1, 3): 1}
        assert len(await parquet(client)) == (0 if limits is INLINE else 1)


@STAGED
async def test_a_repeated_transaction_deletes_the_batches(limits: dict[str, int]) -> None:
    """Goal: whatever its upper; the new ones are consumed and their blobs gone, the old ones stay."""
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        updates = [("a", 1, 0, 1), ("b", 1, 0, 1)]
        await w.compare_and_append_batch([await w.batch(updates, 0, 1)], 0, 1, txn=("app", 5))
        assert await client.txn_number("t", "app") == 5
        kept = await parquet(client)
        for number, expected in ((5, 0), (4, 0), (5, 7)):
            again = [await w.batch(updates, 0, 9), await w.batch(updates, 0, 9)]
            await w.compare_and_append_batch(again, expected, 9, txn=("app", number))
            assert w.upper == f(1)
            assert await parquet(client) == kept
            for batch in again:
                await refused(batch.delete(), KIND.CONSUMED)
        assert await history(client) == summed(updates)
        bad = await w.batch(updates, 0, 9)
        await refused(w.compare_and_append_batch([bad], 1, 9, txn=("app", -1)), KIND.INVALID_TXN)
        await bad.delete()


@EVERYWHERE
async def test_append_batch_drops_what_is_there(location: StoreUrls, limits: dict[str, int]) -> None:
    """Goal: replicas: below, overlapping, at and past the upper; a gap is a mismatch."""
    data = [("ab"[time % 2], 1, time, 1) for time in range(12)]
    async with (
        open_at(location, **limits) as one,
        open_at(location, **limits) as two,
        one.writer("t", SCHEMA) as w,
        two.writer("t", SCHEMA) as other,
    ):
        for lower, upper, then in (
            (0, 4, 4),
            (0, 4, 4),
            (1, 3, 4),
            (2, 7, 7),
            (7, 9, 9),
            (0, 9, 9),
            (8, 12, 12),
        ):
            for handle, client in ((w, one), (other, two)):
                b = await handle.batch([u for u in data if lower <= u[2] < upper], lower, upper)
                await handle.append_batch(b, lower, upper)
                await refused(b.delete(), KIND.CONSUMED)
                assert handle.upper == f(then)
                assert await history(client) == summed(u for u in data if u[2] < then)
        kept = await parquet(one)
        b = await w.batch([u for u in data if u[2] >= 3], 3, 12)
        await w.append_batch(b, 3, 12)  # covered: deleted
        assert await parquet(one) == kept
        gap = await w.batch([("z", 1, 20, 1)], 15, 30)
        with pytest.raises(ap.UpperMismatch) as caught:
            await w.append_batch(gap, 15, 30)
        assert (caught.value.expected, caught.value.current) == (f(15), f(12))
        await refused(w.append_batch(gap, 12, 30), KIND.INVALID_BATCH_BOUNDS)
        await gap.delete()
        assert await parquet(one) == kept


async def test_a_batch_is_appended_by_any_handle_of_its_shard(location: StoreUrls) -> None:
    """Goal: also when the writer that built it is closed: that only ends its heartbeats."""
    async with open_at(location, **PARTS) as client, client.writer("t", SCHEMA) as w:
        builder_of = await client.writer("t", SCHEMA)
        b = await builder_of.batch([("a", 1, 0, 1)], 0, 1)
        small = await builder_of.batch([("b", 1, 1, 1)], 1, 2)
        await builder_of.aclose()
        await w.compare_and_append_batch([b], 0, 1)
        await w.compare_and_append([], 1, 1)
        await w.append_batch(small, 1, 2)
        assert await rows(client) == [("a", 1, 1), ("b", 1, 1)]


@STAGED
async def test_a_batch_whose_writers_lease_ran_out(limits: dict[str, int]) -> None:
    """Goal: `BatchExpired`, though the handle itself registers anew; the batch can be deleted."""
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        before = w.writer_id
        await commit(shard_of(client).register, ExpireWriter(before), Slot())
        for append in (
            lambda: w.compare_and_append_batch([b], 0, 1),
            lambda: w.append_batch(b, 0, 1),
        ):
            with pytest.raises(ap.BatchExpired):
                await append()
        assert w.upper == f(0)
        fresh = await w.batch([("a", 1, 0, 1)], 0, 1)
        assert w.writer_id != before
        await w.compare_and_append_batch([fresh], 0, 1)
        await b.delete()
        assert await rows(client) == [("a", 1, 1)]
