"""Listen; see `test_indexed_reading.py`."""

import asyncio
import random
import uuid
from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, Records, Sealed
from aiopersist.testing.faults import Faults, FaultyBlob
from tests.indexed.indexed_reading_kit import (
    NO_CACHE,
    TINY,
    at,
    lost_lease,
    plain,
    read,
    rest,
    settle_down,
    stream_of,
    summed,
    take,
    take_all,
    take_rows,
    told,
)
from tests.support.schemas import Row
from tests.support.virtual import in_virtual_time


async def test_events_are_per_commit_records_and_then_the_last_seal(either: Indexed) -> None:
    ix = either
    a, b = await stream_of(ix), await stream_of(ix, "b")
    await ix.write([(a, at(1))])
    snapshot, events = await ix.listen(a)
    assert plain(await snapshot.rows()) == at(1)
    await asyncio.gather(
        ix.write([(a, at(9, 8)), (b, at(0)), (a, at(10))]),
        ix.seal([a], 3),
        ix.write([(a, at(7))]),
        ix.seal([a, b], 5),
        ix.write([(a, [])]),
        ix.write([(a, at(2))]),
        return_exceptions=True,
    )
    await ix.write([(a, at(6))])
    await ix.seal([a], 6)
    assert await take_all(events, 4) == [at(9, 8, 10, 7), 5, at(6), 6]
    await snapshot.aclose()
    await events.aclose()


async def test_nothing_is_told_of_what_does_not_change_the_stream(ix: Indexed) -> None:
    a, b = await stream_of(ix), await stream_of(ix, "b")
    await ix.seal([a], 5)
    _, events = await ix.listen(a)
    await ix.write([(b, at(1))])
    await ix.write([(a, []), (b, at(1))])
    await ix.write([])
    await ix.seal([b], 3)
    await ix.allow_compaction([(a, 4)])
    for refused in (ix.write([(b, at(4)), (a, at(4))]), ix.seal([a], 4)):
        with pytest.raises(ap.Error):
            await refused
    await ix.register("c", str, int)
    await ix.destroy("b")
    await settle_down(ix)
    assert await rest(events) == []
    await ix.write([(a, at(5))])
    assert await take_all(events, 1) == [at(5)]


async def test_the_items_are_records_and_sealed(ix: Indexed) -> None:
    a = await stream_of(ix)
    _, events = await ix.listen(a)
    await ix.write([(a, at(5))])
    await ix.seal([a], 2)
    first, second = await anext(events), await anext(events)
    assert isinstance(first, Records) and isinstance(first.updates, ap.Updates)
    assert second == Sealed(2) and isinstance(second.time, int)


async def test_a_snapshot_and_what_is_told_after_it_are_exactly_everything(either: Indexed) -> None:
    """Goal: listeners that are opened at any moment beside concurrent writers agree on one order; each has
    what came before in its snapshot and what came after in its events, with nothing twice."""
    ix, rng = either, random.Random(1)
    a, b = await stream_of(ix), await stream_of(ix, "b")
    _, all_events = await ix.listen(a)
    opened: list[tuple[list[Row], Any]] = []

    async def write(number: int) -> None:
        for i in range(15):
            rows = [(f"{number}.{i}", j, rng.randrange(100), 1) for j in range(rng.choice([1, 2, 9]))]
            await ix.write([(b, at(1)), (a, rows)])
            if rng.random() < 0.3:
                await asyncio.sleep(0.001)

    async def maintain() -> None:
        for _ in range(10):
            await settle_down(ix)
            await asyncio.sleep(0.002)

    async def follow() -> None:
        await asyncio.sleep(rng.random() * 0.1)
        snapshot, events = await ix.listen(a)
        async with snapshot:
            opened.append((plain(await snapshot.rows()), events))

    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(write(n))
        for _ in range(12):
            group.create_task(follow())
        group.create_task(maintain())
    written = await read(ix, a)
    everything = await take_rows(all_events, len(written))
    assert sorted(everything) == sorted(written)
    for before, events in opened:
        after = await take_rows(events, len(everything) - len(before), 0.02)
        assert before + after == everything
    assert len({len(before) for before, _ in opened}) > 1


