"""Goal: a staged batch is appended once, or is still the caller's, also if the statement that appends it
is lost or the caller is cancelled; no blob is deleted that a state may name."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.batches.outcomes_kit import CONSUMED, PENDING, by_compare, by_replica, doubtful, rig, staged
from tests.support.cancelling import cancelled_after
from tests.support.internals import staged_of
from tests.support.rigs import Rig
from tests.support.schemas import ROWS, Writer
from tests.support.shards import CAS, SIZES, refused


async def by_txn(r: Rig, w: Writer, batch: ap.Batch) -> None:
    await w.compare_and_append_batch([batch], 0, 1, txn=("app", 1))


async def by_many(r: Rig, w: Writer, batch: ap.Batch) -> None:
    """Of one shard: one statement like any other."""
    await r.client.compare_and_append_many([ap.Append(w, batch, 0, 1)])


APPENDS = [by_compare, by_replica, by_txn, by_many]


async def cancelled_repeats(r: Rig) -> AsyncIterator[tuple[Any, ap.Batch]]:
    """What `settle` says of a repeat that is cancelled at each of its steps, and the batch of it."""
    w, first = await staged(r)
    await by_txn(r, w, first)
    for steps in range(1, 60):
        batch = await w.batch(ROWS, 0, 1)
        r.kept.append(batch)
        if not await cancelled_after(by_txn(r, w, batch), steps):
            return
        yield await w.settle(), batch


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("single", SIZES)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "handed_over"])
@pytest.mark.parametrize(
    "outcomes",
    [
        [Outcome.LOST],
        [Outcome.DROPPED],
        [Outcome.REFUSED],
        [Outcome.LATE],
        [Outcome.DROPPED, Outcome.REFUSED, Outcome.LATE, Outcome.LOST],
    ],
    ids="+".join,
)
async def test_an_append_whose_answers_are_lost_lands_once(
    append: Any, single: int, shared: bool, outcomes: list[Outcome]
) -> None:
    """Goal: its own success is not taken for a mismatch, nor for a copy that came first."""
    async with rig(inline_writes_single_max_bytes=single) as r:
        w, batch = await staged(r, shared=shared)
        for outcome in outcomes:
            r.faults.fail_next(CAS, outcome)
        await append(r, w, batch)
        await r.faults.land()
        assert await r.history() == ROWS
        assert await refused(batch.delete()) == CONSUMED
        assert await w.settle() is None
        assert await r.parts() == await r.named()
        assert len(await r.parts()) == (0 if single else 1)


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("single", SIZES)
@pytest.mark.parametrize("landing", [False, True], ids=["never", "lands"])
@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_while_the_outcome_is_unknown(
    append: Any, single: int, outcome: Outcome, landing: bool
) -> None:
    """Goal: pending for every use, from any handle; then consumed with its blobs there, or free."""
    async with rig(inline_writes_single_max_bytes=single) as r:
        w, batch = await staged(r)
        other = await r.writer()
        await doubtful(r, w, append(r, w, batch), outcome)
        uses = [
            batch.delete(),
            batch.flush_to_blob(),
            other.compare_and_append_batch([batch], 0, 1),
            other.append_batch(batch, 0, 1),
        ]
        assert {await refused(use) for use in uses} == {PENDING}
        for use in (batch.to_transmittable, lambda: batch.rewrite_ts(0, 1)):
            with pytest.raises(ap.InvalidUsage) as caught:
                use()
            assert caught.value.kind == PENDING
        r.faults.heal()
        if landing:
            await r.faults.land()
        if outcome is Outcome.LOST or (outcome is Outcome.LATE and landing):
            assert await w.settle() == ap.Committed(ap.Antichain(1))
            assert await refused(batch.delete()) == CONSUMED
            assert await refused(append(r, w, batch)) == CONSUMED
        else:
            assert await w.settle() == ap.NotCommitted()
            await append(r, w, batch)
        await r.faults.land()
        assert await r.history() == ROWS
        assert await r.parts() == await r.named()


@pytest.mark.parametrize("outcome", [Outcome.DROPPED, Outcome.LATE])
@pytest.mark.parametrize("single", SIZES)
async def test_not_committed_is_free_to_delete(single: int, outcome: Outcome) -> None:
    async with rig(inline_writes_single_max_bytes=single) as r:
        w, batch = await staged(r)
        await doubtful(r, w, by_compare(r, w, batch), outcome)
        r.faults.heal()
        assert await w.settle() == ap.NotCommitted()
        await batch.delete()
        await r.faults.land()
        assert await r.parts() == []
        assert await r.history() == []


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_the_next_append_of_the_handle_settles_first(outcome: Outcome) -> None:
    """Goal: another batch of the same handle is appended next; the first is decided by then."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        w, first = await staged(r)
        second = await w.batch([("b", 2, 1, 1)], 0, 2)
        r.kept.append(second)
        await doubtful(r, w, by_compare(r, w, first), outcome)
        r.faults.heal()
        upper = 1 if outcome is Outcome.LOST else 0
        await w.compare_and_append_batch([second], upper, 2)
        assert await w.settle() is None
        if outcome is Outcome.LOST:
            assert await refused(first.delete()) == CONSUMED
        else:
            await first.delete()
        await r.faults.land()
        assert await r.history() == [*(ROWS if upper else []), ("b", 2, 1, 1)]
        assert await r.parts() == await r.named()


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_closing_the_handle_settles(outcome: Outcome) -> None:
    """Goal: a handle that is closed in doubt leaves the batch consumed or free, not pending for ever."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        w, batch = await staged(r)
        await doubtful(r, w, by_compare(r, w, batch), outcome)
        r.faults.heal()
        await w.aclose()
        await r.faults.land()
        if outcome is Outcome.LOST:
            assert await refused(batch.delete()) == CONSUMED
            assert await r.history() == ROWS
        else:
            other = await r.writer()
            await other.compare_and_append_batch([batch], 0, 1)
            assert await r.history() == ROWS
        assert await r.parts() == await r.named()


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_indeterminate_leaves_it_pending(outcome: Outcome) -> None:
    async with rig(retry_timeout_s=0.05, inline_writes_single_max_bytes=0) as r:
        w, batch = await staged(r)
        r.faults.fail_next(CAS, outcome)
        r.faults.fail_next("scan", Outcome.REFUSED, 1000)
        with pytest.raises(ap.Indeterminate):
            await by_compare(r, w, batch)
        assert await refused(batch.delete()) == PENDING
        with pytest.raises(ap.Error):
            await w.settle()
        assert await refused(batch.delete()) == PENDING
        r.faults.heal()
        if outcome is Outcome.LOST:
            assert await w.settle() == ap.Committed(ap.Antichain(1))
        else:
            assert await w.settle() == ap.NotCommitted()
            await by_compare(r, w, batch)
        await r.faults.land()
        assert await r.history() == ROWS
        assert await r.parts() == await r.named()


async def test_unavailable_leaves_it_free() -> None:
    async with rig(retry_timeout_s=0.05, inline_writes_single_max_bytes=0) as r:
        w, batch = await staged(r)
        r.faults.fail_next(CAS, Outcome.REFUSED, 1000)
        with pytest.raises(ap.StorageUnavailable):
            await by_compare(r, w, batch)
        r.faults.heal()
        assert await w.settle() is None
        await by_compare(r, w, batch)
        assert await r.history() == ROWS


@pytest.mark.parametrize("append", [by_compare, by_replica, by_txn])
async def test_after_a_mismatch_the_caller_keeps_it(append: Any) -> None:
    """Goal: also where the mismatch is found only by the statement; then retried at the upper, or deleted."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        w = await r.writer()
        other = await r.writer(r.honest)
        kept, dropped = [await w.batch([("a", 1, 3, 1)], 0, 5) for _ in range(2)]
        blobs = await r.parts()
        await other.compare_and_append([], 0, 3)
        for batch in (kept, dropped):
            with pytest.raises(ap.UpperMismatch) as caught:
                await w.compare_and_append_batch([batch], 0, 5)
            assert caught.value.current == w.upper == ap.Antichain(3)
        with pytest.raises(ap.UpperMismatch):
            await w.append_batch(kept, 4, 5)  # there would be a gap
        assert await r.parts() == blobs
        await w.compare_and_append_batch([kept], 3, 5)
        await dropped.delete()
        assert await r.history() == [("a", 1, 3, 1)]
        assert await r.parts() == await r.named()


