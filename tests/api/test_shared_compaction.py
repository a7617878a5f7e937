"""Goal: a compaction that several processes share changes nothing that can be read at any time, whatever they
do wrong or however they end; what is not applied is the sweep's."""

import asyncio
import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.compact.shared_compaction import PIECE, RESULT, CompactedPiece, CompactionPiece
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from aiopersist.testing.model import Model, comparable, gathered
from tests.conftest import StoreUrls
from tests.support.processes import Place
from tests.support.schemas import NAN, SCHEMA, Key, Val
from tests.support.shards import is_sound, state_of

pytestmark = pytest.mark.usefixtures("started_postgres")

MAINTENANCE_LEASE_S = 60.0
TINY: dict[str, Any] = {"blob_target_size": 1500, "row_group_bytes": 400, "blob_cache_bytes": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "inline": {},
    "blobs": {**TINY, "inline_writes_single_max_bytes": 0},
    "both": {**TINY, "inline_writes_single_max_bytes": 900},
}
BLOBS = LAYOUTS["blobs"]


# --- random data, and what must hold of it --------------------------------------------------------------


def some_rows(chance: random.Random, model: Model, time: int, count: int = 25) -> list[Any]:
    """Updates that meet and cancel."""
    rows = [
        (f"k{chance.randrange(30):02}", chance.randrange(3), time, chance.choice([1, 1, 2, -1]))
        for _ in range(count)
    ]
    return rows + [(k, v, time, -d) for k, v, _, d in chance.sample(model.updates, len(model.updates) // 5)]


async def append(w: Any, model: Model, rows: list[Any], upper: int) -> None:
    lower: Any = model.upper[0]
    await w.compare_and_append(rows, lower, upper)
    model.append(rows, [lower], [upper])


async def filled(client: ap.Client, seed: int = 0, appends: int = 5) -> Model:
    chance, model = random.Random(seed), Model()
    async with client.writer("t", SCHEMA) as w:
        for time in range(appends):
            await append(w, model, some_rows(chance, model, time), time + 1)
    return model


async def move_since(client: ap.Client, to: Any) -> None:
    async with client.critical_since("t", "c") as since:
        await since.compare_and_downgrade_since(0, 0, to)


async def is_the_model(client: ap.Client, model: Model, since: int = 0, schema: Any = SCHEMA) -> None:
    """At every time that can be read; and the shard is sound."""
    async with client.reader("t", schema) as r:
        for as_of in range(since, model.upper[0]):
            async with r.snapshot(as_of) as s:
                found = [(comparable(k), comparable(v), d) for k, v, d in await s.rows()]
            expected = [(comparable(k), comparable(v), d) for k, v, d in model.contents(as_of)]
            assert found == expected, as_of
    if schema is SCHEMA:
        await is_sound(client)


async def is_one_run(client: ap.Client) -> None:
    (batch,) = (await state_of(client)).batches.values()
    assert batch.runs == ()
    assert sum(part.inline is not None for part in batch.parts) <= 1


async def nothing_is_left(place: Place, client: ap.Client) -> None:
    """No claim, no writer; after collection and a sweep no blob that is not needed."""
    state = await state_of(client)
    assert not state.claims
    assert all(writer.lease_s == MAINTENANCE_LEASE_S for writer in state.writers.values())
    await client.force_gc("t")
    await client.sweep_leaked_blobs(dry_run=False)
    state = await state_of(client)
    assert await place.parts() == {p.key for b in state.batches.values() for p in b.parts if p.key}


async def done(workers: list[ap.Client], pieces: list[bytes]) -> list[bytes]:
    """All pieces, by all of them, at the same time, in any order."""
    order = random.Random(len(pieces)).sample(range(len(pieces)), len(pieces))
    found = await asyncio.gather(
        *(worker.compact_piece(pieces[n]) for worker, n in zip(itertools.cycle(workers), order))
    )
    return list(found)


async def compacted(client: ap.Client, workers: list[ap.Client], tasks: int = 4) -> bool:
    async with client.shared_compaction("t") as compaction:
        return await compaction.apply(await done(workers, await compaction.pieces(tasks)))


# --- it changes nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 2, 5, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_contents_stay_as_they_were(place: Place, layout: str, tasks: int) -> None:
    """Goal: one sorted run, the same contents at each time that since allows, and nothing left behind."""
    clients = [await place.client(**LAYOUTS[layout]) for _ in range(3)]
    model = await filled(clients[0], seed=tasks)
    await move_since(clients[0], 2)
    async with clients[0].shared_compaction("t") as compaction:
        assert compaction.is_needed
        pieces = await compaction.pieces(tasks)
        assert (len(pieces) > 1) == (tasks > 1 and layout != "inline")
        assert await compaction.apply(await done(clients, pieces))
    await is_one_run(clients[1])
    (batch,) = (await state_of(clients[1])).batches.values()
    assert batch.len == len(gathered((k, v, max(t, 2), d) for k, v, t, d in model.updates))
    await is_the_model(clients[1], model, since=2)
    await nothing_is_left(place, clients[2])
    async with clients[1].shared_compaction("t") as compaction:
        assert not compaction.is_needed
        assert await compaction.pieces(3) == []
        assert not await compaction.apply([])
        assert "nothing to do" in repr(compaction)
    await nothing_is_left(place, clients[2])


async def test_every_kind_of_store(location: StoreUrls) -> None:
    urls: Any = {"blob": location.blob, "consensus": location.consensus}
    settings = ap.Settings(**BLOBS)
    async with (
        ap.open(**urls, settings=settings, maintenance=False) as client,
        ap.open(**urls, settings=settings, maintenance=False) as other,
    ):
        model = await filled(client)
        assert await compacted(client, [client, other])
        await is_one_run(other)
        await is_the_model(other, model)


class Evolved(Val):
    more: str | None = None


KINDS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "float": (
        ap.Schema(key=float, val=float),
        [NAN, float("inf"), 0.0, *(n / 3 for n in range(-20, 20))],
        [NAN, 0.0, 1.5],
    ),
    "optional": (ap.Schema(key=int | None, val=str | None), [None] * 20 + list(range(20)), [None, "a"]),
    "struct": (
        ap.Schema(key=Key, val=Val),
        [Key(region=r, number=n) for r in "abc" for n in (None, *range(8))],
        [Val(amount=a, number=n) for a in (None, 1) for n in (NAN, 0.5)],
    ),
    "no key": (ap.Schema(key=None, val=int), [None], list(range(60))),
    "list": (ap.Schema(key=list[int], val=int), [[], [1], *([n, -n] for n in range(30))], [1, 2]),
    "hot": (SCHEMA, ["hot"] * 30 + ["a", "z"], list(range(150))),
    "long": (SCHEMA, ["x" * 300 + str(n) for n in range(20)], [1, 2]),
}
WITH_NAN = {"float", "struct"}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_type(place: Place, kind: str) -> None:
    client, other = await place.client(**LAYOUTS["both"]), await place.client(**BLOBS)
    schema, keys, vals = KINDS[kind]
    chance, model = random.Random(kind), Model()
    async with client.writer("t", schema) as w:
        for time in range(4):
            rows = [
                (chance.choice(keys), chance.choice(vals), time, chance.choice([1, 2, -1])) for _ in range(40)
            ]
            await append(w, model, rows, time + 1)
    await move_since(client, 1)
    rounds = 0
    while await compacted(client, [client, other]):  # long keys are more runs than are read at once
        rounds += 1
    assert 1 <= rounds < 10
    await is_one_run(client)
    await is_the_model(other, model, since=1, schema=schema)
    if kind not in WITH_NAN:
        await is_sound(other)


async def test_nan_is_sound(place: Place) -> None:
    client = await place.client(**BLOBS)
    async with client.writer("t", KINDS["float"][0]) as w:
        await w.compare_and_append([(NAN, 1.0, 0, 1), (0.0, NAN, 0, 1)], 0, 1)
    await is_sound(client)


async def test_an_evolved_schema(place: Place) -> None:
    """Goal: what was written before is written again as it is read now."""
    client, other = await place.client(**BLOBS), await place.client(**BLOBS)
    old, new = ap.Schema(key=str, val=Val), ap.Schema(key=str, val=Evolved)
    model = Model()
    async with client.writer("t", old) as w:
        await append(w, model, [(f"k{n:02}", Val(amount=n, number=n / 2), 0, 1) for n in range(50)], 1)
    await client.compare_and_evolve_schema("t", 0, new)
    async with client.writer("t", new) as w:
        rows = [(f"k{n:02}", Evolved(amount=n, number=n / 2, more="m"), 1, 1) for n in range(50)]
        await append(w, model, rows, 2)
    assert await compacted(client, [other])
    model.updates = [(k, Evolved(**v.model_dump()), t, d) for k, v, t, d in model.updates]
    await is_the_model(other, model, schema=new)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_product_times(place: Place, layout: str) -> None:
    client, other = await place.client(**LAYOUTS[layout]), await place.client(**BLOBS)
    schema: Any = ap.Schema(key=str, val=int, time=2)
    chance, model = random.Random(3), Model(upper=[(0, 0)])
    async with client.writer("t", schema) as w:
        for lower, upper in itertools.pairwise([(0, 0), (2, 0), (3, 1), (5, 5)]):
            fits = [
                t
                for t in itertools.product(range(5), repeat=2)
                if ap.Antichain(lower).less_equal(t) and not ap.Antichain(upper).less_equal(t)
            ]
            rows = [
                (
                    f"k{chance.randrange(20)}",
                    chance.randrange(3),
                    chance.choice(fits),
                    chance.choice([1, -1, 2]),
                )
                for _ in range(40)
            ]
            await w.compare_and_append(rows, lower, upper)
            model.append(rows, [lower], [upper])
    since = ap.Antichain((0, 2), (1, 0))
    await move_since(client, since)
    assert await compacted(client, [client, other])
    await is_one_run(client)
    async with other.reader("t", schema) as r:
        for as_of in itertools.product(range(5), repeat=2):
            if since.less_equal(as_of):
                async with r.snapshot(as_of) as s:
                    assert await s.rows() == model.contents(as_of)
    await is_sound(other)


async def test_batches_that_were_truncated_and_rewritten(place: Place) -> None:
    """Goal: what the state says of a part holds for its pieces, too."""
    client, other = await place.client(**BLOBS), await place.client(**BLOBS)
    model = Model()
    async with client.writer("t", SCHEMA) as w:
        wide = [(f"k{n:02}", n % 3, n % 5, 1) for n in range(60)]
        data = (await w.batch(wide, 0, 5)).to_transmittable()
        await w.compare_and_append_batch([await w.batch_from_transmittable(data)], 0, 3)
        model.append([row for row in wide if row[2] < 3], [0], [3])
        batch = await w.batch([(f"k{n:02}", 7, 3, 1) for n in range(60)], 3, 4)
        batch.rewrite_ts(4, 5)
        await w.compare_and_append_batch([batch], 3, 5)
        model.append([(f"k{n:02}", 7, 4, 1) for n in range(60)], [3], [5])
    await is_the_model(client, model)
    await move_since(client, 1)
    assert await compacted(client, [client, other])
    await is_one_run(client)
    await is_the_model(other, model, since=1)


async def test_more_runs_than_fit_take_several_rounds(place: Place) -> None:
    client = await place.client(**BLOBS, compaction_memory_bytes=48 * 1024 * 1024)
    model = await filled(client, appends=12)
    rounds = 0
    while True:
        async with client.shared_compaction("t") as compaction:
            if not compaction.is_needed:
                break
            assert await compaction.apply(await done([client], await compaction.pieces(3)))
        rounds += 1
        assert rounds < 40
    assert rounds > 1
    await is_one_run(client)
    await is_the_model(client, model)


async def test_a_batch_of_more_runs_than_fit(place: Place) -> None:
    """Goal: of the runs of a single batch some are merged in each round, those of few updates first, whatever
    their places in the batch; runs of several parts stay as they are."""
    client = await place.client(**BLOBS, compaction_memory_bytes=2000)
    model = Model()
    rows = [(f"k{n:03}", run, 0, 1) for run, rows in enumerate((150, 30, 90, 31, 60)) for n in range(rows)]
    async with client.writer("t", SCHEMA) as w:
        await append(w, model, rows, 1)
    (batch,) = (await state_of(client)).batches.values()
    assert 0 < len(batch.runs) < len(batch.parts) - 1
    while await compacted(client, [client]):
        await is_the_model(client, model)
    await is_one_run(client)


async def test_nothing_there_and_nobody_to_read_it(place: Place) -> None:
    client = await place.client(**BLOBS)
    with pytest.raises(ap.UnknownShard):
        await client.shared_compaction("t")
    async with client.writer("t", SCHEMA) as w:
        assert not await compacted(client, [client])
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
        await w.compare_and_append([("a", 1, 1, 1)], 1, 2)
        await move_since(client, ap.Antichain())
        async with client.shared_compaction("t") as compaction:  # its batches are only to be forgotten
            assert not compaction.is_needed
    await nothing_is_left(place, client)


async def test_it_applies_what_is_to_be_retained(place: Place) -> None:
    client = await place.client(**BLOBS)
    model = await filled(client)
    await client.retain("t", 2)
    assert await compacted(client, [client])
    since: Any = (await state_of(client)).since
    assert since == ap.Antichain(3)
    await is_the_model(client, model, since=3)


# --- beside others --------------------------------------------------------------------------------------


async def test_appends_and_reads_go_on(place: Place) -> None:
    """Goal: at each moment of a round the contents are the model's, also for who began to read before."""
    client, worker, other = [await place.client(**LAYOUTS["both"]) for _ in range(3)]
    chance, model = random.Random(5), Model()
    async with other.writer("t", SCHEMA) as w, other.reader("t", SCHEMA) as r:
        for time in range(4):
            await append(w, model, some_rows(chance, model, time), time + 1)
        for _ in range(3):
            before = await r.snapshot()
            async with client.shared_compaction("t") as compaction:
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
    async with client.shared_compaction("t") as compaction:
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

    async with client.shared_compaction("t") as first:
        waiting = [asyncio.create_task(second()), asyncio.create_task(other.force_compaction("t"))]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        assert len((await state_of(other)).claims) == 1
        assert await first.apply(await done([client], await first.pieces(3)))
    async with asyncio.timeout(20):
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
        async with client.shared_compaction("t") as compaction:
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
    async with asyncio.timeout(20):
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
    async with client.shared_compaction("t") as compaction:
        results = await done([client, other], await compaction.pieces(3))
        shard = other._shards.at(await other.shard_id("t"))
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
    async with client.shared_compaction("t") as compaction:
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


# --- results that are not those of the pieces -------------------------------------------------------------


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


@pytest.mark.parametrize("layout", ["blobs", "both"])
async def test_wrong_results_are_refused(place: Place, layout: str) -> None:
    """Goal: one result of each piece, of this round; then the right ones, in any order, still do."""
    client, other = await place.client(**LAYOUTS[layout]), await place.client(**LAYOUTS[layout])
    model = await filled(client)
    async with client.shared_compaction("t") as earlier:
        pieces = await earlier.pieces(4)
        of_another_round = await done([other], pieces)
    async with client.shared_compaction("t") as compaction:
        pieces = await compaction.pieces(4)
        results = [await other.compact_piece(piece) for piece in pieces]
        wrongs: list[Any] = [make(results) for make in WRONG.values()]
        wrongs += [of_another_round, [of_another_round[0], *results[1:]], pieces, [*results[:-1], pieces[-1]]]
        for wrong in wrongs:
            with pytest.raises(ap.InvalidUpdate):
                await compaction.apply(wrong)
        again = [await client.compact_piece(piece) for piece in pieces]  # done twice: either result will do
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
    async with client.shared_compaction("t") as compaction:
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
        client.shared_compaction("t") as compaction,
        client.shared_read("t") as shared,
        client.writer("t", SCHEMA) as w,
    ):
        piece = (await compaction.pieces(3))[1]
        others: list[Any] = [
            *(await shared.pieces(2)),
            w.to_transmittable(),
            await client.compact_piece(piece),
        ]
        others += [b"", b"\n", b"x", piece + b" ", piece.decode(), None, 3]
        chance = random.Random(1)
        for _ in range(40):
            at = chance.randrange(len(piece))
            others += [piece[:at], piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]]
        others.append(PIECE.encode(PIECE.decode(piece, CompactionPiece).replace(shard="t")))
        for data in others:
            with pytest.raises(ap.InvalidUpdate):
                await client.compact_piece(data)
        async with ap.open("mem://", maintenance=False) as elsewhere:
            with pytest.raises(ap.UnknownShard):
                await elsewhere.compact_piece(piece)


