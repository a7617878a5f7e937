"""Group commit; see `test_indexed_calls.py`."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, Refused
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from tests.indexed.indexed_calls_kit import OTHER_CALLS, Faulty, at, commits, last_seqno, read, two
from tests.indexed.indexed_reading_kit import take_all
from tests.support.virtual import in_virtual_time


async def test_calls_that_arrive_together_are_one_compare_and_set(client: ap.Client) -> None:
    async with client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        before = commits(client)
        calls: list[Awaitable[int]] = []
        for n in range(60):
            calls += [ix.write([(a, at(n + 1)), (b, at(n))]), ix.seal([a], n), ix.allow_compaction([(b, n)])]
        assert await asyncio.gather(*calls) == list(range(1, 181))
        assert commits(client) - before == 1
        assert len((await ix.inspect(a)).unsealed) == len((await ix.inspect(b)).unsealed) == 1
        assert (await ix.inspect(b)).unsealed == [(0, 180, 0, 59)]


@in_virtual_time
async def test_callers_that_come_one_after_the_other_share_commits_under_load() -> None:
    """While one commit is on its way the next group gathers: two round trips, not twenty."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    async with ap.open(blob=ap.open_blob(url), consensus=consensus) as client:
        async with client.indexed("ix", background=False) as ix:
            a, _ = await two(ix)
            faults.latency_s = (0.1, 0.1)
            before = commits(client)
            calls = []
            for n in range(20):
                calls.append(asyncio.ensure_future(ix.write([(a, at(n))])))
                await asyncio.sleep(0.002)
            assert await asyncio.gather(*calls) == list(range(1, 21))
            assert commits(client) - before <= 3
            faults.latency_s = (0.0, 0.0)


async def test_commands_are_applied_in_the_order_of_the_calls(ix: Indexed) -> None:
    a, b = await two(ix)
    found = await asyncio.gather(
        ix.write([(a, at(4))]),
        ix.seal([a], 5),
        ix.write([(a, at(4)), (b, at(1))]),
        ix.write([(a, at(5))]),
        ix.seal([a], 6),
        ix.seal([a], 5),
        ix.allow_compaction([(a, 3)]),
        ix.allow_compaction([(a, 2)]),
        ix.write([(b, at(8))]),
        return_exceptions=True,
    )
    refused = {n: (e.seqno, e.time, e.frontier) for n, e in enumerate(found) if isinstance(e, Refused)}
    assert refused == {2: (3, 4, ap.Antichain(5)), 5: (6, 5, ap.Antichain(6)), 7: (8, 2, ap.Antichain(3))}
    assert [f for f in found if isinstance(f, int)] == [1, 2, 4, 5, 7, 9]
    assert await read(ix, a) == [("k", 4, 4, 1), ("k", 5, 5, 1)]
    assert await read(ix, b) == at(8)


async def test_a_slow_write_keeps_its_place(ix: Indexed) -> None:
    """Goal: neither encoding on threads nor slow iterators reorder: what was called first is sealed last."""
    a, b = await two(ix)
    _, events = await ix.listen(a)

    async def slow() -> AsyncIterator[Any]:
        for row in at(1, 2, 3, key="slow"):
            await asyncio.sleep(0.02)
            yield row

    large = at(*[4] * 30_000, key="large")
    found = await asyncio.gather(
        ix.write([(a, slow())]),
        ix.write([(a, large)]),
        ix.write([(b, at(1)), (a, at(5))]),
        ix.seal([a], 9),
        ix.write([(a, at(8))]),
        return_exceptions=True,
    )
    assert found[:4] == [1, 2, 3, 4]
    assert isinstance(found[4], Refused)
    told: list[Any] = []
    while 9 not in told:
        told += await take_all(events, 1)
    rows = [row for item in told if isinstance(item, list) for row in item]
    assert [key for key, _ in itertools.groupby(row[0] for row in rows)] == ["slow", "large", "k"]
    assert len(rows) == 30_004
    assert told[-1] == 9


