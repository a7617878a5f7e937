"""Beside other work, results that do not fit the pieces; see `test_shared_compaction.py`."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.compact.shared_compaction import PIECE, RESULT, CompactedPiece, CompactionPiece
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from aiopersist.testing.model import Model
from tests.maintenance.shared_compaction_kit import (
    BLOBS,
    LAYOUTS,
    append,
    compacted,
    done,
    filled,
    is_one_run,
    is_the_model,
    move_since,
    nothing_is_left,
    some_rows,
)
from tests.support.internals import shards_of
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import state_of

pytestmark = pytest.mark.usefixtures("started_postgres")


def renumbered(data: bytes, number: int) -> bytes:
    return RESULT.encode(RESULT.decode(data, CompactedPiece).replace(number=number))


WRONG: dict[str, Callable[[list[bytes]], list[Any]]] = {
    "none": lambda r: [],
    "one is missing": lambda r: r[:-1],
    "the first is missing": lambda r: r[1:],
    "one twice": lambda r: [*r, r[0]],
    "one in the place of another": lambda r: [r[0], *r[:-1]],
    "one more": lambda r: [*r, renumbered(r[0], len(r))],
    "numbers from 1": lambda r: [renumbered(d, n + 1) for n, d in enumerate(r)],
    "damaged": lambda r: [*r[:-1], r[-1][:-3] + b"xxx"],
    "cut": lambda r: [*r[:-1], r[-1][:50]],
    "empty": lambda r: [*r[:-1], b""],
    "no bytes": lambda r: [*r[:-1], None],
    "text": lambda r: [d.decode() for d in r],
}


def with_piece(data: bytes, **changes: Any) -> bytes:
    value = PIECE.decode(data, CompactionPiece)
    return PIECE.encode(value.replace(piece=value.piece.replace(**changes)))


# --- beside others ------------------------------------------------------------------------------------


async def test_appends_and_reads_go_on(place: Place) -> None:
    """Goal: at each moment of a round the contents are the model's, also for reads that began before."""
    client, worker, other = [await place.client(**LAYOUTS["both"]) for _ in range(3)]
    chance, model = random.Random(5), Model()
    async with other.writer("t", SCHEMA) as w, other.reader("t", SCHEMA) as r:
        for time in range(4):
            await append(w, model, some_rows(chance, model, time), time + 1)
        for _ in range(3):
            before = await r.snapshot()
            async with client.workers.shared_compaction("t") as compaction:
                upper: Any = model.upper[0]
                await append(w, model, some_rows(chance, model, upper), upper + 1)
                results = []
                for piece in await compaction.pieces(3):
                    results.append(await worker.compact_piece(piece))
                    upper = model.upper[0]
                    await append(w, model, some_rows(chance, model, upper), upper + 1)
                    await is_the_model(other, model)
                    await other.force_gc("t")
                assert await compaction.apply(results)
                await is_the_model(other, model)
            await other.force_gc("t")
            assert await before.rows() == model.contents(before.as_of)
            await before.aclose()
    assert await compacted(client, [worker])
    await is_the_model(other, model)
    await nothing_is_left(place, client)


async def test_since_that_moves_meanwhile(place: Place) -> None:
    """Goal: a result is as of the since that it was claimed at, which is never beyond the shard's."""
    client, other = await place.client(**BLOBS), await place.client(**BLOBS)
    model = await filled(client)
    await move_since(client, 1)
    async with client.workers.shared_compaction("t") as compaction:
        pieces = await compaction.pieces(3)
        await move_since(other, 3)
        assert await compaction.apply(await done([other], pieces))
        await is_the_model(other, model, since=3)
    assert await compacted(other, [client])
    await is_the_model(client, model, since=3)


