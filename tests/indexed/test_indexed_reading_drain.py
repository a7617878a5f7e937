"""Drain, evict, trim; see `test_indexed_reading.py`."""

import uuid

import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.indexed.indexed_reading_kit import (
    NO_CACHE,
    TINY,
    at,
    plain,
    read,
    settle_down,
    stream_of,
    summed,
    take_all,
)


async def test_a_drain_makes_one_sorted_batch_of_what_was_sealed(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, [("b", 1, 3, 1), ("a", 1, 7, 1), ("b", 1, 3, 2), ("a", 9, 3, 1)])])
    await ix.write([(a, [("b", 1, 3, -1), ("a", 2, 0, 1), ("z", 1, 4, 1), ("z", 1, 4, -1)])])
    await ix.seal([a], 5)
    assert (await ix.inspect(a)).trace == []  # logically moved, not yet physically
    assert await ix.step() == []
    view = await ix.inspect(a)
    assert view.trace == [(0, 5, 0, 0, 3)]
    assert view.unsealed == [(0, 1, 7, 7)]
    async with await ix.snapshot(a) as snapshot:
        wanted = [("a", 2, 0, 1), ("a", 9, 3, 1), ("b", 1, 3, 2)]
        assert plain((await snapshot.trace_rows()).rows()) == wanted
    await ix.seal([a], 8)
    await ix.step()
    view = await ix.inspect(a)
    assert view.trace == [(0, 5, 0, 0, 3), (5, 8, 0, 0, 1)]
    assert view.unsealed == []


async def test_a_drain_keeps_stored_times_though_since_is_beyond(either: Indexed) -> None:
    """Its since is {0}, for exactly that description."""
    ix = either
    a = await stream_of(ix)
    await ix.allow_compaction([(a, 50)])
    await ix.write([(a, at(1, 2))])
    await ix.seal([a], 3)
    await ix.step()
    assert (await ix.inspect(a)).trace == [(0, 3, 0, 0, 2)]
    async with await ix.snapshot(a) as snapshot:
        assert plain((await snapshot.trace_rows()).rows()) == at(1, 2)
        assert {u.time for u in await snapshot.rows()} == {50}


async def test_where_nothing_is_to_be_read_no_batch_is_made(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(9))])
    await ix.seal([a], 5)
    await ix.step()
    view = await ix.inspect(a)
    assert (view.seal, view.trace_upper, view.trace) == (5, 0, [])
    await ix.seal([a], 10)
    await ix.step()
    assert (await ix.inspect(a)).trace == [(0, 10, 0, 0, 1)]


async def test_a_batch_around_the_interval_that_holds_nothing_in_it_makes_no_batch(either: Indexed) -> None:
    """Goal: its least and greatest times say that there may be something, and there is nothing."""
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(2, 100))])
    await ix.write([(a, at(2, 100))])
    await ix.seal([a], 3)
    await ix.step()
    assert (await ix.inspect(a)).unsealed == [(0, 1, 100, 100), (1, 2, 2, 100)]
    await ix.seal([a], 50)
    await ix.step()
    view = await ix.inspect(a)
    assert (view.trace_upper, view.trace) == (3, [(0, 3, 0, 0, 1)])
    assert view.unsealed == [(0, 1, 100, 100), (1, 2, 100, 100)]
    await ix.seal([a], 101)
    await ix.step()
    assert (await ix.inspect(a)).trace == [(0, 3, 0, 0, 1), (3, 101, 0, 0, 1)]


async def test_what_cancels_to_nothing_is_an_empty_batch_without_a_blob(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(*range(20)))])
    await ix.write([(a, at(*range(20), diff=-1))])
    await ix.seal([a], 20)
    await ix.step()
    view = await ix.inspect(a)
    assert (view.trace, view.unsealed) == ([(0, 20, 0, 0, 0)], [])
    counters = ix.counters()
    for name in ("trace_blobs", "trace_bytes", "unsealed_blobs", "unsealed_bytes"):
        assert counters[name] == 0
    assert await read(ix, a) == []


