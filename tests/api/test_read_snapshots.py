"""Goal: a snapshot is the exact contents at one time, in every form the same, in key order, summed and
never wrapped; at any time that is held; by few requests and in bounded memory."""

import asyncio
import math
import random
import uuid
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from aiopersist.testing.model import Model, comparable, summed
from aiopersist.testing.strategies import histories, times
from tests.support.schemas import PRODUCT, SCHEMA, TIME_MAX
from tests.support.shards import rows_until

KEYS = [letter * n for letter in "abcdefg" for n in (1, 2)]
BOUNDS = {
    "inline": {},
    "blobs": {"inline_writes_single_max_bytes": 0},
    "tiny parts": {"inline_writes_single_max_bytes": 0, "blob_target_size": 10},
    "tiny row groups": {"inline_writes_single_max_bytes": 0, "row_group_bytes": 16},
    "flushed": {"inline_writes_single_max_bytes": 200, "inline_writes_total_max_bytes": 500},
}


async def filled(client: ap.Client, upper: int = 5) -> ap.WriteHandle[str, int]:
    """A shard with one row more at each complete time."""
    writer: ap.WriteHandle[str, int] = await client.writer("s", SCHEMA)
    for t in range(upper):
        await writer.compare_and_append([("k", t, t, 1)], t, t + 1)
    return writer


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


async def random_history(client: ap.Client, rng: random.Random, name: str = "s") -> Model:
    """Appends of all sizes, with many keys that meet again."""
    writer = await client.writer(name, SCHEMA)
    model, lower = Model(), 0
    for size in (3, 0, 20, 7, 70, 1, 10):
        upper = lower + rng.choice([1, 2, 5])
        rows = [
            (rng.choice(KEYS), rng.randrange(4), rng.randrange(lower, upper), rng.choice([-1, 1, 2]))
            for _ in range(size)
        ]
        await writer.compare_and_append(rows, lower, upper)
        model.append(rows, [lower], [upper])
        lower = upper
    await writer.aclose()
    return model


# --- contents ----------------------------------------------------------------------------------------


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
    Kinds("greatest ints", int, int, [-(2**63), -1, 0, TIME_MAX], [TIME_MAX, -(2**63)]),
]


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


class Sum(NamedTuple):
    id: str
    diffs: list[int]
    overflows: bool


SUMS = [
    Sum("greatest", [TIME_MAX - 5, 5], False),
    Sum("one more", [TIME_MAX - 5, 6], True),
    Sum("least", [-TIME_MAX, -1], False),
    Sum("one less", [-TIME_MAX, -2], True),
    Sum("beyond and back", [TIME_MAX, TIME_MAX, -TIME_MAX, -TIME_MAX, 7], False),
    Sum("twice around", [TIME_MAX, TIME_MAX, 2], True),
    Sum("beyond, to zero", [TIME_MAX, 1, -TIME_MAX, -1], False),
]


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


# --- as_of ---------------------------------------------------------------------------------------------


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
    """Goal: who reads a shard that nothing was appended to is told so at once, instead of waiting for ever;
    by a fresh look, so what another process has just appended is read."""
    writer = await mem.writer("s", SCHEMA)
    reader = await mem.reader("s", SCHEMA)
    async with asyncio.timeout(30):
        with pytest.raises(ap.NotReadable, match="shard 's': nothing was appended yet") as caught:
            await reader.snapshot(wait=wait)
    assert (caught.value.as_of, caught.value.upper) == (None, ap.Antichain(0))
    waiting = asyncio.ensure_future(reader.snapshot(2).__aenter__())
    await writer.compare_and_append([("k", 0, 0, 1)], 0, 3)
    for snapshot in (await reader.snapshot(wait=wait), await waiting):
        assert (snapshot.as_of, await snapshot.rows()) == (2, [("k", 0, 1)])