async def test_a_claim_keeps_others_away(place: Place) -> None:
    """Goal: two shared ones, and others, do nothing twice: they wait until it is given back."""
    client, other = await place.client(**BLOBS), await place.client(**BLOBS)
    model = await filled(client)

    async def second() -> bool:
        async with other.shared_compaction("t") as compaction:
            return compaction.is_needed

    async with client.workers.shared_compaction("t") as first:
        waiting = [asyncio.create_task(second()), asyncio.create_task(other.force_compaction("t"))]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        assert len((await state_of(other)).claims) == 1
        assert await first.apply(await done([client], await first.pieces(3)))
    async with asyncio.timeout(50):
        assert await asyncio.gather(*waiting) == [False, None]
    await is_the_model(other, model)
    await nothing_is_left(place, client)


@pytest.mark.parametrize("how", ["closed", "cancelled", "client closed", "lease"])
async def test_a_round_that_is_given_up(place: Place, how: str) -> None:
    """Goal: its claim is free at once, or with its lease; what it wrote is swept; the next one works."""
    client, worker, other = [await place.client(**BLOBS) for _ in range(3)]
    model = await filled(client)
    started = asyncio.Event()
    found: list[bytes] = []

    async def a_round() -> None:
        async with client.workers.shared_compaction("t") as compaction:
            pieces = await compaction.pieces(4)
            found.extend(pieces)
            await worker.compact_piece(pieces[0])  # and the others die
            started.set()
            if how != "closed":
                await asyncio.sleep(60)

    before = await place.parts()
    task = asyncio.create_task(a_round())
    await started.wait()
    if how == "cancelled":
        task.cancel()
    if how == "client closed":
        await client.aclose()
        task.cancel()
    if how == "lease":
        place.clock.ahead_s += 3601
    else:
        await asyncio.wait([task])
    assert await place.parts() > before
    async with asyncio.timeout(50):
        assert await compacted(other, [other])
    assert len((await other.sweep_leaked_blobs(dry_run=False)).keys) >= 1
    await is_the_model(other, model)
    task.cancel()
    await asyncio.wait([task])
    await nothing_is_left(place, other)
    for piece in found:  # whose parts are gone
        with pytest.raises(ap.LeaseExpired):
            await worker.compact_piece(piece)
    await is_the_model(other, model)
    await nothing_is_left(place, other)


@pytest.mark.parametrize("replaced", [False, True], ids=["as it was", "replaced"])
async def test_a_claim_that_was_lost(place: Place, replaced: bool) -> None:
    """Goal: applied too late it does nothing; whether or not another has done the work."""
    client, other = await place.client(**BLOBS), await place.client(**BLOBS)
    model = await filled(client)
    async with client.workers.shared_compaction("t") as compaction:
        results = await done([client, other], await compaction.pieces(3))
        shard = shards_of(other).at(await other.shard_id("t"))
        await commit(shard.register, ExpireWriter(compaction._registration.writer), Slot())  # type: ignore[union-attr]
        if replaced:
            assert await compacted(other, [other])
        after = (await state_of(other)).batches
        assert not await compaction.apply(results)
        assert (await state_of(other)).batches == after
    await is_the_model(other, model)
    await nothing_is_left(place, other)


async def test_applied_once(place: Place) -> None:
    """Goal: again it is `False`, as after others have changed the shard, and nothing is damaged."""
    client, other = await place.client(**BLOBS), await place.client(**BLOBS)
    model = await filled(client)
    async with client.workers.shared_compaction("t") as compaction:
        results = await done([client, other], await compaction.pieces(3))
        assert await compaction.apply(results)
        after = (await state_of(other)).batches
        assert not await compaction.apply(results)
        assert (await state_of(other)).batches == after
    for call in (compaction.apply(results), compaction.pieces(2)):
        with pytest.raises(ap.InvalidUsage) as caught:
            await call
        assert caught.value.kind == ap.UsageKind.CLOSED
    await is_the_model(other, model)
    await nothing_is_left(place, other)


# --- results that are not those of the pieces ---------------------------------------------------------


