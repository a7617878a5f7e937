"""Goal: a staged batch is appended once, or is still the caller's, whatever becomes of the statement that
appends it or of the caller; no blob is deleted that a state may name."""

import asyncio
import gc
import random
import uuid
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.cancelling import cancelled_after
from tests.support.schemas import ROWS, SCHEMA, Row, Writer
from tests.support.shards import CAS, SIZES, refused

PENDING, CONSUMED = ap.UsageKind.OUTCOME_PENDING, ap.UsageKind.CONSUMED


@dataclass
class Rig:
    """One place in memory: `client` reaches its consensus through `faults` and its blobs through
    `blob_faults`, `honest` both directly."""

    client: ap.Client
    honest: ap.Client
    faults: Faults
    blob_faults: Faults
    blob: MemoryBlob
    stack: AsyncExitStack
    kept: list[ap.Batch] = field(default_factory=list)

    async def writer(self, client: ap.Client | None = None) -> Writer:
        return await self.stack.enter_async_context((client or self.client).writer("t", SCHEMA))

    async def blobs(self) -> set[str]:
        return {key async for key, _ in self.blob.list("") if key.endswith(".parquet")}

    async def named(self) -> set[str]:
        """The blobs that the newest state names."""
        async with self.honest.writer("t", SCHEMA) as w:
            batches = (await w._shard.open()).batches.values()
            return {part.key for batch in batches for part in batch.parts if part.key}

    async def history(self) -> list[Row]:
        """All updates, summed."""
        found: Counter[Any] = Counter()
        async with self.honest.reader("t", SCHEMA) as r:
            upper: Any = await r.fetch_recent_upper()
            if upper == ap.Antichain(0):
                return []
            async with r.subscribe(0) as changes:
                async for step in changes.steps():
                    for key, val, time, diff in step.updates:
                        found[key, val, time] += diff
                    if upper <= step.upper:
                        break
        return sorted((*what, diff) for what, diff in found.items() if diff)


@asynccontextmanager
async def rig(**limits: Any) -> AsyncIterator[Rig]:
    place, faults, blob_faults = uuid.uuid4().hex, Faults(), Faults()
    url = f"mem://{place}"
    async with AsyncExitStack() as stack:
        blob = MemoryBlob(place)
        honest = await stack.enter_async_context(ap.open(blob=url, consensus=url, maintenance=False))
        client = await stack.enter_async_context(
            ap.open(
                blob=FaultyBlob(blob, blob_faults),
                consensus=FaultyConsensus(MemoryConsensus(place), faults),
                settings=ap.Settings(**{"retry_timeout_s": 3.0, **limits}),
                maintenance=False,
            )
        )
        r = Rig(client, honest, faults, blob_faults, blob, stack)
        try:
            yield r
        finally:
            faults.heal()
            faults.latency_s = (0.0, 0.0)
            blob_faults.heal()
            for batch in r.kept:
                batch._staged.spent_elsewhere()


async def doubtful(r: Rig, w: Writer, work: Awaitable[Any], outcome: Outcome) -> None:
    """Make that append end without an answer, its statement having ended so."""
    await w.fetch_recent_upper()
    r.faults.fail_next(CAS, outcome)
    r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
    scans = r.faults.calls["scan"]
    task = asyncio.ensure_future(work)
    while r.faults.calls["scan"] == scans:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def expire(r: Rig, w: Writer) -> None:
    other = await r.writer(r.honest)
    await commit(other._shard.register, ExpireWriter(w.writer_id), Slot())


async def by_compare(r: Rig, w: Writer, batch: ap.Batch) -> None:
    await w.compare_and_append_batch([batch], 0, 1)


async def by_replica(r: Rig, w: Writer, batch: ap.Batch) -> None:
    await w.append_batch(batch, 0, 1)


async def by_txn(r: Rig, w: Writer, batch: ap.Batch) -> None:
    await w.compare_and_append_batch([batch], 0, 1, txn=("app", 1))


async def by_many(r: Rig, w: Writer, batch: ap.Batch) -> None:
    """Of one shard: one statement like any other."""
    await r.client.compare_and_append_many([ap.Append(w, batch, 0, 1)])


APPENDS = [by_compare, by_replica, by_txn, by_many]


async def staged(r: Rig, *, shared: bool = False) -> tuple[Writer, ap.Batch]:
    w = await r.writer()
    batch = await w.batch(ROWS, 0, 1)
    if shared:
        batch = await w.batch_from_transmittable(batch.to_transmittable())
    r.kept.append(batch)
    return w, batch


