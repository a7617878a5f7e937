"""Goal: a snapshot is the exact contents at one time, in every form the same, in key order, summed and
never wrapped; at any time that is held; by few requests and in bounded memory."""

import asyncio
import math
import random
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

import aiopersist as ap
from aiopersist.testing.model import Model, comparable, summed
from aiopersist.testing.strategies import histories, times
from tests.read.snapshots_kit import BOUNDS, filled, random_history
from tests.support.schemas import INT_MAX, PRODUCT, SCHEMA
from tests.support.shards import rows_until


async def all_forms(snapshot: ap.Snapshot[Any, Any]) -> list[Any]:
    """The contents in every form there is, as lists of rows."""
    table = await snapshot.to_arrow()
    batches = [batch async for batch in snapshot.batches()]
    pandas = await snapshot.to_pandas()
    assert table.column_names == ["key", "val", "diff"] == list(pandas.columns)
    assert all(batch.schema.equals(table.schema) for batch in batches)
    as_rows = [
        [tuple(row.values()) for row in t.to_pylist()]
        for t in (table, pa.Table.from_batches(batches, table.schema))
    ]
    return [
        await snapshot.rows(),
        [row async for row in snapshot],
        *as_rows,
        (await snapshot.to_polars()).rows(),
        list(pandas.itertuples(index=False, name=None)),
    ]


class Place(BaseModel):
    model_config = ConfigDict(frozen=True)
    name: str | None
    at: float


class Thing(BaseModel):
    tags: list[str]
    seen: datetime | None = None


class Kinds(NamedTuple):
    id: str
    key: Any
    val: Any
    keys: list[Any]
    vals: list[Any]


NAN = math.nan


DAY = datetime(2020, 2, 2, tzinfo=UTC)


KINDS = [
    Kinds("floats", float, float | None, [NAN, -math.inf, -1.5, 0.0, math.inf], [None, NAN, 1.0]),
    Kinds("optional text", str | None, None, [None, "", "a", "b\0", "é", "\U0001f600"], [None]),
    Kinds("bytes", bytes, bool, [b"", b"\0", b"\xff", b"\xff\0"], [False, True]),
    Kinds(
        "models",
        Place,
        Thing,
        [Place(name=None, at=NAN), Place(name="", at=1), Place(name="b", at=-1), Place(name="b", at=NAN)],
        [Thing(tags=[]), Thing(tags=["a"], seen=DAY), Thing(tags=["a", "b"]), Thing(tags=["b"])],
    ),
    Kinds("lists", list[int | None], list[str], [[], [None], [None, 1], [1], [1, -1]], [[], [""], ["a"]]),
    Kinds("greatest ints", int, int, [-(2**63), -1, 0, INT_MAX], [INT_MAX, -(2**63)]),
]


class Sum(NamedTuple):
    id: str
    diffs: list[int]
    overflows: bool


SUMS = [
    Sum("greatest", [INT_MAX - 5, 5], False),
    Sum("one more", [INT_MAX - 5, 6], True),
    Sum("least", [-INT_MAX, -1], False),
    Sum("one less", [-INT_MAX, -2], True),
    Sum("beyond and back", [INT_MAX, INT_MAX, -INT_MAX, -INT_MAX, 7], False),
    Sum("twice around", [INT_MAX, INT_MAX, 2], True),
    Sum("beyond, to zero", [INT_MAX, 1, -INT_MAX, -1], False),
]


BAD_TIMES = [ap.Antichain(3), ap.Antichain(), (1, 2), (3,), -1, 2**63, True, 1.0, "3"]


# --- contents -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
async def test_all_forms_agree_with_the_oracle_at_every_time(bounds: Any) -> None:
    async with ap.open("mem://", settings=ap.Settings(**bounds)) as client:
        for seed in range(1 if "blob_target_size" in bounds else 2):
            model = await random_history(client, random.Random(seed), str(seed))
            reader = await client.reader(str(seed), SCHEMA)
            for time in {0, 1, model.upper[0] - 1, *range(2, model.upper[0], 4)}:
                async with reader.snapshot(time) as snapshot:
                    assert snapshot.as_of == time
                    expected = model.contents(time)
                    for form in await all_forms(snapshot):
                        assert form == expected
            await reader.aclose()


