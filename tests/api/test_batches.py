"""Goal: every sentence about staged batches: what they say of themselves, how they are appended, truncated,
moved in time, deleted and flushed, what is refused, and which statistics their parts carry."""

import asyncio
import gc
import json
import random
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.conftest import StoreUrls
from tests.support.schemas import KIND, PRODUCT, SCHEMA
from tests.support.shards import f, open_at, open_mem, parquet, rows, shard_of, summed, until

BLOB, INLINE = {"inline_writes_single_max_bytes": 0}, {"inline_writes_single_max_bytes": 16384}
PARTS = {"inline_writes_single_max_bytes": 0, "blob_target_size": 0}
STAGED = pytest.mark.parametrize("limits", [INLINE, BLOB, PARTS], ids=["inline", "blob", "parts"])
BOTH = pytest.mark.parametrize("limits", [INLINE, BLOB], ids=["inline", "blob"])
EVERYWHERE = pytest.mark.parametrize(
    ("location", "limits"),
    [
        pytest.param("mem", INLINE, id="mem-inline"),
        pytest.param("mem", BLOB, id="mem-blob"),
        pytest.param("mem", PARTS, id="mem-parts"),
        pytest.param("files+sqlite", INLINE, id="files+sqlite-inline"),
        pytest.param("files+sqlite", PARTS, id="files+sqlite-parts"),
        pytest.param("s3+postgres", PARTS, id="s3+postgres-parts"),
    ],
    indirect=["location"],
)


async def history(client: ap.Client, since: Any = 0, schema: Any = SCHEMA) -> dict[Any, int]:
    """All updates of the shard, summed, as a listen gives them; those at `since` are there too."""
    sums: dict[Any, int] = {}
    async with client.reader("t", schema) as r:
        upper = await r.fetch_recent_upper()
        async with r.subscribe(since) as updates:
            async for step in updates.steps():
                for key, val, time, diff in step.updates:
                    sums[key, val, time] = sums.get((key, val, time), 0) + diff
                if upper <= step.upper:
                    break
    return {update: diff for update, diff in sums.items() if diff}


def summed_at(updates: Iterable[Sequence[Any]], as_of: int) -> list[Any]:
    """The oracle of a snapshot."""
    sums: dict[Any, int] = {}
    for key, val, time, diff in updates:
        if time <= as_of:
            sums[key, val] = sums.get((key, val), 0) + diff
    return [(*kv, diff) for kv, diff in sorted(sums.items()) if diff]


async def refused(call: Any, kind: ap.UsageKind, **values: Any) -> ap.InvalidUsage:
    """`call` is an awaitable, or a function that does not wait."""
    with pytest.raises(ap.InvalidUsage) as caught:
        if callable(call):
            call()
        else:
            await call
    assert caught.value.kind is kind
    assert {name: getattr(caught.value, name) for name in values} == values
    return caught.value


