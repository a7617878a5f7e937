"""Leases, bytes that are no piece, other processes; see `test_shared_read.py`."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.read.shared_read import ENVELOPE, TransmittedPiece
from tests.read.shared_read_kit import (
    KINDS,
    LAYOUTS,
    changes,
    contents,
    filled,
    move_since,
    read,
    rows_of,
    ten_times,
    told,
)
from tests.support.processes import Place, place_in_memory
from tests.support.schemas import SCHEMA
from tests.support.shards import state_of
from tests.support.virtual import in_virtual_time

pytestmark = pytest.mark.usefixtures("started_postgres")


async def churn(client: ap.Client, since: int) -> None:
    """Replace all contents, twice, and collect the garbage."""
    async with client.writer("t", SCHEMA) as w:
        for _ in range(2):
            t: Any = (await w.fetch_recent_upper()).time
            await w.compare_and_append([(f"new{n}", t, t, 1) for n in range(50)], t, t + 1)
            await move_since(client, max(since, t))
            await client.admin.force_compaction("t")
            await client.admin.force_gc("t")


async def a_piece(client: ap.Client) -> bytes:
    shared = await client.workers.shared_read("t", keep=True)
    return (await shared.pieces(3))[1]


def resealed(data: bytes, **changes: Any) -> bytes:
    """The piece with other fields, as its maker would have sent it."""
    return ENVELOPE.encode(ENVELOPE.decode(data, TransmittedPiece).replace(**changes))


def with_piece(data: bytes, **changes: Any) -> bytes:
    return resealed(data, piece=ENVELOPE.decode(data, TransmittedPiece).piece.replace(**changes))


def with_keys(data: bytes, **keys: Any) -> bytes:
    return with_piece(data, keys={**ENVELOPE.decode(data, TransmittedPiece).piece.keys, **keys})


FORGED: dict[str, Callable[[bytes], bytes]] = {
    "no shard": lambda p: resealed(p, shard="nothing"),
    "parts of another shard": lambda p: resealed(p, shard=str(ap.ShardId.new())),
    "an unknown schema": lambda p: with_piece(p, schema_id=7),
    "a prefix of columns that are not there": lambda p: with_keys(p, prefix=["a", 1, 2, 3]),
    "a bound of another type": lambda p: with_keys(p, lower=[1]),
    "a prefix that is none": lambda p: with_keys(p, prefix=5),
    "no prefix": lambda p: with_piece(p, keys={}),
    "an int out of range": lambda p: with_keys(p, prefix=["a"], lower=2**70),
}


READER = """
import asyncio, sys
import aiopersist as ap


async def main():
    pieces = [bytes.fromhex(line) for line in sys.stdin.read().split()]
    async with ap.open(blob=sys.argv[1], consensus=sys.argv[2], maintenance=False) as client:
        for piece in pieces:
            async for batch in client.workers.read_piece(piece):
                for row in batch.to_pylist():
                    print(row["key"], row["val"], row["diff"])