async def test_listeners_in_another_client_hear_the_same(location: Any) -> None:
    """Goal: a reader's events are those of the owner, in the same order, over a change of the owner."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as client,
        ap.open(blob=location.blob, consensus=location.consensus) as other,
    ):
        ix = await client.indexed("ix", background=False)
        a, b = await stream_of(ix), await stream_of(ix, "b")
        await ix.write([(a, at(0))])
        async with other.indexed("ix", readonly=True) as reader:
            snapshot, events = await reader.listen(a)
            _, own = await ix.listen(a)
            assert plain(await snapshot.rows()) == at(0)
            await asyncio.gather(*[ix.write([(a, at(5 + n)), (b, at(n))]) for n in range(6)])
            await ix.seal([a], 3)
            await settle_down(ix)
            with pytest.raises(ap.Error):
                await ix.write([(a, at(2))])
            heard = await take(own, 2)
            assert await take(events, 2) == heard == [at(*range(5, 11)), 3]
            async with client.indexed("ix", background=False) as late:
                await late.write([(a, at(20))])
                await late.seal([a], 12)
                await settle_down(late)
                await late.write([(a, at(21))])
                assert await take(events, 3) == [at(20), 12, at(21)]
                second, again = await reader.listen(a)
                assert summed(await second.rows()) == summed(at(0, *range(5, 11), 20, 21))
                await late.destroy("a")
                assert await rest(events, 5) == await rest(again, 5) == []
        await ix.stop()


@pytest.mark.parametrize("where", ["owner", "reader"])
async def test_what_a_listener_has_not_taken_yet_is_kept_for_it(where: str) -> None:
    """Goal: drained, evicted, trimmed, merged, collected and even destroyed: it is told as it was written."""
    options = ap.Settings(**TINY, **NO_CACHE, rollup_every=2, watch_timeout_s=0.2)
    url = f"mem://{uuid.uuid4().hex}"
    async with (
        ap.open(url, settings=options) as client,
        ap.open(url, settings=options) as other,
        client.indexed("ix", background=False) as ix,
        other.indexed("ix", readonly=True) as reader,
    ):
        a, b = await stream_of(ix), await stream_of(ix, "b")
        _, events = await (ix if where == "owner" else reader).listen(a)
        wanted: list[Any] = []
        for t in range(0, 30, 5):
            rows = at(*range(t + 7, t - 1, -1))
            await ix.write([(a, rows)])
            await ix.seal([a], t + 5)
            wanted += [rows, t + 5]
            await settle_down(ix)
        await ix.allow_compaction([(a, 30)])
        await settle_down(ix)
        await asyncio.sleep(0.05)
        await ix.destroy("a")
        for _ in range(6):
            await ix.seal([b], 0)
            await ix.step()
        async with asyncio.timeout(50):
            assert [told(item) async for item in events] == wanted
        await events.aclose()


@pytest.mark.parametrize("where", ["owner", "reader"])
async def test_a_listener_that_is_too_far_behind_ends_with_lease_expired(where: str) -> None:
    """Goal: at the limit it hears all; one commit more, and it has lost its place for good. Others go on."""
    options = ap.Settings(listen_queue_max=5)
    url = f"mem://{uuid.uuid4().hex}"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(ap.open(url, settings=options))
        ix = await stack.enter_async_context(client.indexed("ix", background=False))
        a, b = await stream_of(ix), await stream_of(ix, "b")
        source = ix
        if where == "reader":
            other = await stack.enter_async_context(ap.open(url, settings=options))
            source = await stack.enter_async_context(other.indexed("ix", readonly=True))
        _, slow = await source.listen(a)
        _, slower = await source.listen(a)
        _, beside = await source.listen(b)
        for t in range(5):
            await asyncio.gather(ix.write([(a, at(t))]), ix.seal([a], 0))
            await ix.write([])
        await ix.write([(b, at(1))])
        assert await take(beside, 1) == [at(1)]  # what was committed before is heard by now
        assert await take(slow, 5) == [at(t) for t in range(5)]
        await ix.write([(a, at(5))])
        await ix.write([(b, at(2))])
        assert await take(beside, 1) == [at(2)]
        for _ in range(2):
            with pytest.raises(ap.LeaseExpired):
                await take(slower, 1)
        assert await take(slow, 1) == [at(5)]


@in_virtual_time
async def test_a_reader_that_lost_its_lease_ends_with_lease_expired() -> None:
    """Goal: its versions were truncated while it heard nothing: it says so, and never skips any."""
    async with lost_lease() as (ix, a, reader, events):
        with pytest.raises(ap.LeaseExpired):
            async with asyncio.timeout(50):
                while True:
                    try:
                        await anext(events)
                    except ap.StorageUnavailable:
                        continue
        snapshot, again = await reader.listen(a)
        assert summed(await snapshot.rows()) == summed(at(*range(12)))
        await ix.write([(a, at(50))])
        assert await take(again, 1) == [at(50)]


@pytest.mark.parametrize("where", ["owner", "reader"])
async def test_waits_that_are_given_up_lose_nothing(where: str) -> None:
    rng = random.Random(2)
    url, faults = f"mem://{uuid.uuid4().hex}", Faults(latency_s=(0.0, 0.004))
    options = ap.Settings(**TINY, **NO_CACHE)
    blob = FaultyBlob(ap.open_blob(url), faults)
    async with (
        ap.open(url, settings=options) as client,
        ap.open(blob=blob, consensus=ap.open_consensus(url), settings=options) as other,
    ):
        owning, following = (other, client) if where == "owner" else (client, other)
        async with (
            owning.indexed("ix", background=False) as ix,
            following.indexed("ix", readonly=True) as reader,
        ):
            a = await stream_of(ix)
            _, events = await (ix if where == "owner" else reader).listen(a)

            async def write() -> list[Any]:
                wanted: list[Any] = []
                for t in range(12):
                    rows = at(*range(t, t + rng.choice([1, 20])))
                    await asyncio.gather(ix.write([(a, rows)]), ix.seal([a], t))
                    wanted += [rows] if t == 0 else [rows, t]
                return wanted

            writing = asyncio.ensure_future(write())
            heard: list[Any] = []
            async with asyncio.timeout(50):
                while not heard or heard[-1] != 11:
                    try:
                        async with asyncio.timeout(rng.choice([0, 0.0005, 0.003, 0.05])):
                            heard.append(told(await anext(events)))
                    except TimeoutError:
                        continue
            assert [item for item in heard if item != 0] == await writing


async def test_several_who_wait_share_the_events(ix: Indexed) -> None:
    a = await stream_of(ix)
    _, events = await ix.listen(a)
    waits = [asyncio.ensure_future(anext(events)) for _ in range(6)]
    for t in range(3):
        await asyncio.sleep(0.005)
        await asyncio.gather(ix.write([(a, at(t + 1))]), ix.seal([a], t + 1))
    async with asyncio.timeout(50):
        items = [told(item) for item in await asyncio.gather(*waits)]
    assert items == [item for t in range(3) for item in (at(t + 1), t + 1)]
