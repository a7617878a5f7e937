"""Goal: a copy reads as its source at every time that both hold, whatever was written, given up, compacted or
collected between two calls, and wherever a call was killed; and no other shard is taken for a copy."""

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.state.copying import mark_of
from aiopersist.testing.model import Model, gathered
from tests.support.location import NAME, Place, Way, append, contents, move_since
from tests.support.schemas import KIND, NAN, PRODUCT, SCHEMA, V1, V2
from tests.support.shards import f

STEP_SMALL = {"blob_target_size": 20}  # a step is eight parts


async def same_as(model: Model, client: Any, name: str = NAME) -> None:
    """The shard has the contents of the model at each time that it holds: at since, and then each change."""
    async with client.reader(name, SCHEMA) as r:
        upper = (await r.fetch_recent_upper()).time
        since = r.since.time
        if since >= upper:
            return
        async with r.snapshot(since, wait=False) as s:
            assert await s.rows() == model.contents(since)
        changes: list[Any] = []
        if since < upper - 1:
            async with r.listen(since, until=upper) as listen:
                async for step in listen:
                    changes += step.rows() if isinstance(step, ap.Updates) else []
        expected = model.changes(since, upper=[upper])
        assert gathered(changes) == expected


async def moved(client: Any, rng: random.Random, upper: int) -> None:
    """Give up some history, perhaps beyond what was written; then it is compacted or not."""
    await move_since(client, rng.randrange(upper + 2))
    if rng.random() < 0.7:
        await client.admin.force_compaction(NAME)
    if rng.random() < 0.3:
        await client.admin.force_gc(NAME)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
async def test_a_copy_follows_its_source(seed: int) -> None:
    """Goal: after each call the copy has all that the source has, and says nothing else."""
    rng, source, target = random.Random(seed), Place(), Place()
    limits = STEP_SMALL if seed % 2 else {"inline_writes_single_max_bytes": 16384}
    async with source.open(**limits) as client, target.open(**limits) as other:
        async with client.writer(NAME, SCHEMA) as w:
            for _ in range(8):
                for _ in range(rng.randrange(4)):
                    await append(source, w, rng)
                if rng.random() < 0.5:
                    await moved(client, rng, w.upper.time)
                if rng.random() < 0.3:
                    await other.force_compaction(NAME) if NAME in await other.list_shards() else None
                copied = await client.admin.copy_shard(NAME, other, verify=True)
                view = await client.admin.inspect(NAME)
                assert (copied.since, copied.upper, copied.differing) == (view.since, view.upper, ())
                await same_as(source.model, other)
                assert bool(copied.compared) == (view.since < view.upper)
        assert (await other.fsck(NAME)).ok
        assert (await client.admin.copy_shard(NAME, other)).updates == 0


@pytest.mark.parametrize(("beyond", "brought"), [(-1, 2), (0, None), (1, None)])
async def test_a_copy_brings_only_what_is_new(beyond: int, brought: int | None) -> None:
    """Goal: updates are not written again, even across a merge, while since is before the copy's upper. At
    the upper already, times before it were moved onto it, and nothing is doubled either."""
    source, target, rng = Place(), Place(), random.Random(1)
    async with source.open() as client, target.open() as other, client.writer(NAME, SCHEMA) as w:
        for _ in range(20):
            await append(source, w, rng)
        await client.admin.copy_shard(NAME, other)
        upper = w.upper.time
        await append(source, w, rng, many=1)
        await append(source, w, rng, many=1)
        await move_since(client, upper + beyond)
        await client.admin.force_compaction(NAME)  # one batch, of what was copied and what is new
        copied = await client.admin.copy_shard(NAME, other)
        assert copied.updates == brought or (brought is None and copied.updates > 2)
        await same_as(source.model, other)


async def prepared() -> Place:
    """A source that has lost the history at the upper of its first copy."""
    place, rng = Place(), random.Random(2)
    async with place.open() as client, client.writer(NAME, SCHEMA) as w:
        for _ in range(3):
            await append(place, w, rng)
    return place


