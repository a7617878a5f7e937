"""Goal: looks at many keys cost few lists, whatever the number of keys, and tell what looks at each would."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

import aiopersist as ap
from aiopersist.base.runtime import Runtime
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.memory import MemoryBlob
from aiopersist.storage.objects import bulk
from aiopersist.storage.objects.bucket import Object, Tagged
from aiopersist.storage.objects.consensus import ObjectsConsensus
from aiopersist.storage.objects.names import floor_name, folder_of, version_name
from aiopersist.testing.storage.heads import grow
from aiopersist.web.census import Census
from tests.storage.objects_kit import Counting, Objects, Place

LONG = "long/" + "ä" * 100  # its folder has the hash of the key


class Pausing(Objects):
    """The next list has passed `before` names up to `at`, and pauses there."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.world)
        self.at = ""
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    async def find(self, prefix: str, *, after: str = "", limit: int | None = None) -> list[Tagged]:
        if self.meanwhile is None:
            return await super().find(prefix, after=after, limit=limit)
        before = [f for f in await super().find(prefix, after=after, limit=limit) if f.name <= self.at]
        meanwhile, self.meanwhile = self.meanwhile, None
        await meanwhile()
        left = None if limit is None else limit - len(before)
        return before + await super().find(prefix, after=max(self.at, after), limit=left)


@pytest.mark.parametrize("others", [0, 10], ids=["alone", "with others"])
async def test_an_orphan_at_the_version_that_is_known(place: Place, others: int) -> None:
    """A list passes the place of the next version; then that is written, the others are truncated, and
    somebody who slept creates the version that the reader knows. That the head has not moved would be wrong:
    it had moved before the call."""
    writer, _ = place.handle()
    await grow(writer, "k", 31)
    keys = {f"a{n}": 0 for n in range(others)}
    for key in keys:
        await grow(writer, key, 1)
    bucket = Pausing(place)
    reader = ObjectsConsensus(bucket, runtime=Runtime())
    assert await reader.head("k") == Versioned(30, b"30")
    for n in range(30, 50):
        assert await writer.compare_and_set("k", n, b"%d" % (n + 1))
    await writer.truncate("k", 50)

    async def meanwhile() -> None:
        assert await writer.compare_and_set("k", 50, b"51")
        await writer.truncate("k", 51)
        orphan = folder_of("k") + version_name(30)
        place.world.stored[orphan] = Object(b"token\norphan", "orphan")

    bucket.at, bucket.meanwhile = folder_of("k") + version_name(51), meanwhile
    assert await reader.heads({"k": 30, **keys}) == {"k": Versioned(51, b"51")}