async def test_a_finished_shard(client: ap.Client) -> None:
    writer = await filled(client, 2)
    await writer.compare_and_append([("x", 9, TIME_MAX, 1)], 2, ap.Antichain())
    reader = await client.reader("s", SCHEMA)
    async with reader.snapshot() as snapshot:
        assert (snapshot.as_of, await snapshot.rows()) == (TIME_MAX, [*rows_until(1), ("x", 9, 1)])
    async with reader.snapshot(TIME_MAX - 1, wait=False) as snapshot:
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
        async with asyncio.timeout(10):
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
        async with asyncio.timeout(2):
            with pytest.raises(ap.SinceViolation) as caught:
                await reader.snapshot(20, wait=wait)
            assert (caught.value.as_of, caught.value.since) == (20, ap.Antichain(50))
    with pytest.raises(ap.NotReadable):
        await reader.snapshot(60, wait=False)


BAD_TIMES = [ap.Antichain(3), ap.Antichain(), (1, 2), (3,), -1, 2**63, True, 1.0, "3"]


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


# --- life ------------------------------------------------------------------------------------------------


async def test_it_stays_what_it_is(client: ap.Client) -> None:
    """While others append, and give up its history."""
    writer = await filled(client, 5)
    reader = await client.reader("s", SCHEMA)
    mover = await client.reader("s", SCHEMA, hold=0)
    async with reader.snapshot(3) as snapshot:
        rows = aiter(snapshot)
        first = await anext(rows)
        await writer.compare_and_append([("a", 0, 5, 1), ("k", 1, 5, -1)], 5, 6)
        await mover.downgrade_since(5)
        assert [first, *[row async for row in rows]] == rows_until(3)
        assert await snapshot.rows() == rows_until(3)


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
async def test_iterations_survive_cancelled_waits(bounds: Any) -> None:
    """Every row once, in order, however often a wait is given up."""
    rng, url = random.Random(3), f"mem://{uuid.uuid4().hex}"
    faults = Faults(latency_s=(0, 0.002))
    blob, consensus = FaultyBlob(ap.open_blob(url), faults), FaultyConsensus(ap.open_consensus(url), faults)
    options = ap.Settings(blob_cache_bytes=0, **bounds)
    async with ap.open(blob=blob, consensus=consensus, settings=options) as client:
        model = await random_history(client, rng)
        reader = await client.reader("s", SCHEMA)
        async with reader.snapshot() as snapshot:
            for items in (aiter(snapshot), snapshot.batches()):
                seen: list[Any] = []
                while True:
                    try:
                        async with asyncio.timeout(rng.choice([0, 0.0005, 0.002])):
                            seen.append(await anext(items))  # type: ignore[call-overload]
                    except TimeoutError:
                        continue
                    except StopAsyncIteration:
                        break
                rows = (
                    seen
                    if seen and isinstance(seen[0], tuple)
                    else [tuple(r.values()) for b in seen for r in b.to_pylist()]
                )
                assert rows == model.contents(snapshot.as_of)


async def test_closing_ends_every_use(client: ap.Client) -> None:
    await filled(client)
    reader = await client.reader("s", SCHEMA)
    snapshot = await reader.snapshot(4)
    rows, batches = aiter(snapshot), snapshot.batches()
    await anext(rows)
    await snapshot.aclose()
    await snapshot.aclose()
    calls = [snapshot.rows, snapshot.to_arrow, snapshot.to_polars, snapshot.to_pandas]
    calls += [lambda: anext(rows), lambda: anext(batches), lambda: anext(aiter(snapshot))]
    for call in calls:
        with pytest.raises(ap.InvalidUsage, match="CLOSED"):
            await call()
    assert not reader._shard.register.pins
    async with reader.snapshot(4) as again:
        assert await again.rows() == rows_until(4)


async def test_an_iteration_that_failed_does_not_look_like_one_that_ended(mem: ap.Client) -> None:
    writer = await mem.writer("s", SCHEMA)
    await writer.compare_and_append([("k", 1, 0, TIME_MAX), ("k", 1, 1, 1)], 0, 2)
    async with (await mem.reader("s", SCHEMA)).snapshot() as snapshot:
        rows = aiter(snapshot)
        for _ in range(3):
            with pytest.raises(ap.DiffOverflow):
                await anext(rows)


