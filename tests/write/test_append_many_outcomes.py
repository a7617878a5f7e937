"""Outcomes; see `test_append_many.py`."""

import asyncio
import itertools
import uuid
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.support.cancelling import cancelled_after
from tests.support.internals import shard_of
from tests.support.rigs import Rig, sums
from tests.support.schemas import SCHEMA
from tests.support.shards import SIZES, becomes
from tests.write.append_many_kit import MANY, NAMES, contents, one_each, rig, rows, writers


async def doubtful(r: Rig, appends: list[ap.Append], outcome: Outcome) -> None:
    """Make that call end without an answer, its statement having ended so."""
    for append in appends:
        await append.writer.fetch_recent_upper()  # so that the statement is no mismatch
    r.faults.fail_next(MANY, outcome)
    r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
    sent = r.faults.calls[MANY]
    call = asyncio.create_task(r.client.compare_and_append_many(appends))
    while r.faults.calls[MANY] == sent or not r.faults.calls["scan"]:
        await asyncio.sleep(0.001)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    r.faults.heal()


ORDERS = [pytest.param(order, id="".join(map(str, order))) for order in itertools.permutations(range(3))]


async def settled_alike(client: ap.Client, honest: ap.Client, steps: int) -> None:
    """Cancel it after that many steps; the writers agree with each other and with what is there."""
    names = [uuid.uuid4().hex for _ in range(2)]
    async with client.writer(names[0], SCHEMA) as a, client.writer(names[1], SCHEMA) as b:
        batch = await b.batch(rows("k"), 0, 1)
        appends = [ap.Append(a, rows("k"), 0, 1), ap.Append(b, batch, 0, 1)]
        cancelled = await cancelled_after(client.compare_and_append_many(appends), steps)
        writers = [a, b] if steps % 2 else [b, a]
        answers = [await w.settle() for w in writers]
        uppers = [await w.fetch_recent_upper() for w in writers]
        assert uppers[0] == uppers[1]
        if not cancelled:
            assert (answers, uppers[0]) == ([None, None], ap.Antichain(1))
        elif uppers[0] == ap.Antichain(1):
            assert answers == [ap.Committed(ap.Antichain(1))] * 2
        else:
            assert answers == [ap.NotCommitted()] * 2
            await client.compare_and_append_many(appends)
        for name in names:
            assert await sums(honest, name) == {"k": 1}


@pytest.mark.parametrize("single", SIZES)
@pytest.mark.parametrize(
    "outcomes",
    [
        [Outcome.LOST],
        [Outcome.DROPPED],
        [Outcome.REFUSED],
        [Outcome.LATE],
        [Outcome.LATE, Outcome.LOST],
        [Outcome.DROPPED, Outcome.REFUSED, Outcome.LATE, Outcome.LOST],
    ],
    ids="+".join,
)
async def test_answers_that_are_lost(outcomes: list[Outcome], single: int) -> None:
    """Goal: the call returns only when all is in, once."""
    async with rig(inline_writes_single_max_bytes=single) as r:
        ws = await writers(r, NAMES)
        batch = await ws[2].batch(rows("k"), 0, 1)
        for outcome in outcomes:
            r.faults.fail_next(MANY, outcome)
        await r.client.compare_and_append_many([*one_each(ws[:2]), ap.Append(ws[2], batch, 0, 1)])
        assert len(r.faults.injected) == len(outcomes)
        await r.faults.land()
        assert await contents(r, NAMES) == [{"k": 1}] * 3
        assert [await w.settle() for w in ws] == [None] * 3
        assert len(await r.parts()) == (0 if single else 3)


