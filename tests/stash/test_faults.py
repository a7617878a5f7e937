"""Goal: if requests or answers between a stash and Postgres are lost, a change happens once or is
reported, and never twice; afterwards the stash goes on working."""

import asyncio
import random

import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.stash import StaleLower, Stash, StashCollection
from tests.stash.attack import ARRIVAL_S, LOSSES, Loss, keys, put
from tests.stash.faults_kit import BIG, FAILURES, KINDS, NEVER, REPORT, Way, Work, _known, _open, _stalled
from tests.support.internals import session_of


async def self_paced(stash: Stash, c: StashCollection[str, int], key: str) -> None:
    """Append, though a change of another opener, or an own change in doubt, may come in between, and though
    reads find dead connections; once each."""
    while True:
        try:
            await put(stash, c, [key])
            return
        except StaleLower:
            await asyncio.sleep(0)
        except StorageUnavailable:
            await asyncio.sleep(0.01)


# --- each step of the protocol ------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_loss_at_each_step_is_not_noticed(way: Way, kind: str, loss: Loss) -> None:
    """Goal: with patience, if any answer or request is lost or late, the change happens once."""
    async with ap.stash.open(way.url, NEVER) as stash:
        c = await stash.collection("c", str, int)
        work = Work(kind, stash, c, way.admin)
        for step in range(100):
            call, name = await work.prepare(), f"n{step}"
            async with way.proxy.losing(loss, step), asyncio.timeout(50):
                await call(name)
            assert await work.times(name) == 1
            if not way.proxy.struck:
                break
            if loss == "late":
                await asyncio.sleep(ARRIVAL_S)
                assert await work.times(name) == 1
            await work.reset()
        assert step >= 1  # one was lost at least
        await put(stash, c, ["after"])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "kind", ["small", "migrate", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("big", "create"))]
)
async def test_a_loss_at_each_step_is_reported(way: Way, kind: str, loss: Loss) -> None:
    """Goal: without patience, a change that failed determinately did not happen, one in doubt at most once,
    also if it comes late; and the handle works on."""
    doubts = 0
    async with ap.stash.open(way.url, REPORT) as stash:
        c = await stash.collection("c", str, int)
        work = Work(kind, stash, c, way.admin)
        for step in range(100):
            call, name = await work.prepare(), f"n{step}"
            error: Exception | None = None
            async with way.proxy.losing(loss, step, refusing=True), asyncio.timeout(50):
                try:
                    await call(name)
                except FAILURES as caught:
                    error = caught
                    doubts += isinstance(caught, Indeterminate)
                way.proxy.accept()
                if error is not None and loss == "late":  # a change in doubt may land at any moment of these
                    for n in range(3):
                        await self_paced(stash, c, f"between-{step}-{n}")
            happened = await work.times(name)
            assert happened <= 1
            if error is None or (isinstance(error, StorageUnavailable) and kind != "create"):
                assert happened == (error is None), error  # a creation may lose the answer of a later read
            await work.reset()
            await self_paced(stash, c, f"after-{step}")
            if not way.proxy.struck:
                break
        assert step >= 1
        assert doubts
        found = await keys(stash, c)
        assert [key for key in found if key.startswith("after")] == sorted(
            f"after-{n}" for n in range(step + 1)
        )


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_losses_in_a_row(way: Way, seed: int) -> None:
    """Goal: a network that loses every third answer costs time and nothing else."""
    chance, lost = random.Random(seed), 0

    def unlucky(answer: bytes) -> bool:
        nonlocal lost
        if chance.random() > 0.08:
            return False
        lost += 1
        asyncio.get_running_loop().call_soon(again)
        return True

    def again() -> None:
        way.proxy.swallow_answers_then_cut(unlucky)

    async with ap.stash.open(way.url, NEVER) as stash:
        c = await stash.collection("c", str, int)
        again()
        expected = [f"k{n:02}" for n in range(40)]
        for key in expected:
            await put(stash, c, [key])
        await put(stash, c, [f"m{n:04}" for n in range(BIG)])
        way.proxy._swallow = None
        found = await keys(stash, c)
    assert found[:40] == expected and len(found) == 40 + BIG
    assert lost > 3