async def test_a_lost_part_is_never_an_empty_one() -> None:
    """The store lost it while the reader is registered: `Corruption`."""
    url = f"mem://{uuid.uuid4().hex}"
    blob = ap.open_blob(url)
    options = ap.Settings(inline_writes_single_max_bytes=0, blob_cache_bytes=0)
    async with ap.open(blob=blob, consensus=ap.open_consensus(url), settings=options) as client:
        await filled(client, 3)
        reader = await client.reader("s", SCHEMA)
        parts = [key async for key, _ in blob.list("") if key.endswith(".parquet")]
        snapshot = await reader.snapshot(2)
        await blob.delete(parts[1:2])
        for _ in range(2):
            with pytest.raises(ap.Corruption) as caught:
                await snapshot.rows()
            assert caught.value.shard_id == reader.shard_id
        with pytest.raises(ap.Corruption):
            async for _ in snapshot:
                pass


# --- cost --------------------------------------------------------------------------------------------------


def requests(client: ap.Client) -> dict[str, int]:
    return {op: client.metrics[op].count for op in client.metrics if op != "consensus.now"}


async def test_a_known_complete_time_of_inline_data_costs_no_request(client: ap.Client) -> None:
    writer = await filled(client)
    reader = await client.reader("s", SCHEMA)
    before = requests(client)
    for time in (0, 4, 2):
        async with reader.snapshot(time) as snapshot:
            assert await snapshot.rows() == rows_until(time)
            assert [row async for row in snapshot] == rows_until(time)
    assert requests(client) == before
    async with reader.snapshot() as snapshot:  # one linearizable read
        await snapshot.rows()
    after = requests(client)
    assert sum(after.values()) - sum(before.values()) == 1
    await writer.aclose()


async def test_parts_cost_at_most_two_requests_each(location: Any) -> None:
    options = ap.Settings(inline_writes_single_max_bytes=0, blob_cache_bytes=0)
    place = {"blob": location.blob, "consensus": location.consensus}
    async with ap.open(**place, settings=options, maintenance=False) as client:
        await filled(client, 6)
        reader = await client.reader("s", SCHEMA)
        for form in ("rows", "batches"):
            before = requests(client)
            async with reader.snapshot(3) as snapshot:  # four parts; those after it are not touched
                if form == "rows":
                    assert await snapshot.rows() == rows_until(3)
                else:
                    assert sum([b.num_rows async for b in snapshot.batches()]) == 4
            asked = {op: count - before.get(op, 0) for op, count in requests(client).items()}
            assert sum(asked.values()) == 4, asked


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("runs", "row_group", "memory"),
    [(3, 64 * 1024, 2**28), (40, 64 * 1024, 2**28), (8, 2**22, 2**21)],
    ids=["few runs", "many runs", "large row groups"],
)
async def test_batches_need_bounded_memory(runs: int, row_group: int, memory: int) -> None:
    """Many runs, as much again in each: what is held is a row group of each, or what a read may have."""
    rows = 240_000 // runs
    options = ap.Settings(
        read_memory_bytes=memory,
        inline_writes_single_max_bytes=0,
        row_group_bytes=row_group,
        blob_cache_bytes=0,
        blob_target_size=2**30,
    )
    schema = ap.Schema(key=bytes, val=int)
    async with ap.open("mem://", settings=options) as client:
        writer = await client.writer("big", schema)
        for run in range(runs):
            keys = [b"%032d" % ((i * 7919 + run) % 1_000_003) for i in range(rows)]
            table = pa.table(
                {
                    "key": keys,
                    "val": pa.array([run] * rows),
                    "time": pa.array([run] * rows),
                    "diff": pa.array([1] * rows),
                }
            )
            await writer.compare_and_append(table, run, run + 1)
            del table, keys
        reader = await client.reader("big", schema)
        async with reader.snapshot() as snapshot:
            total = (await snapshot.to_arrow()).nbytes
            pa.default_memory_pool().release_unused()
            before, peak, seen, last = pa.total_allocated_bytes(), 0, 0, b""
            async for batch in snapshot.batches():
                assert batch.column("key")[0].as_py() >= last
                last = batch.column("key")[-1].as_py()
                seen += batch.num_rows
                peak = max(peak, pa.total_allocated_bytes() - before)
            assert seen == runs * rows
            assert total > 12_000_000
            assert peak < max(total // 4, min(6 * runs * row_group, 2 * memory)), (peak, total)