async def test_a_step_trims_one_batch_which_keeps_its_seqnos(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(1, 20))])
    await ix.write([(a, at(30, 31))])
    await ix.write([(a, at(2, 21, 22))])
    await ix.write([(a, at(3, 4))])
    await ix.seal([a], 10)
    await ix.step()
    view = await ix.inspect(a)
    assert view.unsealed == [(0, 1, 20, 20), (1, 2, 30, 31), (2, 3, 2, 22)]
    await ix.step()
    view = await ix.inspect(a)
    assert view.unsealed == [(0, 1, 20, 20), (1, 2, 30, 31), (2, 3, 21, 22)]
    assert summed(await read(ix, a)) == summed(at(1, 20, 30, 31, 2, 21, 22, 3, 4))


async def test_a_batch_is_trimmed_down_to_the_traces_upper_and_not_if_it_begins_there(
    either: Indexed,
) -> None:
    """Goal: the trace's upper itself is not in the trace; so what is there stays, and alone."""
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(1, 10))])
    await ix.write([(a, at(10, 11))])
    await ix.write([(a, at(9))])
    await ix.seal([a], 10)
    await ix.step()
    view = await ix.inspect(a)
    assert view.unsealed == [(0, 1, 10, 10), (1, 2, 10, 11)]
    before = ix._core.state.seqno
    await ix.step()
    assert ix._core.state.seqno == before  # nothing was rewritten
    assert summed(await read(ix, a)) == summed(at(1, 10, 10, 11, 9))


async def test_steps_with_nothing_to_do_touch_no_store() -> None:
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    blob, consensus = (
        FaultyBlob(ap.open_blob(url), faults),
        FaultyConsensus(ap.open_consensus(url), faults),
    )
    options = ap.Settings(**TINY, rollup_every=4)
    async with ap.open(blob=blob, consensus=consensus, settings=options) as client:
        async with client.indexed("ix", background=False) as ix:
            a, b = await stream_of(ix), await stream_of(ix, "b")
            for t in range(9):
                await ix.write([(a, at(t, t + 3)), (b, at(50))])
                await ix.seal([a, b], t)
                await settle_down(ix)
            await ix.allow_compaction([(a, 5)])
            await settle_down(ix)
            for _ in range(6):
                await ix.step()
            before = faults.calls.total()
            for _ in range(5):
                assert await ix.step() == []
            assert faults.calls.total() == before
            await ix.seal([a, b], 9)
            await ix.step()
            assert faults.calls.total() > before


async def test_steps_and_compactions_take_no_seqno_and_are_told_to_no_listener(either: Indexed) -> None:
    ix = either
    a = await stream_of(ix)
    snapshot, events = await ix.listen(a)
    for t in range(4):
        await ix.write([(a, at(t, t + 5))])
        await ix.seal([a], t + 1)
        await ix.allow_compaction([(a, t)])
        await settle_down(ix)
    wanted = [item for t in range(4) for item in (at(t, t + 5), t + 1)]
    assert await take_all(events, len(wanted)) == wanted
    async with await ix.snapshot(a) as after:
        assert (snapshot.seqno, after.seqno) == (0, 12)


async def test_a_step_that_fails_raises_counts_and_is_repeated() -> None:
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    blob = FaultyBlob(ap.open_blob(url), faults)
    options = ap.Settings(**TINY, **NO_CACHE, retry_timeout_s=0.01)
    async with ap.open(blob=blob, consensus=ap.open_consensus(url), settings=options) as client:
        async with client.indexed("ix", background=False) as ix:
            a, b = await stream_of(ix), await ix.register("b", str, str)
            await ix.write([(a, at(*range(30))), (b, [("k", "v", 1, 1)])])
            await ix.seal([a, b], 10)
            faults.rates = {Outcome.REFUSED: 1.0}
            for _ in range(2):
                with pytest.raises(ap.StorageUnavailable):
                    await ix.step()
            faults.heal()
            assert ix.counters()["failed_steps"] == 2
            view = await ix.inspect(a)
            assert (view.trace, len(view.unsealed)) == ([], 1)
            await ix.step()
            assert (await ix.inspect(a)).trace == [(0, 10, 0, 0, 10)]
            assert summed(await read(ix, a)) == summed(at(*range(30)))
