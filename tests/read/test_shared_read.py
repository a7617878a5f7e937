"""Goal: the pieces of a shared read, one after the other, equal a plain list of updates, in any process
and beside any other work; a read that was given up is an error, never wrong data."""

import itertools
import random
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob
from aiopersist.testing.model import Model
from tests.conftest import StoreUrls
from tests.read.shared_read_kit import (
    AT,
    KINDS,
    LAYOUTS,
    TASKS,
    TINY,
    all_read,
    changes,
    contents,
    filled,
    read,
    rows_of,
    told,
)
from tests.read.test_query import client_of
from tests.support.processes import Place
from tests.support.schemas import SCHEMA, Val

pytestmark = pytest.mark.usefixtures("started_postgres")


class Evolved(BaseModel):
    amount: int | None
    number: float
    more: str | None = None


WIDE: dict[str, tuple[Any, list[int]]] = {
    "where clocks are put back": (
        pa.timestamp("s", "Europe/Berlin"),
        [int(AT.timestamp()) + 60 * n for n in range(-70, 140, 7)],
    ),
    "uint64": (pa.uint64(), [2**64 - 30 + n for n in range(30)]),
    "float32": (pa.float32(), list(range(2**24 - 30, 2**24))),
    "large string": (pa.large_string(), list(range(30))),
    "wide binary": (pa.binary(300), list(range(12))),
}


def as_column(t: Any, values: list[int]) -> Any:
    if pa.types.is_temporal(t):
        return pa.array(values, pa.int64()).cast(t)
    if pa.types.is_fixed_size_binary(t):
        return pa.array([b"%0300d" % value for value in values], t)
    if pa.types.is_large_string(t):
        return pa.array([f"{value:05}" for value in values], t)
    return pa.array(values, pa.uint64()).cast(t)


CONDITIONS: dict[str, tuple[Any, Any, Callable[..., bool]]] = {
    "key": ("str", pc.field("key") > "k030", lambda k, v: k > "k030"),
    "val": ("str", pc.field("val") == 2, lambda k, v: v == 2),
    "either": ("str", (pc.field("key") < "k010") | (pc.field("val") == 1), lambda k, v: k < "k010" or v == 1),
    "nothing": ("str", pc.field("val") == 99, lambda k, v: False),
    "null": ("optional", pc.field("key").is_null(), lambda k, v: k is None),
    "field": ("struct", pc.field("region") == "b", lambda k, v: k.region == "b"),
    "field of val": ("struct", pc.field("val", "amount") == 1, lambda k, v: v.amount == 1),
    "nan": ("float", pc.is_nan(pc.field("key")), lambda k, v: k != k),
    "float": ("float", pc.field("key") >= 0.0, lambda k, v: k >= 0.0),
    "hot": ("hot", pc.field("val") < 50, lambda k, v: v < 50),
}


WITHOUT_STATISTICS = {"stats_budget_bytes": 0}


async def sizes(client: ap.Client, pieces: list[bytes]) -> list[int]:
    return [len(await rows_of(client, piece)) for piece in pieces]


# --- a place, and random data -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(k, layout) for k in KINDS for layout in LAYOUTS if layout == "both" or k in ("str", "hot", "struct")],
)
async def test_pieces_are_the_contents_and_the_changes(place: Place, kind: str, layout: str) -> None:
    """Goal: for every type, layout and number of tasks the pieces, in order, are exactly the sorted sums: no
    row in two, none missing, at times before and after compaction."""
    schema, keys, vals = KINDS[kind]
    client, other = await place.client(**LAYOUTS[layout]), await place.client()
    model = await filled(client, schema, keys, vals, seed=len(kind))
    await all_read(client, other, contents(model, 9))
    await all_read(client, other, contents(model, 5), as_of=5)
    await all_read(client, other, changes(model, 2, 10), start=2)
    await all_read(other, client, changes(model, 3, 7), start=3, end=7)