@in_virtual_time
async def test_a_refused_call_returns_only_after_the_commit_of_its_group() -> None:
    """Goal: a caller that gets a seqno finds its write durable: the answer waits for the store."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    async with ap.open(blob=ap.open_blob(url), consensus=consensus) as client, ap.open(url) as other:
        ix = await client.indexed("ix", background=False)
        a, _ = await two(ix)
        await ix.seal([a], 5)
        faults.latency_s = (0.1, 0.1)
        call = asyncio.ensure_future(ix.write([(a, at(4))]))
        await asyncio.sleep(0.05)
        assert not call.done()
        with pytest.raises(Refused):
            await call
        faults.latency_s = (0.0, 0.0)
        async with other.indexed("ix", readonly=True) as reader:
            assert await last_seqno(reader, a) == 2


async def test_nobody_sees_what_is_not_durable(faulty: Faulty) -> None:
    """Goal: neither a snapshot nor a listener of the very instance; a snapshot waits for the commit."""
    async with faulty.client.indexed("ix", background=False) as ix:
        a, _ = await two(ix)
        _, events = await ix.listen(a)
        faulty.faults.fail_next("compare_and_set", Outcome.REFUSED, times=100)
        write = asyncio.ensure_future(ix.write([(a, at(4))]))
        await asyncio.sleep(0)
        with pytest.raises(ap.StorageUnavailable):
            await ix.snapshot(a)
        with pytest.raises(ap.StorageUnavailable):
            await write
        faulty.faults.heal()
        async with await ix.snapshot(a) as snapshot:
            assert (snapshot.seqno, await snapshot.rows()) == (0, [])
        assert await take_all(events, 0) == []
        assert (await ix.inspect(a)).unsealed == []
        assert await ix.write([(a, at(6))]) == 1
        assert await take_all(events, 1) == [at(6)]


async def test_a_failed_commit_fails_all_its_callers_and_gives_its_seqnos_out_again(faulty: Faulty) -> None:
    async with faulty.client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        await ix.seal([a], 5)
        faulty.faults.fail_next("compare_and_set", Outcome.REFUSED, times=100)
        found = await asyncio.gather(
            ix.write([(a, at(6)), (b, at(1))]),
            ix.write([(a, at(4))]),  # refused, if there were a commit
            ix.seal([b], 7),
            ix.allow_compaction([(b, 7)]),
            return_exceptions=True,
        )
        assert [type(f) for f in found] == [ap.StorageUnavailable] * 4
        assert ix.counters()["failed_commands"] == 4
        faulty.faults.heal()
        assert await ix.description("b") == ap.Description(0, 0, 0)
        assert await ix.write([(b, at(0))]) == 2
    async with ap.open(faulty.url) as other, other.indexed("ix", readonly=True) as reader:
        assert (await read(reader, a), await read(reader, b)) == ([], at(0))
        assert await last_seqno(reader, a) == 2


@pytest.mark.parametrize("moment", ["together", "meanwhile"])
@pytest.mark.parametrize("call", OTHER_CALLS)
async def test_other_calls_get_the_error_of_what_was_pending_and_do_nothing(
    faulty: Faulty, call: str, moment: str
) -> None:
    """Goal: they first commit the pending commands that were called before them."""
    async with faulty.client.indexed("ix", background=False) as ix:
        a, _ = await two(ix)
        faulty.faults.fail_next("compare_and_set", Outcome.REFUSED)
        faulty.faults.latency_s = (0.3, 0.3)  # the commit is under way, and fails after its deadline
        write = asyncio.ensure_future(ix.write([(a, at(4))]))
        await asyncio.sleep(0 if moment == "together" else 0.02)
        outcome = (await asyncio.gather(OTHER_CALLS[call](ix, a), return_exceptions=True))[0]
        with pytest.raises(ap.StorageUnavailable):
            await write
        faulty.faults.heal()
        faulty.faults.latency_s = (0.0, 0.0)
        assert isinstance(outcome, ap.StorageUnavailable), outcome
        assert ix.counters()["streams"] == 2
        assert ix.counters()["unexpected_responses"] == 0
        assert await ix.write([(a, at(5))]) == 1


async def test_a_transient_failure_is_repeated_and_nobody_notices(faulty: Faulty) -> None:
    options = ap.Settings(retry_timeout_s=5)
    async with (
        ap.open(
            blob=ap.open_blob(faulty.url),
            consensus=FaultyConsensus(ap.open_consensus(faulty.url), faulty.faults),
            settings=options,
        ) as client,
        client.indexed("ix", background=False) as ix,
    ):
        a, _ = await two(ix)
        _, events = await ix.listen(a)
        for outcome in (Outcome.REFUSED, Outcome.LOST, Outcome.DROPPED):
            faulty.faults.fail_next("compare_and_set", outcome, times=2)
            await ix.write([(a, at(4))])
        assert await read(ix, a) == at(4, 4, 4)
        assert await take_all(events, 3) == [at(4)] * 3
        assert await ix.seal([a], 2) == 4


async def test_a_write_whose_outcome_was_unknown_is_read_once_it_is_settled(faulty: Faulty) -> None:
    """Goal: nothing goes on until it is settled: durable updates are in the next snapshot, and are told."""
    async with faulty.client.indexed("ix", background=False) as ix, ap.open(faulty.url) as other:
        a, _ = await two(ix)
        _, events = await ix.listen(a)
        faulty.faults.fail_next("compare_and_set", Outcome.LOST)
        faulty.faults.fail_next("scan", Outcome.REFUSED, times=100)
        with pytest.raises(ap.Indeterminate):
            await ix.write([(a, at(4))])
        faulty.faults.heal()
        async with other.indexed("ix", readonly=True) as reader:
            assert await read(reader, a) == at(4)  # it happened
        assert await last_seqno(ix, a) == 1
        assert await read(ix, a) == at(4)
        assert await take_all(events, 1) == [at(4)]
        assert await ix.seal([a], 3) == 2


async def test_a_cancelled_call_is_applied_as_a_whole_or_not_at_all(ix: Indexed) -> None:
    a, b = await two(ix)
    snapshots = []
    for delay in [0.0] * 4 + [0.0005, 0.001, 0.002, 0.004] * 3:
        task = asyncio.ensure_future(ix.write([(a, at(1)), (b, at(1))]))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        snapshots.append((len(await read(ix, a)), len(await read(ix, b))))
    assert all(left == right for left, right in snapshots), snapshots
    await ix.write([(a, at(2))])
    assert await last_seqno(ix, a) == len(await read(ix, a))


async def test_a_cancelled_input_does_not_hold_up_what_was_called_after_it(ix: Indexed) -> None:
    a, _ = await two(ix)

    async def never() -> AsyncIterator[Any]:
        yield at(1)[0]
        await asyncio.Event().wait()

    stuck = asyncio.ensure_future(ix.write([(a, never())]))
    after = asyncio.ensure_future(ix.write([(a, at(7))]))
    await asyncio.sleep(0.02)
    assert not after.done()  # commands are in the order of the calls
    stuck.cancel()
    async with asyncio.timeout(50):
        assert await after == 1
    assert await read(ix, a) == at(7)
