"""Goal: a table that is not resident answers as one that is, in bounded memory, with few requests."""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import FaultyBlob
from tests.conftest import StoreUrls
from tests.support.processes import Place
from tests.table.kit import Gate, entries, in_time, sent
from tests.table.test_types import KEYS, same

SMALL = {"row_group_bytes": 20_000, "blob_target_size": 150_000, "inline_writes_single_max_bytes": 0}
COUNT = 6000


def key(number: int) -> str:
    return f"k{number:06}"


def val(number: int) -> str:
    """A val that cannot be compressed."""
    return random.Random(number).randbytes(40).hex()


def blob_reads(client: ap.Client) -> int:
    return sum(count for op, count in sent(client).items() if op.startswith("blob.get"))


@asynccontextmanager
async def compacted(location: Any) -> AsyncIterator[None]:
    """A table of several parts with many row groups, compacted."""
    settings = ap.Settings(**SMALL)
    opening = ap.open(blob=location.blob, consensus=location.consensus, settings=settings, maintenance=False)
    async with opening as client:
        table = client.table("t", str, str)
        await table.put_many({key(2 * n): val(n) for n in range(COUNT)})
        await client.admin.force_compaction("t")
        yield


def open_partial(location: Any, **settings: Any) -> Any:
    limits = ap.Settings(**{**SMALL, "blob_cache_bytes": 0, "watch_timeout_s": 0.05, **settings})
    return ap.open(blob=location.blob, consensus=location.consensus, settings=limits, maintenance=False)


async def test_a_key_costs_two_requests(location: StoreUrls) -> None:
    """The first get of a key reads an index and a row group, the next one of that part a row group. A key
    that is known, or beyond all parts, costs nothing."""
    dice = random.Random(1)
    async with compacted(location), open_partial(location) as client:
        table = await client.table("t", str, str, resident=False)
        assert blob_reads(client) == 0, "opening reads nothing"
        found = []
        for n in [0, COUNT - 1, *(dice.randrange(COUNT) for _ in range(20))]:
            before = blob_reads(client)
            assert await table.get(key(2 * n)) == val(n)
            found.append(blob_reads(client) - before)
            assert await table.get(key(2 * n)) == val(n)
            assert blob_reads(client) - before == found[-1], "it is known by now"
        assert found[0] == 2
        assert max(found) <= 2
        assert sum(found) <= len(found) + 5, "the indexes of the parts are not read twice"
        before = blob_reads(client)
        assert await table.get(key(7)) is None
        assert blob_reads(client) - before <= 2
        assert await table.get("z") is None
        assert blob_reads(client) - before <= 2, "statistics tell"


async def test_the_history_of_a_key_lies_in_one_part(location: StoreUrls) -> None:
    """Parts are cut between keys, though all their vals are kept: a get reads one part."""
    limits = {**SMALL, "row_group_bytes": 3000, "compaction_memory_bytes": 1}
    settings = ap.Settings(**limits)  # type: ignore[arg-type]
    stores = {"blob": location.blob, "consensus": location.consensus}
    async with ap.open(**stores, settings=settings, maintenance=False) as client:
        table = client.table("t", str, str)
        for n in range(7):
            await table.put_many({key(k): val(n + k) for k in range(60)})
        await client.admin.force_compaction("t")
    async with open_partial(location) as client:
        table = await client.table("t", str, str, resident=False)
        state = await client._shards.at(await client.shard_id("t")).open()
        assert sum(len(batch.parts) for batch in state.batches.values()) > 15
        for k in range(60):
            before = blob_reads(client)
            assert await table.get(key(k)) == val(6 + k)
            assert blob_reads(client) - before == 1, k


async def test_a_put_costs_a_look_up_and_a_commit(location: StoreUrls) -> None:
    async with compacted(location), open_partial(location, inline_writes_single_max_bytes=16_384) as client:
        table = await client.table("t", str, str, resident=False)
        await table.put("a", "registers the writer")
        before = sent(client)
        await table.put(key(2000), "new")
        cost = sent(client) - before
        assert sum(n for op, n in cost.items() if op.startswith("blob.get")) == 2
        assert sum(n for op, n in cost.items() if "compare_and_set" in op) == 1
        before = sent(client)
        await asyncio.gather(*(table.put(key(2 * n), "newer") for n in range(40)))
        cost = sent(client) - before
        assert sum(n for op, n in cost.items() if op.startswith("blob.get")) <= 2