@pytest.mark.parametrize("repeats", [1, 8], ids=["spread", "hot"])
@pytest.mark.parametrize("kind", WIDE)
async def test_arrow_types_that_python_orders_otherwise(place: Place, kind: str, repeats: int) -> None:
    """Goal: bounds of Arrow types that Python has less exactly, or orders in another way, lose no row."""
    t, values = WIDE[kind]
    client = await place.client(**{**LAYOUTS["blobs"], "blob_target_size": 300, "row_group_bytes": 60})
    schema: Any = ap.Schema(key=t, val=int)
    numbers = [value for value in values for _ in range(repeats)]
    columns = {
        "key": as_column(t, numbers),
        "val": pa.array([n % repeats for n in range(len(numbers))]),
        "time": pa.array([0] * len(numbers)),
        "diff": pa.array([1] * len(numbers)),
    }
    async with client.writer("t", schema) as w:
        await w.compare_and_append(pa.table(columns), 0, 1)
    async with client.workers.shared_read("t") as shared:
        for tasks in TASKS:
            batches = []
            for piece in await shared.pieces(tasks):
                batches += [batch async for batch in client.workers.read_piece(piece)]
            found = pa.Table.from_batches(batches)
            for name in ("key", "val", "diff"):
                assert found.column(name).combine_chunks().equals(columns[name]), tasks


@pytest.mark.parametrize("layout", ["inline", "both"])
@pytest.mark.parametrize("compacted", [False, True])
async def test_contents_at_product_times(place: Place, compacted: bool, layout: str) -> None:
    client, other = await place.client(**LAYOUTS[layout]), await place.client()
    schema: Any = ap.Schema(key=str, val=int, time=2)
    chance, model = random.Random(3), Model(upper=[(0, 0)])
    upper: Any = [(0, 0)]
    async with client.writer("t", schema) as w:
        for later in [[(0, 2), (1, 0)], [(0, 4), (2, 0)], [(0, 6), (3, 3), (4, 0)]]:
            fits = [
                (a, b)
                for a in range(4)
                for b in range(6)
                if ap.Antichain(*upper).less_equal((a, b)) and not ap.Antichain(*later).less_equal((a, b))
            ]
            rows = [
                (
                    f"k{chance.randrange(40):02}",
                    chance.randrange(3),
                    chance.choice(fits),
                    chance.choice([1, 2, -1]),
                )
                for _ in range(60)
            ]
            await w.compare_and_append(rows, ap.Antichain(*upper), ap.Antichain(*later))
            model.append(rows, upper, later)
            upper = later
        if compacted:
            async with client.critical_since("t", "c") as since:
                await since.compare_and_downgrade_since(0, 0, ap.Antichain((0, 1), (1, 0)))
            await client.admin.force_compaction("t")
    for as_of in [(0, 1), (1, 1), (2, 2), (0, 5), (3, 2)]:
        await all_read(client, other, contents(model, as_of), as_of=as_of)


@pytest.mark.parametrize("statistics", [True, False], ids=["", "no statistics"])
@pytest.mark.parametrize("name", CONDITIONS)
async def test_a_condition_is_exact(place: Place, name: str, statistics: bool) -> None:
    """Goal: whether the plan knows it or not; and with parts that the state says nothing of."""
    kind, where, keep = CONDITIONS[name]
    layout = LAYOUTS["both"] | ({} if statistics else WITHOUT_STATISTICS)
    client, other = await place.client(**layout), await place.client()
    model = await filled(client, *KINDS[kind])
    async with client.workers.shared_read("t") as whole, client.workers.shared_read("t", start=2) as changed:
        for tasks, planned in itertools.product(TASKS, (None, where)):
            assert await read(other, await whole.pieces(tasks, planned), where) == contents(model, 9, keep)
            assert await read(other, await changed.pieces(tasks, planned), where) == changes(
                model, 2, 10, keep
            )
        unknown = pc.field("nothing") == 1
        piece = (await whole.pieces(1))[0]
        for refused in (rows_of(other, piece, unknown), whole.pieces(1, unknown)):
            with pytest.raises(ap.InvalidUsage) as caught:
                await refused
            assert caught.value.kind == ap.UsageKind.INVALID_COLUMN