def with_piece(data: bytes, **changes: Any) -> bytes:
    value = PIECE.decode(data, CompactionPiece)
    return PIECE.encode(value.replace(piece=value.piece.replace(**changes)))


async def test_a_piece_of_a_schema_that_the_shard_does_not_know(place: Place) -> None:
    """Goal: as it comes from a later state, of a store that was then restored from a backup."""
    client = await place.client(**BLOBS)
    await filled(client)
    async with client.shared_compaction("t") as compaction:
        piece = (await compaction.pieces(3))[1]
        with pytest.raises(ap.InvalidUpdate):
            await client.compact_piece(with_piece(piece, schema_id=7))


async def test_a_lost_blob_is_corruption(place: Place) -> None:
    """Goal: the claim is held, and the newest version names the part: that is not an expected race."""
    client = await place.client(**BLOBS)
    await filled(client)
    async with client.shared_compaction("t") as compaction:
        pieces = await compaction.pieces(3)
        await place.blob.delete(list(await place.parts()))
        with pytest.raises(ap.Corruption):
            await client.compact_piece(pieces[0])


# --- other processes ---------------------------------------------------------------------------------------

WORKER = """
import asyncio, os, signal, sys
import aiopersist as ap

blob, consensus, dies = *sys.argv[1:3], sys.argv[3] == "dies"
LIMITS = ap.Settings(inline_writes_single_max_bytes=0, blob_target_size=1500, row_group_bytes=400)


async def main():
    pieces = [bytes.fromhex(line) for line in sys.stdin.read().split()]
    async with ap.open(blob=blob, consensus=consensus, settings=LIMITS, maintenance=False) as client:
        for piece in pieces:
            result = await client.compact_piece(piece)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            print(result.hex(), flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_processes_share_it_and_one_is_killed(tmp_path: Path) -> None:
    """Goal: its pieces are done again by another; what it left is swept."""
    urls = f"file://{tmp_path}/blob?fsync=off", f"sqlite://{tmp_path}/state.db"

    def start(pieces: list[bytes], name: str) -> Any:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *urls, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return process, asyncio.to_thread(process.communicate, "\n".join(p.hex() for p in pieces))

    async with ap.open(
        blob=urls[0], consensus=urls[1], settings=ap.Settings(**BLOBS), maintenance=False
    ) as client:
        model = await filled(client)
        async with client.shared_compaction("t") as compaction:
            pieces = await compaction.pieces(4)
            (killed, dying), (_, working) = start(pieces[:2], "dies"), start(pieces[2:], "works")
            (_, _), (out, _) = await asyncio.gather(dying, working)
            assert killed.returncode < 0
            results = [bytes.fromhex(line) for line in out.split()]
            with pytest.raises(ap.InvalidUpdate):
                await compaction.apply(results)
            results += [await client.compact_piece(piece) for piece in pieces[:2]]
            assert await compaction.apply(results)
            assert not (await client.sweep_leaked_blobs()).keys  # its writer is still there
        leaked = (await client.sweep_leaked_blobs(dry_run=False)).keys
        assert any(key.endswith(".parquet") for key in leaked)
        await is_one_run(client)
        await is_the_model(client, model)
