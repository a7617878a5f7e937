"""Arguments; see `test_shared_read.py`."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from tests.read.shared_read_kit import all_read, changes, contents, move_since, read, ten_times, told
from tests.support.processes import Place, place_in_memory
from tests.support.schemas import NAN, SCHEMA
from tests.support.virtual import in_virtual_time

pytestmark = pytest.mark.usefixtures("started_postgres")


USAGE: dict[str, tuple[dict[str, Any], ap.UsageKind]] = {
    "both": ({"as_of": 3, "start": 1}, ap.UsageKind.INVALID_TIME),
    "as_of and end": ({"as_of": 3, "end": 5}, ap.UsageKind.INVALID_TIME),
    "an end alone": ({"end": 3}, ap.UsageKind.INVALID_TIME),
    "the other way round": ({"start": 5, "end": 4}, ap.UsageKind.INVALID_BOUNDS),
    "a product time": ({"as_of": (1, 2)}, ap.UsageKind.INVALID_TIME),
    "a frontier": ({"as_of": ap.Antichain(3)}, ap.UsageKind.INVALID_TIME),
    "a text": ({"as_of": "3"}, ap.UsageKind.INVALID_TIME),
    "negative": ({"as_of": -1}, ap.UsageKind.INVALID_TIME),
    "too large": ({"as_of": 2**63}, ap.UsageKind.INVALID_TIME),
    "negative start": ({"start": -1}, ap.UsageKind.INVALID_TIME),
    "negative end": ({"start": 0, "end": -1}, ap.UsageKind.INVALID_TIME),
    "a product start": ({"start": (1, 2)}, ap.UsageKind.INVALID_TIME),
}


WAITING: dict[str, dict[str, Any]] = {
    "contents": {"as_of": 12},
    "changes": {"start": 5, "end": 13},
    "later changes": {"start": 12, "end": 13},
}


async def waiting(client: ap.Client, **asked: Any) -> "asyncio.Task[Any]":
    """It is registered, and waits."""

    async def opened() -> Any:
        return await client.workers.shared_read("t", **asked)

    task = asyncio.create_task(opened())
    async with asyncio.timeout(50):
        while not any(r.since.elements for r in (await client.admin.inspect("t")).readers.values()):
            await asyncio.sleep(0.01)
    assert not task.done()
    return task


@pytest.mark.parametrize("case", USAGE)
async def test_what_is_no_read(place: Place, case: str) -> None:
    client = await place.client()
    await ten_times(client)
    asked, kind = USAGE[case]
    with pytest.raises(ap.InvalidUsage) as caught:
        await client.workers.shared_read("t", **asked)
    assert caught.value.kind == kind
    assert not (await client.admin.inspect("t")).readers


async def test_product_times_have_no_changes_and_no_greatest_time(place: Place) -> None:
    client = await place.client()
    schema: Any = ap.Schema(key=str, val=int, time=2)
    async with client.writer("t", schema) as w:
        await w.compare_and_append([("a", 1, (0, 0), 1)], (0, 0), (1, 1))
    for asked in ({}, {"start": 0}, {"start": (0, 0)}, {"as_of": 3}, {"as_of": (1, 2, 3)}):
        with pytest.raises(ap.InvalidUsage) as caught:
            await client.workers.shared_read("t", **asked)  # type: ignore[arg-type]
        assert caught.value.kind == ap.UsageKind.INVALID_TIME


@pytest.mark.parametrize("lease_s", [0, -1, float("inf"), NAN, True, "1"])
async def test_a_lease_is_a_positive_time(place: Place, lease_s: Any) -> None:
    client = await place.client()
    await ten_times(client)
    with pytest.raises(ValueError):
        client.workers.shared_read("t", lease_s=lease_s)


async def test_unknown_shards_and_finished_ones(place: Place) -> None:
    client = await place.client()
    with pytest.raises(ap.UnknownShard):
        await client.workers.shared_read("t")
    model = await ten_times(client)
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 10, ap.Antichain())
    async with client.workers.shared_read("t") as whole, client.workers.shared_read("t", start=4) as changed:
        assert (whole.as_of, changed.end) == (2**63 - 1, None)
        assert await read(client, await whole.pieces(3)) == contents(model, 9)
        assert await read(client, await changed.pieces(3)) == changes(model, 4, 10)
    await client.admin.drop("t")
    with pytest.raises((ap.UnknownShard, ap.ShardFinalized)):
        await client.workers.shared_read("t")


async def test_history_that_is_gone(place: Place) -> None:
    """Goal: contents want `since <= as_of`; changes want `since < start`, or both at the minimum."""
    client = await place.client()
    model = await ten_times(client)
    await all_read(client, client, changes(model, 0, 10), start=0)
    await move_since(client, 4)
    await client.admin.force_compaction("t")
    refused: list[dict[str, Any]] = [
        {"as_of": 3},
        {"start": 0},
        {"start": 4},
        {"start": 4, "end": 4},
        {"start": 3, "end": 99},
    ]
    for asked in refused:
        async with asyncio.timeout(50):
            with pytest.raises(ap.SinceViolation) as caught:
                await client.workers.shared_read("t", **asked)
        assert caught.value.since == ap.Antichain(4)
    await all_read(client, client, contents(model, 4), as_of=4)
    await all_read(client, client, changes(model, 5, 10), start=5)
    await all_read(client, client, [], start=10)
    await all_read(client, client, [], start=7, end=7)
    assert not (await client.admin.inspect("t")).readers


async def test_what_is_not_complete_yet(place: Place) -> None:
    client = await place.client()
    async with client.writer("t", SCHEMA):
        for wait in (False, True):  # at once: a wait for a first append needs a time
            async with asyncio.timeout(50):
                with pytest.raises(ap.NotReadable, match="nothing was appended yet") as caught:
                    await client.workers.shared_read("t", wait=wait)
            assert (caught.value.as_of, caught.value.upper) == (None, ap.Antichain(0))
        async with client.workers.shared_read("t", start=0, wait=False) as shared:
            assert (shared.end, await read(client, await shared.pieces(2))) == (0, [])
    await ten_times(client)
    for asked, time in (({"as_of": 10}, 10), ({"start": 3, "end": 11}, 10)):
        with pytest.raises(ap.NotReadable) as caught:
            await client.workers.shared_read("t", wait=False, **asked)
        assert (caught.value.as_of, caught.value.upper) == (time, ap.Antichain(10))
    async with client.workers.shared_read("t", start=12, wait=False) as shared:
        assert (shared.start, shared.end) == (12, 12)
    async with asyncio.timeout(50):
        while (await client.admin.inspect("t")).readers:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("case", WAITING)
async def test_it_waits_and_holds_history_meanwhile(place: Place, case: str) -> None:
    """Goal: since is kept where the read needs it, though others move theirs; let go once it is planned."""
    asked = WAITING[case]
    client, other = await place.client(), await place.client()
    model = await ten_times(other)
    task = await waiting(client, **asked)
    async with other.writer("t", SCHEMA) as w:
        for t in (10, 11, 12):
            await move_since(other, t)
            needed = asked.get("as_of", asked.get("start", 0) - 1)
            assert (await other.inspect("t")).since == ap.Antichain(min(t, needed))
            assert not task.done()
            rows = [("late", t, t, 1)]
            await w.compare_and_append(rows, t, t + 1)
            model.append(rows, [t], [t + 1])
            await other.force_compaction("t")
    async with asyncio.timeout(50):
        shared = await task
    await move_since(other, 12)
    await move_since(other, 13)
    assert (await other.inspect("t")).since == ap.Antichain(13)
    await other.force_compaction("t")
    await other.force_gc("t")
    wanted = contents(model, 12) if "as_of" in asked else changes(model, asked["start"], 13)
    assert await read(other, await shared.pieces(3)) == wanted
    await shared.aclose()


async def test_waiting_for_the_first_complete_time(place: Place) -> None:
    client, other = await place.client(), await place.client()
    async with other.writer("t", SCHEMA) as w:

        async def opened() -> Any:
            return await client.workers.shared_read("t", 2)

        task = asyncio.create_task(opened())
        await asyncio.sleep(0.1)
        assert not task.done()
        await w.compare_and_append([("a", 1, 0, 1)], 0, 3)
    async with asyncio.timeout(50):
        shared = await task
    assert (shared.as_of, await read(client, await shared.pieces(1))) == (2, told([("a", 1, 1)]))


@in_virtual_time
async def test_waiting_longer_than_the_lease() -> None:
    """Goal: the lease is renewed while the read waits, too: a wait has no end of its own."""
    async with place_in_memory() as place:
        client, other = await place.client(), await place.client()
        model = await ten_times(other)
        task = await waiting(client, as_of=10, lease_s=0.4)
        async with other.writer("t", SCHEMA) as w:
            for _ in range(12):
                await asyncio.sleep(0.1)
                await w.compare_and_append([], 10, 10)
                await move_since(other, 10)
            rows = [("late", 1, 10, 1)]
            await w.compare_and_append(rows, 10, 11)
            model.append(rows, [10], [11])
        async with asyncio.timeout(50):
            shared = await task
        assert await read(other, await shared.pieces(3)) == contents(model, 10)


async def test_a_wait_that_is_given_up_lets_go(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiopersist.base.supervisor.RELEASE_DEADLINE_S", 0.1)
    client, other = await place.client(), await place.client()
    await ten_times(other)
    task = await waiting(client, as_of=50)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(50):
        while (await other.inspect("t")).readers:
            await asyncio.sleep(0.01)
    task = await waiting(client, as_of=50)
    await client.aclose()
    with pytest.raises(ap.InvalidUsage) as caught:
        await task
    assert caught.value.kind == ap.UsageKind.CLOSED
    assert not (await other.inspect("t")).readers