# --- answers that are lost -------------------------------------------------------------------------


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
        assert await r.blobs() == await r.named()
        assert len(await r.blobs()) == (0 if single else 1)


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
        assert await r.blobs() == await r.named()


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
        assert await r.blobs() == set()
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
        assert await r.blobs() == await r.named()


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
        assert await r.blobs() == await r.named()


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
        assert await r.blobs() == await r.named()


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
        blobs = await r.blobs()
        await other.compare_and_append([], 0, 3)
        for batch in (kept, dropped):
            with pytest.raises(ap.UpperMismatch) as caught:
                await w.compare_and_append_batch([batch], 0, 5)
            assert caught.value.current == w.upper == ap.Antichain(3)
        with pytest.raises(ap.UpperMismatch):
            await w.append_batch(kept, 4, 5)  # there would be a gap
        assert await r.blobs() == blobs
        await w.compare_and_append_batch([kept], 3, 5)
        await dropped.delete()
        assert await r.history() == [("a", 1, 3, 1)]
        assert await r.blobs() == await r.named()


@pytest.mark.parametrize("append", [by_replica, by_txn], ids=["covered", "txn"])
async def test_a_success_that_writes_nothing_consumes_it(append: Any) -> None:
    """Goal: blobs that nobody needs are deleted; those of the first append stay."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        w, first = await staged(r)
        second = await w.batch(ROWS, 0, 1)
        await append(r, w, first)
        await append(r, w, second)
        assert await refused(second.delete()) == CONSUMED
        assert await r.blobs() == await r.named()
        assert await r.history() == ROWS


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


async def test_a_cancelled_repeat_is_committed() -> None:
    """Goal: at whatever step; also while the blobs that nobody needs are deleted."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        answers = [answer async for answer, _ in cancelled_repeats(r)]
        assert set(answers) == {ap.Committed(ap.Antichain(1))}


async def test_a_cancelled_repeat_that_is_committed_has_consumed_its_batch() -> None:
    """Goal: `Committed` means success, and a success consumes: nobody is left to delete the blobs."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        batches = [b async for answer, b in cancelled_repeats(r) if isinstance(answer, ap.Committed)]
        assert {batch._staged.use.value for batch in batches} == {"consumed"}


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
            r.blob_faults.latency_s = (0.0, 0.05) if await r.blobs() else (0.0, 0.0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert await w.settle() == ap.NotCommitted()


# --- cancellation ----------------------------------------------------------------------------------


async def cancelled_append(r: Rig, steps: int) -> None:
    name = uuid.uuid4().hex
    async with r.client.writer(name, SCHEMA) as w:
        batches = [await w.batch([(key, 1, 0, 1)], 0, 1) for key in "ab"]
        cancelled = await cancelled_after(w.compare_and_append_batch(batches, 0, 1), steps)
        answer = await w.settle()
        upper = await w.fetch_recent_upper()
        if upper == ap.Antichain(1):
            assert answer == (ap.Committed(upper) if cancelled else None)
            assert {await refused(batch.delete()) for batch in batches} == {CONSUMED}
        else:
            assert cancelled
            assert answer == ap.NotCommitted()
            await batches[1].delete()
            await w.compare_and_append_batch(batches[:1], 0, 1)
        expected = ["a", "b"] if answer != ap.NotCommitted() else ["a"]
        async with r.honest.reader(name, SCHEMA) as reader, reader.snapshot() as s:
            assert [key for key, _, _ in await s.rows()] == expected


@pytest.mark.parametrize("single", SIZES)
async def test_cancelled_at_any_step(single: int) -> None:
    async with rig(inline_writes_single_max_bytes=single) as r:
        for steps in range(1, 40):
            await cancelled_append(r, steps)


async def test_cancelled_at_any_step_of_slow_stores() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        for steps in range(1, 200, 9):
            r.faults.latency_s = (0.0, 0.001)
            r.faults.rates = dict.fromkeys(
                (Outcome.LOST, Outcome.DROPPED, Outcome.LATE, Outcome.REFUSED), 0.08
            )
            await cancelled_append(r, steps)


async def test_cancelled_while_it_waits_for_its_turn() -> None:
    """Goal: another append of the handle hangs; the batch of the one that waited is free at once."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        w, batch = await staged(r)
        r.faults.latency_s = (0.05, 0.05)
        slow = asyncio.create_task(w.compare_and_append([], 0, 0))
        await asyncio.sleep(0.005)
        waiting = asyncio.create_task(by_compare(r, w, batch))
        await asyncio.sleep(0.005)
        assert await refused(batch.delete()) == PENDING  # while an append of it runs
        waiting.cancel()
        await asyncio.wait([waiting])
        r.faults.latency_s = (0.0, 0.0)
        await batch.delete()
        await slow
        assert await w.settle() == ap.NotCommitted()
        assert await r.blobs() == set()


