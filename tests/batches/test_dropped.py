"""Dropped batches, statistics; see `test_batches.py`."""

import gc
import json
import uuid
import warnings
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from pydantic import BaseModel, ConfigDict

import aiopersist as ap
from tests.batches.batches_kit import BLOB, BOTH, INLINE, STAGED
from tests.support.internals import staged_of
from tests.support.schemas import PRODUCT, SCHEMA
from tests.support.shards import open_mem, parquet


class Sale(BaseModel):
    model_config = ConfigDict(frozen=True)
    Amount: int
    note: str | None = None
    price: float = 0.0
    tags: list[int] = []


SALES = ap.Schema(key=str, val=Sale)


async def stats_of(updates: Any, schema: Any, time: Any = 0, end: Any = 99, **limits: Any) -> Any:
    """The only part of a batch of `updates`, its statistics, and the length of their stored form."""
    async with open_mem(**limits) as client, client.writer("t", schema) as w:
        b = await w.batch(updates, time, end)
        (part,) = b.parts
        stored = staged_of(b).hollow.parts[0].stats
        try:
            return part.stats, part.key_lower, len(json.dumps(stored, separators=(",", ":")))
        finally:
            await b.delete()


WIDE = pa.schema(
    [pa.field(name, pa.int64()) for name in [*(f"column_{n:02}" for n in range(40)), "Amount_EUR"]]
)


async def wide_stats(**limits: Any) -> Any:
    schema = ap.Schema(key=str, val=pa.struct(list(WIDE)))
    updates = [(f"k{n}", {field.name: n for field in WIDE}, n, 1) for n in range(3)]
    return await stats_of(updates, schema, **limits)


class Id(BaseModel):
    model_config = ConfigDict(frozen=True)
    name: str
    number: int


# --- dropped batches ----------------------------------------------------------------------------------


@STAGED
async def test_a_dropped_batch_warns(limits: dict[str, int]) -> None:
    """Goal: with the number of its parts, and their keys."""
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
        keys = await parquet(client)
        gc.collect()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            del b
            gc.collect()
        (warning,) = [w for w in found if w.category is ResourceWarning]
        text = str(warning.message)
        assert all(key in text for key in keys)
        assert f"{max(len(keys), 1)} parts" in text


async def test_batches_that_need_no_warning() -> None:
    """Goal: without parts, or consumed in any way."""
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        updates = [("a", 1, 0, 1)]
        batches = [await w.batch(u, 0, 9) for u in ([], updates, updates, updates, updates)]
        await batches[1].delete()
        await w.compare_and_append_batch([batches[2]], 0, 1)
        await w.append_batch(batches[3], 0, 1)
        batches[4].to_transmittable()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            del batches
            gc.collect()
        assert [w for w in found if w.category is ResourceWarning] == []


# --- statistics ---------------------------------------------------------------------------------------


@BOTH
async def test_bounds_and_null_counts_of_each_leaf(limits: dict[str, int]) -> None:
    updates = [
        ("b", Sale(Amount=5, note=None, price=-0.0), 3, 1),
        ("a", Sale(Amount=-7, note="x", price=2.5, tags=[1]), 9, 1),
        ("c", Sale(Amount=1, note=None, price=-1.5), 4, 1),
    ]
    stats, key_lower, _ = await stats_of(updates, SALES, **limits, stats_budget_bytes=10_000)
    assert key_lower == "a"
    assert stats["key"] == ap.ColumnStats("a", "c", 0)
    assert stats["val.Amount"] == ap.ColumnStats(-7, 5, 0)
    assert stats["val.note"] == ap.ColumnStats("x", "x", 2)
    assert stats["val.price"] == ap.ColumnStats(-1.5, 2.5, 0)
    assert stats["time"] == ap.ColumnStats(3, 9, 0)
    assert {"key", "val.Amount", "val.note", "val.price", "time"} <= stats.keys()
    assert "val" not in stats


@BOTH
async def test_statistics_are_of_what_is_in_the_part(limits: dict[str, int]) -> None:
    """Goal: what cancelled out does not widen a bound."""
    updates = [("a", 1, 0, 1), ("z", 99, 50, 1), ("z", 99, 50, -1), ("b", 2, 1, 1)]
    stats, _, _ = await stats_of(updates, SCHEMA, **limits)
    assert stats["key"] == ap.ColumnStats("a", "b", 0)
    assert stats["val"] == ap.ColumnStats(1, 2, 0)
    assert stats["time"] == ap.ColumnStats(0, 1, 0)


@BOTH
async def test_product_times_have_statistics_per_component(limits: dict[str, int]) -> None:
    updates = [("a", 1, (2, 9), 1), ("b", 2, (5, 3), 1)]
    stats, _, _ = await stats_of(updates, PRODUCT, (0, 0), (99, 99), **limits)
    assert stats["time.0"] == ap.ColumnStats(2, 5, 0)
    assert stats["time.1"] == ap.ColumnStats(3, 9, 0)
    assert "time" not in stats


