"""Goal: an append of batches that is cancelled at any step has happened, or not, and its batches know it."""

import asyncio
import uuid

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.batches.outcomes_kit import CONSUMED, PENDING, by_compare, by_replica, rig, staged
from tests.support.cancelling import cancelled_after
from tests.support.rigs import Rig
from tests.support.schemas import ROWS, SCHEMA
from tests.support.shards import SIZES, refused


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
        assert await r.parts() == []


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
