"""Stop, the cost of a commit, and counters; see `test_indexed_calls.py`."""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, Refused, Stopped
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from tests.indexed.indexed_calls_kit import OTHER_CALLS, READONLY, Faulty, at, parts_below, read, two

# --- stop ---------------------------------------------------------------------------------------------


async def test_stopping_commits_what_is_pending(client: ap.Client) -> None:
    ix = await client.indexed("ix", background=False)
    a, b = await two(ix)
    writes = [asyncio.ensure_future(ix.write([(a, at(n)), (b, at(n))])) for n in range(10)]
    seal = asyncio.ensure_future(ix.seal([b], 4))
    await asyncio.sleep(0)
    await ix.stop()
    assert await asyncio.gather(*writes, seal) == list(range(1, 12))
    async with client.indexed("ix", background=False) as ix:
        assert await read(ix, a) == at(*range(10))
        assert (await ix.description("b")).upper == ap.Antichain(4)


async def test_after_the_end_every_call_is_stopped(mem: ap.Client) -> None:
    ix = await mem.indexed("ix", background=False)
    a, _ = await two(ix)
    await ix.write([(a, at(1))])
    snapshot, listener = await ix.listen(a)
    waiting = asyncio.ensure_future(anext(listener, None))
    await asyncio.sleep(0.01)
    await ix.stop()
    assert await waiting is None
    assert await anext(listener, None) is None
    await ix.stop()
    await ix.aclose()
    calls = {**READONLY, **OTHER_CALLS, "compact": lambda ix, a: ix.compact(a)}
    for call in calls.values():
        with pytest.raises(Stopped):
            await call(ix, a)
    with pytest.raises(Stopped):
        ix.counters()
    with pytest.raises(ap.InvalidUsage):
        await snapshot.rows()
    await snapshot.aclose()
    await listener.aclose()


async def test_stopped_is_an_invalid_usage_of_kind_closed(mem: ap.Client) -> None:
    async with mem.indexed("ix") as ix:
        pass
    with pytest.raises(ap.InvalidUsage) as caught:
        await ix.description("a")
    assert isinstance(caught.value, Stopped)
    assert caught.value.kind is ap.UsageKind.CLOSED