@pytest.mark.parametrize("append", [by_replica, by_txn], ids=["covered", "txn"])
async def test_a_success_that_writes_nothing_consumes_it(append: Any) -> None:
    """Goal: unused blobs are deleted; those of the first append stay."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        w, first = await staged(r)
        second = await w.batch(ROWS, 0, 1)
        await append(r, w, first)
        await append(r, w, second)
        assert await refused(second.delete()) == CONSUMED
        assert await r.parts() == await r.named()
        assert await r.history() == ROWS


async def test_a_cancelled_repeat_is_committed() -> None:
    """Goal: at any step; also while unused blobs are deleted."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        answers = [answer async for answer, _ in cancelled_repeats(r)]
        assert set(answers) == {ap.Committed(ap.Antichain(1))}


async def test_a_cancelled_repeat_that_is_committed_has_consumed_its_batch() -> None:
    """Goal: `Committed` means success, and a success consumes: no caller is left to delete the blobs."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        batches = [b async for answer, b in cancelled_repeats(r) if isinstance(answer, ap.Committed)]
        assert {staged_of(batch).use.value for batch in batches} == {"consumed"}


async def test_cancelled_while_the_blobs_of_a_mismatch_are_deleted() -> None:
    """Goal: an append that was cancelled is told of as `NotCommitted`, not as `None`."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        w = await r.writer()
        other = await r.writer(r.honest)
        await other.compare_and_append([], 0, 1)  # which `w` has not seen
        deletions = r.blob_faults.calls["delete"]
        call = asyncio.create_task(w.compare_and_append(ROWS, 0, 1))
        while r.blob_faults.calls["delete"] == deletions:
            await asyncio.sleep(0)
            r.blob_faults.latency_s = (0.0, 0.05) if await r.parts() else (0.0, 0.0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert await w.settle() == ap.NotCommitted()