async def later(place: Place) -> None:
    async with place.open() as client, client.writer(NAME, SCHEMA) as w:
        for _ in range(3):
            await append(place, w, random.Random(3))
        await move_since(client, w.upper.time - 2)
        await client.admin.force_compaction(NAME)
        await append(place, w, random.Random(4))


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.long)])
async def test_a_copier_that_is_killed(stride: int, again: bool, landed: bool) -> None:
    """Goal: killed before or after any request, it leaves a copy that says nothing wrong, and the next call
    ends right."""
    source = await prepared()
    begun = Place()
    if again:
        async with source.open() as client, begun.open() as other:
            await client.admin.copy_shard(NAME, other)
        await later(source)
    number, crashed = 1 - stride, True
    while crashed:
        number += stride
        target, way = Place(begun), Way(landed=landed)
        async with source.open(**STEP_SMALL) as client:
            with suppress(ap.Error):
                async with target.open(way, **STEP_SMALL) as killed:
                    way.crash_at = way.calls + number
                    await client.admin.copy_shard(NAME, killed)
                    way.crash_at = None
            crashed = way.crashed
            async with asyncio.timeout(50), target.open() as other:
                if again:
                    await same_as(source.model, other)
                copied = await client.admin.copy_shard(NAME, other, verify=True)
                assert (copied.upper.elements, copied.differing) == (source.model.upper, ())
                await same_as(source.model, other)
    assert number > 10


async def test_two_copiers_at_once() -> None:
    """Goal: both end well, and no update comes twice."""
    source, target = await prepared(), Place()
    async with (
        source.open(**STEP_SMALL) as client,
        target.open(**STEP_SMALL) as other,
        target.open() as third,
    ):
        for _ in range(2):
            calls = [client.admin.copy_shard(NAME, place, verify=True) for place in (other, third, other)]
            for copied in await asyncio.gather(*calls):
                assert copied.differing == ()
            await same_as(source.model, other)
            await later(source)


async def test_steps_end_where_a_copy_can_be_read() -> None:
    """Goal: long history comes in several appends, in order, and progress says how far."""
    source, target, rng = Place(), Place(), random.Random(1)
    async with source.open(**STEP_SMALL) as client, target.open(**STEP_SMALL) as other:
        async with client.writer(NAME, SCHEMA) as w:
            for _ in range(30):
                await append(source, w, rng)
        copy = ap.track(client.admin.copy_shard(NAME, other))
        seen = [done.done async for done in copy]
        assert copy.newest is not None
        assert copy.newest.done == copy.newest.total == 180
        assert (await copy).updates > 0
        view = await other.inspect(NAME)
        assert len(view.batches) > 3
    assert seen == sorted(seen)


async def test_who_wrote_a_copy_has_it_alone() -> None:
    """Goal: a shard that is no copy, or was written, is refused and left as it is."""
    source, target = await prepared(), Place()
    async with source.open() as client, target.open() as other:
        await client.admin.copy_shard(NAME, other)
        async with other.writer(NAME, SCHEMA) as w:
            await w.write([("mine", 1)])
            await later(source)
            for verify in (False, True):
                with pytest.raises(ap.InvalidUsage, match="has other writes") as refused:
                    await client.admin.copy_shard(NAME, other, verify=verify)
                assert refused.value.kind is KIND.INVALID_COPY
            async with other.writer("taken", SCHEMA) as taken:
                await taken.write([("mine", 1)])
        with pytest.raises(ap.InvalidUsage, match="is not a copy"):
            await client.admin.copy_shard(NAME, other, name="taken")
        with pytest.raises(ap.InvalidUsage, match="itself"):
            await client.admin.copy_shard(NAME, client)
        with pytest.raises(ap.InvalidUsage, match="give the name"):
            await client.admin.copy_shard(await client.shard_id(NAME), other)
        async with client.indexed("ix"):
            with pytest.raises(ap.Unsupported, match="Indexed"):
                await client.admin.copy_shard("ix", other)
        with pytest.raises(ap.UnknownShard):
            await client.admin.copy_shard("nothing", other)
        assert set(await other.list_shards()) == {NAME, "taken"}
        assert (await contents(other))[-1][0] == "mine"