@BOTH
async def test_without_statistics(limits: dict[str, int]) -> None:
    stats, key_lower, _ = await stats_of(
        [("b", 1, 0, 1), ("a", 1, 0, 1)], SCHEMA, **limits, stats_collection_enabled=False
    )
    assert (stats, key_lower) == (None, "a")


async def test_parts_without_statistics_are_read() -> None:
    async with open_mem(**BLOB, stats_collection_enabled=False) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append_batch([await w.batch([("a", 1, 0, 1), ("b", 2, 0, 1)], 0, 1)], 0, 1)
        async with client.reader("t", SCHEMA) as r, r.snapshot(0) as s:
            assert await s.rows() == [("a", 1, 1), ("b", 2, 1)]


@BOTH
async def test_statistics_of_durations(limits: dict[str, int]) -> None:
    """Goal: Arrow has no least duration; a part has bounds of them nevertheless."""
    schema = ap.Schema(key=str, val=pa.duration("s"))
    updates = [("a", timedelta(1), 0, 1), ("b", timedelta(2), 0, 1)]
    async with open_mem(**limits) as client, client.writer("t", schema) as w:
        b = await w.batch(updates, 0, 1)
        (part,) = b.parts
        await w.compare_and_append_batch([b], 0, 1)
        async with client.reader("t", schema) as r, r.snapshot(0) as s:
            assert [row[0] for row in await s.rows()] == ["a", "b"]
        assert part.key_lower == "a"
        assert part.stats is not None
        assert part.stats["val"] == (timedelta(1), timedelta(2), 0)


@pytest.mark.parametrize("kind", ["str", "bytes"])
@pytest.mark.parametrize("size", [255, 256, 257, 5000])
@BOTH
async def test_long_values_are_cut_to_bounds_that_bound(kind: str, size: int, limits: dict[str, int]) -> None:
    low, high = "a" * size, "y" * size
    values = [low, high] if kind == "str" else [low.encode(), high.encode()]
    schema = ap.Schema(key=str, val=str) if kind == "str" else ap.Schema(key=bytes, val=bytes)
    limits = {**limits, "inline_writes_single_max_bytes": 50_000 if limits is INLINE else 0}
    updates = [("k" if kind == "str" else v, v, 0, 1) for v in values]
    stats, key_lower, _ = await stats_of(updates, schema, **limits, stats_budget_bytes=10_000)
    for name in ("val",) if kind == "str" else ("key", "val"):
        found = stats[name]
        assert found.min == values[0][:256]
        assert found.max >= values[1]
        assert len(found.max) <= 256
        if size <= 256:
            assert found.max == values[1]
        else:
            assert found.max == values[1][:255] + ("z" if kind == "str" else b"z")
    if kind == "bytes":
        assert key_lower == values[0][:256]


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        (b"\xff" * 300, b"\xff" * 256, None),
        (b"a" + b"\xff" * 300, b"a" + b"\xff" * 255, b"b"),
        (b"\xff" * 256, b"\xff" * 256, b"\xff" * 256),
        (b"\xff" * 256 + b"\x00", b"\xff" * 256, None),
        ("é" * 200, "é" * 128, "é" * 127 + "ê"),
        ("x" + "é" * 200, "x" + "é" * 127, "x" + "é" * 126 + "ê"),
        ("\U0010ffff" * 100, "\U0010ffff" * 64, None),
        ("a" + "\U0010ffff" * 100, "a" + "\U0010ffff" * 63, "b"),
        ("\ud7ff" * 100, "\ud7ff" * 85, "\ud7ff" * 84 + "\ue000"),  # no surrogates
        ("\x7f" * 300, "\x7f" * 256, None),  # the exact bound is looked at below
    ],
    ids=["ff", "a_ff", "ff_256", "ff_257", "two_bytes", "half", "last", "a_last", "surrogate", "one_byte"],
)
@BOTH
async def test_where_a_bound_is_rounded_up(value: Any, low: Any, high: Any, limits: dict[str, int]) -> None:
    schema = ap.Schema(key=str, val=type(value))
    stats, _, _ = await stats_of([("k", value, 0, 1)], schema, **limits, stats_budget_bytes=10_000)
    found = stats["val"]
    as_bytes = (lambda v: v.encode()) if isinstance(value, str) else bytes
    assert found.min == low
    if value == "\x7f" * 300:  # the successor has two bytes: any bound of at most 256 bytes will do
        assert found.max >= value
        return
    assert found.max == high
    if high is not None:
        assert as_bytes(high) >= as_bytes(value)
        assert len(as_bytes(high)) <= 256


