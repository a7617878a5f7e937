"""Goal: the one state of a shard follows the store and nothing else: through rollups, lost answers,
versions that come between two looks, and a store that is restored under it."""

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest

import aiopersist as ap
from aiopersist.maintenance.due import has_long_tail
from aiopersist.maintenance.shard import ShardMaintenance
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.log import consensus_key
from aiopersist.shard.shard import Shard
from aiopersist.state.keys import writer_of
from aiopersist.state.lifecycle import EvolveSchema
from aiopersist.state.writing import ExpireWriter, HeartbeatWriter
from aiopersist.testing.faults import Outcome
from tests.shard.register_kit import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import CAS

SETTINGS = ap.Settings(rollup_every=8, compaction_idle_s=0.1)
GUARD_S = 30.0
KEPT: WeakKeyDictionary[ap.Client, Shard] = WeakKeyDictionary()


def shard_of(client: ap.Client) -> Shard:
    if client not in KEPT:
        (KEPT[client],) = client._shards._open.values()
    return KEPT[client]


def under_way(client: ap.Client) -> bool:
    return any(shard.running for shard in client._services.maintenance._shards.values())


async def rows(client: ap.Client) -> list[Any]:
    async with client.reader("t", SCHEMA) as r, r.snapshot() as s:
        return await s.rows()


async def appended(client: ap.Client, count: int) -> str:
    """`count` appends by one writer; returns the shard."""
    async with client.writer("t", SCHEMA) as w:
        for n in range(count):
            upper: Any = w.upper.time
            await w.compare_and_append([(f"{upper:03}", n, upper, 1)], upper, upper + 1)
        shard_of(client)
        return w.shard_id


@asynccontextmanager
async def truncating_after(place: Place, client: ap.Client, shard: str) -> AsyncIterator[None]:
    """Whoever looks for a version of `shard` finds that it was truncated meanwhile."""
    scan = place.consensus.scan

    async def truncated(key: str, from_seqno: int, limit: int) -> Any:
        if key == consensus_key(shard):
            place.consensus.scan = scan  # type: ignore[method-assign]
            async with place.open(maintenance=False) as other, other.writer("t", SCHEMA) as w:
                await w.compare_and_append([], w.upper, w.upper)
                await ShardMaintenance(shard_of(other)).roll_up()
                latest = shard_of(other).state.latest_rollup
                assert latest is not None
                await place.consensus.truncate(key, latest)
        return await scan(key, from_seqno, limit)

    place.consensus.scan = truncated  # type: ignore[method-assign]
    yield
    place.consensus.scan = scan  # type: ignore[method-assign]


def saved(place: Place) -> Any:
    return copy.deepcopy(place.consensus._shared.logs)


def restore(place: Place, backup: Any) -> None:
    place.consensus._shared.logs.clear()
    place.consensus._shared.logs.update(copy.deepcopy(backup))


async def _all_refuse(client: ap.Client, w: ap.WriteHandle[Any, Any]) -> None:
    with pytest.raises(ap.Corruption):
        await w.fetch_recent_upper()
    with pytest.raises(ap.Corruption):
        await w.compare_and_append([("d", 1, 7, 1)], 7, 8)
    with pytest.raises(ap.Corruption):
        await client.reader("t", SCHEMA)


# --- rollups ------------------------------------------------------------------------------------------


async def test_rollups_are_written_and_opened_from(place: Place) -> None:
    """Goal: one for some `rollup_every` versions, and an opening reads only newer versions."""
    async with place.open(**SETTINGS.model_dump(exclude_unset=True)) as client:
        shard = await appended(client, 50)
        async with asyncio.timeout(GUARD_S):
            while under_way(client) or has_long_tail(shard_of(client).state, SETTINGS):
                await asyncio.sleep(0.01)
    found = await place.keys(".rollup")
    assert 1 <= len(found) <= 3  # older ones are collected
    assert all(key.startswith(shard) for key in found)
    place.faults.calls.clear()
    async with place.open(maintenance=False) as client, client.reader("t", SCHEMA) as r:
        assert r.upper == ap.Antichain(50)
        state = shard_of(client).state
        assert state.latest_rollup is not None
        assert state.seqno - state.latest_rollup < 20
        assert await rows(client) == [(f"{n:03}", n, 1) for n in range(50)]


async def test_what_rollups_make_superfluous_may_go(place: Place) -> None:
    """Goal: with all before the latest rollup truncated, at once after it was named, all goes on."""
    async with place.open(maintenance=False) as client, place.open(maintenance=False) as stale:
        shard = await appended(client, 3)
        assert len(await rows(stale)) == 3
        for turn in range(3):
            await ShardMaintenance(shard_of(client)).roll_up()
            latest = shard_of(client).state.latest_rollup
            assert latest is not None
            await place.consensus.truncate(consensus_key(shard), latest)
            async with asyncio.timeout(50), place.open(maintenance=False) as fresh:
                assert len(await rows(fresh)) == 3 + turn * 2
                assert len(await rows(stale)) == 3 + turn * 2
                await appended(stale, 1)
            await appended(client, 1)