@pytest.mark.parametrize("layout", ["blobs", "both"])
async def test_wrong_results_are_refused(place: Place, layout: str) -> None:
    """Goal: one result of each piece, of this round; then the right ones, in any order, still do."""
    client, other = await place.client(**LAYOUTS[layout]), await place.client(**LAYOUTS[layout])
    model = await filled(client)
    async with client.workers.shared_compaction("t") as earlier:
        pieces = await earlier.pieces(4)
        of_another_round = await done([other], pieces)
    async with client.workers.shared_compaction("t") as compaction:
        pieces = await compaction.pieces(4)
        results = [await other.compact_piece(piece) for piece in pieces]
        wrongs: list[Any] = [make(results) for make in WRONG.values()]
        wrongs += [of_another_round, [of_another_round[0], *results[1:]], pieces, [*results[:-1], pieces[-1]]]
        for wrong in wrongs:
            with pytest.raises(ap.InvalidUpdate):
                await compaction.apply(wrong)
        again = [
            await client.workers.compact_piece(piece) for piece in pieces
        ]  # done twice: either result will do
        mixed = [random.Random(n).choice(pair) for n, pair in enumerate(zip(results, again))]
        assert await compaction.apply(mixed[::-1])
    await is_one_run(client)
    await is_the_model(other, model)
    await nothing_is_left(place, client)


async def test_results_of_an_earlier_division_are_refused(place: Place) -> None:
    """Goal: asked for pieces again, in another number, results of the first ones are worthless, and never
    damage: there each piece holds less."""
    client, other = await place.client(**BLOBS), await place.client(**LAYOUTS["inline"])
    model = await filled(client)
    async with other.writer("t", SCHEMA) as w:
        await append(w, model, [("inline", 1, 5, 1)], 6)
    async with client.workers.shared_compaction("t") as compaction:
        first = await compaction.pieces(8)
        results = await done([other], first)
        second = await compaction.pieces(2)
        assert len(second) < len(first)
        ordered = sorted(results, key=lambda data: RESULT.decode(data, CompactedPiece).number)
        try:
            applied = await compaction.apply(ordered[: len(second)])
        except ap.InvalidUpdate:
            applied = False
        assert not applied
    await is_the_model(other, model)


async def test_garbage_is_no_piece(place: Place) -> None:
    client = await place.client(**BLOBS)
    await filled(client)
    async with (
        client.workers.shared_compaction("t") as compaction,
        client.workers.shared_read("t") as shared,
        client.writer("t", SCHEMA) as w,
    ):
        piece = (await compaction.pieces(3))[1]
        others: list[Any] = [
            *(await shared.pieces(2)),
            w.to_transmittable(),
            await client.workers.compact_piece(piece),
        ]
        others += [b"", b"\n", b"x", piece + b" ", piece.decode(), None, 3]
        chance = random.Random(1)
        for _ in range(40):
            at = chance.randrange(len(piece))
            others += [piece[:at], piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]]
        others.append(PIECE.encode(PIECE.decode(piece, CompactionPiece).replace(shard="t")))
        for data in others:
            with pytest.raises(ap.InvalidUpdate):
                await client.workers.compact_piece(data)
        async with ap.open("mem://", maintenance=False) as elsewhere:
            with pytest.raises(ap.UnknownShard):
                await elsewhere.compact_piece(piece)


async def test_a_piece_of_a_schema_that_the_shard_does_not_know(place: Place) -> None:
    """Goal: as it comes from a later state, of a store that was then restored from a backup."""
    client = await place.client(**BLOBS)
    await filled(client)
    async with client.workers.shared_compaction("t") as compaction:
        piece = (await compaction.pieces(3))[1]
        with pytest.raises(ap.InvalidUpdate):
            await client.workers.compact_piece(with_piece(piece, schema_id=7))


async def test_a_lost_blob_is_corruption(place: Place) -> None:
    """Goal: the claim is held, and the newest version names the part: that is not an expected race."""
    client = await place.client(**BLOBS)
    await filled(client)
    async with client.workers.shared_compaction("t") as compaction:
        pieces = await compaction.pieces(3)
        await place.blob.delete(list(await place.parts()))
        with pytest.raises(ap.Corruption):
            await client.workers.compact_piece(pieces[0])
