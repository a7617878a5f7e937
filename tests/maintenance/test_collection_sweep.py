"""The sweep beside unfinished work, fsck; see `test_collection.py`."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import StorageUnavailable
from aiopersist.state.diff import decode_diff
from tests.support.internals import shards_of
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


DAMAGES = ["missing", "flipped", "swapped", "cut", "rollup gone", "rollup flipped"]


async def current_keys(client: Any, shard_id: str) -> set[str]:
    shard = shards_of(client).at(ap.ShardId.parse(shard_id))
    state = await shard.open()
    parts = {part.key for batch in state.batches.values() for part in batch.parts if part.key}
    return parts | {rollup.key for rollup in state.rollups.values()}


# --- the sweep beside work that is not done -----------------------------------------------------------


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
    """Goal: the blobs of batches that may still be appended are kept; swept batches are refused."""
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


# --- fsck ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
async def test_fsck_finds_damage(damage: str) -> None:
    """Goal: for any damage to a named blob, the error names the blob, and no data is served."""
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
            report = await client.admin.fsck(NAME)
            assert not report.ok
            if end == ".parquet":
                assert any(key in problem for problem in report.problems)
                with pytest.raises(ap.Corruption):
                    await contents(client)


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
        report = await client.admin.fsck(NAME)
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
        report = await client.admin.fsck(NAME)
        assert report.ok, report.problems


async def test_compaction_of_a_lost_blob_ends() -> None:
    """Goal: `Corruption`, as for any reader, not a wait without end."""
    place, shard_id = await prepared()
    async with place.open() as client:
        key = min(k for k in await current_keys(client, shard_id) if k.endswith(".parquet"))
        del place.blob._shared.blobs[key]
        with pytest.raises(ap.Corruption):
            async with asyncio.timeout(50):
                await client.admin.force_compaction(NAME)


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
                async with asyncio.timeout(50):
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
            held = asyncio.ensure_future(way.until_held())
            await asyncio.wait([task, held], return_when=asyncio.FIRST_COMPLETED)
            held.cancel()
            if task.done():
                break
            way.held.clear()
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