asyncio.run(main())
"""


# --- leases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"start": 3}], ids=["contents", "changes"])
async def test_others_go_on_around_it(place: Place, asked: dict[str, Any]) -> None:
    """Goal: compaction, collection and appends between any two pieces change nothing; the blobs are gone
    once the read is closed, and then a piece is `LeaseExpired`."""
    client, other = await place.client(**LAYOUTS["blobs"]), await place.client(**LAYOUTS["blobs"])
    model = await ten_times(client)
    expected = changes(model, 3, 10) if asked else contents(model, 9)
    shared = await client.workers.shared_read("t", **asked)
    pieces, found = await shared.pieces(4), []
    planned = await place.parts()
    for number, piece in enumerate(pieces):
        found += await rows_of((client, other)[number % 2], piece)
        await churn(other, 9)
        assert planned <= await place.parts()
    assert found == expected
    assert await read(other, await shared.pieces(9)) == expected  # of what it planned, however late
    await shared.aclose()
    await shared.aclose()
    with pytest.raises(ap.InvalidUsage) as caught:
        await shared.pieces(2)
    assert caught.value.kind == ap.UsageKind.CLOSED
    await churn(other, 9)
    assert not planned & await place.parts()
    for reader in (client, other, await place.client()):
        for piece in pieces:
            with pytest.raises(ap.LeaseExpired):
                await rows_of(reader, piece)


async def test_a_piece_that_is_being_read_when_the_read_is_closed(place: Place) -> None:
    """Goal: it ends with `LeaseExpired`, after rows that are right."""
    client, other = await place.client(**LAYOUTS["blobs"]), await place.client(**LAYOUTS["blobs"])
    model = await ten_times(client)
    shared = await client.workers.shared_read("t")
    (piece,) = await shared.pieces(1)
    expected, found = contents(model, 9), []
    with pytest.raises(ap.LeaseExpired):
        async for batch in other.read_piece(piece):
            rows = batch.to_pylist()
            found += told((r["key"], r["val"], r["diff"]) for r in rows)
            if not shared._scope.closed:
                await shared.aclose()
                await churn(client, 9)
    assert found == expected[: len(found)]


async def test_an_expired_lease(place: Place) -> None:
    """Goal: time passes without a heartbeat, another client commits: the blobs go, and the read is
    refused."""
    client, other = await place.client(**LAYOUTS["blobs"]), await place.client(**LAYOUTS["blobs"])
    model = await ten_times(client)
    shared = await client.workers.shared_read("t", keep=True, lease_s=60)
    pieces = await shared.pieces(3)
    place.clock.ahead_s += 45
    await churn(other, 9)
    assert await read(other, pieces) == contents(model, 9)  # which renews it
    place.clock.ahead_s += 45
    await churn(other, 9)
    assert await read(other, pieces) == contents(model, 9)
    place.clock.ahead_s += 70
    await churn(other, 9)
    for piece in pieces:
        with pytest.raises(ap.LeaseExpired):
            await rows_of(other, piece)
    with pytest.raises(ap.LeaseExpired):
        await shared.pieces(3)
    await shared.aclose()


@in_virtual_time
async def test_an_open_read_is_renewed() -> None:
    async with place_in_memory() as place:
        client, other = await place.client(), await place.client()
        await ten_times(client)
        shared = await client.workers.shared_read("t", lease_s=0.4)
        kept = await client.workers.shared_read("t", lease_s=0.4, keep=True)
        await asyncio.sleep(0.7)
        async with other.writer("t", SCHEMA) as w:
            await w.compare_and_append([], 10, 10)  # expires what is overdue
        assert list((await state_of(other)).readers) == [shared._reader]
        await shared.aclose()
        await kept.aclose()
        assert not (await state_of(other)).readers


@in_virtual_time
async def test_renewals_let_go_of_nothing() -> None:
    """Goal: neither a heartbeat nor a reader tells that older versions are not needed: others read them."""
    async with place_in_memory() as place:
        client, other = await place.client(**LAYOUTS["blobs"]), await place.client(**LAYOUTS["blobs"])
        model = await ten_times(client)
        async with client.workers.shared_read("t", lease_s=0.8) as shared:
            pieces = await shared.pieces(3)
            for _ in range(3):
                await churn(other, 9)
                await asyncio.sleep(0.3)
                await churn(other, 9)
                await rows_of(other, pieces[0])
            assert await read(other, pieces) == contents(model, 9)


async def test_who_reads_renews(place: Place) -> None:
    """Goal: a kept read lives as long as a process reads it; a commit at most once a quarter of the lease."""
    client, other = await place.client(), await place.client()
    await ten_times(client)
    kept = await client.workers.shared_read("t", lease_s=40, keep=True)
    (piece,) = await kept.pieces(1)

    async def heard() -> float:
        return float((await state_of(other)).readers[kept._reader].heartbeat)

    begun = await heard()
    await rows_of(other, piece)
    assert await heard() == begun
    for _ in range(6):
        place.clock.ahead_s += 11
        await rows_of(other, piece)
        later = await heard()
        assert later >= begun + 11
        await rows_of(other, piece)
        assert await heard() == later
        begun = later
    await kept.aclose()
    assert kept._reader in (await state_of(other)).readers


async def test_closing_the_client_ends_what_is_not_kept(place: Place) -> None:
    client, other = await place.client(**LAYOUTS["blobs"]), await place.client(**LAYOUTS["blobs"])
    model = await ten_times(client)
    kept = await (await client.workers.shared_read("t", keep=True)).pieces(3)
    ended = await (await client.workers.shared_read("t")).pieces(3)
    await client.aclose()
    assert len((await other.inspect("t")).readers) == 1
    await churn(other, 9)
    assert await read(other, kept) == contents(model, 9)
    assert await read(other, ended) == contents(model, 9)  # they are of the same version
    with pytest.raises(ap.InvalidUsage) as caught:
        client.workers.read_piece(kept[0])
    assert caught.value.kind == ap.UsageKind.CLOSED


@in_virtual_time
async def test_it_never_moves_since() -> None:
    async with place_in_memory() as place:
        client = await place.client()
        await ten_times(client)
        async with client.workers.shared_read("t", as_of=5, lease_s=0.2) as shared:
            await rows_of(client, (await shared.pieces(1))[0])
            await asyncio.sleep(0.3)
            assert (await client.admin.inspect("t")).since == ap.Antichain(0)
        assert (await client.admin.inspect("t")).since == ap.Antichain(0)


async def test_a_lost_blob_is_corruption(place: Place) -> None:
    """Goal: the lease is there, the newest version names the part, and it is gone."""
    client = await place.client(**LAYOUTS["blobs"])
    await ten_times(client)
    async with client.workers.shared_read("t") as shared:
        pieces = await shared.pieces(2)
        await place.blob.delete(list(await place.parts()))
        for piece in pieces:
            with pytest.raises(ap.Corruption):
                await rows_of(client, piece)


# --- what is no piece ---------------------------------------------------------------------------------


async def test_garbage_is_refused(place: Place) -> None:
    client = await place.client(**LAYOUTS["both"])
    await ten_times(client)
    piece = await a_piece(client)
    async with client.writer("t", SCHEMA) as w, client.workers.shared_compaction("t") as compaction:
        batch = await w.batch([("a", 1, 10, 1)], 10, 11)
        others: list[Any] = [w.to_transmittable(), batch.to_transmittable(), *(await compaction.pieces(2))]
    chance = random.Random(1)
    for _ in range(60):
        at = chance.randrange(len(piece))
        others.append(piece[:at] + bytes([piece[at] ^ (1 << chance.randrange(8))]) + piece[at + 1 :])
        others.append(piece[:at])
    others += [b"", b"\n", b"x", b"aiopersist-piece", piece + b" ", piece.decode(), None, 3, [piece]]
    for data in others:
        with pytest.raises(ap.InvalidUpdate):
            await rows_of(client, data)


@pytest.mark.parametrize("case", FORGED)
async def test_what_can_be_no_piece_of_the_shard_is_refused(place: Place, case: str) -> None:
    client = await place.client(**LAYOUTS["blobs"])
    await ten_times(client)
    with pytest.raises(ap.InvalidUpdate):
        await rows_of(client, FORGED[case](await a_piece(client)))


async def test_a_piece_of_another_location(place: Place) -> None:
    client = await place.client(**LAYOUTS["blobs"])
    await ten_times(client)
    piece = await a_piece(client)
    async with ap.open("mem://", maintenance=False) as other:
        with pytest.raises(ap.UnknownShard):
            await rows_of(other, piece)


async def test_a_dropped_shard(place: Place) -> None:
    client, other = await place.client(**LAYOUTS["blobs"]), await place.client()
    await ten_times(client)
    piece = await a_piece(client)
    shared = await client.workers.shared_read("t")
    await other.drop("t")
    with pytest.raises((ap.ShardFinalized, ap.UnknownShard)):
        await rows_of(other, piece)
    await shared.aclose()


# --- other processes ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_pieces_are_read_by_other_processes(tmp_path: Any) -> None:
    """Goal: halves, read by two processes after the planning client is gone, are the whole."""
    urls = f"file://{tmp_path}/blob?fsync=off", f"sqlite://{tmp_path}/state.db"
    settings = ap.Settings(**LAYOUTS["both"])
    async with ap.open(blob=urls[0], consensus=urls[1], settings=settings, maintenance=False) as client:
        model = await filled(client, *KINDS["hot"])
        pieces = await (await client.workers.shared_read("t", keep=True)).pieces(6)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", READER, *urls],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    shares = ["\n".join(p.hex() for p in pieces[:3]), "\n".join(p.hex() for p in pieces[3:])]
    answers = await asyncio.gather(
        *(asyncio.to_thread(process.communicate, share) for process, share in zip(running, shares))
    )
    assert [process.returncode for process in running] == [0, 0]
    rows = [line.split() for out, _ in answers for line in out.splitlines()]
    assert [(k, int(v), int(d)) for k, v, d in rows] == model.contents(9)
