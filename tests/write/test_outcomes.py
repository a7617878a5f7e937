"""Goal: an append is in the shard once or not at all, also if its statement is lost or its caller is
cancelled, and `settle` says which."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.support.internals import session_of
from tests.support.schemas import SCHEMA
from tests.support.shards import CAS, becomes
from tests.write.outcomes_kit import by_compare, rig

Append = Callable[[ap.WriteHandle[str, int]], Awaitable[Any]]


async def by_append(w: ap.WriteHandle[str, int]) -> None:
    await w.append([("a", 1, 0, 1)], 0, 1)


async def by_write(w: ap.WriteHandle[str, int]) -> None:
    await w.write([("a", 1)])


async def by_txn(w: ap.WriteHandle[str, int]) -> None:
    await w.compare_and_append([("a", 1, 0, 1)], 0, 1, txn=("app", 1))


APPENDS = [by_compare, by_append, by_write, by_txn]


BLOBS = [pytest.param(16384, id="inline"), pytest.param(0, id="blob")]


async def _cancel_after(work: Awaitable[Any], steps: int) -> bool:
    """Cancel `work` after that many turns of the loop; whether it was cancelled."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


async def _cancelled_appends(client: ap.Client, honest: ap.Client, append: Append, steps: int) -> None:
    name = uuid.uuid4().hex
    async with client.writer(name, SCHEMA) as w:
        cancelled = await _cancel_after(append(w), steps)
        outcome = await w.settle()
        upper = await w.fetch_recent_upper()
        if not cancelled:
            assert outcome is None
            assert upper == ap.Antichain(1)
        else:
            assert outcome == (ap.NotCommitted() if upper == ap.Antichain(0) else ap.Committed(upper))
        if upper == ap.Antichain(0):
            await append(w)
        async with honest.reader(name, SCHEMA) as r, r.snapshot() as s:
            assert await s.rows() == [("a", 1, 1)]


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("inline", BLOBS)
@pytest.mark.parametrize(
    "outcomes",
    [
        [Outcome.LOST],
        [Outcome.DROPPED],
        [Outcome.REFUSED],
        [Outcome.LATE],
        [Outcome.DROPPED, Outcome.LOST],
        [Outcome.LATE, Outcome.LOST],
        [Outcome.LATE, Outcome.REFUSED, Outcome.LATE, Outcome.DROPPED],
        [Outcome.LOST, Outcome.LOST],
    ],
    ids="+".join,
)
async def test_an_append_whose_answers_are_lost_lands_once(
    append: Append, inline: int, outcomes: list[Outcome]
) -> None:
    """Goal: the call returns only when it is in, once; a statement that lands later changes nothing."""
    async with rig(inline_writes_single_max_bytes=inline) as r, r.client.writer("t", SCHEMA) as w:
        for outcome in outcomes:
            r.faults.fail_next(CAS, outcome)
        await append(w)
        assert len(r.faults.injected) >= 1
        await r.faults.land()
        assert await r.sums() == {"a": 1}
        assert await w.settle() is None
        assert len(await r.parts()) == (0 if inline else 1)
        await w.compare_and_append([("b", 1, 1, 1)], 1, 2)
        assert await r.sums() == {"a": 1, "b": 1}


