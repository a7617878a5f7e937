"""Goal: compaction, garbage collection, the sweep and the end of a shard lose no data and leave no
garbage: also when a process crashes or is cut off at any moment, beside any readers, writers, compactions
and collections."""

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.state.diff import decode_diff
from aiopersist.testing.model import gathered
from tests.support.internals import shards_of
from tests.support.location import (
    NAME,
    SCHEMA,
    Place,
    Way,
    append,
    both,
    contents,
    finished,
    move_since,
    prepared,
    sound,
)
from tests.support.shards import noted

DROP = "drop"


@pytest.mark.slow
@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("collected", [False, True])
async def test_a_crash_at_every_request(collected: bool, landed: bool) -> None:
    """Goal: whichever request is the last of a client, nothing is lost and nothing stays for ever."""
    origin, shard_id = await prepared(collected)
    n, crashed = 0, True
    while crashed:
        n += 1
        place, way = Place(origin), Way(landed=landed)
        with suppress(ap.Error):
            async with place.open(way) as client:
                way.crash_at = way.calls + n
                await both(client)
                way.crash_at = None
        crashed = way.crashed
        with noted(f"crashed at request {n}"):
            await finished(place, shard_id)
    assert n > 20


@pytest.mark.parametrize("end", ["finalize", DROP])
@pytest.mark.parametrize("landed", [False, True])
async def test_a_crash_at_every_request_of_the_end(end: str, landed: bool) -> None:
    """Goal: repeating it, and a sweep, leave a tombstone and nothing else."""
    origin, shard_id = await prepared()
    if end == "finalize":
        async with origin.open() as client:
            async with client.writer(NAME, SCHEMA) as w:
                await w.compare_and_append([], w.upper, ap.Antichain())
            await move_since(client, ap.Antichain())  # type: ignore[arg-type]
    faults, n = [], 0
    while True:
        n += 1
        place, way = Place(origin), Way(landed=landed)
        with suppress(ap.Error):
            async with place.open(way) as client:
                way.crash_at = way.calls + n
                await getattr(client, end)(NAME)
                way.crash_at = None
        async with asyncio.timeout(50), place.open() as client:
            if way.crashed:
                with suppress(ap.UnknownShard):
                    await getattr(client, end)(NAME)
            await client.admin.sweep_leaked_blobs(dry_run=False)
            if place.blobs() or len(place.versions(shard_id).data) not in (1, 2):  # the second says so
                faults.append((n, len(place.blobs()), len(place.versions(shard_id).data)))
            with pytest.raises(ap.ShardFinalized):
                await client.reader(shard_id, SCHEMA)
        if not way.crashed:
            break
    assert n > 5
    assert not faults