# --- late ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_s", [0.0, 0.3])
async def test_the_first_sending_comes_after_the_second(way: Way, late_s: float) -> None:
    """Goal: of two sendings one happens, whichever comes first, and the appends after it are not hurt."""
    async with ap.stash.open(way.url, NEVER) as stash:
        c = await stash.collection("c", str, int)
        await put(stash, c, ["warm"])
        batch = await c.make_batch(stash)
        c.append_to_batch(batch, "k", 0, 1)
        way.proxy.hold_requests()
        task = asyncio.create_task(stash.append([batch]))
        await asyncio.sleep(ARRIVAL_S)
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        if late_s:
            await task  # settled and sent again
            await put(stash, c, ["next"])
        arrive()
        await task
        await asyncio.sleep(late_s)
        await put(stash, c, ["last"])
        assert await keys(stash, c) == ["k", "last", *(["next"] if late_s else []), "warm"]


async def test_a_change_in_doubt_that_comes_late_counts_as_what_it_is(way: Way) -> None:
    """Goal: it was reported as in doubt and comes before the next change: that one notices, and goes on."""
    async with ap.stash.open(way.url, REPORT) as stash:
        c = await stash.collection("c", str, int)
        await put(stash, c, ["warm"])
        batch = await c.make_batch(stash)
        c.append_to_batch(batch, "doubtful", 0, 1)
        stale = await c.make_batch(stash)
        way.proxy.hold_requests()
        task = asyncio.create_task(stash.append([batch]))
        await asyncio.sleep(ARRIVAL_S)
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        way.proxy.refuse()
        with pytest.raises(Indeterminate):
            await task
        way.proxy.accept()
        arrive()
        async with asyncio.timeout(50):
            while not await way.admin.fetchval("SELECT count(*) FROM data WHERE key LIKE '%doubtful%'"):
                await asyncio.sleep(0.01)
        with pytest.raises(StaleLower):
            await stash.append([stale])
        await put(stash, c, ["next"])
        assert await keys(stash, c) == ["doubtful", "next", "warm"]


async def test_a_late_commit_of_several_statements(way: Way) -> None:
    """Goal: a COMMIT that is on its way while the client is cut is waited for, and counts."""
    async with ap.stash.open(way.url, ap.Settings(stash_idle_in_transaction_s=5.0)) as stash:
        c = await stash.collection("c", str, int)
        batch = await c.make_batch(stash)
        for n in range(BIG):
            c.append_to_batch(batch, f"k{n}", 0, 1)
        way.proxy.after_answer_with(
            session_of(stash)._token.encode(), way.proxy.hold_requests
        )  # it has signed
        task = asyncio.create_task(stash.append([batch]))
        await _stalled(way)
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        await asyncio.sleep(0.2)
        assert not task.done()  # the library waits for the transaction that is in progress
        arrive()
        await asyncio.wait_for(task, 30)
        assert len(await keys(stash, c)) == BIG


async def test_a_late_opening_disturbs_nobody(way: Way) -> None:
    """Goal: the first sending of any step of a take-over, repeated since and then late, fences neither the
    opener that sent it nor the one that took over after it."""
    async with ap.stash.open(way.direct) as earlier:
        await earlier.collection("c", str, int)
    for step in range(2, 40):
        way.proxy.after_answers(step, way.proxy.hold_requests)
        opening = asyncio.ensure_future(_open(way.url))
        async with asyncio.timeout(50):
            while way.proxy._requests.is_set() and not opening.done():
                await asyncio.sleep(0.005)
        await asyncio.sleep(ARRIVAL_S)
        done = opening.done()
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        stash = await asyncio.wait_for(opening, 30)
        c = await _known(stash)
        await put(stash, c, [f"a{step}"])
        arrive()
        await asyncio.sleep(ARRIVAL_S)
        await stash.confirm_leadership()
        await put(stash, c, [f"b{step}"])
        await stash.aclose()
        if done:
            break
    assert step > 4