@pytest.mark.parametrize("late", [False, True], ids=["lost_for_good", "lands_later"])
async def test_after_a_cancellation_a_statement_on_its_way_cannot_land_any_more(late: bool) -> None:
    """Goal: settling looks, finds the version vacant, and occupies it."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        r.faults.fail_next(CAS, Outcome.LATE if late else Outcome.DROPPED)
        r.faults.fail_next("scan", Outcome.DROPPED, 1000)  # what came of it cannot be looked at yet
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await by_compare(w)
        r.faults.heal()
        assert await w.settle() == ap.NotCommitted()
        await r.faults.land()
        assert await w.fetch_recent_upper() == ap.Antichain(0)
        assert await w.settle() == ap.NotCommitted()  # as often as one asks
        await by_compare(w)
        assert await w.settle() is None
        assert await r.sums() == {"a": 1}


async def test_a_statement_that_lands_before_settling_is_told() -> None:
    """Goal: held back during the append, there when it is settled: Committed, with the upper it left."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        r.faults.fail_next(CAS, Outcome.LATE)
        r.faults.fail_next("scan", Outcome.DROPPED, 1000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await by_compare(w)
        r.faults.heal()
        await r.faults.land()
        assert await w.settle() == ap.Committed(ap.Antichain(1))
        assert w.upper == ap.Antichain(1)
        with pytest.raises(ap.UpperMismatch):
            await by_compare(w)
        assert await r.sums() == {"a": 1}


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_a_store_that_stays_away_makes_an_append_indeterminate(outcome: Outcome) -> None:
    """Goal: only where nothing can be learned the caller is told so, and learns it later."""
    async with rig(retry_timeout_s=0.05) as r, r.client.writer("t", SCHEMA) as w:
        r.faults.fail_next(CAS, outcome)
        r.faults.fail_next("scan", Outcome.REFUSED, 1000)
        with pytest.raises(ap.Indeterminate):
            await by_compare(w)
        with pytest.raises(ap.Error):
            await w.settle()
        r.faults.heal()
        expected = ap.Committed(ap.Antichain(1)) if outcome is Outcome.LOST else ap.NotCommitted()
        assert await w.settle() == expected
        await r.faults.land()
        upper = await w.fetch_recent_upper()
        assert upper == ap.Antichain(1 if outcome is Outcome.LOST else 0)


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("inline", BLOBS)
async def test_unavailable_says_that_it_did_not_happen(append: Append, inline: int) -> None:
    """Goal: StorageUnavailable is determinate; nothing is pending after it, no blob is left."""
    async with rig(retry_timeout_s=0.05, inline_writes_single_max_bytes=inline) as r:
        async with r.client.writer("t", SCHEMA) as w:
            r.faults.fail_next(CAS, Outcome.REFUSED, 1000)
            with pytest.raises(ap.StorageUnavailable):
                await append(w)
            r.faults.heal()
            await becomes(r.parts, [])
            assert await w.settle() is None
            assert await w.fetch_recent_upper() == ap.Antichain(0)
            await append(w)
        assert await r.sums() == {"a": 1}


async def test_what_another_call_settled_is_still_told() -> None:
    """Goal: the next call of any task settles first; the outcome is kept for `settle`."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        r.faults.fail_next(CAS, Outcome.LOST)
        r.faults.fail_next("scan", Outcome.DROPPED, 1000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await by_compare(w)
        r.faults.heal()
        await session_of(w).begin_turn()  # as any call does
        session_of(w).end_turn()
        assert await w.settle() == ap.Committed(ap.Antichain(1))
        await w.compare_and_append([], 1, 2)
        assert await w.settle() is None


async def test_an_append_refused_at_its_first_step_ends_what_settle_tells() -> None:
    """Goal: the outcome is told until the next append *begins*, with any outcome of that one."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        await _cancel_after(by_compare(w), 1)
        assert await w.settle() == ap.NotCommitted()
        with pytest.raises(ap.InvalidUsage):
            await w.compare_and_append([], 5, 4)
        assert await w.settle() is None


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("inline", BLOBS)
async def test_cancelled_at_any_step_in_memory(append: Append, inline: int) -> None:
    """Goal: at every single step of the loop at which an append may be cancelled, `settle` is right."""
    async with rig(inline_writes_single_max_bytes=inline) as r:
        for steps in range(1, 31):
            await _cancelled_appends(r.client, r.honest, append, steps)


@pytest.mark.parametrize("append", APPENDS)
async def test_cancelled_at_any_step_with_latency(append: Append) -> None:
    """Goal: the same while every statement takes its time, and some answers are lost."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        for steps in range(1, 300, 13):
            r.faults.latency_s = (0.0, 0.001)
            r.faults.rates = {Outcome.LOST: 0.1, Outcome.DROPPED: 0.1, Outcome.REFUSED: 0.1}
            await _cancelled_appends(r.client, r.honest, append, steps)


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("steps", [1, 3, 10, 30, 100, 300, 1000])
async def test_cancelled_at_some_step_in_files_and_sqlite(tmp_path: Any, append: Append, steps: int) -> None:
    async with ap.open(tmp_path) as client, ap.open(tmp_path) as honest:
        await _cancelled_appends(client, honest, append, steps)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), calls=st.lists(st.integers(1, 120), min_size=1, max_size=8))
def test_a_history_of_cancelled_appends_under_faults(seed: int, calls: list[int]) -> None:
    """Goal: over many appends of one handle the shard holds exactly those that were acknowledged or
    settled as committed."""

    async def run() -> None:
        async with rig() as r, r.client.writer("t", SCHEMA) as w:
            r.faults._random.seed(seed)
            r.faults.latency_s = (0.0, 0.0005)
            r.faults.rates = dict.fromkeys((Outcome.LOST, Outcome.DROPPED, Outcome.LATE), 0.1)
            expected = {}
            upper = 0
            for number, steps in enumerate(calls):
                key = f"k{number}"
                rows = [(key, number, upper, 1)]
                cancelled = await _cancel_after(w.compare_and_append(rows, upper, upper + 1), steps)
                if not cancelled or isinstance(await w.settle(), ap.Committed):
                    expected[key] = 1
                    upper += 1
            r.faults.heal()
            await r.faults.land()
            assert await w.fetch_recent_upper() == ap.Antichain(upper)
            if upper:
                assert await r.sums() == expected

    asyncio.run(run())


async def test_a_cancelled_write_that_was_not_taken_is_withdrawn() -> None:
    """Goal: a caller that goes away takes nothing from the others that wait."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        r.faults.latency_s = (0.02, 0.02)
        first = asyncio.create_task(w.write([("a", 1)]))
        await asyncio.sleep(0.01)
        second, third = (asyncio.create_task(w.write([(key, 1)])) for key in "bc")
        await asyncio.sleep(0.005)
        second.cancel()
        assert await first == 0
        assert await third == 1
        assert await w.settle() == ap.NotCommitted()
        assert await r.sums() == {"a": 1, "c": 1}


async def test_a_cancelled_write_shares_the_fate_of_its_group() -> None:
    """Goal: rows that were taken are committed with the others; `settle` answers the time after."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        await w.write([("0", 0)])
        r.faults.latency_s = (0.02, 0.02)
        calls = [asyncio.create_task(w.write([(key, 1)])) for key in "ab"]
        await asyncio.sleep(0.01)
        calls[0].cancel()
        assert await calls[1] == 1
        assert await w.settle() == ap.Committed(ap.Antichain(2))
        assert await r.sums() == {"0": 1, "a": 1, "b": 1}


async def test_a_repeat_that_was_cancelled_is_committed() -> None:
    """Goal: a recorded transaction number is one whose append happened, for every caller."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        async with r.honest.writer("t", SCHEMA) as other:  # `w` has not heard of it yet
            await other.compare_and_append([("a", 1, 0, 1)], 0, 1, txn=("app", 7))
            await other.compare_and_append([], 1, 5)
        r.faults.latency_s = (0.01, 0.01)
        assert await _cancel_after(w.compare_and_append([("a", 1, 1, 1)], 1, 2, txn=("app", 7)), 1)
        assert await w.settle() == ap.Committed(ap.Antichain(5))
        assert await w.settle() == ap.Committed(ap.Antichain(5))
        assert await r.sums(4) == {"a": 1}


async def test_a_hanging_statement_blocks_no_other_handle() -> None:
    """Goal: rule 10: while a statement of one handle never ends, others of the process append."""
    async with rig() as r:
        async with r.client.writer("t", SCHEMA) as w, r.client.writer("t", SCHEMA) as other:
            inner, hang, release = r.faults.call, asyncio.Event(), asyncio.Event()

            async def call(op: str, act: Any) -> Any:
                if op == CAS and not hang.is_set():
                    hang.set()
                    await release.wait()
                return await inner(op, act)

            r.faults.call = call  # type: ignore[method-assign]
            hung = asyncio.create_task(w.compare_and_append([("hung", 1, 0, 1)], 0, 1))
            await hang.wait()
            async with asyncio.timeout(50):
                await other.compare_and_append([("a", 1, 0, 1)], 0, 1)
                await other.compare_and_append([("b", 1, 1, 1)], 1, 2)
            hung.cancel()
            async with asyncio.timeout(50):
                assert await w.settle() == ap.NotCommitted()
            release.set()  # too late
        assert await r.sums() == {"a": 1, "b": 1}