async def test_stopping_with_a_store_that_is_gone_tells_the_callers_and_releases(faulty: Faulty) -> None:
    ix = await faulty.client.indexed("ix", background=False)
    a, _ = await two(ix)
    _, listener = await ix.listen(a)
    faulty.faults.rates = {Outcome.REFUSED: 1.0}
    writes = [asyncio.ensure_future(ix.write([(a, at(n))])) for n in range(3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(50):
        await ix.stop()
    found = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(f) for f in found] == [ap.StorageUnavailable] * 3
    assert await anext(listener, None) is None
    with pytest.raises(Stopped):
        await ix.description("a")
    faulty.faults.heal()
    async with faulty.client.indexed("ix", background=False) as again:
        assert await read(again, a) == []


async def test_stopping_does_not_wait_long_for_an_input_that_never_ends(
    mem: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: its caller gets an error that says that it is stopped, not one of the library's insides."""
    monkeypatch.setattr("aiopersist.base.supervisor.RELEASE_DEADLINE_S", 0.2)
    ix = await mem.indexed("ix", background=False)
    a, _ = await two(ix)

    async def never() -> AsyncIterator[Any]:
        yield at(1)[0]
        await asyncio.Event().wait()

    stuck = asyncio.ensure_future(ix.write([(a, never())]))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(50):
        await ix.stop()
        (found,) = await asyncio.gather(stuck, return_exceptions=True)
    assert isinstance(found, ap.Error), repr(found)
    async with mem.indexed("ix", background=False) as again:
        assert await read(again, a) == []


async def test_closing_the_client_stops_it() -> None:
    async with ap.open("mem://") as client:
        ix = await client.indexed("ix")
        a, _ = await two(ix)
        _, listener = await ix.listen(a)
        waiting = asyncio.ensure_future(anext(listener, None))
        await asyncio.sleep(0.01)
    async with asyncio.timeout(50):
        (found,) = await asyncio.gather(waiting, return_exceptions=True)
    assert found is None or isinstance(found, ap.InvalidUsage)
    with pytest.raises(ap.InvalidUsage):
        await ix.write([(a, at(1))])


async def test_an_instance_that_was_stopped_leaves_the_next_one_alone(mem: ap.Client) -> None:
    first = await mem.indexed("ix", background=False)
    second = await mem.indexed("ix", background=False)
    await first.stop()
    a, _ = await two(second)
    assert await second.write([(a, at(1))]) == 1
    await second.stop()


async def test_the_body_of_with_raises_what_it_raises(mem: ap.Client) -> None:
    with pytest.raises(ZeroDivisionError):
        async with mem.indexed("ix") as ix:
            a, _ = await two(ix)
            await ix.write([(a, at(1))])
            raise ZeroDivisionError
    async with mem.indexed("ix") as ix:
        assert await read(ix, a) == at(1)


# --- what a commit costs, and counters ----------------------------------------------------------------


async def test_what_a_commit_writes_is_proportional_to_the_change() -> None:
    """Goal: the hundredth stream, and the thousandth batch, cost what the first did."""
    url = f"mem://{uuid.uuid4().hex}"
    sizes: list[int] = []

    class Weighed(FaultyConsensus):
        async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
            sizes.append(len(data))
            return await super().compare_and_set(key, expected, data)

    consensus = Weighed(ap.open_consensus(url), Faults())
    async with ap.open(blob=ap.open_blob(url), consensus=consensus) as client:
        async with client.indexed("ix", background=False) as ix:
            first = await ix.register("s0", str, int)
            await ix.write([(first, at(1))])
            small = sizes[-1]
            await asyncio.gather(*[ix.register(f"s{n}", str, int) for n in range(1, 200)])
            for _ in range(50):
                await ix.write([(first, at(1))])
            await ix.write([(first, at(1))])
            assert math.isclose(sizes[-1], small, rel_tol=0.1)


async def test_counters_say_what_was_done(ix: Indexed) -> None:
    a, b = await two(ix)
    found = ix.counters()
    assert found["streams"] == 2
    assert set(found) == {
        "streams", "unsealed_blobs", "unsealed_bytes", "trace_blobs", "trace_bytes", "writes", "records",
        "bytes", "failed_commands", "failed_steps", "compactions", "compaction_seconds", "compaction_bytes",
        "skipped_compactions", "failed_compactions", "unexpected_responses",
    }  # fmt: skip
    await ix.write([(a, at(1, 2, 3)), (b, at(4))])
    await ix.write([])
    await ix.seal([a], 2)
    with pytest.raises(Refused):
        await ix.write([(a, at(1))])
    found = ix.counters()
    assert (found["writes"], found["records"], found["failed_commands"]) == (2, 4, 1)
    assert found["bytes"] > 0 and found["unsealed_bytes"] > 0 and found["trace_bytes"] == 0
    await ix.destroy("b")
    assert ix.counters()["streams"] == 1


async def test_blobs_of_refused_and_bad_writes_are_deleted() -> None:
    options = ap.Settings(inline_writes_single_max_bytes=0, blob_target_size=200, row_group_bytes=80)
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url, settings=options) as client, client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        await ix.seal([a], 10)
        with pytest.raises(Refused):
            await ix.write([(b, at(*range(50))), (a, at(*range(50)))])
        with pytest.raises(ap.InvalidUpdate):
            await ix.write([(b, at(*range(50))), (a, [*at(*range(10, 50)), ("k", None, 50, 1)])])
        async with asyncio.timeout(50):
            while await parts_below(url):
                await asyncio.sleep(0.01)
        await ix.write([(b, at(*range(50)))])
        assert await parts_below(url) == ix.counters()["unsealed_blobs"] > 1


async def test_streams_of_every_kind_of_value(client: ap.Client) -> None:
    """Each stream has its own codecs, and they are written together."""
    async with client.indexed("ix", background=False) as ix:
        texts = await ix.register("texts", str, None)
        numbers = await ix.register("numbers", int, float)
        optionals = await ix.register("optionals", int | None, list[str])
        await ix.write(
            [
                (texts, [("ä", None, 1, 1)]),
                (numbers, [(-5, 0.5, 2, 3)]),
                (optionals, [(None, ["x", "y"], 3, -1)]),
            ]
        )
        await ix.seal([texts, numbers, optionals], 10)
        await ix.step()
        assert await read(ix, texts) == [("ä", None, 1, 1)]
        assert await read(ix, numbers) == [(-5, 0.5, 2, 3)]
        assert await read(ix, optionals) == [(None, ["x", "y"], 3, -1)]


async def test_the_background_drains_and_compacts_by_itself() -> None:
    options = ap.Settings(indexed_step_s=0.01)
    async with ap.open("mem://", settings=options) as client, client.indexed("ix") as ix:
        a, _ = await two(ix)
        for t in range(6):
            await ix.write([(a, at(t))])
            await ix.seal([a], t + 1)
            await asyncio.sleep(0.02)
        await ix.allow_compaction([(a, 6)])
        async with asyncio.timeout(50):
            while len((view := await ix.inspect(a)).trace) > 3 or view.unsealed or view.in_flight:
                await asyncio.sleep(0.01)
        assert ix.counters()["compactions"] > 0
        assert sorted(await read(ix, a)) == [("k", t, 6, 1) for t in range(6)]


async def test_a_round_while_a_compaction_is_answered_is_not_the_last() -> None:
    """Goal: a round between a commit of a compaction and its answer asks for nothing, as the request is in
    flight; the answer brings another round, which asks for what is left. Rounds come in every turn here."""
    async with ap.open("mem://", settings=ap.Settings(indexed_step_s=1e-6)) as client:
        async with client.indexed("ix", background=False) as ix:
            a, _ = await two(ix)
            for t in range(12):
                await ix.write([(a, at(t))])
                await ix.seal([a], t + 1)
                await ix.step()
            await ix.allow_compaction([(a, 12)])
            assert len((await ix.inspect(a)).trace) > 3
        async with client.indexed("ix") as ix, asyncio.timeout(50):
            while len((view := await ix.inspect(a)).trace) > 3 or view.in_flight:
                await asyncio.sleep(0.001)
            assert sorted(await read(ix, a)) == [("k", t, 12, 1) for t in range(12)]


def test_settings_have_what_the_specification_names() -> None:
    assert ap.Settings().listen_queue_max > 0
    assert timedelta(seconds=ap.Settings().indexed_step_s) > timedelta(0)
