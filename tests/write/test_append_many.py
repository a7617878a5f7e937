"""Goal: an append to several shards is in all of them or in none, also if its statement is lost or its
caller is cancelled, and every writer that took part says so for its own shard."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from aiopersist.storage.consensus import Entry
from aiopersist.testing.faults import FaultyConsensus
from tests.support.internals import shard_of
from tests.support.rigs import sums
from tests.support.schemas import SCHEMA
from tests.support.shards import SIZES, becomes
from tests.write.append_many_kit import MANY, NAMES, contents, one_each, rig, rows, writers


class Plain(FaultyConsensus):
    """A backend without transactions over several keys."""

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        raise ap.Unsupported("one key at a time")


@pytest.mark.several_shards
@pytest.mark.parametrize("single", SIZES)
async def test_updates_and_batches_in_three_shards(location: Any, single: int) -> None:
    """Goal: on every kind of store; one shard gets updates, one a batch, one several."""
    blob, consensus = location
    limits = ap.Settings(inline_writes_single_max_bytes=single)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(ap.open(blob=blob, consensus=consensus, settings=limits))
        ws = [await stack.enter_async_context(client.writer(name, SCHEMA)) for name in NAMES]
        batch = await ws[1].batch(rows("b"), 0, 1)
        two = [await ws[2].batch(rows("c", n), 0, 3) for n in range(2)]
        await client.compare_and_append_many(
            [ap.Append(ws[0], rows("a"), 0, 5), ap.Append(ws[1], batch, 0, 1), ap.Append(ws[2], two, 0, 3)]
        )
        assert [w.upper for w in ws] == [ap.Antichain(5), ap.Antichain(1), ap.Antichain(3)]
        for used in (batch, *two):
            with pytest.raises(ap.InvalidUsage) as caught:
                await used.delete()
            assert caught.value.kind == ap.UsageKind.CONSUMED
        assert [await w.settle() for w in ws] == [None] * 3
        other = await stack.enter_async_context(ap.open(blob=blob, consensus=consensus))
        assert [await sums(other, name) for name in NAMES] == [{"a": 1}, {"b": 1}, {"c": 2}]
        stale = await ws[1].batch(rows("late", 1), 0, 9)
        appends = [
            ap.Append(ws[0], rows("late", 5), 5, 6),
            ap.Append(ws[1], [stale], 1, 9),
            ap.Append(ws[2], [], 2, 4),
        ]
        with pytest.raises(ap.UpperMismatch) as mismatch:
            await client.compare_and_append_many(appends)
        assert mismatch.value.shard_id == ws[2].shard_id
        assert [await sums(other, name) for name in NAMES] == [{"a": 1}, {"b": 1}, {"c": 2}]
        await client.compare_and_append_many([*appends[:2], ap.Append(ws[2], [], 3, 4)])
        expected = [{"a": 1, "late": 1}, {"b": 1, "late": 1}, {"c": 2}]
        assert [await sums(other, name) for name in NAMES] == expected


@pytest.mark.parametrize("known", [True, False], ids=["seen", "not_seen_yet"])
@pytest.mark.parametrize("staged", [True, False], ids=["batches", "updates"])
@pytest.mark.parametrize("single", SIZES)
@pytest.mark.parametrize("at", range(3))
async def test_a_mismatch_names_its_shard(at: int, single: int, staged: bool, known: bool) -> None:
    """Goal: nothing is in any shard, no blob of updates is left, batches are the caller's still."""
    async with rig(inline_writes_single_max_bytes=single) as r:
        ws = await writers(r, NAMES)
        others = await writers(r, NAMES, r.honest)
        await others[at].compare_and_append([], 0, 7)
        if known:
            await ws[at].fetch_recent_upper()
        batches = [await w.batch(rows("k"), 0, 10) for w in ws] if staged else []
        blobs = await r.parts()
        given: Any = batches if staged else [rows("k")] * 3
        appends = [ap.Append(w, one, 0, 10) for w, one in zip(ws, given, strict=True)]
        with pytest.raises(ap.UpperMismatch) as caught:
            await r.client.compare_and_append_many(appends)
        assert caught.value.shard_id == ws[at].shard_id
        assert (caught.value.expected, caught.value.current) == (ap.Antichain(0), ap.Antichain(7))
        assert ws[at].upper == ap.Antichain(7)
        uppers = [await w.fetch_recent_upper() for w in others]
        assert uppers == [ap.Antichain(7 if n == at else 0) for n in range(3)]
        await becomes(r.parts, blobs)
        assert [await w.settle() for w in ws] == [None] * 3
        for batch in batches:
            await batch.delete()
        assert await r.parts() == []


