"""Goal: the pieces of a shared read are, one after the other, what a plain list of updates says, whoever
reads them, whatever happens meanwhile; and a read that was given up is told, never answered with wrong
data."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.read.shared_read import ENVELOPE, TransmittedPiece
from aiopersist.testing.model import Model, comparable, summed
from tests.conftest import StoreUrls
from tests.support.processes import Place
from tests.support.schemas import NAN, SCHEMA, Key, Val
from tests.support.shards import state_of

pytestmark = pytest.mark.usefixtures("started_postgres")

TASKS = [1, 12]
TINY: dict[str, Any] = {"blob_target_size": 2000, "row_group_bytes": 500, "blob_cache_bytes": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "inline": {},
    "blobs": {**TINY, "inline_writes_single_max_bytes": 0},
    "both": {**TINY, "inline_writes_single_max_bytes": 1200},
    "one part": {"inline_writes_single_max_bytes": 0, "row_group_bytes": 300},
}


class Holder(BaseModel, frozen=True):
    key: Key | None
    last: int


class Evolved(BaseModel):
    amount: int | None
    number: float
    more: str | None = None


# --- what is read -----------------------------------------------------------------------------------


def told(rows: Any) -> list[Any]:
    """Rows as they are compared: the last column is an int, and so is the time."""
    return [(comparable(key), comparable(val), *rest) for key, val, *rest in rows]


def contents(model: Model, as_of: Any, keep: Callable[..., bool] = lambda key, val: True) -> list[Any]:
    return told(row for row in model.contents(as_of) if keep(row[0], row[1]))


def changes(
    model: Model, start: int, end: int, keep: Callable[..., bool] = lambda key, val: True
) -> list[Any]:
    wanted = ((k, [v, t], d) for k, v, t, d in model.updates if start <= t < end and keep(k, v))
    return told((key, val, time, diff) for key, (val, time), diff in summed(wanted))


async def rows_of(client: ap.Client, piece: bytes, where: Any = None) -> list[Any]:
    found = []
    async for batch in client.read_piece(piece, where):
        assert batch.num_rows
        found += list(zip(*(batch.column(name).to_pylist() for name in batch.schema.names), strict=True))
    return told(found)


async def read(client: ap.Client, pieces: list[bytes], where: Any = None) -> list[Any]:
    """All pieces, one after the other, read in any order."""
    found: dict[int, list[Any]] = {}
    for number in random.Random(len(pieces)).sample(range(len(pieces)), len(pieces)):
        found[number] = await rows_of(client, pieces[number], where)
    return [row for number in range(len(pieces)) for row in found[number]]


async def all_read(client: ap.Client, reader: ap.Client, expected: list[Any], **asked: Any) -> None:
    """By any number of tasks; planned by one client, read by another."""
    async with client.shared_read("t", **asked) as shared:
        for tasks in TASKS:
            pieces = await shared.pieces(tasks)
            assert (await read(reader, pieces)) == expected, (asked, tasks, len(pieces))


# --- a place, and random data -------------------------------------------------------------------------


Pool = list[Any]


async def filled(
    client: ap.Client,
    schema: Any,
    keys: Pool,
    vals: Pool,
    *,
    seed: int = 0,
    appends: int = 5,
    rows: int = 30,
    compacting: bool = True,
) -> Model:
    """Random updates, which meet and cancel; since moves to 1, and some of it is compacted there."""
    chance, model = random.Random(seed), Model()
    async with client.writer("t", schema) as w:
        for start in range(0, 2 * appends, 2):
            updates = []
            for _ in range(rows):
                key, val, diff = chance.choice(keys), chance.choice(vals), chance.choice([1, 1, 2, -1])
                updates.append((key, val, start + chance.randrange(2), diff))
            updates += [
                (k, v, start + 1, -d) for k, v, _, d in chance.sample(model.updates, len(model.updates) // 4)
            ]
            await w.compare_and_append(updates, start, start + 2)
            model.append(updates, [start], [start + 2])
            if compacting and start == 4:
                async with client.critical_since("t", "c") as since:
                    await since.compare_and_downgrade_since(0, 0, 1)
                await client.force_compaction("t")
    return model


AT = datetime(2024, 10, 27, 0, 30, tzinfo=UTC)  # half an hour before clocks are put back in Berlin
KINDS: dict[str, tuple[Any, Pool, Pool]] = {
    "str": (SCHEMA, [f"k{n:03}" for n in range(60)] + ["", "ä", "\U0010ffff", "z"], list(range(4))),
    "long str": (SCHEMA, ["x" * 300 + str(n) for n in range(20)] + ["x" * 256, "\U0010ffff" * 90], [1, 2]),
    "bytes": (
        ap.Schema(key=bytes, val=bytes),
        [b"", b"\x00", b"\xff", b"\xff" * 300, b"a" * 300, *(bytes([n, 255 - n]) for n in range(0, 256, 5))],
        [b"", b"\x00\xff", b"v"],
    ),
    "int": (ap.Schema(key=int, val=str), [-(2**63), 2**63 - 1, *range(-40, 40)], ["a", "b", ""]),
    "bool": (ap.Schema(key=bool, val=int), [True, False], list(range(50))),
    "float": (
        ap.Schema(key=float, val=float),
        [NAN, float("inf"), float("-inf"), 0.0, 1e-320, *(n / 3 for n in range(-20, 20))],
        [NAN, 0.0, float("-inf"), 2.5],
    ),
    "mostly nan": (ap.Schema(key=float, val=int), [NAN] * 30 + [1.0, 2.0], list(range(40))),
    "optional": (ap.Schema(key=int | None, val=str | None), [None] * 20 + list(range(30)), [None, "a", "b"]),
    "struct": (
        ap.Schema(key=Key, val=Val),
        [Key(region=r, number=n) for r in ("a", "b", "c") for n in (None, *range(12))],
        [Val(amount=a, number=n) for a in (None, 1, 2) for n in (NAN, 0.5)],
    ),
    "optional struct": (
        ap.Schema(key=Holder, val=Val | None),
        [Holder(key=k, last=n) for k in (None, Key(region="a", number=None)) for n in range(20)],
        [None, Val(amount=None, number=1.0)],
    ),
    "no key": (ap.Schema(key=None, val=int), [None], list(range(80))),
    "no val": (ap.Schema(key=str, val=None), [f"k{n:03}" for n in range(80)], [None]),
    "list": (
        ap.Schema(key=list[int], val=int),
        [[], [1], [1, 2], [2], *([n, -n] for n in range(40))],
        [1, 2],
    ),
    "list val": (ap.Schema(key=int, val=list[str]), [1, 1, 1, 2], [[], ["a"], ["a", "b"], ["b"]]),
    "date": (
        ap.Schema(key=date, val=date),
        [date(1, 1, 1), date(9999, 12, 31), date(2024, 2, 29)],
        [date.max],
    ),
    "datetime": (ap.Schema(key=datetime, val=int), [AT + timedelta(minutes=n) for n in range(60)], [1, 2]),
    "decimal": (
        ap.Schema(key=Decimal, val=int),
        [Decimal(n) / 8 for n in range(-30, 30)] + [Decimal(10) ** 20],
        [1, 2],
    ),
    "hot": (SCHEMA, ["hot"] * 40 + ["a", "b", "x", "y"], list(range(200))),
    "two hot": (ap.Schema(key=int, val=str), [5] * 20 + [6] * 20 + [1, 9], [f"{n:03}" for n in range(60)]),
    "one row": (SCHEMA, ["only"], [1]),
}


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
    async with client.shared_read("t") as shared:
        for tasks in TASKS:
            batches = []
            for piece in await shared.pieces(tasks):
                batches += [batch async for batch in client.read_piece(piece)]
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
            await client.force_compaction("t")
    for as_of in [(0, 1), (1, 1), (2, 2), (0, 5), (3, 2)]:
        await all_read(client, other, contents(model, as_of), as_of=as_of)


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


@pytest.mark.parametrize("name", CONDITIONS)
async def test_a_condition_is_exact(place: Place, name: str) -> None:
    kind, where, keep = CONDITIONS[name]
    client, other = await place.client(**LAYOUTS["both"]), await place.client()
    model = await filled(client, *KINDS[kind])
    async with client.shared_read("t") as whole, client.shared_read("t", start=2) as changed:
        for tasks in TASKS:
            assert await read(other, await whole.pieces(tasks), where) == contents(model, 9, keep)
            assert await read(other, await changed.pieces(tasks), where) == changes(model, 2, 10, keep)
        with pytest.raises(ap.InvalidUsage) as caught:
            await rows_of(other, (await whole.pieces(1))[0], pc.field("nothing") == 1)
        assert caught.value.kind == ap.UsageKind.INVALID_COLUMN


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_schema_that_evolved(place: Place, layout: str) -> None:
    """Goal: parts of both schemas give rows of the newest one; who planned with the older one reads on."""
    client, other = await place.client(**LAYOUTS[layout]), await place.client()
    old, new = ap.Schema(key=str, val=Val), ap.Schema(key=str, val=Evolved)
    keys = [f"k{n:02}" for n in range(40)]
    model = await filled(client, old, keys, KINDS["struct"][2], compacting=False)
    async with client.shared_read("t") as before:
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
            shared = await client.shared_read("t", keep=True)
            pieces = await shared.pieces(4)
        await reader.force_compaction("t")
        await reader.force_gc("t")
        assert await read(reader, pieces) == contents(model, 9)


# --- how it is divided -----------------------------------------------------------------------------


async def sizes(client: ap.Client, pieces: list[bytes]) -> list[int]:
    return [len(await rows_of(client, piece)) for piece in pieces]


@pytest.mark.parametrize("keys", [1, 2, 1000], ids=["one key", "two keys", "many keys"])
async def test_pieces_are_about_equal(place: Place, keys: int) -> None:
    """Goal: also where one key has all rows; and about as many as were asked for."""
    client = await place.client(**{**TINY, "inline_writes_single_max_bytes": 0})
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([(f"k{n % keys:04}", n, 0, 1) for n in range(1000)], 0, 1)
    async with client.shared_read("t") as shared:
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
                    await client.shared_read("t", wait=wait)
        await w.compare_and_append([], 4, 5)
    async with client.shared_read("t") as shared:
        assert await read(client, await shared.pieces(2)) == told([("a", 1, 1)])


async def test_few_rows_are_one_piece_and_none_are_one(place: Place) -> None:
    client = await place.client()
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, 1)
        async with client.shared_read("t") as shared:
            pieces = await shared.pieces(5)
            assert len(pieces) == 1
            assert await read(client, pieces) == []
        await w.compare_and_append([("a", 1, 1, 1)], 1, 2)
    async with client.shared_read("t") as shared:
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
    async with client.shared_read("t", as_of=1) as shared:
        with pytest.raises(ap.DiffOverflow) as caught:
            await read(client, await shared.pieces(2))
        assert caught.value.shard_id == await client.shard_id("t")


# --- what may be asked for ---------------------------------------------------------------------------


async def ten_times(client: ap.Client, name: str = "t") -> Model:
    model = Model()
    rows = [(f"k{n:03}", t, t, 1) for t in range(10) for n in range(20)]
    async with client.writer(name, SCHEMA) as w:
        await w.compare_and_append(rows, 0, 10)
    model.append(rows, [0], [10])
    return model


async def move_since(client: ap.Client, to: Any, name: str = "t") -> None:
    async with client.critical_since(name, "c") as since:
        await since.compare_and_downgrade_since(0, 0, to)


USAGE: dict[str, tuple[dict[str, Any], ap.UsageKind]] = {
    "both": ({"as_of": 3, "start": 1}, ap.UsageKind.INVALID_TIME),
    "as_of and end": ({"as_of": 3, "end": 5}, ap.UsageKind.INVALID_TIME),
    "an end alone": ({"end": 3}, ap.UsageKind.INVALID_TIME),
    "the other way round": ({"start": 5, "end": 4}, ap.UsageKind.INVALID_BOUNDS),
    "a product time": ({"as_of": (1, 2)}, ap.UsageKind.INVALID_TIME),
    "a frontier": ({"as_of": ap.Antichain(3)}, ap.UsageKind.INVALID_TIME),
    "a text": ({"as_of": "3"}, ap.UsageKind.INVALID_TIME),
    "negative": ({"as_of": -1}, ap.UsageKind.INVALID_TIME),
    "too large": ({"as_of": 2**63}, ap.UsageKind.INVALID_TIME),
    "negative start": ({"start": -1}, ap.UsageKind.INVALID_TIME),
    "negative end": ({"start": 0, "end": -1}, ap.UsageKind.INVALID_TIME),
    "a product start": ({"start": (1, 2)}, ap.UsageKind.INVALID_TIME),
}


@pytest.mark.parametrize("case", USAGE)
async def test_what_is_no_read(place: Place, case: str) -> None:
    client = await place.client()
    await ten_times(client)
    asked, kind = USAGE[case]
    with pytest.raises(ap.InvalidUsage) as caught:
        await client.shared_read("t", **asked)
    assert caught.value.kind == kind
    assert not (await client.inspect("t")).readers


async def test_product_times_have_no_changes_and_no_greatest_time(place: Place) -> None:
    client = await place.client()
    schema: Any = ap.Schema(key=str, val=int, time=2)
    async with client.writer("t", schema) as w:
        await w.compare_and_append([("a", 1, (0, 0), 1)], (0, 0), (1, 1))
    for asked in ({}, {"start": 0}, {"start": (0, 0)}, {"as_of": 3}, {"as_of": (1, 2, 3)}):
        with pytest.raises(ap.InvalidUsage) as caught:
            await client.shared_read("t", **asked)  # type: ignore[arg-type]
        assert caught.value.kind == ap.UsageKind.INVALID_TIME


@pytest.mark.parametrize("lease_s", [0, -1, float("inf"), NAN, True, "1"])
async def test_a_lease_is_a_positive_time(place: Place, lease_s: Any) -> None:
    client = await place.client()
    await ten_times(client)
    with pytest.raises(ValueError):
        client.shared_read("t", lease_s=lease_s)


async def test_unknown_shards_and_finished_ones(place: Place) -> None:
    client = await place.client()
    with pytest.raises(ap.UnknownShard):
        await client.shared_read("t")
    model = await ten_times(client)
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 10, ap.Antichain())
    async with client.shared_read("t") as whole, client.shared_read("t", start=4) as changed:
        assert (whole.as_of, changed.end) == (2**63 - 1, None)
        assert await read(client, await whole.pieces(3)) == contents(model, 9)
        assert await read(client, await changed.pieces(3)) == changes(model, 4, 10)
    await client.drop("t")
    with pytest.raises((ap.UnknownShard, ap.ShardFinalized)):
        await client.shared_read("t")


async def test_history_that_is_gone(place: Place) -> None:
    """Goal: contents want `since <= as_of`; changes want `since < start`, or both at the minimum."""
    client = await place.client()
    model = await ten_times(client)
    await all_read(client, client, changes(model, 0, 10), start=0)
    await move_since(client, 4)
    await client.force_compaction("t")
    refused: list[dict[str, Any]] = [
        {"as_of": 3},
        {"start": 0},
        {"start": 4},
        {"start": 4, "end": 4},
        {"start": 3, "end": 99},
    ]
    for asked in refused:
        async with asyncio.timeout(5):
            with pytest.raises(ap.SinceViolation) as caught:
                await client.shared_read("t", **asked)
        assert caught.value.since == ap.Antichain(4)
    await all_read(client, client, contents(model, 4), as_of=4)
    await all_read(client, client, changes(model, 5, 10), start=5)
    await all_read(client, client, [], start=10)
    await all_read(client, client, [], start=7, end=7)
    assert not (await client.inspect("t")).readers


async def test_what_is_not_complete_yet(place: Place) -> None:
    client = await place.client()
    async with client.writer("t", SCHEMA):
        for wait in (False, True):  # at once: who waits for a first append says for which time
            async with asyncio.timeout(30):
                with pytest.raises(ap.NotReadable, match="nothing was appended yet") as caught:
                    await client.shared_read("t", wait=wait)
            assert (caught.value.as_of, caught.value.upper) == (None, ap.Antichain(0))
        async with client.shared_read("t", start=0, wait=False) as shared:
            assert (shared.end, await read(client, await shared.pieces(2))) == (0, [])
    await ten_times(client)
    for asked, time in (({"as_of": 10}, 10), ({"start": 3, "end": 11}, 10)):
        with pytest.raises(ap.NotReadable) as caught:
            await client.shared_read("t", wait=False, **asked)
        assert (caught.value.as_of, caught.value.upper) == (time, ap.Antichain(10))
    async with client.shared_read("t", start=12, wait=False) as shared:
        assert (shared.start, shared.end) == (12, 12)
    async with asyncio.timeout(5):
        while (await client.inspect("t")).readers:
            await asyncio.sleep(0.01)


WAITING: dict[str, dict[str, Any]] = {
    "contents": {"as_of": 12},
    "changes": {"start": 5, "end": 13},
    "later changes": {"start": 12, "end": 13},
}


async def waiting(client: ap.Client, **asked: Any) -> "asyncio.Task[Any]":
    """It is registered, and waits."""

    async def opened() -> Any:
        return await client.shared_read("t", **asked)

    task = asyncio.create_task(opened())
    async with asyncio.timeout(5):
        while not any(r.since.elements for r in (await client.inspect("t")).readers.values()):
            await asyncio.sleep(0.01)
    assert not task.done()
    return task


@pytest.mark.parametrize("case", WAITING)
async def test_it_waits_and_holds_history_meanwhile(place: Place, case: str) -> None:
    """Goal: since is kept where the read needs it, though others move theirs; let go once it is planned."""
    asked = WAITING[case]
    client, other = await place.client(), await place.client()
    model = await ten_times(other)
    task = await waiting(client, **asked)
    async with other.writer("t", SCHEMA) as w:
        for t in (10, 11, 12):
            await move_since(other, t)
            needed = asked.get("as_of", asked.get("start", 0) - 1)
            assert (await other.inspect("t")).since == ap.Antichain(min(t, needed))
            assert not task.done()
            rows = [("late", t, t, 1)]
            await w.compare_and_append(rows, t, t + 1)
            model.append(rows, [t], [t + 1])
            await other.force_compaction("t")
    async with asyncio.timeout(5):
        shared = await task
    await move_since(other, 12)
    await move_since(other, 13)
    assert (await other.inspect("t")).since == ap.Antichain(13)
    await other.force_compaction("t")
    await other.force_gc("t")
    wanted = contents(model, 12) if "as_of" in asked else changes(model, asked["start"], 13)
    assert await read(other, await shared.pieces(3)) == wanted
    await shared.aclose()


async def test_waiting_for_the_first_complete_time(place: Place) -> None:
    client, other = await place.client(), await place.client()
    async with other.writer("t", SCHEMA) as w:

        async def opened() -> Any:
            return await client.shared_read("t", 2)

        task = asyncio.create_task(opened())
        await asyncio.sleep(0.1)
        assert not task.done()
        await w.compare_and_append([("a", 1, 0, 1)], 0, 3)
    async with asyncio.timeout(5):
        shared = await task
    assert (shared.as_of, await read(client, await shared.pieces(1))) == (2, told([("a", 1, 1)]))


async def test_waiting_longer_than_the_lease(place: Place) -> None:
    """Goal: the lease is renewed while the read waits, too: a wait has no end of its own."""
    client, other = await place.client(), await place.client()
    model = await ten_times(other)
    task = await waiting(client, as_of=10, lease_s=0.4)
    async with other.writer("t", SCHEMA) as w:
        for _ in range(12):
            await asyncio.sleep(0.1)
            await w.compare_and_append([], 10, 10)
            await move_since(other, 10)
        rows = [("late", 1, 10, 1)]
        await w.compare_and_append(rows, 10, 11)
        model.append(rows, [10], [11])
    async with asyncio.timeout(5):
        shared = await task
    assert await read(other, await shared.pieces(3)) == contents(model, 10)


async def test_a_wait_that_is_given_up_lets_go(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiopersist.shard.shards.RELEASE_DEADLINE_S", 0.1)
    client, other = await place.client(), await place.client()
    await ten_times(other)
    task = await waiting(client, as_of=50)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        while (await other.inspect("t")).readers:
            await asyncio.sleep(0.01)
    task = await waiting(client, as_of=50)
    await client.aclose()
    with pytest.raises(ap.InvalidUsage) as caught:
        await task
    assert caught.value.kind == ap.UsageKind.CLOSED
    assert not (await other.inspect("t")).readers


# --- leases ----------------------------------------------------------------------------------------


async def churn(client: ap.Client, since: int) -> None:
    """Replace all that is there, twice, and collect what nobody needs."""
    async with client.writer("t", SCHEMA) as w:
        for _ in range(2):
            t: Any = (await w.fetch_recent_upper()).time
            await w.compare_and_append([(f"new{n}", t, t, 1) for n in range(50)], t, t + 1)
            await move_since(client, max(since, t))
            await client.force_compaction("t")
            await client.force_gc("t")


@pytest.mark.parametrize("asked", [{}, {"start": 3}], ids=["contents", "changes"])
async def test_others_go_on_around_it(place: Place, asked: dict[str, Any]) -> None:
    """Goal: compaction, collection and appends between any two pieces change nothing; the blobs are gone
    once the read is closed, and then a piece is `LeaseExpired`."""
    client, other = await place.client(**LAYOUTS["blobs"]), await place.client(**LAYOUTS["blobs"])
    model = await ten_times(client)
    expected = changes(model, 3, 10) if asked else contents(model, 9)
    shared = await client.shared_read("t", **asked)
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
    shared = await client.shared_read("t")
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
    """Goal: time passes, nobody renews, anybody commits: the blobs go, and that is told."""
    client, other = await place.client(**LAYOUTS["blobs"]), await place.client(**LAYOUTS["blobs"])
    model = await ten_times(client)
    shared = await client.shared_read("t", keep=True, lease_s=60)
    pieces = await shared.pieces(3)
    place.clock.ahead_s += 59
    await churn(other, 9)
    assert await read(other, pieces) == contents(model, 9)  # which renews it
    place.clock.ahead_s += 59
    await churn(other, 9)
    assert await read(other, pieces) == contents(model, 9)
    place.clock.ahead_s += 61
    await churn(other, 9)
    for piece in pieces:
        with pytest.raises(ap.LeaseExpired):
            await rows_of(other, piece)
    with pytest.raises(ap.LeaseExpired):
        await shared.pieces(3)
    await shared.aclose()


async def test_an_open_read_is_renewed(place: Place) -> None:
    client, other = await place.client(), await place.client()
    await ten_times(client)
    shared = await client.shared_read("t", lease_s=0.4)
    kept = await client.shared_read("t", lease_s=0.4, keep=True)
    await asyncio.sleep(0.7)
    async with other.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 10, 10)  # expires what is overdue
    assert list((await state_of(other)).readers) == [shared._reader]
    await shared.aclose()
    await kept.aclose()
    assert not (await state_of(other)).readers


async def test_renewals_let_go_of_nothing(place: Place) -> None:
    """Goal: neither a heartbeat nor a reader tells that older versions are not needed: others read them."""
    client, other = await place.client(**LAYOUTS["blobs"]), await place.client(**LAYOUTS["blobs"])
    model = await ten_times(client)
    async with client.shared_read("t", lease_s=0.8) as shared:
        pieces = await shared.pieces(3)
        for _ in range(3):
            await churn(other, 9)
            await asyncio.sleep(0.3)
            await churn(other, 9)
            await rows_of(other, pieces[0])
        assert await read(other, pieces) == contents(model, 9)


async def test_who_reads_renews(place: Place) -> None:
    """Goal: what is kept lives as long as somebody reads it; a commit at most once a quarter of the lease."""
    client, other = await place.client(), await place.client()
    await ten_times(client)
    kept = await client.shared_read("t", lease_s=40, keep=True)
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
    kept = await (await client.shared_read("t", keep=True)).pieces(3)
    ended = await (await client.shared_read("t")).pieces(3)
    await client.aclose()
    assert len((await other.inspect("t")).readers) == 1
    await churn(other, 9)
    assert await read(other, kept) == contents(model, 9)
    assert await read(other, ended) == contents(model, 9)  # they are of the same version
    with pytest.raises(ap.InvalidUsage) as caught:
        client.read_piece(kept[0])
    assert caught.value.kind == ap.UsageKind.CLOSED


async def test_it_never_moves_since(place: Place) -> None:
    client = await place.client()
    await ten_times(client)
    async with client.shared_read("t", as_of=5, lease_s=0.2) as shared:
        await rows_of(client, (await shared.pieces(1))[0])
        await asyncio.sleep(0.3)
        assert (await client.inspect("t")).since == ap.Antichain(0)
    assert (await client.inspect("t")).since == ap.Antichain(0)


async def test_a_lost_blob_is_corruption(place: Place) -> None:
    """Goal: the lease is there, the newest version names the part, and it is gone."""
    client = await place.client(**LAYOUTS["blobs"])
    await ten_times(client)
    async with client.shared_read("t") as shared:
        pieces = await shared.pieces(2)
        await place.blob.delete(list(await place.parts()))
        for piece in pieces:
            with pytest.raises(ap.Corruption):
                await rows_of(client, piece)


# --- what is no piece --------------------------------------------------------------------------------


async def a_piece(client: ap.Client) -> bytes:
    shared = await client.shared_read("t", keep=True)
    return (await shared.pieces(3))[1]


async def test_garbage_is_refused(place: Place) -> None:
    client = await place.client(**LAYOUTS["both"])
    await ten_times(client)
    piece = await a_piece(client)
    async with client.writer("t", SCHEMA) as w, client.shared_compaction("t") as compaction:
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
    shared = await client.shared_read("t")
    await other.drop("t")
    with pytest.raises((ap.ShardFinalized, ap.UnknownShard)):
        await rows_of(other, piece)
    await shared.aclose()


# --- other processes ---------------------------------------------------------------------------------

READER = """
import asyncio, sys
import aiopersist as ap


async def main():
    pieces = [bytes.fromhex(line) for line in sys.stdin.read().split()]
    async with ap.open(blob=sys.argv[1], consensus=sys.argv[2], maintenance=False) as client:
        for piece in pieces:
            async for batch in client.read_piece(piece):
                for row in batch.to_pylist():
                    print(row["key"], row["val"], row["diff"])

asyncio.run(main())
"""


@pytest.mark.slow
async def test_pieces_are_read_by_other_processes(tmp_path: Any) -> None:
    """Goal: halves, read by two processes after the planning client is gone, are the whole."""
    urls = f"file://{tmp_path}/blob?fsync=off", f"sqlite://{tmp_path}/state.db"
    settings = ap.Settings(**LAYOUTS["both"])
    async with ap.open(blob=urls[0], consensus=urls[1], settings=settings, maintenance=False) as client:
        model = await filled(client, *KINDS["hot"])
        pieces = await (await client.shared_read("t", keep=True)).pieces(6)
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