@BOTH
async def test_long_bytes_of_a_fixed_size(limits: dict[str, int]) -> None:
    schema = ap.Schema(key=str, val=pa.binary(300))
    stats, _, _ = await stats_of([("k", b"abc" * 100, 7, 1)], schema, **limits, stats_budget_bytes=10_000)
    assert stats["key"] == ap.ColumnStats("k", "k", 0)
    assert stats["time"] == ap.ColumnStats(7, 7, 0)
    low, high, nulls = stats["val"]
    assert (low is None or low <= b"abc" * 100, high is None or high >= b"abc" * 100, nulls) == (
        True,
        True,
        0,
    )


@BOTH
async def test_the_budget_of_statistics(limits: dict[str, int]) -> None:
    """Goal: whole columns are left out; those that stay are as they were."""
    whole, _, _ = await wide_stats(**limits, stats_budget_bytes=100_000)
    assert len(whole) == 44
    for budget in (0, 10, 200, 1024):
        found, key_lower, size = await wide_stats(**limits, stats_budget_bytes=budget)
        assert key_lower == "k0"
        assert found.items() <= whole.items()
        assert len(found) < 44
        assert (len(found) > 5) is (budget == 1024)
        if limits is BLOB:
            assert size <= max(budget, 2)
    default, _, _ = await wide_stats(**limits)
    assert default == found


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ({"equals": ("amount_eur",)}, {"val.Amount_EUR"}),
        ({"prefixes": ("amount_",)}, {"val.Amount_EUR"}),
        ({"suffixes": ("_eur", "_07")}, {"val.Amount_EUR", "val.column_07"}),
        ({"equals": ("key",), "prefixes": ("tim",)}, {"key", "time"}),
        ({"equals": ("val.amount_eur",), "prefixes": ("val",)}, set()),  # only the last component counts
        ({"equals": ("Amount_EUR",)}, set()),  # patterns are in lower case
        ({"prefixes": ("column_",)}, {f"val.column_{n:02}" for n in range(40)}),  # far beyond any budget
    ],
)
@BOTH
async def test_untrimmable_columns_stay(columns: Any, kept: set[str], limits: dict[str, int]) -> None:
    untrimmable = ap.UntrimmableColumns(**columns)
    found, _, _ = await wide_stats(**limits, stats_budget_bytes=0, stats_untrimmable_columns=untrimmable)
    assert set(found or {}) == kept


@pytest.mark.parametrize(
    ("columns", "name", "stays"),
    [
        ({"equals": ("key",)}, "key", True),
        ({"equals": ("key",)}, "KEY", True),
        ({"equals": ("key",)}, "val.Key", True),
        ({"equals": ("key",)}, "key.part", False),
        ({"equals": ("key",)}, "keys", False),
        ({"prefixes": ("am",)}, "val.Amount", True),
        ({"prefixes": ("am",)}, "amounts.total", False),
        ({"suffixes": ("_ts",)}, "val.deep.CREATED_TS", True),
        ({"suffixes": ("_ts",)}, "val.created_ts.x", False),
        ({}, "key", False),
    ],
)
async def test_should_retain(columns: Any, name: str, stays: bool) -> None:
    assert ap.UntrimmableColumns(**columns).should_retain(name) is stays


@pytest.mark.parametrize(
    ("schema", "keys", "least"),
    [
        (ap.Schema(key=int, val=int), [3, -5, 0], -5),
        (ap.Schema(key=float, val=int), [float("inf"), 1.5, -2.0], -2.0),
        (ap.Schema(key=uuid.UUID, val=int), [uuid.UUID(int=9), uuid.UUID(int=3)], uuid.UUID(int=3)),
        (ap.Schema(key=bool, val=int), [True, False], False),
        (ap.Schema(key=str | None, val=int), ["a", None], None),
        (ap.Schema(key=None, val=int), [None], None),
        (ap.Schema(key=list[int], val=int), [[2], [1, 5], [1]], [1]),
        (
            ap.Schema(key=Id, val=int),
            [Id(name="b", number=1), Id(name="a", number=9)],
            Id(name="a", number=9),
        ),
        (ap.Schema(key=str, val=int), ["b" * 900, "c"], "b" * 256),
        (ap.Schema(key=bytes, val=int), [b"\xff" * 900], b"\xff" * 256),
    ],
    ids=["int", "float", "uuid", "bool", "null", "unit", "list", "model", "long_str", "long_bytes"],
)
@BOTH
async def test_the_least_key_of_a_part(schema: Any, keys: Any, least: Any, limits: dict[str, int]) -> None:
    """Goal: a value of the key's type, cut where it is long."""
    _, found, _ = await stats_of([(key, 1, 0, 1) for key in keys], schema, **limits)
    assert found == least
    assert type(found) is type(least)
