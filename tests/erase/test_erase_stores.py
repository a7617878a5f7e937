"""Goal: `erase` trusts what lies in the stores, not the state: blobs that no version names, keys in
positions, what a process left that crashed in the middle."""

import json
import os
from contextlib import suppress

import pytest

import aiopersist as ap
from aiopersist.base.errors import Error
from tests.erase.kit import NOW, SECRET, places, stays, with_history
from tests.support.internals import shards_of, stack_of
from tests.support.location import Place as Memory
from tests.support.location import Way, expire_writers
from tests.support.processes import Place
from tests.support.shards import noted


async def test_blobs_that_no_version_names_are_found(place: Place) -> None:
    """Goal: it trusts the stores, not the state."""
    client = await place.client(inline_writes_single_max_bytes=0)
    people = await with_history(client)
    blob = stack_of(client).blob
    copied = [(key, await blob.get(key)) async for key, _ in blob.list("s") if key.endswith(".parquet")]
    assert (await client.admin.erase(people, ["ada"], wait=NOW)).done
    for key, data in copied:
        assert data is not None
        await blob.set(key, data)
    told = await client.admin.erase(people, ["ada"], dry_run=True)
    assert not told.done and {r.kind for r in told.remnants} == {"part"}
    await expire_writers(client, await client.shard_id("people"))
    assert (await client.admin.erase(people, ["ada"], wait=NOW)).done  # it sweeps them
    assert await places(client) == []


async def test_what_cannot_be_read_is_not_called_gone(quiet_mem: ap.Client) -> None:
    people = await with_history(quiet_mem)
    shard = await quiet_mem.shard_id("people")
    blob = stack_of(quiet_mem).blob
    await blob.set(f"{shard}/w1/strange.parquet", b"no part")
    await blob.set(f"{shard}/w1/strange.txt", SECRET)
    told = await quiet_mem.erase(people, ["ada"], dry_run=True)
    assert [r.kind for r in told.remnants].count("unread") == 2


async def test_a_position_that_names_a_key(place: Place) -> None:
    """Goal: a consumer that stands within the contents keeps a key in the state, and is named for it."""
    client = await place.client(row_group_bytes=500, blob_target_size=1000, read_memory_bytes=1000)
    people = client.table("people", key=str, val=bytes)
    await people.put_many({f"key {n:05}": os.urandom(100) for n in range(300)})
    async with people.subscription("mailer") as mailer:
        step = await anext(aiter(mailer))
        await mailer.ack(step, durable=True)
    record = (await shards_of(client).existing("people")).state.subscriptions["mailer"]
    key = json.loads(record.position.contents.key)
    told = await client.admin.erase(people, [key], wait=NOW)
    assert not told.done and "position" in {r.kind for r in told.remnants}
    assert [h.id for h in told.holders] == ["mailer"]
    assert (await client.admin.erase(people, [key], wait=NOW, end_holds=["subscription:mailer"])).done


@pytest.mark.slow
@pytest.mark.parametrize("landed", [False, True])
async def test_a_call_that_crashed_is_called_again(landed: bool) -> None:
    """Goal: whichever request is the last of a process, another one goes on, and then nothing is left."""
    crash_at, crashed = 1, True
    origin = Memory()
    async with origin.open() as client:
        await with_history(client)
    while crashed:
        place, way = Memory(origin), Way(landed=landed)
        with suppress(Error):
            async with place.open(way) as client:
                people = client.table("people", key=str, val=bytes)
                await people.get("bob")
                way.crash_at = way.calls + crash_at
                assert (await client.admin.erase(people, ["ada"], wait=NOW)).done
                way.crash_at = None
        crashed = way.crashed
        with noted(f"crashed at request {crash_at}"):
            await goes_on(place)
        crash_at += 3 if crash_at < 10 else 10
    assert crash_at > 20


async def goes_on(place: Memory) -> None:
    async with place.open() as client:
        people = client.table("people", key=str, val=bytes)
        await expire_writers(client, await client.shard_id("people"))  # their leases, and claims, run out
        told = await client.admin.erase(people, ["ada"], wait=NOW)
        dead = [holder.id for holder in told.holders]
        assert (await client.admin.erase(people, ["ada"], wait=NOW, end_holds=dead)).done
        assert await places(client) == []
        await stays(people)
