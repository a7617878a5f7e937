"""The builder's registration; see `test_shared.py`."""

import asyncio

import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from tests.batches.shared_kit import ROWS, World, check_blobs, world
from tests.support.internals import session_of, shard_of, shards_of
from tests.support.schemas import SCHEMA, Writer
from tests.support.shards import SIZES
from tests.support.virtual import in_virtual_time


async def expire(w: Writer) -> None:
    """What any process does to a writer that was not heard of for long."""
    await commit(shard_of(w).register, ExpireWriter(w.writer_id), Slot())


@in_virtual_time
async def test_the_registration_lives_until_the_batch_is_consumed() -> None:
    """Goal: its writer was closed with its client; the handle that restored the batch keeps the lease, not
    longer."""
    async with world(writer_lease_s=0.7, inline_writes_single_max_bytes=0) as place:
        client = await place.client()
        async with client, client.writer("t", SCHEMA) as w:
            builder = w.writer_id
            data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        there, bystander = await place.writer(), await place.writer()
        batch = await place.restore(there, data)
        for _ in range(6):  # every commit expires overdue registrations
            await asyncio.sleep(0.2)
            await bystander.compare_and_append([], 0, 0)
        assert builder in (await shard_of(there).open()).writers
        await there.compare_and_append_batch([batch], 0, 2)
        assert await place.history() == ROWS
        for _ in range(6):
            await asyncio.sleep(0.2)
            await bystander.compare_and_append([], 2, 2)
        assert builder not in (await shard_of(there).open()).writers


async def test_a_registration_that_is_gone_is_told_at_restoring(place: World) -> None:
    w, there = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    blobs = await place.blobs()
    await expire(w)
    with pytest.raises(ap.BatchExpired) as caught:
        await place.restore(there, data)
    assert caught.value.shard_id == there.shard_id
    with pytest.raises(ap.BatchExpired):
        await place.restore(w, data)
    assert await place.history() == []
    assert await place.blobs() == blobs  # the sweep's


async def test_a_registration_that_ends_later_is_told_at_the_append(place: World) -> None:
    w, there = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    copies = [await place.restore(there, data) for _ in range(2)]
    await expire(w)
    for append in (there.compare_and_append_batch(copies[:1], 0, 2), there.append_batch(copies[0], 0, 2)):
        with pytest.raises(ap.BatchExpired):
            await append
    for copy in copies:
        await copy.delete()  # it is unknown whether it was appended: consumed, its blobs left to the sweep
    assert await place.history() == []
    await there.compare_and_append(ROWS, 0, 2)
    assert await place.history() == ROWS


@pytest.mark.parametrize("single", SIZES)
@in_virtual_time
async def test_an_expired_copy_of_an_appended_batch_deletes_nothing(single: int) -> None:
    """Goal: the record that says "spent" is gone with its writer; the blobs are still named."""
    async with world(inline_writes_single_max_bytes=single) as place:
        w, there = await place.writer(), await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        one, two, three = [await place.restore(there, data) for _ in range(3)]
        await there.compare_and_append_batch([one], 0, 2, txn=("app", 1))
        await expire(w)
        await there.compare_and_append([], 2, 3)
        await two.delete()
        await there.compare_and_append_batch([three], 0, 2, txn=("app", 1))  # a repeat
        await asyncio.sleep(0.01)
        assert await check_blobs(place, there) == []
        assert await place.history() == ROWS


async def test_restoring_renews_a_registration_known_from_before() -> None:
    """Goal: each restored batch has a lease from its restoring on, also where an earlier one of the same
    writer was consumed here before."""
    async with world(writer_lease_s=1000.0) as place:
        w, there, bystander = await place.writer(), await place.writer(), await place.writer()
        first, second = [(await w.batch(ROWS, 0, 2)).to_transmittable() for _ in range(2)]
        await (await there.batch_from_transmittable(first)).delete()
        place.clock.ahead_s += 900
        for living in (there, bystander):
            await session_of(living).registration._heartbeat()
        batch = await there.batch_from_transmittable(second)
        place.clock.ahead_s += 200  # the next heartbeat is due after 250
        await bystander.compare_and_append([], 0, 0)
        await there.compare_and_append_batch([batch], 0, 2)


async def test_restoring_looks_whether_a_registration_known_from_before_is_gone() -> None:
    async with world() as place:
        w, there = await place.writer(), await place.writer()
        first, second = [(await w.batch(ROWS, 0, 2)).to_transmittable() for _ in range(2)]
        await (await there.batch_from_transmittable(first)).delete()
        await expire(w)
        with pytest.raises(ap.BatchExpired):
            batch = await there.batch_from_transmittable(second)
            await batch.delete()


@in_virtual_time
async def test_many_handed_over_batches_keep_their_registration_while_the_writer_is_open() -> None:
    """Goal: the writer registers anew after some hundred; batches that were handed over under the earlier
    registration stay alive as long as the writer is open."""
    async with world(writer_lease_s=0.8) as place:
        w = await place.writer()
        other = await place.writer()
        earlier = w.writer_id
        datas = [(await w.batch([], 0, 2)).to_transmittable() for _ in range(300)]
        assert w.writer_id != earlier
        for _ in range(8):
            await asyncio.sleep(0.2)
            await other.compare_and_append([], 0, 0)
        for data in (datas[0], datas[-1]):
            await (await place.restore(other, data)).delete()


@pytest.mark.parametrize(
    "at_once",
    [
        False,
        True,
    ],
)
@in_virtual_time
async def test_heartbeats_of_restored_batches_end_with_the_handle(at_once: bool) -> None:
    """Goal: closing a writer with restored batches outstanding stops their heartbeats, also where several
    were restored at the same moment."""
    async with world(writer_lease_s=0.4) as place:
        client = await place.client()
        async with client.writer("t", SCHEMA) as w:
            datas = [(await w.batch(ROWS, 0, 2)).to_transmittable() for _ in range(3)]
        there = await client.writer("t", SCHEMA)
        limit = asyncio.Semaphore(3 if at_once else 1)

        async def restore(data: bytes) -> None:
            async with limit:
                await place.restore(there, data)

        await asyncio.gather(*map(restore, datas))
        observer = await place.client()
        await there.aclose()
        register = shards_of(observer).at(there.shard_id).register
        state = await register.refresh()
        assert state is not None
        await asyncio.sleep(0.5)
        later = await register.refresh()
        assert later is not None
        assert later.seqno == state.seqno


async def test_a_restored_batch_survives_its_handle(place: World) -> None:
    """Goal: the handle that restored it is closed: for the length of the lease the bytes are still good."""
    w = await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    client = await place.client()
    async with client.writer("t", SCHEMA) as there:
        batch = await place.restore(there, data)
    async with client.writer("t", SCHEMA) as there:
        await there.compare_and_append_batch([batch], 0, 2)
        copy = await place.restore(there, data)
        with pytest.raises(ap.AlreadyAppended):
            await copy.delete()
    assert await place.history() == ROWS


async def test_handed_over_after_its_handle_was_closed(place: World) -> None:
    """Goal: closing a writer with an outstanding batch only stops its heartbeats."""
    client, there = await place.client(), await place.writer()
    async with client.writer("t", SCHEMA) as w:
        batch = await w.batch(ROWS, 0, 2)
    data = batch.to_transmittable()
    await client.aclose()
    restored = await place.restore(there, data)
    await there.compare_and_append_batch([restored], 0, 2)
    assert await place.history() == ROWS