async def test_no_maintenance_without_maintenance(place: Place) -> None:
    async with place.open(maintenance=False, rollup_every=2) as client:
        await appended(client, 10)
    assert await place.keys(".rollup") == []


async def test_a_rollup_that_is_not_there_is_corruption(place: Place) -> None:
    """Goal: told after a second look at the head, not waited for."""
    async with place.open(maintenance=False) as client:
        await appended(client, 3)
        await ShardMaintenance(shard_of(client)).roll_up()
        await place.blob.delete(await place.keys(".rollup"))
        async with asyncio.timeout(50), place.open() as fresh:
            with pytest.raises(ap.Corruption, match="rollup"):
                await fresh.reader("t")
        assert len(await rows(client)) == 3  # a client that has the state needs no rollup


async def test_a_gap_below_the_head_is_corruption(place: Place) -> None:
    """Goal: missing versions that no collection can have dropped are an error, not a wait."""
    async with place.open(maintenance=False) as client:
        shard = await appended(client, 3)
        await place.consensus.truncate(consensus_key(shard), 2)
        async with asyncio.timeout(50), place.open() as fresh:
            with pytest.raises(ap.Corruption, match="not there"):
                await fresh.reader("t")


@pytest.mark.parametrize("damaged", [1, 2, 3])
async def test_a_damaged_rollup_is_read_again_twice(place: Place, damaged: int) -> None:
    async with place.open(maintenance=False) as client:
        await appended(client, 3)
        await ShardMaintenance(shard_of(client)).roll_up()
    get, left = place.blob.get, damaged

    async def damaging(key: str) -> bytes | None:
        nonlocal left
        data = await get(key)
        if key.endswith(".rollup") and data and left:
            left -= 1
            return data[:-3] + b"xxx"
        return data

    place.blob.get = damaging  # type: ignore[method-assign]
    async with place.open() as fresh:
        if damaged < 3:
            assert len(await rows(fresh)) == 3
        else:
            with pytest.raises(ap.Corruption):
                await fresh.reader("t")


async def test_a_writer_of_rollups_never_comes_back_under_its_id(place: Place) -> None:
    """Goal: once expired, an id may have been swept: a fresh one is registered."""
    async with place.open(maintenance=False) as client:
        await appended(client, 1)
        shard = shard_of(client)
        maintenance, writers = ShardMaintenance(shard), []
        for expire in (False, True, False):
            await maintenance.roll_up()
            (newest,) = (
                rollup for at, rollup in shard.state.rollups.items() if at == shard.state.latest_rollup
            )
            writers.append(writer_of(newest.key))
            await appended(client, 1)
            if expire:
                await commit(shard.register, ExpireWriter(writers[-1]), Slot())
        assert writers[0] == writers[1] != writers[2]


# --- lost answers of maintenance ----------------------------------------------------------------------


async def test_a_flush_whose_answer_is_lost_keeps_its_blob(place: Place) -> None:
    """Goal: unknown counts as applied: what the state may name is not deleted."""
    limits = {"inline_writes_single_max_bytes": 300, "inline_writes_total_max_bytes": 1000}
    async with place.open(maintenance=False, **limits) as client, client.writer("t", SCHEMA) as w:
        shard = shard_of(client)
        n = 0
        while not await place.keys(".parquet"):
            lost = len(await place.keys(".parquet")) == 0 and shard.state.inline_bytes > 400
            if lost:
                place.faults.fail_next(CAS, Outcome.LOST)
            async with truncating_after(place, client, w.shard_id):
                await w.compare_and_append([(f"{n:03}" + "x" * 40, n, n, 1)], n, n + 1)
            n += 1
            assert n < 40
        assert place.faults.injected
        assert len(await rows(client)) == n
        async with place.open() as fresh:
            assert len(await rows(fresh)) == n


async def test_a_rollup_whose_answer_is_lost_is_kept(place: Place) -> None:
    async with place.open(maintenance=False) as client:
        shard = await appended(client, 3)
        maintenance = ShardMaintenance(shard_of(client))
        await maintenance.roll_up()
        await appended(client, 1)
        place.faults.fail_next(CAS, Outcome.LOST)
        async with truncating_after(place, client, shard):
            try:
                await maintenance.roll_up()
            except ap.Indeterminate:
                pass
        for key in (await shard_of(client).open()).rollups.values():
            assert await place.blob.get(key.key) is not None
        async with place.open() as fresh:
            assert len(await rows(fresh)) == 4