@pytest.mark.slow
async def test_cancelled_at_every_step() -> None:
    """Goal: as a crash, and without leaks that are left to a sweep where nothing was sent."""
    origin, shard_id = await prepared()
    n, done = 0, False
    while not done:
        place = Place(origin)
        async with asyncio.timeout(50), place.open() as client:
            task = asyncio.create_task(both(client))
            for _ in range(n):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await sound(place, client)
        with noted(f"cancelled after {n} steps"):
            await finished(place, shard_id)
        n += max(1, n // 3)


async def test_a_compaction_cancelled_as_it_claims_can_be_called_again() -> None:
    """Goal: no process waits for its claim; not for ever, and not for a lease that the wait itself renews."""
    place, _ = await prepared()
    way = Way()
    async with place.open(way, writer_lease_s=0.4) as client:
        way.holds = lambda op, what: op == "compare_and_set" and bool(decode_diff(what).changes.claims)
        task = asyncio.create_task(client.admin.force_compaction(NAME))
        await way.until_held()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        way.holds = lambda op, what: False
        way.go.set()
        async with asyncio.timeout(50):
            await client.admin.force_compaction(NAME)
        await sound(place, client)


# --- readers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_open_snapshots_and_listens_outlast_collections(seed: int) -> None:
    """Goal: an open read goes on to its end, beside any compaction and collection."""
    rng, place = random.Random(seed), Place()
    async with place.open() as one, place.open() as two:
        w = await one.writer(NAME, SCHEMA)
        readers = [await client.reader(NAME, SCHEMA) for client in (one, two)]
        open_: list[tuple[Any, list[Any]]] = []
        listens: list[tuple[Any, int]] = []
        for turn in range(14):
            await append(place, w, rng, rng.choice([1, 6, 20]))
            r = rng.choice(readers)
            if turn == 3:
                listens.append((await r.listen(r.since.time), r.since.time))
            try:
                s = await r.snapshot(rng.choice([None, rng.randrange(w.upper.time)]))
                open_.append((s, place.model.contents(s.as_of)))
            except ap.SinceViolation:
                pass
            if rng.random() < 0.6:
                await move_since(rng.choice([one, two]), w.upper.time - 1)
            for client in rng.sample([one, two], 2):
                if rng.random() < 0.7:
                    await client.admin.force_compaction(NAME)
                if rng.random() < 0.7:
                    await client.admin.force_gc(NAME)
            await one.sweep_leaked_blobs(dry_run=False)
            while open_ and rng.random() < 0.4:
                s, expected = open_.pop(rng.randrange(len(open_)))
                assert await s.rows() == expected
                await s.aclose()
        for s, expected in open_:
            assert await s.rows() == expected
            await s.aclose()
        for listen, as_of in listens:
            seen: list[Any] = []
            async for item in listen:
                if isinstance(item, ap.Progress):
                    if item.upper == w.upper:
                        break
                else:
                    seen += item
            assert gathered(seen) == place.model.changes(as_of)
            await listen.aclose()
        for client in (one, two):
            await client.admin.force_compaction(NAME)
            await client.admin.force_gc(NAME)
        await sound(place, two)


async def test_an_expired_reader_is_told_so() -> None:
    """Goal: never wrong data, never `Corruption`."""
    place, _ = await prepared()
    way = Way()
    async with place.open(way, reader_lease_s=0.2) as slow, place.open() as other:
        r = await slow.reader(NAME, SCHEMA)
        s = await r.snapshot()
        expected = place.model.contents(s.as_of)
        way.holds = lambda op, what: op in ("compare_and_set", "now")
        await asyncio.sleep(0.3)
        async with other.writer(NAME, SCHEMA) as w:
            for _ in range(3):
                await append(place, w, random.Random(3))
        await both(other)
        await both(other)
        with pytest.raises(ap.LeaseExpired):
            assert await s.rows() != expected
        way.holds = lambda op, what: False
        way.go.set()
        await sound(place, slow)


# --- several at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_two_clients_compact_and_collect(seed: int) -> None:
    """Goal: sound, nothing lost, no deadlock, beside a writer and a reader."""
    rng, place = random.Random(seed), Place()

    async def maintenance(client: Any) -> None:
        mine = random.Random(rng.random())
        while working:
            call = mine.choice(
                [client.admin.force_compaction, client.admin.force_gc, client.admin.fsck, None]
            )
            await (client.admin.sweep_leaked_blobs(dry_run=False) if call is None else call(NAME))

    async with asyncio.timeout(50), place.open() as one, place.open() as two, place.open() as three:
        w = await one.writer(NAME, SCHEMA)
        await append(place, w, rng)
        working = True
        tasks = [asyncio.create_task(maintenance(client)) for client in (one, two, three)]
        for n in range(20):
            await append(place, w, rng)
            if n % 3 == 0:
                await move_since(two, max(0, w.upper.time - 4))
            upper = place.model.upper[0]
            assert await contents(three, upper - 1) == place.model.contents(upper - 1)
        working = False
        await asyncio.gather(*tasks)
        await w.aclose()
        await sound(place, three)
        await finished(place, w.shard_id)


async def test_a_sweep_beside_collections_that_the_head_does_not_tell_of() -> None:
    """Goal: versions that vanish between two reads of one head are no damage, however often they do."""
    place, rng, way = Place(), random.Random(1), Way()
    async with place.open() as client, client.writer(NAME, SCHEMA) as w:
        async with client.reader(NAME, SCHEMA) as r:
            await append(place, w, rng)
            async with r.snapshot(w.upper.time - 1):  # holds the versions
                for _ in range(3):
                    await append(place, w, rng)
                    await client.admin.force_gc(NAME)
        left = sorted(shards_of(client).at(ap.ShardId.parse(w.shard_id)).state.rollups)
        assert len(left) == 3
        assert place.versions(w.shard_id).first < left[0]

        looked = False

        def truncate(op: str, limit: Any) -> bool:
            nonlocal looked
            if op != "scan":
                return False
            if looked and left:  # it has just looked which one is the earliest
                seqno = left.pop(0)
                log = place.versions(w.shard_id)
                log.data, log.first = log.data[seqno - log.first :], seqno
            looked = limit == 1
            return False

        async with place.open(way) as other:
            way.holds = truncate
            await other.sweep_leaked_blobs()
            assert not left


async def test_a_collection_beside_an_older_one_deletes_what_it_drops() -> None:
    """Goal: versions are truncated only once their parts are deleted."""
    place, shard_id = await prepared()
    older, newer = Way(), Way()
    async with place.open(older) as one, place.open(newer) as two:
        older.holds = lambda op, what: op == "truncate"
        first = asyncio.create_task(one.force_gc(NAME))
        await older.until_held()
        await two.force_compaction(NAME)
        newer.holds = lambda op, what: op == "scan" and 1 < what < 512
        second = asyncio.create_task(two.force_gc(NAME))
        await newer.until_held()
        older.go.set()
        await first
        newer.holds = lambda op, what: False
        newer.go.set()
        await second
        await sound(place, two)
    assert set(place.blobs(".parquet")) <= place.named(shard_id)