async def test_a_source_that_went_back() -> None:
    """Goal: a source that was restored to an earlier state is behind its copy: the call says so. One that has
    gone another way since is found by `verify`."""
    source, target = await prepared(), Place()
    earlier = Place(source)
    await later(source)
    async with source.open() as client, target.open() as other:
        await client.admin.copy_shard(NAME, other)
    async with earlier.open() as client, target.open() as other, client.writer(NAME, SCHEMA) as w:
        with pytest.raises(ap.InvalidUsage, match="restored from a backup"):
            await client.admin.copy_shard(NAME, other)
        upper = w.upper.time
        await w.compare_and_append([("other", 1, upper, 1)], upper, upper + 100)
        copied = await client.admin.copy_shard(NAME, other, verify=True)
        assert copied.differing


async def test_product_times() -> None:
    """Goal: product times are copied as they are; history that compaction took is told, not guessed."""
    source, target = Place(), Place()
    async with source.open() as client, target.open() as other, client.writer(NAME, PRODUCT) as w:
        await w.compare_and_append([("a", 1, (0, 0), 1), ("b", 2, (3, 1), 1)], f((0, 0)), f((4, 0), (0, 2)))
        copied = await client.admin.copy_shard(NAME, other, verify=True)
        assert (copied.upper, copied.compared) == (f((4, 0), (0, 2)), ((0, 0),))
        await w.compare_and_append([("b", 2, (4, 1), -1)], f((4, 0), (0, 2)), f((9, 9)))
        assert (await client.admin.copy_shard(NAME, other, verify=True)).differing == ()
        async with other.reader(NAME, PRODUCT) as r:
            for time, expected in {(3, 1): ["a", "b"], (4, 0): ["a"], (4, 1): ["a"], (8, 9): ["a"]}.items():
                async with r.snapshot(time) as s:
                    assert [key for key, *_ in await s.rows()] == expected
        await w.compare_and_append([("c", 2, (9, 9), 1)], f((9, 9)), f((20, 20)))
        await move_since_to(client, (15, 15))
        await client.admin.force_compaction(NAME)
        with pytest.raises(ap.Unsupported, match="another name"):
            await client.admin.copy_shard(NAME, other)
        assert (await client.admin.copy_shard(NAME, other, name="anew", verify=True)).compared == ((15, 15),)


async def move_since_to(client: Any, time: Any) -> None:
    async with client.critical_since(NAME, "c") as c:
        await c.compare_and_downgrade_since(0, 0, time)


async def test_a_closed_shard() -> None:
    """Goal: a shard that ends can be copied, before and after it ends; its since goes on moving."""
    source, target = await prepared(), Place()
    async with source.open() as client, target.open() as other, client.writer(NAME, SCHEMA) as w:
        await client.admin.copy_shard(NAME, other)
        upper = w.upper.time
        await w.compare_and_append([("last", 1, upper + 7, 1)], upper, ap.Antichain())
        copied = await client.admin.copy_shard(NAME, other, verify=True)
        assert (copied.upper, copied.differing) == (ap.Antichain(), ())
        await move_since(client, upper + 3)
        copied = await client.admin.copy_shard(NAME, other, verify=True)
        assert (copied.since, copied.updates) == (f(upper + 3), 0)
        assert copied.compared[-1] == 2**63 - 1
        assert ("last", 1, 1) in await contents(other, upper + 7)


async def test_an_evolved_schema() -> None:
    """Goal: the copy has all schemas, and what was written by each."""
    source, target = Place(), Place()
    old, new = ap.Schema(str, V1), ap.Schema(str, V2)
    async with source.open() as client, target.open() as other:
        async with client.writer(NAME, old) as w:
            await w.write([("a", V1(name="x"))])
        await client.admin.copy_shard(NAME, other)
        assert await client.compare_and_evolve_schema(NAME, 0, new) == 1
        async with client.writer(NAME, new) as w:
            await w.write([("b", V2(name="y", age=3))])
        assert (await client.admin.copy_shard(NAME, other, verify=True)).differing == ()
        async with other.reader(NAME, new) as r, r.snapshot() as s:
            assert await s.rows() == [("a", V2(name="x"), 1), ("b", V2(name="y", age=3), 1)]
        async with other.reader(NAME, old) as r, r.snapshot() as s:
            assert await s.rows() == [("a", V1(name="x"), 1), ("b", V1(name="y"), 1)]


class Item(BaseModel):
    count: int
    weight: float


