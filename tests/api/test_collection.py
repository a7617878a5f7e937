"""Goal: compaction, garbage collection, the sweep and the end of a shard lose nothing and leave nothing:
whoever crashes or is cut off at whatever moment, whoever else reads, writes, compacts or collects."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.errors import StorageUnavailable
from aiopersist.state.diff import decode_diff
from aiopersist.testing.model import gathered, summed
from tests.support.location import (
    NAME,
    SCHEMA,
    Place,
    Way,
    append,
    both,
    collection,
    compaction,
    contents,
    expire_writers,
    finished,
    move_since,
    prepared,
    sound,
)
from tests.support.shards import noted


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


DROP = "drop"


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
        async with asyncio.timeout(5), place.open() as client:
            if way.crashed:
                with suppress(ap.UnknownShard):
                    await getattr(client, end)(NAME)
            await client.sweep_leaked_blobs(dry_run=False)
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
        async with asyncio.timeout(10), place.open() as client:
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
    """Goal: nobody waits for its claim; not for ever, and not for a lease that the wait itself renews."""
    place, _ = await prepared()
    way = Way()
    async with place.open(way, writer_lease_s=0.4) as client:
        way.holds = lambda op, what: op == "compare_and_set" and bool(decode_diff(what).changes.claims)
        task = asyncio.create_task(client.force_compaction(NAME))
        await way.until_held()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        way.holds = lambda op, what: False
        way.go.set()
        async with asyncio.timeout(2):
            await client.force_compaction(NAME)
        await sound(place, client)


# --- readers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_open_snapshots_and_listens_outlast_collections(seed: int) -> None:
    """Goal: what was open is read to its end, whatever was compacted and collected meanwhile."""
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
                    await client.force_compaction(NAME)
                if rng.random() < 0.7:
                    await client.force_gc(NAME)
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
            await client.force_compaction(NAME)
            await client.force_gc(NAME)
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


# --- several at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_two_clients_compact_and_collect(seed: int) -> None:
    """Goal: sound, nothing lost, no deadlock, beside a writer and a reader."""
    rng, place = random.Random(seed), Place()

    async def maintenance(client: Any) -> None:
        mine = random.Random(rng.random())
        while working:
            call = mine.choice([client.force_compaction, client.force_gc, client.fsck, None])
            await (client.sweep_leaked_blobs(dry_run=False) if call is None else call(NAME))

    async with asyncio.timeout(20), place.open() as one, place.open() as two, place.open() as three:
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
                    await client.force_gc(NAME)
        left = sorted(client._shards.at(ap.ShardId.parse(w.shard_id)).state.rollups)
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


# --- the sweep beside work that is not done -----------------------------------------------------------


@asynccontextmanager
async def paused(
    place: Place, holds: Callable[[str, Any], bool], work: Callable[[Any], Awaitable[Any]], **limits: Any
) -> AsyncIterator[tuple[Any, "asyncio.Task[Any]"]]:
    """`work` of another client, held back at its first call that `holds`; goes on at the end."""
    way = Way()
    async with place.open(way, **limits) as slow, place.open() as other:
        way.holds = holds
        task = asyncio.ensure_future(work(slow))
        await way.until_held()
        try:
            yield other, task
        finally:
            way.holds = lambda op, what: False
            way.go.set()
            await asyncio.wait([task])


def is_part(op: str, what: Any) -> bool:
    return op == "set" and what.endswith(".parquet")


def is_rollup(op: str, what: Any) -> bool:
    return op == "set" and what.endswith(".rollup")


def names_a_part(op: str, what: Any) -> bool:
    return op == "compare_and_set" and b".parquet" in what


def names_a_rollup(op: str, what: Any) -> bool:
    return op == "compare_and_set" and bool(decode_diff(what).changes.rollups)


PAUSES = {
    "compaction, part": (is_part, compaction),
    "compaction, replace": (names_a_part, compaction),
    "rollup": (is_rollup, collection),
    "rollup, named": (names_a_rollup, collection),
    "deletes": (lambda op, what: op == "delete", both),
    "truncate": (lambda op, what: op == "truncate", both),
    "truncated, deletes rollups": (lambda op, what: op == "delete" and what[0].endswith("rollup"), both),
}


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("pause", PAUSES)
async def test_maintenance_paused_beside_everything(pause: str, expired: bool) -> None:
    """Goal: what goes on after a pause finds its blobs, or is refused, though others swept, and collected,
    and have expired it."""
    place, shard_id = await prepared()
    holds, work = PAUSES[pause]
    async with paused(place, holds, work) as (other, task):
        await other.sweep_leaked_blobs(dry_run=False)
        if expired:
            await expire_writers(other, shard_id)
            await other.sweep_leaked_blobs(dry_run=False)
            await both(other)
            await other.sweep_leaked_blobs(dry_run=False)
        await collection(other)
        async with other.writer(NAME, SCHEMA) as w:
            await append(place, w, random.Random(1))
        await collection(other)
        await sound(place, other)
    with suppress(ap.BatchExpired):
        await task
    await finished(place, shard_id)


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("kind", ["upload", "append", "staged", "builder", "transmitted"])
async def test_writers_paused_beside_a_sweep(kind: str, expired: bool) -> None:
    """Goal: what may still be appended is there; what was swept is refused."""
    place, shard_id = await prepared()
    way, rng = Way(), random.Random(2)
    async with place.open(way) as slow, place.open() as other:
        w, batch = await slow.writer(NAME, SCHEMA), None
        lower = w.upper.time
        updates = [(f"{n:03}" * 9, n, lower, 1) for n in range(30)]
        if kind in ("upload", "append"):
            way.holds = is_part if kind == "upload" else names_a_part
            task = asyncio.ensure_future(w.compare_and_append(updates, lower, lower + 1))
            await way.until_held()
        else:
            builder = await w.builder(lower)
            await builder.extend(updates)
            staged = None if kind == "builder" else await builder.finish(lower + 1)
            data = staged.to_transmittable() if staged is not None and kind == "transmitted" else None
        if expired:
            await expire_writers(other, shard_id)
        await both(other)
        await other.sweep_leaked_blobs(dry_run=False)
        way.holds = lambda op, what: False
        way.go.set()
        try:
            if kind in ("upload", "append"):
                await task
            else:
                handle = w if data is None else await other.writer(NAME, SCHEMA)
                if data is not None:
                    batch = await handle.batch_from_transmittable(data)
                else:
                    batch = staged if staged is not None else await builder.finish(lower + 1)
                await handle.compare_and_append_batch([batch], lower, lower + 1)
            place.model.append(updates, [lower], [lower + 1])
            assert kind in ("upload", "append") or not expired
        except (ap.BatchExpired, ap.LeaseExpired):
            assert expired
            if batch is not None:
                await batch.delete()
        await sound(place, other)
        async with other.writer(NAME, SCHEMA) as again:
            await append(place, again, rng)
        await w.aclose()
    await finished(place, shard_id)


# --- fsck ----------------------------------------------------------------------------------------------


DAMAGES = ["missing", "flipped", "swapped", "cut", "rollup gone", "rollup flipped"]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_fsck_finds_damage(damage: str) -> None:
    """Goal: whatever became of a blob that is named, it is said, of which blob, and nothing is served."""
    origin, shard_id = await prepared()
    end = ".rollup" if damage.startswith("rollup") else ".parquet"
    for key in sorted(origin.named(shard_id)):
        place = Place(origin)
        blobs = place.blob._shared.blobs
        async with place.open() as client:
            current = await current_keys(client, shard_id)
            if key not in current or not key.endswith(end):
                continue
            others = [k for k in sorted(current) if k.endswith(end) and k != key]
            if damage.endswith(("missing", "gone")):
                del blobs[key]
            elif damage == "cut":
                blobs[key] = blobs[key][:-1]
            elif damage == "swapped":
                blobs[key] = next(blobs[k] for k in others if blobs[k] != blobs[key])
            else:
                at = len(blobs[key]) // 2
                blobs[key] = blobs[key][:at] + bytes([blobs[key][at] ^ 64]) + blobs[key][at + 1 :]
            report = await client.fsck(NAME)
            assert not report.ok
            if end == ".parquet":
                assert any(key in problem for problem in report.problems)
                with pytest.raises(ap.Corruption):
                    await contents(client)


async def current_keys(client: Any, shard_id: str) -> set[str]:
    shard = client._shards.at(ap.ShardId.parse(shard_id))
    state = await shard.open()
    parts = {part.key for batch in state.batches.values() for part in batch.parts if part.key}
    return parts | {rollup.key for rollup in state.rollups.values()}


async def test_fsck_of_what_a_crashed_collection_left() -> None:
    """Goal: one that was cut off between the deletion of old rollups and of their names did no damage."""
    place, _ = await prepared()
    way = Way()

    def crash(op: str, what: Any) -> bool:
        if op == "compare_and_set" and "rollups" in (decode_diff(what).changes.drop or {}):
            way.crashed = True
            raise StorageUnavailable("crashed")
        return False

    with suppress(ap.Error):
        async with place.open(way) as client:
            way.holds = crash
            await collection(client)
    assert way.crashed
    async with place.open() as client:
        report = await client.fsck(NAME)
        assert report.ok, report.problems


async def test_fsck_beside_a_collection() -> None:
    """Goal: parts that were replaced and collected after fsck read the state are no damage."""
    place, _ = await prepared()
    way = Way()
    async with place.open(way) as checking, place.open() as other:
        way.holds = lambda op, what: op == "get" and what.endswith(".parquet")
        task = asyncio.ensure_future(checking.fsck(NAME))
        await way.until_held()
        await both(other)
        way.holds = lambda op, what: False
        way.go.set()
        report = await task
        assert report.ok, report.problems


async def test_fsck_of_a_run_that_goes_on_with_an_equal_row() -> None:
    """Goal: parts that begin where the one before ends continue its run, by contract."""
    place = Place()
    async with place.open(blob_target_size=0) as client, client.writer(NAME, SCHEMA) as w:
        async with w.builder(0) as builder:
            for _ in range(4):
                await builder.add("a", 1, 0, 1)
            batch = await builder.finish(1)
        assert not batch.runs
        await w.compare_and_append_batch([batch], 0, 1)
        assert await contents(client) == [("a", 1, 4)]
        report = await client.fsck(NAME)
        assert report.ok, report.problems


async def test_compaction_of_a_lost_blob_ends() -> None:
    """Goal: `Corruption`, as for any reader, not a wait without end."""
    place, shard_id = await prepared()
    async with place.open() as client:
        key = min(k for k in await current_keys(client, shard_id) if k.endswith(".parquet"))
        del place.blob._shared.blobs[key]
        with pytest.raises(ap.Corruption):
            async with asyncio.timeout(2):
                await client.force_compaction(NAME)


async def test_compaction_whose_writer_expires_ends() -> None:
    """Goal: a fresh registration, or an error; not the same refusal for ever. Small inline batches: there is
    no claim that would tell."""
    place, rng = Place(), random.Random(1)
    async with place.open(inline_writes_single_max_bytes=10000) as client:
        async with client.writer(NAME, SCHEMA) as w:
            for _ in range(3):
                await append(place, w, rng, 2)
            shard_id = w.shard_id
    way = Way()
    limits = {"inline_writes_single_max_bytes": 10000}
    async with place.open(way, **limits) as slow, place.open() as other:
        way.holds = lambda op, what: op == "compare_and_set" and bool(decode_diff(what).changes.batches)
        task = asyncio.ensure_future(slow.force_compaction(NAME))
        await way.until_held()
        await expire_writers(other, shard_id)
        way.holds = lambda op, what: False
        way.go.set()
        try:
            with suppress(ap.BatchExpired):
                async with asyncio.timeout(2):
                    await asyncio.shield(task)
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_compaction_ends_beside_a_since_that_moves() -> None:
    """Goal: what was there when it was asked for, at the since of then or later; it is not begun again as
    often as since moves."""
    place, _ = await prepared()
    way = Way()
    async with place.open(way) as slow, place.open() as other, other.writer(NAME, SCHEMA) as w:
        rounds = 0

        def moving(op: str, what: Any) -> bool:
            nonlocal rounds
            rounds += is_part(op, what)
            return bool(is_part(op, what))

        way.holds = moving
        task = asyncio.ensure_future(slow.force_compaction(NAME))
        for _ in range(12):
            await asyncio.wait([task], timeout=0.05)
            if task.done():
                break
            upper = w.upper.time
            await w.compare_and_append([], upper, upper + 1)
            place.model.append([], [upper], [upper + 1])
            await move_since(other, upper)
            go, way.go = way.go, asyncio.Event()
            go.set()
        finished_ = task.done()
        task.cancel()
        way.holds = lambda op, what: False
        way.go.set()
        await asyncio.wait([task])
        assert finished_, f"{rounds} parts were written, and it did not end"


# --- more runs than the memory allows ------------------------------------------------------------------


async def many_runs(place: Place, w: Any, rng: random.Random) -> None:
    """One batch of many runs of several parts each."""
    rows = [
        (f"{key:02}", 1, 0, run + 1)
        for run in range(5)
        for key in sorted(rng.sample(range(30), rng.choice([2, 3, 5])))
    ]
    async with w.builder(0) as builder:
        for row in rows:
            await builder.add(*row)
        batch = await builder.finish(1)
    assert len(batch.runs) >= 2
    await w.compare_and_append_batch([batch], 0, 1)
    place.model.append(rows, [0], [1])


@pytest.mark.parametrize("seed", [4, 6, 7])
async def test_compaction_of_some_runs_of_a_batch(seed: int) -> None:
    """Goal: those that are read are told apart as they were, though they are fewer and in another order."""
    place, rng = Place(), random.Random(seed)
    limits = {"blob_target_size": 0, "compaction_memory_bytes": 1, "row_group_bytes": 30}
    async with place.open(**limits) as client, client.writer(NAME, SCHEMA) as w:
        await many_runs(place, w, rng)
        await client.force_compaction(NAME)
        async with client.reader(NAME) as r, r.snapshot(0) as snapshot:
            assert [tuple(row) async for row in snapshot] == place.model.contents(0)
        assert await contents(client, 0) == place.model.contents(0)
        await sound(place, client)


async def test_compaction_of_some_runs_of_a_writer_that_is_gone() -> None:
    """Goal: runs that stay as they are need no registered writer: they are no new blobs."""
    place, rng = Place(), random.Random(0)
    async with place.open(blob_target_size=0, compaction_memory_bytes=1) as client:
        async with client.writer(NAME, SCHEMA) as w:
            await many_runs(place, w, rng)
        await client.force_compaction(NAME)


async def test_closing_gives_back_claims() -> None:
    """Goal: a client that is closed in the middle of a compaction blocks nobody for a lease."""
    place, _ = await prepared()
    way = Way()
    async with place.open() as other:
        async with place.open(
            way, maintenance=True, compaction_inputs_min=2, compaction_idle_s=0.02
        ) as client:
            w = await client.writer(NAME, SCHEMA)
            way.holds = is_part_of_compaction
            for n in range(8):
                task = asyncio.create_task(append(place, w, random.Random(n)))
                await asyncio.sleep(0.05)
                del task
                if (await other.inspect(NAME)).claims:
                    break
            assert (await other.inspect(NAME)).claims
            way.holds = lambda op, what: False
            asyncio.get_running_loop().call_later(0.3, way.go.set)
        await asyncio.sleep(0.1)
        assert not (await other.inspect(NAME)).claims


def is_part_of_compaction(op: str, what: Any) -> bool:
    return op == "get"


# --- a life --------------------------------------------------------------------------------------------


class Life:
    """One shard, its clients, and what they do next, from a seed."""

    def __init__(self, seed: int, memory: int) -> None:
        self.memory = memory
        self.rng, self.place, self.now = random.Random(seed), Place(), 0
        self.background = seed % 3 == 2
        self.since = 0
        self.open: list[tuple[Any, list[Any]]] = []
        self.seen: list[Any] = []
        self.cursor: str | None = None

    def client(self) -> Any:
        rng = self.rng
        return self.place.open(
            maintenance=self.background,
            rollup_every=rng.choice([3, 8]),
            compaction_inputs_min=rng.choice([2, 4]),
            compaction_idle_s=0.05,
            compaction_memory_bytes=self.memory,
            blob_target_size=rng.choice([0, 60, 400]),
            row_group_bytes=rng.choice([30, 100, 2**20]),
            inline_writes_single_max_bytes=rng.choice([0, 100, 16384]),
            inline_writes_total_max_bytes=rng.choice([600, 2**20]),
            blob_cache_bytes=rng.choice([0, 2**20]),
            retry_timeout_s=None,
        )

    async def sit(self, steps: int) -> None:
        """One process, for some time."""
        async with self.client() as client, client.writer(NAME, SCHEMA) as w, client.reader(NAME) as r:
            for _ in range(steps):
                await self.step(client, w, r)
            for s, expected in self.open:
                assert await s.rows() == expected
                await s.aclose()
            self.open.clear()
            report = await client.fsck(NAME)
            continued = "it does not continue its run"  # test_fsck_of_a_run_that_goes_on_with_an_equal_row
            assert self.background or all(continued in problem for problem in report.problems), report

    async def step(self, client: Any, w: Any, r: Any) -> None:
        rng, place = self.rng, self.place
        upper = place.model.upper[0]
        match rng.choices(range(9), [8, 1, 2, 2, 2, 1, 4, 2, 1])[0]:
            case 0:
                await append(place, w, rng, rng.choice([0, 1, 3, 12, 40]))
            case 1:
                await self.builder(w)
            case 2 if upper:
                to = max(rng.randrange(upper), upper - 6)
                await move_since(client, to)
                self.since = max(self.since, to)
            case 3:
                await client.force_compaction(NAME)
            case 4:
                await client.force_gc(NAME)
            case 5:
                if rng.random() < 0.5:
                    await client.retain(NAME, rng.choice([None, 0, 3]))
                else:
                    await client.sweep_leaked_blobs(dry_run=False)
            case 6 if upper:
                try:
                    s = await r.snapshot(rng.choice([None, rng.randrange(upper)]))
                except ap.SinceViolation as error:
                    assert not error.since.less_equal(error.as_of)  # noqa: PT017  # no refusal is due either
                else:
                    self.open.append((s, place.model.contents(s.as_of)))
            case 7 if self.open:
                s, expected = self.open.pop(rng.randrange(len(self.open)))
                assert await s.rows() == expected
                await s.aclose()
            case 8 if upper:
                await self.follow(r, upper)

    async def builder(self, w: Any) -> None:
        lower = w.upper.time
        rows = [(self.rng.choice("abc"), 1, lower, 1) for _ in range(9)]
        async with w.builder(lower) as builder:
            for row in rows:
                await builder.add(*row)
            batch = await builder.finish(lower + 1)
        moved = lower + self.rng.choice([0, 3])
        if moved > lower:
            batch.rewrite_ts(moved, moved + 1)
        await w.compare_and_append_batch([batch], lower, moved + 1)
        self.place.model.append([(k, v, moved, d) for k, v, _, d in rows], [lower], [moved + 1])

    async def follow(self, r: Any, upper: int) -> None:
        """From the greatest time, or all that is held, on: what was, and what a listen tells of it."""
        begin = r.since.time if self.rng.random() < 0.5 else upper - 1
        try:
            subscribe = await r.subscribe(begin)
        except ap.SinceViolation:
            return
        seen: list[Any] = []
        async for item in subscribe:
            if isinstance(item, ap.Progress):
                if item.upper == ap.Antichain(upper):
                    break
            else:
                seen += item
        await subscribe.aclose()
        at_first = summed((k, v, d) for k, v, t, d in seen if t == begin)
        assert at_first == self.place.model.contents(begin)
        assert gathered(u for u in seen if u[2] > begin) == self.place.model.changes(begin)


TIGHT = 0, 1


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "memory"), [*((seed, 2**28) for seed in range(2)), TIGHT])
async def test_a_life(seed: int, memory: int) -> None:
    """Goal: whatever is done with a shard, in whatever order and by which process, it shows what was
    written and nothing else."""
    life = Life(seed, memory)
    async with asyncio.timeout(12):
        for _ in range(4):
            await life.sit(25)
        async with life.place.open() as client:
            upper = life.place.model.upper[0]
            assert await contents(client, upper - 1) == life.place.model.contents(upper - 1)
            shard_id = await client.shard_id(NAME)
            await expire_writers(client, shard_id)
            await both(client)
            await expire_writers(client, shard_id)
            await client.sweep_leaked_blobs(dry_run=False)
            assert set(life.place.blobs()) == life.place.named(shard_id)
            await sound(life.place, client)