async def test_contents_on_every_location(client: ap.Client) -> None:
    model = await random_history(client, random.Random(7))
    reader = await client.reader("s", SCHEMA)
    for time in (0, model.upper[0] // 2, model.upper[0] - 1):
        async with reader.snapshot(time) as snapshot:
            expected = model.contents(time)
            assert all(form == expected for form in await all_forms(snapshot))


@settings(max_examples=40)
@given(history=histories(2), as_of=times(2), bounds=st.sampled_from(list(BOUNDS.values())))
def test_product_times(history: Any, as_of: Any, bounds: Any) -> None:
    """Every update at or before `as_of` in the partial order, and nothing else."""

    async def scenario() -> None:
        async with ap.open("mem://", settings=ap.Settings(**bounds)) as client:
            writer, model = await client.writer("p", PRODUCT), Model([(0, 0)])
            for rows, lower, upper in history:
                await writer.compare_and_append(rows, lower, upper)
                model.append(rows, lower.elements, upper.elements)
            reader = await client.reader("p", PRODUCT)
            if not model.complete(as_of):
                with pytest.raises(ap.NotReadable) as caught:
                    await reader.snapshot(as_of, wait=False)
                assert caught.value.upper == ap.Antichain(*model.upper)
                return
            async with reader.snapshot(as_of) as snapshot:
                assert all(form == model.contents(as_of) for form in await all_forms(snapshot))

    asyncio.run(scenario())


@pytest.mark.parametrize("case", KINDS, ids=lambda c: c.id)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
async def test_order_and_sums_of_every_kind_of_key(case: Kinds, bounds: Any) -> None:
    """NaN equals itself and sorts last, nulls first; keys that meet in different parts become one."""
    rng = random.Random(1)
    schema = ap.Schema(key=case.key, val=case.val)
    async with ap.open("mem://", settings=ap.Settings(**bounds)) as client:
        writer = await client.writer("k", schema)
        everything = []
        for t in range(4):
            rows = [(k, v, t, rng.choice([-1, 1, 2])) for k in case.keys for v in case.vals]
            rng.shuffle(rows)
            await writer.compare_and_append(rows, t, t + 1)
            everything += [(k, v, d) for k, v, _, d in rows]
        reader = await client.reader("k", schema)
        expected = comparable(summed(everything))  # in Python NaN is not equal to itself
        async with reader.snapshot() as snapshot:
            assert comparable(await snapshot.rows()) == expected
            assert comparable([row async for row in snapshot]) == expected


async def test_rows_come_with_multiplicities(mem: ap.Client) -> None:
    writer = await mem.writer("s", SCHEMA)
    await writer.compare_and_append([("a", 1, 0, 3), ("b", 1, 0, 1), ("c", 1, 0, -2), ("d", 1, 0, 2)], 0, 1)
    await writer.compare_and_append([("a", 1, 1, -2), ("b", 1, 1, -1), ("c", 1, 1, -1)], 1, 2)
    reader = await mem.reader("s", SCHEMA)
    async with reader.snapshot(1) as snapshot:
        assert await snapshot.rows() == [("a", 1, 1), ("c", 1, -3), ("d", 1, 2)]
    async with reader.snapshot(0) as snapshot:
        assert await snapshot.rows() == [("a", 1, 3), ("b", 1, 1), ("c", 1, -2), ("d", 1, 2)]


@pytest.mark.parametrize("case", SUMS, ids=lambda c: c.id)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
@pytest.mark.parametrize("apart", [False, True], ids=["one append", "many appends"])
async def test_sums_beyond_64_bits(case: Sum, bounds: Any, apart: bool) -> None:
    """Only a final sum out of range is an error, which names its key and val; never a wrap."""
    async with ap.open("mem://", settings=ap.Settings(**bounds)) as client:
        writer = await client.writer("s", SCHEMA)
        rows = [("k", 1, t if apart else 0, d) for t, d in enumerate(case.diffs)]
        for t in range(len(rows)):
            here = [row for row in rows if row[2] == t]
            await writer.compare_and_append([*here, ("a", t, t, 1), ("z", t, t, 1)], t, t + 1)
        reader = await client.reader("s", SCHEMA)
        async with reader.snapshot() as snapshot:

            async def iterated() -> list[Any]:
                return [row async for row in snapshot]

            for form in (snapshot.rows, snapshot.to_arrow, snapshot.to_polars, snapshot.to_pandas, iterated):
                if not case.overflows:
                    await form()
                    continue
                with pytest.raises(ap.DiffOverflow) as caught:
                    await form()
                assert (caught.value.key, caught.value.val) == ("k", 1)
                assert caught.value.shard_id == reader.shard_id
            if not case.overflows:
                total = sum(case.diffs)
                assert [r for r in await iterated() if r[0] == "k"] == ([("k", 1, total)] if total else [])


# --- as_of --------------------------------------------------------------------------------------------


async def test_every_time_that_is_held_stays_readable(client: ap.Client) -> None:
    writer = await filled(client, 12)
    reader = await client.reader("s", SCHEMA)
    for time in (0, 5, 11, 3):
        async with reader.snapshot(time) as snapshot:
            assert await snapshot.rows() == rows_until(time)
    assert await (await reader.snapshot(as_of=2)).rows() == rows_until(2)
    await writer.compare_and_append([], 12, 2000)
    async with reader.snapshot(1999) as snapshot:
        assert await snapshot.rows() == rows_until(11)


async def test_no_time_is_the_greatest_complete_one_of_now(client: ap.Client, location: Any) -> None:
    """Also what another process has just completed."""
    await filled(client, 1)
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        reader = await client.reader("s", SCHEMA)
        writer = await other.writer("s", SCHEMA)
        for t in range(1, 6):
            await writer.compare_and_append([("k", t, t, 1)], t, t + 1)
            async with reader.snapshot() as snapshot:
                assert snapshot.as_of == t
                assert await snapshot.rows() == rows_until(t)


@pytest.mark.parametrize("wait", [True, False])
async def test_without_a_complete_time(mem: ap.Client, wait: bool) -> None:
    """Goal: a read of a shard without any append is refused at once, instead of waiting for ever;
    by a fresh look, so an append that another process has just made is read."""
    writer = await mem.writer("s", SCHEMA)
    reader = await mem.reader("s", SCHEMA)
    async with asyncio.timeout(50):
        with pytest.raises(ap.NotReadable, match="shard 's': nothing was appended yet") as caught:
            await reader.snapshot(wait=wait)
    assert (caught.value.as_of, caught.value.upper) == (None, ap.Antichain(0))
    waiting = asyncio.ensure_future(reader.snapshot(2).__aenter__())
    await writer.compare_and_append([("k", 0, 0, 1)], 0, 3)
    for snapshot in (await reader.snapshot(wait=wait), await waiting):
        assert (snapshot.as_of, await snapshot.rows()) == (2, [("k", 0, 1)])


async def test_a_finished_shard(client: ap.Client) -> None:
    writer = await filled(client, 2)
    await writer.compare_and_append([("x", 9, INT_MAX, 1)], 2, ap.Antichain())
    reader = await client.reader("s", SCHEMA)
    async with reader.snapshot() as snapshot:
        assert (snapshot.as_of, await snapshot.rows()) == (INT_MAX, [*rows_until(1), ("x", 9, 1)])
    async with reader.snapshot(INT_MAX - 1, wait=False) as snapshot:
        assert await snapshot.rows() == rows_until(1)


async def test_it_waits_for_its_time(client: ap.Client, location: Any) -> None:
    await filled(client, 2)
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        writer = await other.writer("s", SCHEMA)
        reader = await client.reader("s", SCHEMA)
        with pytest.raises(ap.NotReadable) as caught:
            await reader.snapshot(3, wait=False)
        assert (caught.value.as_of, caught.value.upper) == (3, ap.Antichain(2))
        waiting = asyncio.ensure_future(reader.snapshot(3).__aenter__())
        await writer.compare_and_append([("k", 2, 2, 1)], 2, 3)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await writer.compare_and_append([("k", 3, 3, 1)], 3, 4)
        async with asyncio.timeout(50):
            snapshot = await waiting
        assert await snapshot.rows() == rows_until(3)
        async with reader.snapshot(3, wait=False) as again:
            assert await again.rows() == rows_until(3)


async def test_since_is_checked_before_the_upper(mem: ap.Client) -> None:
    """At once, not after a wait."""
    await filled(mem, 2)
    reader = await mem.reader("s", SCHEMA, hold=0)
    await reader.downgrade_since(50)
    for wait in (True, False):
        async with asyncio.timeout(50):
            with pytest.raises(ap.SinceViolation) as caught:
                await reader.snapshot(20, wait=wait)
            assert (caught.value.as_of, caught.value.since) == (20, ap.Antichain(50))
    with pytest.raises(ap.NotReadable):
        await reader.snapshot(60, wait=False)


@pytest.mark.parametrize("bad", BAD_TIMES, ids=repr)
async def test_bad_times(mem: ap.Client, bad: Any) -> None:
    await filled(mem)
    reader = await mem.reader("s", SCHEMA)
    with pytest.raises(ap.InvalidUsage) as caught:
        await reader.snapshot(bad)
    assert caught.value.kind is ap.UsageKind.INVALID_TIME


@pytest.mark.parametrize("bad", [None, 3, (1,), (1, 2, 3), (1, -1), ap.Antichain((1, 1))], ids=repr)
async def test_bad_product_times(mem: ap.Client, bad: Any) -> None:
    writer = await mem.writer("p", PRODUCT)
    await writer.compare_and_append([("a", 1, (0, 0), 1)], (0, 0), (5, 5))
    reader = await mem.reader("p", PRODUCT)
    with pytest.raises(ap.InvalidUsage) as caught:
        await reader.snapshot(bad)
    assert caught.value.kind is ap.UsageKind.INVALID_TIME


@pytest.mark.parametrize(
    ("schema", "times"), [(SCHEMA, (0, 1, 5)), (PRODUCT, ((0, 0), (1, 1), (5, 5)))], ids=["ints", "product"]
)
async def test_a_part_without_updates_as_of_a_time(mem: ap.Client, schema: Any, times: Any) -> None:
    """Goal: fetched elsewhere it has none either."""
    as_of, time, upper = times
    writer = await mem.writer("p", schema)
    await writer.compare_and_append([("a", 1, time, 1)], as_of, upper)
    reader = await mem.reader("p", schema)
    for at, expected in ((as_of, []), (time, [("a", 1, time, 1)])):
        async with reader.snapshot(at) as snapshot:
            sent = [part.to_transmittable() for part in snapshot.parts()]
            assert [tuple(u) for data in sent for u in await mem.fetch_part(data)] == expected