async def test_a_plan_with_a_condition_leaves_out_what_cannot_match() -> None:
    """Goal: of small parts only those that may match are fetched; without the condition the plan names all,
    and each is fetched. Of a large part the row groups that may match are shared among the tasks."""
    where = (pc.field("key") >= "c000") & (pc.field("key") < "c100")

    async def rows_and_requests(bounds: str, planned: Any) -> tuple[list[int], Counter[str]]:
        faults, name = Faults(), uuid.uuid4().hex
        blob = FaultyBlob(ap.open_blob(f"mem://{name}"), faults)
        async with client_of(bounds, blob, f"mem://{name}") as client:
            async with client.writer("t", SCHEMA) as writer:
                for time, letter in enumerate("abcd"):
                    updates = [(f"{letter}{i:03}", i, time, 1) for i in range(200)]
                    await writer.compare_and_append(updates, time, time + 1)
            before = Counter(faults.calls)
            async with client.workers.shared_read("t") as shared:
                pieces = await shared.pieces(4, planned)
                rows = [len(await rows_of(client, piece, where)) for piece in pieces]
        assert sum(rows) == 100
        return rows, Counter(faults.calls) - before

    _, requests = await rows_and_requests("blobs", where)
    assert (requests["get"], requests["get_range"]) == (1, 0)
    _, requests = await rows_and_requests("blobs", None)
    assert (requests["get"], requests["get_range"]) == (4, 0)
    rows, _ = await rows_and_requests("tiny row groups", where)
    assert max(rows) <= 30
    rows, _ = await rows_and_requests("tiny row groups", None)
    assert max(rows) == 100


@pytest.mark.parametrize("kind", ["str", "float"])
async def test_no_task_has_a_range_without_matches(place: Place, kind: str) -> None:
    """Goal: a few rows of every run, whose row groups a plan cuts; for floats, where Arrow orders NaN in
    another way, only that no row is lost."""
    client = await place.client(**{**TINY, "row_group_bytes": 2000, "inline_writes_single_max_bytes": 0})
    keys: list[Any] = [f"k{n:04}" for n in range(2000)] if kind == "str" else [n / 2 for n in range(2000)]
    async with client.writer("t", ap.Schema(key=type(keys[0]), val=int)) as w:
        for run in range(8):
            await w.compare_and_append([(k, run, run, 1) for k in keys[run::8]], run, run + 1)
    for where in (pc.field("key") < keys[40], pc.field("key") >= keys[1960]):
        async with client.workers.shared_read("t") as shared:
            pieces = await shared.pieces(8, where)
            rows = [len(await rows_of(client, piece, where)) for piece in pieces]
            assert sum(rows) == 40
            assert kind == "float" or (0 not in rows and len(await shared.pieces(8)) >= 4), rows


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_schema_that_evolved(place: Place, layout: str) -> None:
    """Goal: parts of both schemas give rows of the newest one; a read that was planned with the older one
    goes on."""
    client, other = await place.client(**LAYOUTS[layout]), await place.client()
    old, new = ap.Schema(key=str, val=Val), ap.Schema(key=str, val=Evolved)
    keys = [f"k{n:02}" for n in range(40)]
    model = await filled(client, old, keys, KINDS["struct"][2], compacting=False)
    async with client.workers.shared_read("t") as before:
        older = await before.pieces(4)
        assert await client.compare_and_evolve_schema("t", 0, new) == 1
        rows = [(k, Evolved(amount=1, number=0.5, more="m"), 10, 1) for k in keys]
        async with client.writer("t", new) as w:
            await w.compare_and_append(rows, 10, 11)
        assert await read(other, older) == contents(model, 9)
        evolved = Model()
        evolved.append(
            [(k, Evolved(**v.model_dump()), t, d) for k, v, t, d in model.updates] + rows, [0], [11]
        )
        await all_read(other, client, contents(evolved, 10))
        await all_read(other, client, changes(evolved, 1, 11), start=1)