class Recorded(MemoryBlob):
    """Remembers what it was asked to delete."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.deleted: list[str] = []

    async def delete(self, keys: Sequence[str]) -> None:
        self.deleted += keys
        await super().delete(keys)


@dataclass
class Rig:
    """One place in memory: `client` reaches it through `faults`, `honest` directly."""

    client: ap.Client
    honest: ap.Client
    faults: Faults
    blob: Recorded

    async def parquet(self) -> list[str]:
        return sorted([key async for key, _ in self.blob.list("") if key.endswith(".parquet")])


@asynccontextmanager
async def rig(**limits: Any) -> AsyncIterator[Rig]:
    place, faults = uuid.uuid4().hex, Faults()
    blob, consensus = Recorded(place), MemoryConsensus(place)
    url = f"mem://{place}"
    async with (
        ap.open(blob=url, consensus=url, maintenance=False) as honest,
        ap.open(
            blob=FaultyBlob(blob, faults),
            consensus=FaultyConsensus(consensus, faults),
            settings=ap.Settings(**limits),
            maintenance=False,
        ) as client,
    ):
        try:
            yield Rig(client, honest, faults, blob)
        finally:
            faults.heal()
    await blob.aclose()
    await consensus.aclose()


# --- what a batch says of itself -----------------------------------------------------------------


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
        stored = {key: size async for key, size in client._stack.blob.list("") if key.endswith(".parquet")}
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


# --- w.batch -------------------------------------------------------------------------------------

FINE, BAD, BELOW, BEYOND = ("a", 1, 5, 1), ("a", "text", 5, 1), ("a", 1, 4, 1), ("a", 1, 9, 1)


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


TWO = [("b", 2, 6, 1), ("a", 1, 5, 3)]


async def _two() -> AsyncIterator[Any]:
    for update in TWO:
        yield update


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
            await until(lambda: not r.client._stack.supervisor._tasks)
            assert await r.parquet() == []


# --- appending -----------------------------------------------------------------------------------


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


# --- truncation ----------------------------------------------------------------------------------

WINDOWS = [(0, 10), (0, 4), (4, 10), (3, 7), (6, 7), (1, 9)]


@pytest.mark.parametrize(("lower", "upper"), WINDOWS)
@STAGED
async def test_a_wider_batch_is_truncated(lower: int, upper: int, limits: dict[str, int]) -> None:
    async with open_mem(**limits) as client:
        await check_truncation(client, lower, upper)


@EVERYWHERE
async def test_truncation_everywhere(location: StoreUrls, limits: dict[str, int]) -> None:
    async with open_at(location, **limits) as client:
        await check_truncation(client, 3, 7)


async def check_truncation(client: ap.Client, lower: int, upper: int) -> None:
    """Goal: at both ends; by snapshots, listens, and after the next append over the same times."""
    updates = [(f"k{time % 3}", time % 2, time, time + 1) for time in range(10)]
    inside = [u for u in updates if lower <= u[2] < upper]
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, lower)
        b = await w.batch(updates, 0, 10)
        await w.compare_and_append_batch([b], lower, upper)
        assert w.upper == f(upper)
        assert await history(client) == summed(inside)
        assert await rows(client) == summed_at(inside, upper - 1)
        rest = await w.batch(updates, 0, f())
        await w.compare_and_append_batch([rest], upper, 12)
        both = [u for u in updates if u[2] >= lower]
        assert await history(client) == summed(both)
        for as_of in (lower, upper - 1, 11):
            assert await rows(client, as_of) == summed_at(both, as_of)


@pytest.mark.parametrize(
    ("bounds", "lower", "upper"),
    [
        ((3, 7), 2, 7),
        ((3, 7), 3, 8),
        ((3, 7), 2, 8),
        ((3, 7), 8, 9),
        ((3, 7), 0, 2),
        ((3, 7), 2, 2),
        ((3, f()), 2, f()),
        ((3, 7), 3, f()),
        ((3, 3), 2, 2),
    ],
)
@pytest.mark.parametrize("empty", [False, True], ids=["parts", "empty"])
async def test_a_batch_must_cover_the_append(bounds: Any, lower: Any, upper: Any, empty: bool) -> None:
    """Goal: for every batch, also one without parts, also beside others that do; nothing is changed."""
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, lower)
        b = await w.batch([] if empty or bounds == (3, 3) else [("a", 1, 5, 1)], *bounds)
        wide = await w.batch([("w", 1, 2, 1)], 0, f())
        says = {
            "batch_lower": b.lower,
            "batch_upper": b.upper,
            "append_lower": f(lower),
            "append_upper": upper if isinstance(upper, ap.Antichain) else f(upper),
        }
        for call in (
            w.compare_and_append_batch([wide, b], lower, upper),
            w.compare_and_append_batch([b], lower, upper),
            w.append_batch(b, lower, upper),
        ):
            await refused(call, KIND.INVALID_BATCH_BOUNDS, **says)
        assert w.upper == f(lower)
        await b.delete()
        await wide.delete()


async def test_batches_of_product_times_must_cover_the_append() -> None:
    """Goal: `batch.lower <= lower` and not `batch.upper < upper`, in the partial order: an incomparable
    upper is fine, and truncates."""
    async with open_mem(**BLOB) as client, client.writer("t", PRODUCT) as w:
        b = await w.batch([("a", 1, (1, 1), 1), ("b", 1, (3, 9), 1)], (0, 1), (5, 5))
        await refused(w.compare_and_append_batch([b], (0, 0), (5, 5)), KIND.INVALID_BATCH_BOUNDS)
        await refused(w.compare_and_append_batch([b], (0, 1), (5, 6)), KIND.INVALID_BATCH_BOUNDS)
        await w.compare_and_append([], (0, 0), (0, 1))
        await w.compare_and_append_batch([b], (0, 1), (2, 9))
        assert await history(client, (0, 0), PRODUCT) == {("a", 1, (1, 1)): 1}


@STAGED
async def test_an_empty_interval(limits: dict[str, int]) -> None:
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, 5)
        b, hollow = await w.batch([("a", 1, 6, 1)], 0, 10), await w.batch([], 0, 10)
        for call in (
            w.compare_and_append_batch([b], 5, 5),
            w.compare_and_append_batch([hollow, b], 5, 5),
            w.append_batch(b, 5, 5),
        ):
            await refused(call, KIND.INVALID_EMPTY_TIME_INTERVAL, lower=f(5), upper=f(5))
        await w.compare_and_append_batch([hollow], 5, 5)
        await w.compare_and_append_batch([await w.batch([], 5, 5)], 5, 5)
        await refused(w.compare_and_append_batch([b], 6, 5), KIND.INVALID_BOUNDS, lower=f(6), upper=f(5))
        await w.compare_and_append_batch([b], 5, 10)
        assert await history(client) == {("a", 1, 6): 1}


def le(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def beyond(frontier: Sequence[Sequence[int]], time: Sequence[int]) -> bool:
    return any(le(element, time) for element in frontier)


@EVERYWHERE
async def test_product_times_with_bounds_of_several_elements(
    location: StoreUrls, limits: dict[str, int]
) -> None:
    """Goal: one batch, staged thrice, cut to neighbouring intervals, as a snapshot and a listen see it."""
    draw = random.Random(7)
    grid = [(x, y) for x in range(6) for y in range(6)]
    updates = [(draw.choice("abc"), 0, draw.choice(grid), draw.choice((-1, 1, 2))) for _ in range(22)]
    cuts = [[(0, 0)], [(0, 3), (2, 1)], [(1, 4), (3, 3), (4, 1)], [(6, 4), (3, 6)]]
    async with open_at(location, **limits) as client, client.writer("t", PRODUCT) as w:
        for lower, upper in pairwise(cuts):
            async with w.builder(f((0, 0))) as builder:
                await builder.extend(updates)
                b = await builder.finish(f((6, 6)))
            await w.compare_and_append_batch([b], f(*lower), f(*upper))
            assert w.upper == f(*upper)
            appended = [u for u in updates if not beyond(upper, u[2])]
            assert await history(client, (0, 0), PRODUCT) == summed(appended)
        for as_of in ((0, 0), (2, 0), (0, 5), (3, 3), (5, 5)):
            sums: dict[Any, int] = {}
            for key, val, time, diff in updates:
                if le(time, as_of):
                    sums[key, val] = sums.get((key, val), 0) + diff
            expected = [(*kv, diff) for kv, diff in sorted(sums.items()) if diff]
            assert await rows(client, as_of, PRODUCT) == expected


async def test_replicas_of_product_times() -> None:
    """Goal: what is covered is dropped in the partial order; an incomparable upper is a mismatch."""
    grid = [(x, y) for x in range(5) for y in range(5)]
    updates = [("a", 0, time, 1) for time in grid]
    async with open_mem(**BLOB) as client, client.writer("t", PRODUCT) as w:
        await w.append_batch(await w.batch(updates, (0, 0), (5, 5)), (0, 0), f((0, 3), (2, 1)))
        gap = await w.batch([("z", 0, (4, 4), 1)], f((1, 2)), (9, 9))
        with pytest.raises(ap.UpperMismatch) as caught:
            await w.append_batch(gap, f((1, 2)), (9, 9))
        assert caught.value.current == f((0, 3), (2, 1))
        await gap.delete()
        await w.append_batch(await w.batch(updates, (0, 0), (5, 5)), f((0, 1), (1, 0)), f((4, 4)))
        await w.append_batch(await w.batch(updates, (0, 0), (5, 5)), (0, 0), f((3, 3)))  # covered
        assert w.upper == f((4, 4))
        expected = [u for u in updates if not le((4, 4), u[2])]
        assert await history(client, (0, 0), PRODUCT) == summed(expected)
        assert len(await parquet(client)) == 2


# --- rewriting -----------------------------------------------------------------------------------


@EVERYWHERE
async def test_times_are_advanced_when_they_are_read(location: StoreUrls, limits: dict[str, int]) -> None:
    """Goal: to the frontier of the last call; the parts say it; those beyond it keep their time."""
    updates = [(f"k{time}", 0, time, 1) for time in range(6)] + [("k0", 0, 4, -1)]
    async with open_at(location, **limits) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch(updates, 0, 6)
        b.rewrite_ts(1, 6)
        assert (b.lower, b.upper) == (f(0), f(6))
        b.rewrite_ts(f(3), f(9))
        b.rewrite_ts(3, 9)
        assert (b.lower, b.upper) == (f(0), f(9))
        assert {part.rewrite for part in b.parts} == {f(3)}
        await w.compare_and_append([], 0, 2)
        await w.compare_and_append_batch([b], 2, 9)
        expected = [(key, val, max(time, 3), diff) for key, val, time, diff in updates]
        assert await history(client) == summed(expected)
        for as_of in (2, 3, 4, 8):
            assert await rows(client, as_of) == summed_at(expected, as_of)


async def test_rewriting_far_beyond_the_times() -> None:
    """Goal: data whose time is decided last: all at one time, summed as they are read."""
    async with open_mem(**PARTS) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1), ("a", 1, 1, 2), ("b", 1, 1, 1), ("b", 1, 0, -1)], 0, 2)
        b.rewrite_ts(2**62, 2**63 - 1)
        await w.compare_and_append([], 0, 2**62)
        await w.compare_and_append_batch([b], 2**62, 2**63 - 1)
        assert await rows(client, 2**62) == [("a", 1, 3)]
        assert await history(client) == {("a", 1, 2**62): 3}


async def test_rewriting_to_the_empty_upper() -> None:
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1)], 0, f())
        b.rewrite_ts(5, f())
        await w.compare_and_append_batch([b], 0, f())
        assert w.upper == f()
        assert await history(client) == {("a", 1, 5): 1}


@pytest.mark.parametrize(
    ("before", "frontier", "upper", "fine"),
    [
        ([], 2, 7, True),
        ([], 5, 7, True),  # at the end of the batch and beyond it
        ([], 6, 7, True),
        ([], 1, 7, False),  # before the lower
        ([], 2, 4, False),  # the upper goes back
        ([], 2, 5, True),
        ([], 5, 5, False),  # not before the upper
        ([], 7, 7, False),
        ([], 8, 7, False),
        ([], f(), f(), False),
        ([], f(), 7, False),
        ([], 2**63 - 2, 2**63 - 1, True),
        ([(4, 8)], 4, 8, True),
        ([(4, 8)], 3, 9, False),  # the frontier goes back
        ([(4, 8)], 5, 7, False),
        ([(4, 8)], 5, 8, True),
        ([(4, 8), (6, 9)], 5, 9, False),
        ([(4, 8), (6, 9)], 6, 9, True),
        ([(2, f())], 3, 99, False),
    ],
)
@pytest.mark.parametrize("empty", [False, True], ids=["parts", "empty"])
async def test_where_times_may_be_rewritten_to(
    before: Any, frontier: Any, upper: Any, fine: bool, empty: bool
) -> None:
    """Goal: of a batch of [2, 5), with parts or not; a refusal changes nothing."""
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([] if empty else [("a", 1, 2, 1), ("b", 1, 4, 1)], 2, 5)
        for step in before:
            b.rewrite_ts(*step)
        was = b.upper, [part.rewrite for part in b.parts]
        if fine:
            b.rewrite_ts(frontier, upper)
            assert b.upper == f(upper)
            assert [part.rewrite for part in b.parts] == [f(frontier) for _ in b.parts]
        else:
            error = await refused(lambda: b.rewrite_ts(frontier, upper), KIND.INVALID_REWRITE)
            assert isinstance(error.reason, str)
            assert error.shard_id == w.shard_id
            assert (b.upper, [part.rewrite for part in b.parts]) == was
        await b.delete()


@pytest.mark.parametrize("wrong", [-1, 2**63, (1, 2), "x", None], ids=repr)
async def test_rewriting_takes_frontiers_of_int_times(wrong: Any) -> None:
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        await refused(lambda: b.rewrite_ts(wrong, 5), KIND.INVALID_TIME)
        await refused(lambda: b.rewrite_ts(0, wrong), KIND.INVALID_TIME)
        await b.delete()
        with_pairs = await client.writer("u", PRODUCT)
        b = await with_pairs.batch([("a", 1, (0, 0), 1)], (0, 0), (5, 5))
        for frontier in (3, (3, 3)):
            await refused(lambda at=frontier: b.rewrite_ts(at, (5, 5)), KIND.INVALID_TIME)
        await b.delete()


@dataclass(frozen=True)
class Made:
    """A batch to be made: bounds, rewriting, and whether it has parts."""

    lower: int
    upper: int
    rewrite: tuple[int, int] | None = None
    empty: bool = False


@pytest.mark.parametrize(
    ("batches", "lower", "upper", "kind"),
    [
        ([Made(0, 5, (3, 9))], 0, 9, None),
        ([Made(0, 5, (3, 9))], 3, 9, None),
        ([Made(0, 5, (3, 9))], 4, 9, KIND.INVALID_REWRITE),  # beyond the frontier
        ([Made(0, 5, (3, 9))], 0, 8, KIND.INVALID_REWRITE),  # another upper: not truncated
        ([Made(0, 5, (3, 9))], 0, 10, KIND.INVALID_REWRITE),
        ([Made(2, 5, (3, 9))], 1, 8, KIND.INVALID_REWRITE),  # checked before the bounds
        ([Made(2, 5, (3, 9))], 1, 9, KIND.INVALID_BATCH_BOUNDS),
        ([Made(0, 5, (3, 9), empty=True)], 4, 9, None),  # it has no part
        ([Made(0, 5, (3, 9), empty=True)], 0, 8, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 9)], 0, 9, None),
        ([Made(0, 5, (3, 9)), Made(0, 9)], 1, 9, KIND.INVALID_REWRITE),  # the other counts with its lower
        ([Made(0, 9), Made(0, 5, (3, 9))], 1, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 10)], 0, 9, KIND.INVALID_REWRITE),  # the other may not be truncated
        ([Made(0, 5, (3, 9)), Made(0, 10, empty=True)], 0, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 9, empty=True)], 1, 9, None),
        ([Made(0, 5, (3, 9), empty=True), Made(0, 9)], 1, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 6, (7, 9))], 3, 9, None),
        ([Made(0, 5, (3, 9)), Made(0, 6, (7, 9))], 4, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 6, (7, 10))], 3, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(2, 9)], 2, 9, None),
        ([Made(0, 5, (3, 9)), Made(2, 9)], 1, 9, KIND.INVALID_BATCH_BOUNDS),
        ([Made(0, 9), Made(0, 10)], 1, 8, None),  # none is rewritten: all are truncated
        ([Made(0, 5, (5, 9))], 5, 9, None),
    ],
)
@BOTH
async def test_one_rewritten_batch_puts_all_under_its_rules(
    batches: list[Made], lower: int, upper: int, kind: Any, limits: dict[str, int]
) -> None:
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, lower)
        made, expected = [], []
        for number, m in enumerate(batches):
            updates = [(f"{number}", 0, time, 1) for time in range(m.lower, m.upper)] if not m.empty else []
            made.append(await w.batch(updates, m.lower, m.upper))
            floor = 0
            if m.rewrite is not None:
                made[-1].rewrite_ts(*m.rewrite)
                floor = m.rewrite[0]
            expected += [(key, val, max(time, floor), diff) for key, val, time, diff in updates]
        if kind is not None:
            error = await refused(w.compare_and_append_batch(made, lower, upper), kind)
            assert (error.kind is KIND.INVALID_REWRITE) is hasattr(error, "reason")
            for batch in made:
                await batch.delete()
            assert w.upper == f(lower)
            return
        await w.compare_and_append_batch(made, lower, upper)
        assert await history(client) == summed(u for u in expected if lower <= u[2] < upper)


async def test_a_rewritten_batch_that_is_appended_as_a_replica() -> None:
    """Goal: `append_batch` keeps to the same rules, and drops what is covered after rewriting."""
    updates = [(f"k{time}", 0, time, 1) for time in range(6)]
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        first, second, third = [await w.batch(updates, 0, 6) for _ in range(3)]
        for b in (first, second, third):
            b.rewrite_ts(3, 9)
        await refused(w.append_batch(first, 0, 8), KIND.INVALID_REWRITE)
        await refused(w.append_batch(first, 4, 9), KIND.INVALID_REWRITE)
        await w.compare_and_append([], 0, 2)  # cuts what is before 2 after rewriting: nothing
        await w.append_batch(first, 0, 9)
        expected = {(f"k{time}", 0, max(time, 3)): 1 for time in range(6)}
        assert await history(client) == expected
        await w.append_batch(second, 0, 9)
        assert await parquet(client) == sorted(part.key for b in (first, third) for part in b.parts)
        third.rewrite_ts(3, 12)
        await w.append_batch(third, 0, 12)
        assert w.upper == f(12)
        assert await history(client) == expected


UPDATES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(2, 9), st.integers(-1, 2)), max_size=6
)
MOVED = st.none() | st.lists(st.integers(2, 12), min_size=1, max_size=3).map(sorted)


@settings(max_examples=40)
@given(
    batches=st.lists(st.tuples(UPDATES, MOVED), min_size=1, max_size=4),
    target=st.sampled_from([0, 40, 2**27]),
    single=st.sampled_from([0, 70, 16384]),
    lower=st.integers(0, 12),
    replica=st.booleans(),
)
def test_any_batches_are_read_as_their_updates_were_moved(
    batches: list[Any], target: int, single: int, lower: int, replica: bool
) -> None:
    """Goal: rewritten ones beside others, in one append or one after the other; the oracle moves and
    adds up update by update."""

    async def run() -> None:
        limits = {"blob_target_size": target, "inline_writes_single_max_bytes": single}
        async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
            made, expected, floors = [], [], []
            for updates, moves in batches:
                made.append(await w.batch(updates, 2, 14))
                for frontier in moves or ():
                    made[-1].rewrite_ts(frontier, 14)
                floor = moves[-1] if moves else 2
                floors += [floor] if made[-1].parts else []
                expected += [(k, v, max(t, floor), d) for k, v, t, d in updates]
            begin = max(2, min([lower, *floors]))
            await w.compare_and_append([], 0, begin)
            if replica:  # identical ones would land once: the first covers the others
                first, moves = batches[0]
                for batch in made:
                    if batch is made[0] or not batch.parts:
                        await w.append_batch(batch, begin, 14)
                    else:
                        await batch.delete()
                floor = moves[-1] if moves else 2
                expected = [(k, v, max(t, floor), d) for k, v, t, d in first]
            else:
                await w.compare_and_append_batch(made, begin, 14)
            assert await history(client) == summed(expected)
            for as_of in (begin, 13):
                assert await rows(client, as_of) == summed_at(expected, as_of)

    asyncio.run(run())


# --- deleting and flushing -----------------------------------------------------------------------


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
    async with rig(**PARTS) as r, r.client.writer("t", SCHEMA) as w:
        b = await w.batch([(key, 1, 0, 1) for key in "abcde"], 0, 1)
        keys = sorted(part.key for part in b.parts)
        assert (len(keys), await r.parquet()) == (5, keys)
        r.faults.fail_next("delete", outcome, 2 if outcome is not Outcome.LOST else 1)
        await b.delete()
        assert await r.parquet() == []
        assert sorted(r.blob.deleted) == sorted(keys * (2 if outcome is Outcome.LOST else 1))
        await refused(b.delete(), KIND.CONSUMED)


async def test_a_deletion_that_failed_may_be_repeated() -> None:
    async with rig(retry_timeout_s=0, **PARTS) as r, r.client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
        r.faults.fail_next("delete", Outcome.REFUSED)
        with pytest.raises(ap.StorageUnavailable):
            await b.delete()
        assert len(await r.parquet()) == 2
        await b.delete()
        assert await r.parquet() == []


async def test_a_cancelled_deletion_goes_on() -> None:
    async with rig(**PARTS) as r, r.client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
        r.faults.latency_s = (0.03, 0.03)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await b.delete()
        await refused(b.delete(), KIND.OUTCOME_PENDING)
        await until(lambda: "consumed" in repr(b))
        assert await r.parquet() == []
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
        await until(lambda: not r.client._stack.supervisor._tasks)
        assert ([part.key for part in b.parts], await r.parquet()) == ([None], [])
        await b.flush_to_blob()
        assert [part.key for part in b.parts] == await r.parquet()
        await w.compare_and_append_batch([b], 0, 5)
        assert await history(r.honest) == {("a", 1, 2): 1}


async def test_what_is_flushed_is_deleted_with_the_batch() -> None:
    async with open_mem() as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        await b.flush_to_blob()
        assert len(await parquet(client)) == 1
        await b.delete()
        assert await parquet(client) == []


# --- use once ------------------------------------------------------------------------------------


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
        keys = await r.parquet()
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
        assert await r.parquet() == keys
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
        assert await r.parquet() == keys
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
        assert len(await r.parquet()) == 4


# --- dropped batches -----------------------------------------------------------------------------


@STAGED
async def test_a_dropped_batch_warns(limits: dict[str, int]) -> None:
    """Goal: with the number of its parts, and their keys."""
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
        keys = await parquet(client)
        gc.collect()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            del b
            gc.collect()
        (warning,) = [w for w in found if w.category is ResourceWarning]
        text = str(warning.message)
        assert all(key in text for key in keys)
        assert f"{max(len(keys), 1)} parts" in text


async def test_batches_that_need_no_warning() -> None:
    """Goal: without parts, or consumed in whatever way."""
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        updates = [("a", 1, 0, 1)]
        batches = [await w.batch(u, 0, 9) for u in ([], updates, updates, updates, updates)]
        await batches[1].delete()
        await w.compare_and_append_batch([batches[2]], 0, 1)
        await w.append_batch(batches[3], 0, 1)
        batches[4].to_transmittable()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            del batches
            gc.collect()
        assert [w for w in found if w.category is ResourceWarning] == []


# --- statistics ----------------------------------------------------------------------------------


class Sale(BaseModel):
    model_config = ConfigDict(frozen=True)
    Amount: int
    note: str | None = None
    price: float = 0.0
    tags: list[int] = []


SALES = ap.Schema(key=str, val=Sale)


async def stats_of(updates: Any, schema: Any, time: Any = 0, end: Any = 99, **limits: Any) -> Any:
    """The only part of a batch of `updates`, its statistics, and the length of their stored form."""
    async with open_mem(**limits) as client, client.writer("t", schema) as w:
        b = await w.batch(updates, time, end)
        (part,) = b.parts
        stored = b._staged.hollow.parts[0].stats
        try:
            return part.stats, part.key_lower, len(json.dumps(stored, separators=(",", ":")))
        finally:
            await b.delete()


@BOTH
async def test_bounds_and_null_counts_of_each_leaf(limits: dict[str, int]) -> None:
    updates = [
        ("b", Sale(Amount=5, note=None, price=-0.0), 3, 1),
        ("a", Sale(Amount=-7, note="x", price=2.5, tags=[1]), 9, 1),
        ("c", Sale(Amount=1, note=None, price=-1.5), 4, 1),
    ]
    stats, key_lower, _ = await stats_of(updates, SALES, **limits, stats_budget_bytes=10_000)
    assert key_lower == "a"
    assert stats["key"] == ap.ColumnStats("a", "c", 0)
    assert stats["val.Amount"] == ap.ColumnStats(-7, 5, 0)
    assert stats["val.note"] == ap.ColumnStats("x", "x", 2)
    assert stats["val.price"] == ap.ColumnStats(-1.5, 2.5, 0)
    assert stats["time"] == ap.ColumnStats(3, 9, 0)
    assert {"key", "val.Amount", "val.note", "val.price", "time"} <= stats.keys()
    assert "val" not in stats


@BOTH
async def test_statistics_are_of_what_is_in_the_part(limits: dict[str, int]) -> None:
    """Goal: what cancelled out does not widen a bound."""
    updates = [("a", 1, 0, 1), ("z", 99, 50, 1), ("z", 99, 50, -1), ("b", 2, 1, 1)]
    stats, _, _ = await stats_of(updates, SCHEMA, **limits)
    assert stats["key"] == ap.ColumnStats("a", "b", 0)
    assert stats["val"] == ap.ColumnStats(1, 2, 0)
    assert stats["time"] == ap.ColumnStats(0, 1, 0)


@BOTH
async def test_product_times_have_statistics_per_component(limits: dict[str, int]) -> None:
    updates = [("a", 1, (2, 9), 1), ("b", 2, (5, 3), 1)]
    stats, _, _ = await stats_of(updates, PRODUCT, (0, 0), (99, 99), **limits)
    assert stats["time.0"] == ap.ColumnStats(2, 5, 0)
    assert stats["time.1"] == ap.ColumnStats(3, 9, 0)
    assert "time" not in stats


@BOTH
async def test_without_statistics(limits: dict[str, int]) -> None:
    stats, key_lower, _ = await stats_of(
        [("b", 1, 0, 1), ("a", 1, 0, 1)], SCHEMA, **limits, stats_collection_enabled=False
    )
    assert (stats, key_lower) == (None, "a")


async def test_parts_without_statistics_are_read() -> None:
    async with open_mem(**BLOB, stats_collection_enabled=False) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append_batch([await w.batch([("a", 1, 0, 1), ("b", 2, 0, 1)], 0, 1)], 0, 1)
        async with client.reader("t", SCHEMA) as r, r.snapshot(0) as s:
            assert await s.rows() == [("a", 1, 1), ("b", 2, 1)]


@BOTH
async def test_statistics_of_durations(limits: dict[str, int]) -> None:
    """Goal: Arrow has no least duration; a part has bounds of them nevertheless."""
    schema = ap.Schema(key=str, val=pa.duration("s"))
    updates = [("a", timedelta(1), 0, 1), ("b", timedelta(2), 0, 1)]
    async with open_mem(**limits) as client, client.writer("t", schema) as w:
        b = await w.batch(updates, 0, 1)
        (part,) = b.parts
        await w.compare_and_append_batch([b], 0, 1)
        async with client.reader("t", schema) as r, r.snapshot(0) as s:
            assert [row[0] for row in await s.rows()] == ["a", "b"]
        assert part.key_lower == "a"
        assert part.stats is not None
        assert part.stats["val"] == (timedelta(1), timedelta(2), 0)


@pytest.mark.parametrize("kind", ["str", "bytes"])
@pytest.mark.parametrize("size", [255, 256, 257, 5000])
@BOTH
async def test_long_values_are_cut_to_bounds_that_bound(kind: str, size: int, limits: dict[str, int]) -> None:
    low, high = "a" * size, "y" * size
    values = [low, high] if kind == "str" else [low.encode(), high.encode()]
    schema = ap.Schema(key=str, val=str) if kind == "str" else ap.Schema(key=bytes, val=bytes)
    limits = {**limits, "inline_writes_single_max_bytes": 50_000 if limits is INLINE else 0}
    updates = [("k" if kind == "str" else v, v, 0, 1) for v in values]
    stats, key_lower, _ = await stats_of(updates, schema, **limits, stats_budget_bytes=10_000)
    for name in ("val",) if kind == "str" else ("key", "val"):
        found = stats[name]
        assert found.min == values[0][:256]
        assert found.max >= values[1]
        assert len(found.max) <= 256
        if size <= 256:
            assert found.max == values[1]
        else:
            assert found.max == values[1][:255] + ("z" if kind == "str" else b"z")
    if kind == "bytes":
        assert key_lower == values[0][:256]


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        (b"\xff" * 300, b"\xff" * 256, None),
        (b"a" + b"\xff" * 300, b"a" + b"\xff" * 255, b"b"),
        (b"\xff" * 256, b"\xff" * 256, b"\xff" * 256),
        (b"\xff" * 256 + b"\x00", b"\xff" * 256, None),
        ("é" * 200, "é" * 128, "é" * 127 + "ê"),
        ("x" + "é" * 200, "x" + "é" * 127, "x" + "é" * 126 + "ê"),
        ("\U0010ffff" * 100, "\U0010ffff" * 64, None),
        ("a" + "\U0010ffff" * 100, "a" + "\U0010ffff" * 63, "b"),
        ("\ud7ff" * 100, "\ud7ff" * 85, "\ud7ff" * 84 + "\ue000"),  # no surrogates
        ("\x7f" * 300, "\x7f" * 256, None),  # the exact bound is looked at below
    ],
    ids=["ff", "a_ff", "ff_256", "ff_257", "two_bytes", "half", "last", "a_last", "surrogate", "one_byte"],
)
@BOTH
async def test_where_a_bound_is_rounded_up(value: Any, low: Any, high: Any, limits: dict[str, int]) -> None:
    schema = ap.Schema(key=str, val=type(value))
    stats, _, _ = await stats_of([("k", value, 0, 1)], schema, **limits, stats_budget_bytes=10_000)
    found = stats["val"]
    as_bytes = (lambda v: v.encode()) if isinstance(value, str) else bytes
    assert found.min == low
    if value == "\x7f" * 300:  # the successor has two bytes: any bound of at most 256 bytes will do
        assert found.max >= value
        return
    assert found.max == high
    if high is not None:
        assert as_bytes(high) >= as_bytes(value)
        assert len(as_bytes(high)) <= 256


@BOTH
async def test_long_bytes_of_a_fixed_size(limits: dict[str, int]) -> None:
    schema = ap.Schema(key=str, val=pa.binary(300))
    stats, _, _ = await stats_of([("k", b"abc" * 100, 7, 1)], schema, **limits, stats_budget_bytes=10_000)
    assert stats["key"] == ap.ColumnStats("k", "k", 0)
    assert stats["time"] == ap.ColumnStats(7, 7, 0)
    low, high, nulls = stats["val"]
    assert (low is None or low <= b"abc" * 100, high is None or high >= b"abc" * 100, nulls) == (
        True,
        True,
        0,
    )


WIDE = pa.schema(
    [pa.field(name, pa.int64()) for name in [*(f"column_{n:02}" for n in range(40)), "Amount_EUR"]]
)


async def wide_stats(**limits: Any) -> Any:
    schema = ap.Schema(key=str, val=pa.struct(list(WIDE)))
    updates = [(f"k{n}", {field.name: n for field in WIDE}, n, 1) for n in range(3)]
    return await stats_of(updates, schema, **limits)


@BOTH
async def test_the_budget_of_statistics(limits: dict[str, int]) -> None:
    """Goal: whole columns are left out; those that stay are as they were."""
    whole, _, _ = await wide_stats(**limits, stats_budget_bytes=100_000)
    assert len(whole) == 43
    for budget in (0, 10, 200, 1024):
        found, key_lower, size = await wide_stats(**limits, stats_budget_bytes=budget)
        assert key_lower == "k0"
        assert found.items() <= whole.items()
        assert len(found) < 43
        assert (len(found) > 5) is (budget == 1024)
        if limits is BLOB:
            assert size <= max(budget, 2)
    default, _, _ = await wide_stats(**limits)
    assert default == found


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ({"equals": ("amount_eur",)}, {"val.Amount_EUR"}),
        ({"prefixes": ("amount_",)}, {"val.Amount_EUR"}),
        ({"suffixes": ("_eur", "_07")}, {"val.Amount_EUR", "val.column_07"}),
        ({"equals": ("key",), "prefixes": ("tim",)}, {"key", "time"}),
        ({"equals": ("val.amount_eur",), "prefixes": ("val",)}, set()),  # only the last component counts
        ({"equals": ("Amount_EUR",)}, set()),  # patterns are in lower case
        ({"prefixes": ("column_",)}, {f"val.column_{n:02}" for n in range(40)}),  # far beyond any budget
    ],
)
@BOTH
async def test_untrimmable_columns_stay(columns: Any, kept: set[str], limits: dict[str, int]) -> None:
    untrimmable = ap.UntrimmableColumns(**columns)
    found, _, _ = await wide_stats(**limits, stats_budget_bytes=0, stats_untrimmable_columns=untrimmable)
    assert set(found or {}) == kept


@pytest.mark.parametrize(
    ("columns", "name", "stays"),
    [
        ({"equals": ("key",)}, "key", True),
        ({"equals": ("key",)}, "KEY", True),
        ({"equals": ("key",)}, "val.Key", True),
        ({"equals": ("key",)}, "key.part", False),
        ({"equals": ("key",)}, "keys", False),
        ({"prefixes": ("am",)}, "val.Amount", True),
        ({"prefixes": ("am",)}, "amounts.total", False),
        ({"suffixes": ("_ts",)}, "val.deep.CREATED_TS", True),
        ({"suffixes": ("_ts",)}, "val.created_ts.x", False),
        ({}, "key", False),
    ],
)
async def test_should_retain(columns: Any, name: str, stays: bool) -> None:
    assert ap.UntrimmableColumns(**columns).should_retain(name) is stays


class Id(BaseModel):
    model_config = ConfigDict(frozen=True)
    name: str
    number: int


@pytest.mark.parametrize(
    ("schema", "keys", "least"),
    [
        (ap.Schema(key=int, val=int), [3, -5, 0], -5),
        (ap.Schema(key=float, val=int), [float("inf"), 1.5, -2.0], -2.0),
        (ap.Schema(key=uuid.UUID, val=int), [uuid.UUID(int=9), uuid.UUID(int=3)], uuid.UUID(int=3)),
        (ap.Schema(key=bool, val=int), [True, False], False),
        (ap.Schema(key=str | None, val=int), ["a", None], None),
        (ap.Schema(key=None, val=int), [None], None),
        (ap.Schema(key=list[int], val=int), [[2], [1, 5], [1]], [1]),
        (
            ap.Schema(key=Id, val=int),
            [Id(name="b", number=1), Id(name="a", number=9)],
            Id(name="a", number=9),
        ),
        (ap.Schema(key=str, val=int), ["b" * 900, "c"], "b" * 256),
        (ap.Schema(key=bytes, val=int), [b"\xff" * 900], b"\xff" * 256),
    ],
    ids=["int", "float", "uuid", "bool", "null", "unit", "list", "model", "long_str", "long_bytes"],
)
@BOTH
async def test_the_least_key_of_a_part(schema: Any, keys: Any, least: Any, limits: dict[str, int]) -> None:
    """Goal: a value of the key's type, cut where it is long."""
    _, found, _ = await stats_of([(key, 1, 0, 1) for key in keys], schema, **limits)
    assert found == least
    assert type(found) is type(least)