async def test_a_batch_in_two_appends_at_once() -> None:
    """Goal: of two calls with one batch the second is refused, and takes nothing from the first."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        w, batch = await staged(r)
        other = await r.writer()
        r.faults.latency_s = (0.002, 0.002)
        answers = await asyncio.gather(
            by_compare(r, w, batch), by_replica(r, other, batch), batch.delete(), return_exceptions=True
        )
        kinds = [getattr(answer, "kind", answer) for answer in answers]
        assert kinds == [None, PENDING, PENDING]
        assert await r.history() == ROWS


# --- leases, closing -------------------------------------------------------------------------------


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
        assert await r.blobs() == await r.named()


async def rewritten(batch: ap.Batch, time: int) -> ap.Batch:
    batch.rewrite_ts(time, time + 1)
    return batch


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
        assert await r.blobs() == set()
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
            assert await r.blobs() == await r.named()


async def test_a_closed_handle_with_batches_outstanding() -> None:
    """Goal: its registration is not ended, so for the length of the lease others append or delete them."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        async with r.client.writer("t", SCHEMA) as w:
            one, two = [await w.batch(ROWS, 0, 1) for _ in range(2)]
            builder = w.writer_id
        other = await r.writer()
        assert builder in (await other._shard.open()).writers
        await other.compare_and_append_batch([one], 0, 1)
        await two.delete()
        assert await r.history() == ROWS
        assert await r.blobs() == await r.named()


async def test_a_closed_handle_without_batches_ends_its_registration() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        async with r.client.writer("t", SCHEMA) as w:
            for batch in [await w.batch(ROWS, 0, 1) for _ in range(2)]:
                await batch.delete()
            writer = w.writer_id
        other = await r.writer()
        assert writer not in (await other._shard.open()).writers


async def test_a_closed_client_with_batches_and_builders_outstanding() -> None:
    """Goal: what a builder uploaded is deleted, what is staged stays; nothing hangs, every use says why."""
    async with rig(blob_target_size=0) as r:
        w = await r.writer()
        batch = await w.batch(ROWS, 0, 1)
        staged_blobs = await r.blobs()
        builder = await w.builder(0)
        await builder.add("b", 1, 0, 1)
        await builder.add("c", 1, 0, 1)
        async with asyncio.timeout(5):
            await r.client.aclose()
        assert await r.blobs() == staged_blobs
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
            assert await r.named() <= await r.blobs()
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


# --- everything at once ----------------------------------------------------------------------------