async def test_every_kind_of_store(location: StoreUrls) -> None:
    """Goal: planned by a client that has gone, read by another, compacted and collected meanwhile."""
    settings = ap.Settings(**LAYOUTS["both"])
    async with ap.open(
        blob=location.blob, consensus=location.consensus, settings=settings, maintenance=False
    ) as reader:
        async with ap.open(
            blob=location.blob, consensus=location.consensus, settings=settings, maintenance=False
        ) as client:
            model = await filled(client, *KINDS["struct"])
            shared = await client.workers.shared_read("t", keep=True)
            pieces = await shared.pieces(4)
        await reader.force_compaction("t")
        await reader.force_gc("t")
        assert await read(reader, pieces) == contents(model, 9)


# --- how it is divided --------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1, 2, 1000], ids=["one key", "two keys", "many keys"])
async def test_pieces_are_about_equal(place: Place, keys: int) -> None:
    """Goal: also where one key has all rows; and about as many as were asked for."""
    client = await place.client(**{**TINY, "inline_writes_single_max_bytes": 0})
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([(f"k{n % keys:04}", n, 0, 1) for n in range(1000)], 0, 1)
    async with client.workers.shared_read("t") as shared:
        assert shared.updates_max == 1000
        for tasks in (2, 8):
            found = await sizes(client, await shared.pieces(tasks))
            assert sum(found) == 1000
            assert tasks / 2 <= len(found) <= 2 * tasks
            assert max(found) <= 2.5 * 1000 / tasks, found


async def test_what_is_not_readable_yet_is_no_empty_read(place: Place) -> None:
    """Goal: since has come up to the upper, so no time that is complete is held: that is said, as a snapshot
    says it, and nothing is left of it."""
    client = await place.client()
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 0, 1)], 0, 4)
        async with client.reader("t") as reader:
            await reader.downgrade_since(4)
            with pytest.raises(ap.SinceViolation):
                await reader.snapshot()
            for wait in (True, False):
                with pytest.raises(ap.SinceViolation):
                    await client.workers.shared_read("t", wait=wait)
        await w.compare_and_append([], 4, 5)
    async with client.workers.shared_read("t") as shared:
        assert await read(client, await shared.pieces(2)) == told([("a", 1, 1)])


async def test_few_rows_are_one_piece_and_none_are_one(place: Place) -> None:
    client = await place.client()
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, 1)
        async with client.workers.shared_read("t") as shared:
            pieces = await shared.pieces(5)
            assert len(pieces) == 1
            assert await read(client, pieces) == []
        await w.compare_and_append([("a", 1, 1, 1)], 1, 2)
    async with client.workers.shared_read("t") as shared:
        assert (shared.as_of, shared.start, shared.end, shared.updates_max) == (1, None, None, 1)
        assert await read(client, await shared.pieces(5)) == told([("a", 1, 1)])
        for wrong in (0, -1, True, 1.0, None):
            with pytest.raises(ValueError):
                await shared.pieces(wrong)  # type: ignore[arg-type]


async def test_a_sum_beyond_64_bits_is_told(place: Place) -> None:
    client = await place.client()
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 0, 2**62), ("a", 1, 0, 2**62)], 0, 1)
        await w.compare_and_append([("a", 1, 1, 2**62)], 1, 2)
    async with client.workers.shared_read("t", as_of=1) as shared:
        with pytest.raises(ap.DiffOverflow) as caught:
            await read(client, await shared.pieces(2))
        assert caught.value.shard_id == await client.shard_id("t")