async def test_a_table_comes_back() -> None:
    """Goal: a table that was backed up and restored is a table, with its history, policy and clock; puts go
    on, and NaN is the same as NaN."""
    source, backup, restored = Place(), Place(), Place()
    async with source.open() as client, backup.open() as other, restored.open() as third:
        stock = client.table("stock", str, Item)
        times = [await stock.put("a", Item(count=n, weight=NAN)) for n in range(3)]
        copied = await client.admin.copy_shard("stock", other, verify=True)
        assert copied.differing == ()
        copied = await other.copy_shard("stock", third, name="again", verify=True, detach=True)
        assert copied.differing == ()
        again = third.table("again", str, Item)
        assert [(await again.get("a", as_of=time)).count for time in times] == [0, 1, 2]
        await again.put("b", Item(count=9, weight=1.0))
        assert await again.count() == 2
        views = [await client.admin.inspect("stock"), await third.inspect("again")]
        assert views[0].retention.seconds == views[1].retention.seconds == 86_400
        assert (views[1].table, views[1].clock, views[1].critical) == (True, "wall", {})
        with pytest.raises(ap.InvalidUsage, match="not a copy"):
            await other.copy_shard("stock", third, name="again")


async def test_a_policy_holds_no_more_than_the_source() -> None:
    """Goal: a table's copy has its policy, and gives up what the source has given up all the same."""
    source, target = Place(), Place()
    for number in range(3):
        async with source.open() as client, target.open() as other:
            stock = client.table("stock", str, int)
            await stock.put_many({f"item {n}": n + number for n in range(20)})
        async with source.open() as client, target.open() as other:
            await client.admin.copy_shard("stock", other)
        async with source.open() as client, target.open() as other:
            await client.admin.retain("stock", 1)
            await client.admin.force_compaction("stock")
            copied = await client.admin.copy_shard("stock", other, verify=True)
            assert (copied.since, copied.differing) == ((await client.admin.inspect("stock")).since, ())
            assert copied.since != f(0)


async def test_a_hold_on_the_copy_is_not_overrun() -> None:
    """Goal: who reads the copy's history keeps it; the call says what to do."""
    source, target = await prepared(), Place()
    async with source.open() as client, target.open() as other:
        await client.admin.copy_shard(NAME, other)
        await later(source)
        async with other.reader(NAME, SCHEMA, hold=0) as r:
            with pytest.raises(ap.InvalidUsage, match="End the hold"):
                await client.admin.copy_shard(NAME, other)
            await same_as(source.model, other)
            await r.release()
        await client.admin.copy_shard(NAME, other)
        await same_as(source.model, other)


async def test_the_mark_names_the_source() -> None:
    source, target = await prepared(), Place()
    async with source.open() as client, target.open() as other:
        await client.admin.copy_shard(NAME, other)
        view = await other.inspect(NAME)
        assert list(view.critical) == [mark_of(await client.shard_id(NAME))]
        await other.copy_shard(NAME, client, name="back", verify=True)


async def test_a_readonly_client_can_be_copied_from() -> None:
    source, target = await prepared(), Place()
    way = Way()
    async with source.open(), target.open() as other:
        pass
    async with (
        ap.open(blob=source.blob, consensus=source.consensus, readonly=True) as client,
        target.open(way) as other,
        ap.open(blob=target.blob, consensus=target.consensus, readonly=True) as readonly,
    ):
        assert (await client.admin.copy_shard(NAME, other, verify=True)).differing == ()
        await same_as(source.model, other)
        with pytest.raises(ap.Unsupported):
            await client.admin.copy_shard(NAME, readonly, name="b")


async def test_tags_stay_behind() -> None:
    """Goal: a copy has none of its source's tags; a tag of the copy's own stays, and is no write to it."""
    rng, source, target = random.Random(5), Place(), Place()
    async with source.open() as client, target.open() as other, client.writer(NAME, SCHEMA) as w:
        await append(source, w, rng)
        await client.tag(NAME, "source's")
        await client.admin.copy_shard(NAME, other)
        assert await other.tags(NAME) == {}
        await other.tag(NAME, "copy's")
        await append(source, w, rng)
        await client.admin.copy_shard(NAME, other)
        assert (list(await client.tags(NAME)), list(await other.tags(NAME))) == (["source's"], ["copy's"])
        await same_as(source.model, other)