async def test_entries_are_read_as_they_are_asked_for(location: StoreUrls) -> None:
    """Goal: an iteration that ends early has read a few row groups of a table of many, wherever it began."""
    async with compacted(location), open_partial(location, read_memory_bytes=60_000) as client:
        table = await client.table("t", str, str, resident=False)
        before = blob_reads(client)
        assert len(await entries(table)) == COUNT
        all_of_it = blob_reads(client) - before
        assert all_of_it > 20
        for n in (0, COUNT // 2):
            before = blob_reads(client)
            async for found in table.items(key(2 * n)):
                assert found == (key(2 * n), val(n))
                break
            assert blob_reads(client) - before < all_of_it / 2


async def test_keys_of_a_time_are_one_scan(location: StoreUrls) -> None:
    async with compacted(location), open_partial(location) as client:
        table = await client.table("t", str, str, resident=False)
        time = (await table.view()).upper.time - 1
        await table.put(key(0), "later")
        wanted = [key(0), "none", key(2 * COUNT - 2), *map(key, range(200))]
        before = blob_reads(client)
        found = await table.get_many(wanted, as_of=time)
        assert blob_reads(client) - before <= 4, "the first part and the last"
        assert list(found) == [key(0), key(2 * COUNT - 2), *(key(n) for n in range(2, 200, 2))]
        assert found[key(0)] == val(0)


@pytest.mark.parametrize("reads_again", [True, False])
async def test_a_transaction_whose_table_leaves_memory(reads_again: bool) -> None:
    """Goal: what a transaction read is looked up again before it is compared."""
    async with ap.open(f"mem://{uuid.uuid4().hex}", maintenance=False) as client:
        table = await client.table("t", str, int)
        await table.put_many({"a": 1, "b": 2})

        async def body(tx: ap.Transaction) -> None:
            found = await tx.get(table, "a")
            assert found is not None
            await client.table("t", str, int, resident=False).view()
            tx.put(table, "sum", found + (await tx.get(table, "b") or 0 if reads_again else 2))

        assert (await table.view()).resident
        await client.transact(body)
        assert not (await table.view()).resident
        assert await table.get("sum") == 3


@pytest.mark.parametrize("name", KEYS)
async def test_keys_of_each_type_are_looked_up(name: str) -> None:
    """In parts of one row group per row, whose statistics must not exclude what is there."""
    type_, keys = KEYS[name]
    url = f"mem://{uuid.uuid4().hex}"
    limits = ap.Settings(row_group_bytes=1, inline_writes_single_max_bytes=0, table_resident_bytes=0)
    async with ap.open(url, settings=limits, maintenance=False) as client:
        table = client.table("t", type_, int)
        await table.put_many([(key, number) for number, key in enumerate(keys)])
        await client.admin.force_compaction("t")
        assert not (await table.view()).resident
        for number, key in enumerate(keys):
            assert await table.get(key) == number, key
            with pytest.raises(ap.KeyExists):
                await table.insert(key, 7)
        assert same(await table.get_many(keys), dict(zip(keys, range(len(keys)), strict=True)))
        await table.delete(keys[0])
        assert same(await table.get_many(keys[:2]), {keys[1]: 1})
        assert same([k for k, _ in await entries(table)], keys[1:])


async def test_going_over_and_back_is_invisible(place: Place) -> None:
    """The contents grow beyond what may be resident, and shrink again; tasks read all the time."""
    limits = {"table_resident_bytes": 40_000}
    client, other = await place.client(**limits), await place.client(**limits)
    table, theirs = client.table("t", str, str), other.table("t", str, str)
    await table.put("always", "there")
    seen, done = set(), False

    async def reads() -> None:
        while not done:
            assert await table.get_many(["always", "never"]) == {"always": "there"}
            view = await table.view()
            seen.add(view.resident)
            assert view.bytes <= 80_000
            await asyncio.sleep(0)

    reading = asyncio.ensure_future(reads())
    for n in range(12):
        await (table, theirs)[n % 2].put_many({f"k{n}-{i}": "x" * 100 for i in range(20)})
    assert not (await table.view()).resident
    assert await table.get("k0-0") == "x" * 100
    assert await table.count() == 241
    for n in range(12):
        await theirs.delete(*(f"k{n}-{i}" for i in range(20)))
    await client.admin.retain("t", 1)
    async with asyncio.timeout(50):
        while not (await table.view()).resident:
            for each in (client, other):
                await each.force_gc("t")  # a heartbeat, with which since moves
            await client.admin.force_compaction("t")
            await table.get("always")
            await theirs.get("always")
            await asyncio.sleep(0.01)
    assert await entries(table) == [("always", "there")]
    done = True
    await in_time(reading)
    assert seen == {True, False}


async def test_what_the_handle_says_goes_before_the_size(place: Place) -> None:
    client = await place.client(table_resident_bytes=10_000)
    large, small = (
        client.table("large", str, str, resident=True),
        client.table("small", str, str, resident=False),
    )
    await large.put_many({f"k{n}": "x" * 100 for n in range(1000)})
    await small.put("k", "v")
    assert (await large.view()).resident
    assert not (await small.view()).resident
    assert (await client.table("large", str, str).view()).resident, "nothing else was said"
    assert not (await client.table("large", str, str, resident=False).view()).resident
    assert not (await large.view()).resident, "there is one view"
    assert (await client.table("small", str, str, resident=True).view()).resident
    assert await large.get("k7") == "x" * 100
    assert await small.get("k") == "v"
    with pytest.raises(TypeError, match="resident='yes'"):
        client.table("t", str, str, resident="yes")  # type: ignore[call-overload]


async def test_memory_is_bounded(place: Place) -> None:
    """Whatever is read, written here or by others, the view takes about what it may."""
    client, other = await place.client(table_resident_bytes=50_000), await place.client()
    table, theirs = client.table("t", str, str), other.table("t", str, str)
    await theirs.put_many({key(n): "x" * 50 for n in range(3000)})
    await table.get("a")
    for first in range(0, 3000, 100):
        assert len(await table.get_many(map(key, range(first, first + 100)))) == 100
        assert (await table.view()).bytes <= 50_000
    for n in range(100):
        await table.put_many({key(20 * n + i): f"new {n}" for i in range(20)})
        assert (await table.view()).bytes <= 50_000
    await theirs.put_many({key(n): "y" for n in range(3000)})
    assert await table.get(key(2999)) == "y"
    assert (await table.view()).bytes <= 50_000


async def test_a_transaction_reads_and_ranges(place: Place) -> None:
    """As of one moment, with its own writes, which change, remove and add entries anywhere."""
    dice = random.Random(3)
    limits = {"row_group_bytes": 500, "blob_target_size": 3000, "inline_writes_single_max_bytes": 0}
    client = await place.client(table_resident_bytes=0, **limits)
    table = client.table("t", str, int)
    model = {key(2 * n): n for n in range(300)}
    await table.put_many(model)
    for _ in range(6):
        expected = dict(model)
        written = {key(dice.randrange(620)): dice.choice([None, 7]) for _ in range(dice.choice([0, 3, 40]))}
        start, stop = sorted(key(dice.randrange(620)) for _ in range(2))

        async def body(tx: ap.Transaction, written: Any = written, span: Any = (start, stop)) -> Any:
            for k, val in written.items():
                if val is None:
                    tx.delete(table, k)
                else:
                    tx.put(table, k, val)
            found = await tx.get_many(table, list(written)[:5])
            assert found == {k: v for k, v in list(written.items())[:5] if v is not None}
            some = [entry async for entry in tx.items(table, *span)]
            return some, [entry async for entry in tx.items(table)]

        some, whole = await client.transact(body)
        for k, val in written.items():
            expected.pop(k, None) if val is None else expected.update({k: val})
        assert whole == sorted(expected.items())
        assert some == [(k, v) for k, v in whole if start <= k < stop]
        assert await entries(table) == whole
        model = expected


async def test_a_range_that_a_large_foreign_commit_changed_runs_again(place: Place) -> None:
    """The view does not read what is too large for it. So it does not know what changed: the body runs
    again."""
    client, other = await place.client(table_resident_bytes=2000), await place.client()
    table, theirs = client.table("t", str, int), other.table("t", str, int)
    await table.put("a", 1)
    runs = 0

    async def body(tx: ap.Transaction) -> int:
        nonlocal runs
        runs += 1
        found = [entry async for entry in tx.items(table)]
        if runs == 1:
            await theirs.put_many({key(n): n for n in range(500)})
        tx.put(table, "sum", sum(n for _, n in found))
        return len(found)

    assert await client.transact(body) == 501
    assert runs == 2
    assert await theirs.get("sum") == 1 + sum(range(500))


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_key_that_changes_during_its_look_up(*, cancelled: bool) -> None:
    """The look-up is answered late: by then the key has another val, which came by a commit, and so many
    others came that it would be forgotten. Perhaps nobody waits any more."""
    url, gate = f"mem://{uuid.uuid4().hex}", Gate()
    async with AsyncExitStack() as stack:
        in_blobs = ap.Settings(inline_writes_single_max_bytes=0)
        honest = await stack.enter_async_context(ap.open(url, settings=in_blobs, maintenance=False))
        await honest.table("t", str, str).put_many({key(n): "old" for n in range(40)})
        await honest.force_compaction("t")
        opening = ap.open(
            blob=FaultyBlob(ap.open_blob(url), gate),
            consensus=ap.open_consensus(url),
            settings=ap.Settings(table_resident_bytes=2000, blob_cache_bytes=0, watch_timeout_s=0.02),
            maintenance=False,
        )
        client = await stack.enter_async_context(opening)
        other = (await stack.enter_async_context(ap.open(url, maintenance=False))).table("t", str, str)
        table = await client.table("t", str, str, resident=False)
        gate.hold("get", "get_range", late=True)
        getting = asyncio.ensure_future(table.get(key(3)))
        await in_time(gate.held.wait())
        if cancelled:
            getting.cancel()
            await asyncio.wait([getting])
        for n in range(3, 20):
            await other.put(key(n), "new")  # inline: the view takes it without a request
            async with asyncio.timeout(50):
                while (await table.view()).upper != (await other.view()).upper:
                    await asyncio.sleep(0.005)
        gate.open()
        if not cancelled:
            assert await in_time(getting) == "new"
        for n in (3, 4, 19, 20):
            assert await table.get(key(n)) == ("old" if n == 20 else "new"), n