class Stress:
    """Clients of one place, each with its own faults; `model` holds what was acknowledged or settled as
    committed. Any number of workers."""

    def __init__(self, seed: int, r: Rig) -> None:
        self.chance = random.Random(seed)
        self.r = r
        self.model: list[Row] = []
        self.number = 0
        self.transactions: list[tuple[str, int]] = []
        """Those that are surely recorded."""
        self.posted: list[tuple[bytes, list[Row]]] = []
        """Handed over, and not restored yet; some of them twice."""
        self.done: Counter[str] = Counter()

    async def step(self, w: Writer) -> None:
        """One operation of one worker."""
        kind = self.chance.choice(
            ["stage", "stage", "stage", "post", "receive", "receive", "direct", "discard"]
        )
        self.done[kind] += 1
        upper: Any = (await w.fetch_recent_upper()).time
        if kind == "direct":
            rows = self.rows(upper)
            await self.appended(w, [], rows, w.compare_and_append(rows, upper, upper + 1))
        elif kind == "receive" and self.posted:
            data, rows = self.posted.pop(self.chance.randrange(len(self.posted)))
            try:
                batch = await w.batch_from_transmittable(data)
            except ap.BatchExpired:
                self.done["expired"] += 1
                return
            batch._staged.spent_elsewhere()
            await self.used(w, batch, rows)
        else:
            rows = self.rows(upper)
            batch = await self.built(w, rows, upper)
            batch._staged.spent_elsewhere()  # it may end in the hands of nobody
            if kind == "post":
                data = batch.to_transmittable()
                self.posted += [(data, rows)] * self.chance.choice([1, 2, 3])
            elif kind == "discard":
                await batch.delete()
            else:
                await self.used(w, batch, rows)

    def rows(self, time: int) -> list[Row]:
        self.number += 1
        return [(f"k{self.number}", n, time, 1) for n in range(self.chance.choice([1, 1, 3]))]

    async def built(self, w: Writer, rows: list[Row], lower: int) -> ap.Batch:
        if self.chance.random() < 0.5:
            return await w.batch(rows, lower, lower + 1)
        async with w.builder(lower) as builder:
            for row in rows:
                await builder.add(*row)
            return await builder.finish(lower + 1)

    async def used(self, w: Writer, batch: ap.Batch, rows: list[Row]) -> None:
        """Append it at the upper, rewritten; or, sometimes, delete it."""
        if self.chance.random() < 0.15:
            try:
                await batch.delete()
            except ap.AlreadyAppended:
                self.done["spent"] += 1
            return
        for _ in range(5):
            upper: Any = (await w.fetch_recent_upper()).time
            batch.rewrite_ts(upper, upper + 1)
            rows = [(key, val, upper, diff) for key, val, _, diff in rows]
            txn, repeats = self.transaction()
            call = w.compare_and_append_batch([batch], upper, upper + 1, txn=txn)
            done = await self.appended(w, [] if repeats else [batch], [] if repeats else rows, call)
            if done is not None:
                if txn and done and not repeats:
                    self.transactions.append(txn)
                break
        if repeats:
            self.done["repeats"] += 1
            try:
                await batch.delete()  # it may be free still, if the call was cancelled or mismatched
            except (ap.InvalidUsage, ap.AlreadyAppended):
                pass
            return
        if batch._staged.use.value == "free":
            await self.free(batch)

    def transaction(self) -> tuple[tuple[str, int] | None, bool]:
        """One for an append, if any; and whether it is a repeat, which writes nothing."""
        if self.transactions and self.chance.random() < 0.1:
            return self.chance.choice(self.transactions), True
        self.number += 1
        return (f"app{self.number}", 1) if self.chance.random() < 0.2 else None, False

    async def appended(
        self, w: Writer, batches: list[ap.Batch], rows: list[Row], call: Awaitable[Any]
    ) -> bool | None:
        """Whether it was committed, and is in the model then; `None` if it may be tried again."""
        steps = self.chance.choice([10**4, self.chance.randrange(1, 80)])
        try:
            cancelled = await cancelled_after(call, steps)
        except ap.UpperMismatch:
            return None if batches else False
        except ap.AlreadyAppended:
            self.done["spent"] += 1
            return False
        except ap.BatchExpired:
            self.done["expired"] += 1
            return False
        if cancelled:
            self.done["cancelled"] += 1
            if not isinstance(await w.settle(), ap.Committed):
                return None if batches else False
        for batch in batches:
            assert await refused(batch.delete()) == CONSUMED
        self.done["committed"] += len(batches)
        self.model += rows
        return True

    async def free(self, batch: ap.Batch) -> None:
        try:
            await batch.delete()
        except ap.AlreadyAppended:
            self.done["spent"] += 1


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_life(seed: int) -> None:
    """Goal: some hundred operations of several clients under faults and cancellations: the shard holds
    what was acknowledged or settled as committed, each once; every blob that is named is there, and no
    other but those of batches that nobody took in."""
    single = random.Random(seed).choice([0, 200])
    async with rig(inline_writes_single_max_bytes=single, blob_target_size=60) as r:
        stress = Stress(seed, r)
        r.faults._random.seed(seed)
        place = r.blob._name
        clients = [r.client]
        for _ in range(2):
            opening = ap.open(
                blob=r.blob,
                consensus=FaultyConsensus(MemoryConsensus(place), r.faults),
                settings=ap.Settings(retry_timeout_s=3.0, inline_writes_single_max_bytes=single),
                maintenance=False,
            )
            clients.append(await r.stack.enter_async_context(opening))
        writers = [await r.writer(client) for client in (*clients, clients[0])]
        r.faults.latency_s = (0.0, 0.0005)
        r.faults.rates = dict.fromkeys((Outcome.LOST, Outcome.DROPPED, Outcome.LATE), 0.03)

        async def work(w: Writer) -> None:
            for _ in range(20):
                await stress.step(w)

        async with asyncio.timeout(40):
            await asyncio.gather(*map(work, writers))
        r.faults.heal()
        r.faults.latency_s = (0.0, 0.0)
        await r.faults.land()
        for data, _ in stress.posted:
            batch = await writers[0].batch_from_transmittable(data)
            batch._staged.spent_elsewhere()
            await stress.free(batch)
        await asyncio.sleep(0.02)
        assert stress.done["cancelled"] > 0  # how many depends on the pace of the machine
        assert await r.history() == sorted(stress.model)
        assert await r.blobs() == await r.named()
