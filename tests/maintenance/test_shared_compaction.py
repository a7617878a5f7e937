"""Goal: a compaction that several processes share changes nothing that can be read at any time, even if
they misbehave or die; the sweep deletes the parts that are not applied."""

import itertools
import random
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.model import Model, gathered
from tests.conftest import StoreUrls
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
)
from tests.support.processes import Place
from tests.support.schemas import NAN, SCHEMA, Key, Val
from tests.support.shards import is_sound, state_of

pytestmark = pytest.mark.usefixtures("started_postgres")


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
        async with client.workers.shared_compaction("t") as compaction:
            if not compaction.is_needed:
                break
            assert await compaction.apply(await done([client], await compaction.pieces(3)))
        rounds += 1
        assert rounds < 40
    assert rounds > 1
    await is_one_run(client)
    await is_the_model(client, model)


async def test_a_batch_of_more_runs_than_fit(place: Place) -> None:
    """Goal: of the runs of a single batch some are merged in each round, those of few updates first, in any
    position in the batch; runs of several parts stay as they are."""
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
        await client.workers.shared_compaction("t")
    async with client.writer("t", SCHEMA) as w:
        assert not await compacted(client, [client])
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
        await w.compare_and_append([("a", 1, 1, 1)], 1, 2)
        await move_since(client, ap.Antichain())
        async with client.workers.shared_compaction(
            "t"
        ) as compaction:  # its batches are only to be forgotten
            assert not compaction.is_needed
    await nothing_is_left(place, client)


async def test_it_applies_what_is_to_be_retained(place: Place) -> None:
    client = await place.client(**BLOBS)
    model = await filled(client)
    await client.admin.retain("t", 2)
    assert await compacted(client, [client])
    since: Any = (await state_of(client)).since
    assert since == ap.Antichain(3)
    await is_the_model(client, model, since=3)


async def test_a_shard_without_batches_has_nothing_to_compact() -> None:
    async with ap.open("mem://") as client:
        async with client.writer("t", SCHEMA):
            pass
        async with client.workers.shared_compaction("t") as compaction:
            assert "nothing to do" in repr(compaction)