@pytest.mark.parametrize("page", [5, 20, 1000])
@pytest.mark.parametrize("seed", range(4))
async def test_many_are_what_each_is(
    place: Place, page: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With folders of any length, floors, wishes and orphans, keys that are absent, and others in between."""
    monkeypatch.setattr(bulk, "PAGE", page)
    monkeypatch.setattr(bulk, "TOGETHER_MAX", 16)
    draw, (writer, _) = random.Random(seed), place.handle()
    keys = [*(f"name/{n}" for n in range(25)), *(f"shard/{n}" for n in range(10)), LONG, LONG + "b"]
    for key in keys:
        await grow(writer, key, draw.choice([1, 2, 2, 3, 30]))
        head = await writer.head(key)
        assert head is not None
        if draw.random() < 0.5:
            await writer.truncate(key, draw.randint(0, head.seqno))
        if draw.random() < 0.3:
            place.world.stored[f"{folder_of(key)}x/~wish"] = Object(b"", "wish")
        if draw.random() < 0.3:
            place.world.stored[folder_of(key) + floor_name(head.seqno)] = Object(b"", "floor")
            place.world.stored[folder_of(key) + version_name(max(head.seqno - 1, 0))] = Object(b"t\nx", "o")
    wanted = draw.sample(keys, 30) + [f"name/absent{n}" for n in range(8)]
    heads = {key: await place.handle()[0].head(key) for key in wanted}
    there = {key: head for key, head in heads.items() if head is not None}
    assert await place.handle()[0].heads(dict.fromkeys(wanted)) == there
    known = {key: None if head is None else head.seqno for key, head in heads.items()}
    assert await place.handle()[0].heads(known) == {}
    moved = draw.sample(wanted, 10)
    for key in moved:
        assert await writer.compare_and_set(key, known[key], b"new")
    assert {*await place.handle()[0].heads(known)} == {*moved}


@pytest.mark.blocks_loop  # the bucket in memory sorts all of its names for each list
async def test_many_cost_few_lists(place: Place) -> None:
    """Goal: a list for some hundred keys, and one for each few long ones; the data of what is known are not
    read."""
    writer, _ = place.handle()
    for n in range(600):
        await grow(writer, f"name/{n}", 2)
    known = {f"name/{n}": 1 for n in range(600)}
    handle, calls = place.handle()
    assert await handle.heads(known) == {}
    assert calls.calls == {"list": 5}, "128 at a time"
    calls.calls.clear()
    assert len(await handle.heads(dict.fromkeys(known))) == 600
    assert calls.calls == {"list": 5, "get": 600}
    for n in range(20):
        await grow(writer, f"shard/{n}", 400)
    handle, calls = place.handle()
    assert await handle.heads({f"shard/{n}": 399 for n in range(20)}) == {}
    assert calls.calls["list"] <= 41, "no more than one by one, and one"


@pytest.mark.parametrize("shards", [5, 60])
async def test_an_open_page_costs_a_few_lists(place: Place, shards: int) -> None:
    """Goal: what an inspector reads of a location at rest does not grow with its shards."""
    bucket = Counting(Objects(place.world))
    store = ObjectsConsensus(bucket)
    async with ap.open(blob="mem://", consensus=store, maintenance=False) as client:
        for n in range(shards):
            await client.table(f"t{n}", key=str, val=int).put("a", n)
        census = Census(client)
        await census._pass()
        assert len(census.summaries) == shards
        bucket.calls.clear()
        await census._pass()
        assert bucket.calls.total() <= 8
        assert bucket.calls["get"] == bucket.calls["create"] == 0
    await store.aclose()


@pytest.mark.parametrize("dropped", [10, 40])
async def test_what_was_dropped_costs_nothing_later(place: Place, dropped: int) -> None:
    """Goal: once maintenance has seen what was dropped, lists, overviews, sweeps and rounds cost what they do
    without it; and a name that is taken again is there."""
    blob = MemoryBlob("")
    async with opened(place, blob) as (client, _):
        for n in range(dropped):
            async with client.writer(f"tmp{n}", ap.Schema(key=str, val=int)) as w:
                await w.write([("a", n)])
            await client.admin.drop(f"tmp{n}")
        await client.table("kept", key=str, val=int).put("a", 1)
        await client.admin.maintain()
    for call, most in COSTS.items():
        async with opened(place, blob) as (client, calls):
            before = calls.calls.total()
            await call(client)
            assert calls.calls.total() - before <= most, calls.calls
    async with opened(place, blob) as (client, _):
        await client.table("tmp3", key=str, val=int).put("again", 3)
    async with opened(place, blob) as (client, _):
        assert {*await client.list_shards()} == {"kept", "tmp3"}
        await client.admin.drop("tmp3")
        await client.admin.maintain()
    async with opened(place, blob) as (client, _):
        assert {*await client.list_shards()} == {"kept"}
        place.world.stored |= {
            name: Object(b"t\nnonsense", "n") for name in place.world.stored if name.startswith("kresting/v/")
        }
    async with opened(place, blob) as (client, _):
        assert {*await client.list_shards()} == {"kept"}, "without the record"


COSTS: dict[Callable[[ap.Client], Awaitable[object]], int] = {
    lambda client: client.list_shards(): 9,
    lambda client: client.admin.overview(): 18,
    lambda client: client.admin.usage(): 14,
    lambda client: client.admin.sweep_leaked_blobs(dry_run=True): 14,
    lambda client: client.admin.maintain(): 40,
}


@asynccontextmanager
async def opened(place: Place, blob: MemoryBlob) -> AsyncIterator[tuple[ap.Client, Counting]]:
    """A client of the location, like one of a process of its own, and what it has asked the bucket for."""
    store, calls = place.handle()
    async with ap.open(blob=blob, consensus=store, maintenance=False) as client:
        yield client, calls
    await store.aclose()
