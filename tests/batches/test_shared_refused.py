"""Refusals; see `test_shared.py`."""

import json
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.data.part.inline import checksum
from tests.batches.shared_kit import ROWS, World, world
from tests.support.internals import shard_of
from tests.support.schemas import SCHEMA


def sealed(body: bytes, version: bytes = b"1") -> bytes:
    """Bytes with a right checksum."""
    return b"aiopersist-batch %s %s\n%s" % (version, checksum(body).encode(), body)


async def test_garbage_is_refused(place: World) -> None:
    """Goal: a clear, typed error for everything that is no batch; nothing changes."""
    w = await place.writer()
    batch = await w.batch(ROWS, 0, 2)
    data = batch.to_transmittable()
    head, body = data.split(b"\n", 1)
    before = await place.blobs(), (await shard_of(w).open()).seqno
    garbage: list[Any] = [
        b"",
        b"\n",
        b"garbage",
        b"\x00" * 1000,
        head,
        head + b"\n",
        body,
        data[1:],
        data + b"x",
    ]
    garbage += [data + data, data.upper(), {}, json.loads(body), None, 7, "text", data.decode("latin-1")]
    garbage += [data[:length] for length in range(0, len(data), 7)]
    for one in garbage:
        with pytest.raises(ap.InvalidUpdate) as caught:
            await w.batch_from_transmittable(one)
        assert caught.value.shard_id == w.shard_id
    assert (await place.blobs(), (await shard_of(w).open()).seqno) == before
    restored = await w.batch_from_transmittable(data)
    await w.compare_and_append_batch([restored], 0, 2)
    assert await place.history() == ROWS


async def test_every_flipped_bit_is_noticed(place: World) -> None:
    w = await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    for position in range(len(data)):
        for bit in range(0, 8, 1 if position < 200 else 5):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises((ap.InvalidUpdate, ap.InvalidUsage)):
                await w.batch_from_transmittable(bytes(flipped))
    assert await place.history() == []
    await (await w.batch_from_transmittable(data)).delete()


@pytest.mark.parametrize("version", [b"2", b"17", b"0", b"9" * 30])
async def test_another_format_is_refused(place: World, version: bytes) -> None:
    """Goal: the error for bytes of a later version says so, for any contents; 2 is one with a trace."""
    w = await place.writer()
    with pytest.raises(ap.InvalidUpdate, match=r"format|cannot be read"):
        await w.batch_from_transmittable(sealed(b'{"what": "comes later"}', version))


async def test_a_format_of_absurd_length_is_garbage() -> None:
    async with world() as place:
        w = await place.writer()
        with pytest.raises(ap.InvalidUpdate):
            await w.batch_from_transmittable(sealed(b"{}", b"9" * 5000))


async def test_sealed_nonsense_is_refused(place: World) -> None:
    """Goal: a right checksum over the wrong thing is still no batch."""
    w = await place.writer()
    batch = await w.batch(ROWS, 0, 2)
    data = batch.to_transmittable()
    record = json.loads(data.split(b"\n", 1)[1])
    wrong: list[Any] = [{}, [], None, 1, {**record, "more": 1}, {**record, "batch": {}}, {**record, "id": 3}]
    wrong += [
        {name: value for name, value in record.items() if name != left} for left in ("id", "writer", "batch")
    ]
    for one in wrong:
        with pytest.raises(ap.InvalidUpdate):
            await w.batch_from_transmittable(sealed(json.dumps(one).encode()))
    await (await w.batch_from_transmittable(data)).delete()


async def test_a_batch_of_another_shard_is_refused(place: World) -> None:
    """Goal: both as bytes and as a batch, and it stays good for its own."""
    w = await place.writer()
    client = await place.client()
    async with client.writer("other", SCHEMA) as other:
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        with pytest.raises(ap.InvalidUsage) as caught:
            await other.batch_from_transmittable(data)
        assert caught.value.kind == ap.UsageKind.BATCH_NOT_FROM_THIS_SHARD
        restored = await w.batch_from_transmittable(data)
        for append in (other.compare_and_append_batch([restored], 0, 2), other.append_batch(restored, 0, 2)):
            with pytest.raises(ap.InvalidUsage) as caught:
                await append
            assert caught.value.kind == ap.UsageKind.BATCH_NOT_FROM_THIS_SHARD
        assert await other.fetch_recent_upper() == ap.Antichain(0)
    await w.compare_and_append_batch([restored], 0, 2)
    assert await place.history() == ROWS


async def test_what_was_handed_over_is_consumed(place: World) -> None:
    w = await place.writer()
    batch = await w.batch(ROWS, 0, 2)
    data = batch.to_transmittable()
    with pytest.raises(ap.InvalidUsage) as caught:
        batch.to_transmittable()
    kinds = [caught.value.kind]
    with pytest.raises(ap.InvalidUsage) as caught:
        batch.rewrite_ts(1, 3)
    kinds.append(caught.value.kind)
    uses = [
        w.compare_and_append_batch([batch], 0, 2),
        w.append_batch(batch, 0, 2),
        batch.delete(),
        batch.flush_to_blob(),
    ]
    for use in uses:
        with pytest.raises(ap.InvalidUsage) as caught:
            await use
        kinds.append(caught.value.kind)
    assert set(kinds) == {ap.UsageKind.CONSUMED}
    del batch  # without a warning
    await (await w.batch_from_transmittable(data)).delete()
    assert await place.blobs() == []


async def test_a_consumed_batch_cannot_be_handed_over(place: World) -> None:
    w = await place.writer()
    deleted, appended = await w.batch(ROWS, 0, 2), await w.batch(ROWS, 0, 2)
    await deleted.delete()
    await w.compare_and_append_batch([appended], 0, 2)
    for batch in (deleted, appended):
        with pytest.raises(ap.InvalidUsage) as caught:
            batch.to_transmittable()
        assert caught.value.kind == ap.UsageKind.CONSUMED


async def test_two_copies_in_one_append_are_one_batch_twice(place: World) -> None:
    w, there = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    copies = [await place.restore(there, data), await place.restore(w, data)]
    with pytest.raises(ap.InvalidUsage) as caught:
        await w.compare_and_append_batch(copies, 0, 2)
    assert caught.value.kind == ap.UsageKind.CONSUMED
    await w.compare_and_append_batch(copies[:1], 0, 2)  # both are free still
    with pytest.raises(ap.AlreadyAppended):
        await w.compare_and_append_batch(copies[1:], 1, 2)
    assert await place.history() == ROWS