async def test_a_version_that_lands_between_two_looks_is_ours(place: Place) -> None:
    """Goal: vacant at the scan, there at the head: it is looked for again, not taken for another's."""
    async with place.open(maintenance=False) as client, client.writer("t", SCHEMA) as w:
        shard = shard_of(client)
        seqno = shard.state.seqno
        place.faults.fail_next(CAS, Outcome.LATE)
        head = place.consensus.head

        async def landing(key: str) -> Any:
            await place.faults.land()
            return await head(key)

        place.consensus.head = landing  # type: ignore[method-assign]
        await commit(shard.register, HeartbeatWriter(w.writer_id), Slot())
        assert (await shard.open()).seqno == seqno + 1  # once


@pytest.mark.parametrize("method", ["compare_and_append", "append", "write"])
async def test_a_version_that_lands_before_it_is_sent_again_is_ours(place: Place, method: str) -> None:
    """Goal: vacant at every look; the second sending is told that the version is taken, by the first."""
    async with place.open(maintenance=False) as client, client.writer("t", SCHEMA) as w:
        place.faults.fail_next(CAS, Outcome.LATE)
        write = place.consensus.compare_and_set

        async def landing(key: str, expected: int | None, data: bytes) -> bool:
            place.consensus.compare_and_set = write  # type: ignore[method-assign]
            await place.faults.land()
            return await write(key, expected, data)

        place.consensus.compare_and_set = landing  # type: ignore[method-assign]
        if method == "write":
            assert await w.write([("a", 1)]) == 0
        else:
            await getattr(w, method)([("a", 1, 0, 1)], 0, 1)
        assert await w.fetch_recent_upper() == ap.Antichain(1)
        assert await rows(client) == [("a", 1, 1)]


async def test_a_refusal_follows_a_look(place: Place) -> None:
    """Goal: what a cached state would refuse is decided on a fresh one."""
    schemas = [SCHEMA.to_record(), {"a": 1}, {"b": 2}]
    async with (
        place.open(maintenance=False) as client,
        place.open(maintenance=False) as other,
        client.writer("t", SCHEMA),
        other.writer("t", SCHEMA),
    ):
        mine, theirs = shard_of(client).register, shard_of(other).register
        assert await commit(theirs, EvolveSchema(0, schemas[1]), Slot()) == 1
        assert mine.state is not None
        assert mine.state.schema_id == 0
        assert await commit(mine, EvolveSchema(1, schemas[2]), Slot()) == 2
        with pytest.raises(ap.SchemaMismatch) as caught:
            await commit(theirs, EvolveSchema(7, schemas[1]), Slot())
        assert caught.value.actual == 2  # not what it knew


# --- stores that go back ------------------------------------------------------------------------------


@pytest.mark.parametrize("since", ["shorter", "same_length", "longer"])
async def test_a_restored_store_is_noticed_and_nothing_is_written(place: Place, since: str) -> None:
    """Goal: a head older than what was read, or one that does not follow from it: Corruption."""
    async with place.open(maintenance=False) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
        backup = saved(place)
        await w.compare_and_append([("b", 1, 1, 1)], 1, 2)
        await w.compare_and_append([("c", 1, 2, 1)], 2, 3)
        restore(place, backup)
        if since != "shorter":
            async with place.open(maintenance=False) as other:
                other_writer = await other.writer("t", SCHEMA)
                for upper in range(1, 2 if since == "same_length" else 6):
                    await other_writer.compare_and_append([("z", 1, upper, 1)], upper, upper + 1)
                before = saved(place)
                await _all_refuse(client, w)
                after = saved(place)
                assert before[consensus_key(w.shard_id)] == after[consensus_key(w.shard_id)]
        else:
            await _all_refuse(client, w)
            assert saved(place) == backup


async def test_a_shard_that_vanished_is_corruption(place: Place) -> None:
    async with place.open(maintenance=False) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, 1)
        del place.consensus._shared.logs[consensus_key(w.shard_id)]
        with pytest.raises(ap.Corruption):
            await w.fetch_recent_upper()


async def test_waiters_are_told_that_the_store_was_restored(place: Place) -> None:
    async with (
        place.open(maintenance=False, watch_timeout_s=0.05) as client,
        client.writer("t", SCHEMA) as w,
    ):
        backup = saved(place)
        await w.compare_and_append([], 0, 5)
        waiting = asyncio.create_task(w.wait_for_upper_past(9))
        await asyncio.sleep(0.1)
        restore(place, backup)
        with pytest.raises(ap.Corruption):
            async with asyncio.timeout(50):
                await waiting