@pytest.mark.parametrize(
    ("outcome", "landing"),
    [
        (Outcome.LOST, "never"),
        (Outcome.DROPPED, "never"),
        (Outcome.LATE, "never"),
        (Outcome.LATE, "before"),
        (Outcome.LATE, "between"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
async def test_settled_in_any_order(order: tuple[int, ...], outcome: Outcome, landing: str) -> None:
    """Goal: each writer answers for its own shard, and all give the same answer; batches go with it."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        ws = await writers(r, NAMES)
        batch = await ws[1].batch(rows("k"), 0, 1)
        appends = [ap.Append(ws[0], rows("k"), 0, 4), ap.Append(ws[1], batch, 0, 1), *one_each(ws[2:])]
        await doubtful(r, appends, outcome)
        for call in (batch.delete(), ws[1].append_batch(batch, 0, 1)):
            with pytest.raises(ap.InvalidUsage) as caught:
                await call
            assert caught.value.kind == ap.UsageKind.OUTCOME_PENDING
        if landing == "before":
            await r.faults.land()
        committed = outcome is Outcome.LOST or landing == "before"
        for n in order:
            upper = ap.Antichain(4 if n == 0 else 1)
            expected = ap.Committed(upper) if committed else ap.NotCommitted()
            # the failed `append_batch` above was the last append that began
            if n == 1:
                assert await ws[n].settle() is None
            else:
                assert await ws[n].settle() == expected
            if landing == "between":
                await r.faults.land()
        assert await contents(r, NAMES) == ([{"k": 1}] * 3 if committed else [{}] * 3)
        if not committed:
            await batch.delete()
            await becomes(r.parts, [])
        await asyncio.sleep(0.01)
        assert len(await r.parts()) == (3 if committed else 0)
        for w in ws:
            await w.compare_and_append([], w.upper, 9)
            assert await w.settle() is None


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
@pytest.mark.parametrize("first", [None, 0, 1])
async def test_one_settles_while_the_other_shard_moves_on(first: int | None, outcome: Outcome) -> None:
    """Goal: versions later, the second comes to the answer of the first; also where another's version,
    in one shard alone, decided it."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        ws = await writers(r)
        others = await writers(r, client=r.honest)
        await doubtful(r, one_each(ws), outcome)
        upper = 1 if outcome is Outcome.LOST else 0
        answers: list[Any] = [None, None]
        if first is not None:
            answers[first] = await ws[first].settle()
        moving = 1 if first is None else 1 - first
        for n in range(5):
            await others[moving].compare_and_append(rows(f"other{n}", upper + n), upper + n, upper + n + 1)
        await r.faults.land()
        for n in range(2):
            if n != first:
                answers[n] = await ws[n].settle()
        if outcome is Outcome.LOST:
            assert answers == [ap.Committed(ap.Antichain(1))] * 2
        else:
            assert answers == [ap.NotCommitted()] * 2
        found = await contents(r)
        assert ["k" in one for one in found] == [outcome is Outcome.LOST] * 2
        assert [len(one) for one in found] == [upper + 5 * (n == moving) for n in range(2)]
        await asyncio.sleep(0.01)
        named = {
            part.key
            for other in others
            for batch in (await shard_of(other).open()).batches.values()
            for part in batch.parts
            if part.key
        }
        await becomes(r.parts, sorted(named))


async def test_the_next_call_of_one_writer_settles_only_its_own() -> None:
    """Goal: one writer goes on with appends of its own, before the other has asked."""
    async with rig() as r:
        a, b = await writers(r)
        await doubtful(r, one_each([a, b]), Outcome.LOST)
        await a.compare_and_append(rows("more", 1), 1, 2)
        assert await a.settle() is None
        assert await b.settle() == ap.Committed(ap.Antichain(1))
        await doubtful(r, [*one_each([a], at=2), *one_each([b], at=1)], Outcome.DROPPED)
        await b.compare_and_append(rows("more", 1), 1, 2)
        assert await b.settle() is None
        assert await a.settle() == ap.NotCommitted()
        assert await contents(r) == [{"k": 1, "more": 1}, {"k": 1, "more": 1}]


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_a_store_that_stays_away_makes_it_indeterminate(outcome: Outcome) -> None:
    async with rig(retry_timeout_s=0.05) as r:
        ws = await writers(r)
        batch = await ws[0].batch(rows("k"), 0, 1)
        r.faults.fail_next(MANY, outcome)
        r.faults.fail_next("scan", Outcome.REFUSED, 1000)
        with pytest.raises(ap.Indeterminate):
            await r.client.compare_and_append_many([ap.Append(ws[0], batch, 0, 1), *one_each(ws[1:])])
        for w in ws:
            with pytest.raises(ap.Error):
                await w.settle()
        with pytest.raises(ap.InvalidUsage) as caught:
            await batch.delete()
        assert caught.value.kind == ap.UsageKind.OUTCOME_PENDING
        r.faults.heal()
        answers = [await w.settle() for w in reversed(ws)]
        await r.faults.land()
        if outcome is Outcome.LOST:
            assert answers == [ap.Committed(ap.Antichain(1))] * 2
        else:
            assert answers == [ap.NotCommitted()] * 2
            await batch.delete()
        assert await contents(r) == ([{"k": 1}] * 2 if outcome is Outcome.LOST else [{}, {}])


async def test_unavailable_says_that_it_did_not_happen() -> None:
    async with rig(retry_timeout_s=0.05, inline_writes_single_max_bytes=0) as r:
        ws = await writers(r)
        r.faults.fail_next(MANY, Outcome.REFUSED, 1000)
        with pytest.raises(ap.StorageUnavailable):
            await r.client.compare_and_append_many(one_each(ws))
        r.faults.heal()
        await becomes(r.parts, [])
        assert [await w.settle() for w in ws] == [None, None]
        await r.client.compare_and_append_many(one_each(ws))
        assert await contents(r) == [{"k": 1}] * 2


@pytest.mark.parametrize("single", SIZES)
async def test_cancelled_at_any_step(single: int) -> None:
    async with rig(inline_writes_single_max_bytes=single) as r:
        for steps in range(1, 40):
            await settled_alike(r.client, r.honest, steps)


async def test_cancelled_at_any_step_of_slow_stores() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        for steps in range(1, 300, 23):
            r.faults.latency_s = (0.0, 0.001)
            r.faults.rates = dict.fromkeys(
                (Outcome.LOST, Outcome.DROPPED, Outcome.LATE, Outcome.REFUSED), 0.07
            )
            await settled_alike(r.client, r.honest, steps)
            await r.faults.land()


@pytest.mark.several_shards
@pytest.mark.parametrize("steps", [3, 30, 100, 1000])
async def test_cancelled_at_some_step_on_every_store(location: Any, steps: int) -> None:
    blob, consensus = location
    async with (
        ap.open(blob=blob, consensus=consensus) as client,
        ap.open(blob=blob, consensus=consensus) as honest,
    ):
        await settled_alike(client, honest, steps)
