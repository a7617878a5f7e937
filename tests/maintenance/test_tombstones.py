"""Goal: the tombstones of dropped shards cost a look at all shards no request, are removed after a while,
and fence for as long as a process could still know the shard."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.log import consensus_key
from aiopersist.storage.consensus import Consensus, Versioned
from tests.support.internals import shards_of
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import MONTH_S, requests


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(stack, {})


async def made(client: ap.Client, name: str) -> str:
    async with client.writer(name, SCHEMA) as w:
        batch = await w.batch([("a", 1, 0, 1)], 0, 1)
        await batch.flush_to_blob()
        await w.compare_and_append_batch([batch], 0, 1)
        return w.shard_id


async def keys(place: Place) -> set[str]:
    return {key for key in await place.clock.list_keys("") if not key.startswith("location/")}


# --- what it costs ---------------------------------------------------------------------------------------


async def test_dropped_shards_cost_no_requests() -> None:
    """Goal: after ten times as many drops a look at all shards sends no request more."""
    counts: list[list[int]] = []
    for drops in (5, 50):
        async with AsyncExitStack() as stack:
            place = Place(stack, {})
            client = await place.client()
            await made(client, "kept")
            for n in range(drops):
                await made(client, f"tmp-{n}")
                await client.admin.drop(f"tmp-{n}")
            other, found = await place.client(), []
            for look in ("list_shards", "usage", "sweep_leaked_blobs", "maintain", "maintain"):
                before = requests(other)
                await getattr(other, look)()
                found.append(requests(other) - before)
            assert set(await other.list_shards()) == {"kept"}
            counts.append(found)
    assert counts[0] == counts[1]
    assert counts[0][0] == 3, "with the look for names whose shard was never made"


async def test_shards_at_rest_cost_a_round_no_requests_of_their_own(place: Place) -> None:
    client = await place.client()
    for n in range(20):
        await made(client, f"kept-{n}")
    while (done := await client.admin.maintain()).looked_at:
        pass
    before = requests(client)
    again = await client.admin.maintain()
    assert (again.shards, again.looked_at, done.shards) == (20, 0, 20)
    assert requests(client) - before < 8


# --- when it goes ----------------------------------------------------------------------------------------


async def test_what_a_drop_leaves_goes_after_its_time(place: Place) -> None:
    """Goal: not before; with it what came too late into the blob store; others stay."""
    client = await place.client()
    kept, shard = await made(client, "kept"), await made(client, "tmp")
    writer = f"w{shard[1:]}"
    await client.admin.drop("tmp")
    await place.blob.set(f"{shard}/{writer}/{shard[1:]}.parquet", b"late")
    await client.admin.maintain()
    assert await keys(place) == {f"shard/{kept}", f"shard/{shard}", "name/kept", "name/tmp"}
    place.clock.ahead_s += MONTH_S - 60
    await (await place.client()).maintain()
    assert f"shard/{shard}" in await keys(place)
    place.clock.ahead_s += 120
    await client.admin.maintain()
    assert await keys(place) == {f"shard/{kept}", "name/kept"}
    assert [key async for key, _ in place.blob.list(f"{shard}/")] == []
    assert await client.list_shards() == {"kept": kept}
    again = await made(client, "tmp")
    assert again != shard
    await client.admin.maintain()
    assert (await client.admin.fsck("kept")).ok and (await client.admin.fsck("tmp")).ok


async def test_a_drop_that_crashed_is_finished_first(place: Place) -> None:
    """Goal: a tombstone whose data is still there stays until that is deleted, and ages from then on."""
    from aiopersist.shard.attempt import Slot
    from aiopersist.shard.commit import commit
    from aiopersist.state.lifecycle import Finalize

    client = await place.client()
    shard = await made(client, "tmp")
    found = await shards_of(client).existing("tmp")
    await commit(found.register, Finalize(shard), Slot())
    place.clock.ahead_s += 2 * MONTH_S
    other = await place.client()
    assert (await other.maintain()).parts == 1
    assert f"shard/{shard}" in await keys(place)
    assert await place.parts() == set()
    await other.drop("tmp")
    assert await keys(place) == {f"shard/{shard}", "name/tmp"}
    place.clock.ahead_s += 2 * MONTH_S
    await other.maintain()
    assert await keys(place) == set()


async def test_a_finalized_shard_that_has_a_name_stays(place: Place) -> None:
    """Goal: under its name no process makes a shard of the same id; once the name is dropped, both go."""
    client = await place.client()
    async with client.writer("tmp", SCHEMA) as w, client.critical_since("tmp", "me") as since:
        shard = w.shard_id
        await w.compare_and_append([], 0, ap.Antichain())
        await since.compare_and_downgrade_since(0, 0, ap.Antichain())
    await client.admin.finalize("tmp")
    place.clock.ahead_s += 2 * MONTH_S
    for _ in range(2):
        await client.admin.maintain()
    assert await keys(place) == {f"shard/{shard}", "name/tmp"}
    with pytest.raises(ap.ShardFinalized):
        await (await place.client()).writer("tmp", SCHEMA)
    await client.admin.drop("tmp")
    place.clock.ahead_s += 2 * MONTH_S
    await client.admin.maintain()
    assert await keys(place) == set()


async def test_a_maintainer_that_rested_for_long_looks_at_names_again(place: Place) -> None:
    """Goal: a name that was made anew since its last round, up to the same number, is read: what it names
    now keeps its tombstone."""
    slow, other = await place.client(), await place.client()
    await made(slow, "tmp")
    await slow.maintain()
    await buried(place, "tmp")
    async with other.writer("tmp", SCHEMA) as w, other.critical_since("tmp", "me") as since:
        shard = w.shard_id
        await w.compare_and_append([], 0, ap.Antichain())
        await since.compare_and_downgrade_since(0, 0, ap.Antichain())
    await other.finalize("tmp")
    place.clock.ahead_s += 2 * MONTH_S
    for _ in range(2):
        await slow.maintain()
    assert await keys(place) == {f"shard/{shard}", "name/tmp"}
    with pytest.raises(ap.ShardFinalized):
        await (await place.client()).writer("tmp", SCHEMA)


async def test_a_name_that_an_earlier_version_freed_goes_too(place: Place) -> None:
    """Goal: it did not say when; it counts from the first look."""
    client = await place.client()
    await place.clock.compare_and_set("name/old", None, json.dumps({"format": 1, "shard": None}).encode())
    for _ in range(2):
        await client.admin.maintain()
    assert "name/old" in await keys(place)
    place.clock.ahead_s += MONTH_S + 60
    await client.admin.maintain()
    assert await keys(place) == set()


async def test_a_store_that_removes_nothing_keeps_what_is_left() -> None:
    class Keeps(type(Place(AsyncExitStack(), {}).clock)):  # type: ignore[misc]
        async def remove(self, key: str, expected: Versioned) -> bool:
            return await Consensus.remove(self, key, expected)

    async with AsyncExitStack() as stack:
        place = Place(stack, {})
        place.clock = Keeps(place.clock.inner, place.clock.faults)
        client = await place.client()
        shard = await made(client, "tmp")
        await client.admin.drop("tmp")
        place.clock.ahead_s += 2 * MONTH_S
        for _ in range(2):
            assert (await client.admin.maintain()).failures == {}
        assert await keys(place) == {f"shard/{shard}", "name/tmp"}


# --- handles that still know the shard
# ---------------------------------------------------------------------------


async def buried(place: Place, name: str) -> None:
    """Dropped by another process, and forgotten."""
    other = await place.client()
    await other.drop(name)
    place.clock.ahead_s += MONTH_S + 60
    await other.maintain()


async def test_a_handle_that_was_open_all_the_time_finds_it_finalized(place: Place) -> None:
    """Goal: whatever it asks; and nothing is made anew."""
    client = await place.client()
    shard = await made(client, "tmp")
    async with client.writer("tmp", SCHEMA) as w, client.reader("tmp", SCHEMA) as r, r.listen() as listen:
        await buried(place, "tmp")
        assert await keys(place) == set()
        calls: Mapping[str, Any] = {
            "append": lambda: w.compare_and_append([("a", 1, 1, 1)], 1, 2),
            "write": lambda: w.write([("a", 1)]),
            "upper": w.fetch_recent_upper,
            "snapshot": lambda: r.snapshot(),
            "listen": lambda: anext(listen),
            "batch": lambda: w.append([("a", 1, 1, 1)], 1, 2),
            "maintenance": lambda: client.admin.force_compaction(shard),
        }
        for what, call in calls.items():
            with pytest.raises(ap.ShardFinalized):
                await call()
                raise AssertionError(what)
    assert await keys(place) == set()
    with pytest.raises(ap.UnknownShard):
        await client.reader("tmp", SCHEMA)
    with pytest.raises(ap.UnknownShard):
        await (await place.client()).reader(shard, SCHEMA)


async def test_a_shard_that_is_gone_too_soon_is_corruption(place: Place) -> None:
    """Goal: a store that was restored from a backup is not taken for a drop."""
    client = await place.client()
    async with client.writer("tmp", SCHEMA) as w:
        head = await place.clock.head(consensus_key(w.shard_id))
        assert head is not None and await place.clock.remove(consensus_key(w.shard_id), head)
        with pytest.raises(ap.Corruption, match="backup"):
            await w.fetch_recent_upper()
        with pytest.raises(ap.Corruption, match="backup"):
            await w.compare_and_append([("a", 1, 0, 1)], 0, 1)


async def test_whoever_creates_too_late_makes_nothing(place: Place) -> None:
    """Goal: a process finds the name, stands still while the shard is dropped and forgotten, and goes on."""
    client = await place.client()
    reached, go_on = asyncio.Event(), asyncio.Event()
    inner = place.clock.compare_and_set

    async def stopped(key: str, expected: int | None, data: bytes) -> bool:
        if key.startswith("shard/") and expected is None and not reached.is_set():
            reached.set()
            await go_on.wait()
        return await inner(key, expected, data)

    place.clock.compare_and_set = stopped  # type: ignore[method-assign]
    opening = asyncio.ensure_future(client.writer("tmp", SCHEMA))
    await reached.wait()
    await buried(place, "tmp")
    assert await keys(place) == set()
    go_on.set()
    with pytest.raises(ap.ShardFinalized):
        await opening
    async with client.writer("tmp", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
    assert set(await client.list_shards()) == {"tmp"}