async def test_what_is_no_append_is_refused() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        a, b = await writers(r)
        (again,) = await writers(r, ["a"])
        (stranger,) = await writers(r, ["b"], r.honest)
        batch = await a.batch(rows("k"), 0, 1)
        first = ap.Append(a, batch, 0, 1)
        refused: list[Any] = [
            [first, ap.Append(a, [], 0, 1)],
            [first, ap.Append(again, [], 0, 1)],
            [first, ap.Append(b, [], 0, 1), ap.Append(a, [], 1, 2)],
            [first, ap.Append(stranger, [], 0, 1)],
            [ap.Append(stranger, [], 0, 1)],
            [first, ap.Append(r.client, [], 0, 1)],  # type: ignore[arg-type]
        ]
        for appends in refused:
            with pytest.raises(ap.InvalidUsage) as caught:
                await r.client.compare_and_append_many(appends)
            assert caught.value.kind == ap.UsageKind.INVALID_APPEND
        assert await contents(r) == [{}, {}]
        assert r.faults.calls[MANY] == 0
        await batch.delete()
        await r.client.compare_and_append_many([])
        assert await r.parts() == []


async def test_a_wrong_one_among_several_stops_all() -> None:
    """Goal: bounds, data and batches of each are checked before anything is sent."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        a, b = await writers(r)
        mine, other = await a.batch(rows("k"), 0, 1), await b.batch(rows("k"), 0, 1)
        gone = await b.batch([], 0, 1)
        await gone.delete()
        blobs = await r.parts()
        wrong = [
            (ap.Append(b, [], 1, 0), ap.UsageKind.INVALID_BOUNDS),
            (ap.Append(b, rows("k", 3), 0, 1), ap.UsageKind.UPDATE_BEYOND_UPPER),
            (ap.Append(b, rows("k", 0), 1, 2), ap.UsageKind.UPDATE_NOT_BEYOND_LOWER),
            (ap.Append(b, rows("k"), 0, (1, 2)), ap.UsageKind.INVALID_TIME),
            (ap.Append(b, mine, 0, 1), ap.UsageKind.OUTCOME_PENDING),  # it is in use, right before
            (ap.Append(b, gone, 0, 1), ap.UsageKind.CONSUMED),
            (ap.Append(b, [other, other], 0, 1), ap.UsageKind.CONSUMED),
            (ap.Append(b, other, 0, 2), ap.UsageKind.INVALID_BATCH_BOUNDS),
            (ap.Append(b, [("k", "text", 0, 1)], 0, 1), None),
            (ap.Append(b, [other, ("k", 1, 0, 1)], 0, 1), None),
        ]
        for append, kind in wrong:
            with pytest.raises((ValueError, TypeError)) as caught:
                await r.client.compare_and_append_many([ap.Append(a, mine, 0, 1), append])
            if append.updates is not mine:  # whose other fault is as good
                assert getattr(caught.value, "kind", None) == kind
            assert await r.parts() == blobs
        assert r.faults.calls[MANY] == 0
        await r.client.compare_and_append_many([ap.Append(a, mine, 0, 1), ap.Append(b, other, 0, 1)])
        assert await contents(r) == [{"k": 1}, {"k": 1}]


@pytest.mark.parametrize("single", SIZES)
async def test_a_backend_that_cannot_do_it_says_so(single: int) -> None:
    """Goal: `Unsupported`, determinate: no blob left, batches free, nothing to settle."""
    async with rig(wrap=Plain, inline_writes_single_max_bytes=single) as r:
        a, b = await writers(r)
        batch = await b.batch(rows("k"), 0, 1)
        blobs = await r.parts()
        with pytest.raises(ap.Unsupported):
            await r.client.compare_and_append_many([ap.Append(a, rows("k"), 0, 1), ap.Append(b, batch, 0, 1)])
        await becomes(r.parts, blobs)
        assert [await a.settle(), await b.settle()] == [None, None]
        assert await contents(r) == [{}, {}]
        await b.compare_and_append_batch([batch], 0, 1)
        await a.compare_and_append(rows("k"), 0, 1)
        assert await contents(r) == [{"k": 1}, {"k": 1}]


async def test_a_spent_copy_in_one_shard_stops_all() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        a, b = await writers(r)
        data = (await b.batch(rows("k"), 0, 5)).to_transmittable()
        one, two = await b.batch_from_transmittable(data), await b.batch_from_transmittable(data)
        await b.compare_and_append_batch([one], 0, 1)
        blobs = await r.parts()
        with pytest.raises(ap.AlreadyAppended) as caught:
            await r.client.compare_and_append_many([ap.Append(a, rows("k"), 0, 1), ap.Append(b, two, 1, 5)])
        assert caught.value.shard_id == b.shard_id
        await becomes(r.parts, blobs)
        assert len(blobs) == 1
        assert await contents(r) == [{}, {"k": 1}]


@pytest.mark.parametrize("expired", [[0], [1], [0, 1]])
async def test_a_writer_whose_lease_ran_out_registers_anew(expired: list[int]) -> None:
    async with rig() as r:
        ws = await writers(r)
        for n in expired:  # behind their backs
            (other,) = await writers(r, [NAMES[n]], r.honest)
            await commit(shard_of(other).register, ExpireWriter(ws[n].writer_id), Slot())
        await r.client.compare_and_append_many(one_each(ws))
        assert await contents(r) == [{"k": 1}, {"k": 1}]


async def test_an_expired_batch_in_one_shard_stops_all() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        a, b = await writers(r)
        batch = await b.batch(rows("k"), 0, 1)
        (other,) = await writers(r, ["b"], r.honest)
        await commit(shard_of(other).register, ExpireWriter(b.writer_id), Slot())
        with pytest.raises(ap.BatchExpired) as caught:
            await r.client.compare_and_append_many([ap.Append(a, rows("k"), 0, 1), ap.Append(b, batch, 0, 1)])
        assert caught.value.shard_id == b.shard_id
        await batch.delete()
        await becomes(r.parts, [])
        await r.client.compare_and_append_many(one_each([a, b]))
        assert await contents(r) == [{"k": 1}, {"k": 1}]


async def test_inline_bytes_stay_bounded() -> None:
    """Goal: several shards without room at the same moment: flushed, and appended all the same."""
    async with rig(inline_writes_total_max_bytes=2000) as r:
        ws = await writers(r, NAMES)
        for n in range(12):
            batches = [await ws[0].batch(rows(f"k{n}-{i}", n), n, n + 1) for i in range(n % 5)]
            appends = [ap.Append(ws[0], batches, n, n + 1), *one_each(ws[1:], f"k{n}", n)]
            await r.client.compare_and_append_many(appends)
            for w in ws:
                assert (await shard_of(w).open()).inline_bytes < 2000
        found = await contents(r, NAMES)
        assert found[0] == {f"k{n}-{i}": 1 for n in range(12) for i in range(n % 5)}
        assert found[1] == found[2] == {f"k{n}": 1 for n in range(12)}


async def test_finished_and_closed() -> None:
    """Goal: a shard may be finished by it; a closed writer is refused, and the other shard has nothing."""
    async with rig() as r:
        a, b = await writers(r)
        await r.client.compare_and_append_many(
            [ap.Append(a, rows("k"), 0, ap.Antichain()), ap.Append(b, [], 0, 1)]
        )
        assert a.upper == ap.Antichain()
        with pytest.raises(ap.UpperMismatch) as caught:
            await r.client.compare_and_append_many([ap.Append(a, [], 0, 1), *one_each([b], at=1)])
        assert caught.value.shard_id == a.shard_id
        await b.aclose()
        (fresh,) = await writers(r, ["c"])
        with pytest.raises(ap.InvalidUsage) as usage:
            await r.client.compare_and_append_many([*one_each([fresh]), ap.Append(b, [], 1, 2)])
        assert usage.value.kind == ap.UsageKind.CLOSED
        assert await contents(r, NAMES) == [{"k": 1}, {}, {}]
