"""Goal: engines show every supported type exactly; each other type is refused by its path before anything is
written; bounds never hide a row."""

import datetime as dt
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.data.part.stats import collect
from aiopersist.data.types.field_ids import field_ids
from aiopersist.iceberg.bounds import bound, metrics
from aiopersist.iceberg.types import leaves, schema_json
from tests.iceberg.kit import SETTINGS, by_polars, by_pyiceberg, contents, own_files, planned

UTC = dt.UTC
NINES = "9" * 38


def some(t: Any) -> Any:
    """A list of `t`, with nulls."""
    return pa.list_(pa.field("element", t, True))


SUPPORTED: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [-128, 127]),
    "int16": (pa.int16(), [-(2**15), 2**15 - 1]),
    "int32": (pa.int32(), [-(2**31), 2**31 - 1]),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1]),
    "float32": (pa.float32(), [1.5, float("nan"), float("inf")]),
    "float64": (pa.float64(), [float("-inf"), -0.0, 5e-324, float("nan")]),
    "bool": (pa.bool_(), [True, False]),
    "string": (pa.string(), ["", "ä😀", "x" * 400, "\U0010ffff" * 80]),
    "large_string": (pa.large_string(), ["a", "z\0"]),
    "binary": (pa.binary(), [b"", b"\xff" * 300]),
    "large_binary": (pa.large_binary(), [b"a"]),
    "fixed": (pa.binary(16), [bytes(16), b"\xff" * 16]),
    "wide fixed": (pa.binary(300), [b"\xfe" * 300]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "timestamp s": (pa.timestamp("s"), [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31)]),
    "timestamp ms": (pa.timestamp("ms"), [dt.datetime(1, 1, 1), dt.datetime(2026, 1, 1, 1, 1, 1, 5000)]),
    "timestamp us": (pa.timestamp("us"), [dt.datetime(1, 1, 1), dt.datetime(2026, 1, 1, 1, 1, 1, 5)]),
    "instant us": (pa.timestamp("us", "UTC"), [dt.datetime(2026, 1, 1, tzinfo=UTC)]),
    "instant ms": (pa.timestamp("ms", "UTC"), [dt.datetime(1969, 1, 1, tzinfo=UTC)]),
    "instant +00:00": (pa.timestamp("us", "+00:00"), [dt.datetime(2026, 1, 1, tzinfo=UTC)]),
    "decimal 9": (pa.decimal128(9, 2), [Decimal("-1234567.89"), Decimal("0.01")]),
    "decimal 18": (pa.decimal128(18, 4), [Decimal("-1.2345")]),
    "decimal 38": (pa.decimal128(38, 0), [Decimal(NINES), Decimal(f"-{NINES}")]),
    "decimal 38.38": (pa.decimal128(38, 38), [Decimal(f"0.{NINES}")]),
    "list": (some(pa.int64()), [[], [1, None]]),
    "list of lists": (some(some(pa.date32())), [[[dt.date(2026, 1, 1)], None, []]]),
    "struct": (
        pa.struct([pa.field("a", pa.int32(), False), pa.field("b", pa.struct([pa.field("c", pa.string())]))]),
        [{"a": 1, "b": None}, {"a": 2, "b": {"c": None}}, {"a": 3, "b": {"c": "x"}}],
    ),
    "names": (
        pa.struct([pa.field("a.b", pa.int32(), False), pa.field("ä ö", pa.int32())]),
        [{"a.b": 1, "ä ö": None}],
    ),
}
LIST_OF_STRUCTS = some(pa.struct([pa.field("a", pa.int64(), False), pa.field("b", pa.string())]))

REFUSED = {
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "time32": pa.time32("ms"),
    "time64": pa.time64("us"),
    "duration": pa.duration("us"),
    "null": pa.null(),
    "zone": pa.timestamp("us", "Europe/Berlin"),
    "offset": pa.timestamp("us", "+02:00"),
}


async def written(client: ap.Client, t: pa.DataType, values: list[Any]) -> None:
    """A shard with these values in a nullable and in another field, a null, and a retraction."""
    val = pa.struct([pa.field("v", t, True), pa.field("w", t, False)])
    schema: Any = ap.Schema(int, val)
    rows = [{"v": value, "w": value} for value in values] + [{"v": None, "w": values[0]}]
    columns = [pa.array(range(len(rows)), pa.int64()), pa.array(rows, val)]
    numbers = [pa.array([0] * len(rows), pa.int64()), pa.array([1] * len(rows), pa.int64())]
    async with client.writer("t", schema) as writer:
        table = pa.table([*columns, *numbers], schema.arrow_schema)
        await writer.compare_and_append(table, 0, 1)
        again = table.slice(0, 1)
        for time, diff in ((1, 1), (2, -1)):
            ints = [pa.array([n], pa.int64()) for n in (time, diff)]
            rows_again = pa.table([*again.columns[:2], *ints], schema.arrow_schema)
            await writer.compare_and_append(rows_again, time, time + 1)


@pytest.mark.parametrize("name", SUPPORTED)
async def test_a_type(tmp_path: Path, name: str) -> None:
    t, values = SUPPORTED[name]
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await written(client, t, values)
        for as_of in (0, 1, 2):
            published = await client.publish("t", as_of=as_of)
            expected = await contents(client, as_of=as_of)
            assert by_polars(published.metadata) == expected
            assert by_pyiceberg(published.metadata) == expected


async def test_a_list_of_structs(tmp_path: Path) -> None:
    """pyiceberg 0.12 shows an absent list of structs as an empty one."""
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await written(client, LIST_OF_STRUCTS, [[None, {"a": 1, "b": None}], []])
        published = await client.publish("t")
        assert by_polars(published.metadata) == await contents(client)
        assert by_pyiceberg(published.metadata).total() == 3


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_type(tmp_path: Path, name: str) -> None:
    schema: Any = ap.Schema(str, pa.struct([("a", some(pa.struct([("b.c", REFUSED[name])])))]))
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        async with client.writer("t", schema) as writer:
            await writer.compare_and_append([("k", {"a": []}, 0, 1)], 0, 1)
        with pytest.raises(ap.Unsupported, match=r"^shard 't': val\.a\.element\.b\.c is "):
            await client.publish("t")
        assert own_files(tmp_path) == {}
        assert await client.tags("t") == {}


async def test_fields_with_one_dotted_name(tmp_path: Path) -> None:
    """Engines could not load the table at all."""
    schema: Any = ap.Schema(str, pa.struct([("a.b", pa.int64()), ("a", pa.struct([("b", pa.int64())]))]))
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        async with client.writer("t", schema) as writer:
            await writer.compare_and_append([("k", {"a.b": 1, "a": {"b": 2}}, 0, 1)], 0, 1)
        with pytest.raises(ap.Unsupported, match=r"^shard 't': two fields have the name val\.a\.b, "):
            await client.publish("t")
        assert own_files(tmp_path) == {}


def test_ids_of_evolved_schemas() -> None:
    old = pa.schema(
        [
            ("key", pa.string()),
            ("val", pa.struct([("a", pa.int64())])),
            ("time", pa.int64()),
            ("diff", pa.int64()),
        ]
    )
    new = old.set(1, pa.field("val", pa.struct([("b", pa.string()), ("a", pa.int64())])))
    ids = field_ids([old, new])
    fields = schema_json(new, ids, 1)["fields"][1]["type"]["fields"]
    assert [(f["name"], f["id"]) for f in fields] == [("b", 17), ("a", 16)]


FLOATS = st.floats() | st.sampled_from([0.0, -0.0, float("nan")])


@example([1.0, float("nan")], pa.float64())
@example([0.0, -0.0], pa.float32())
@given(st.lists(FLOATS, min_size=1, max_size=5), st.sampled_from([pa.float32(), pa.float64()]))
def test_bounds_of_floats(values: list[float], t: pa.DataType) -> None:
    column = pa.array([pa.scalar(v, pa.float64()).as_py() for v in values], pa.float64()).cast(t)
    kept = column.to_pylist()
    bounds = _bounds(column)
    if any(v != v for v in kept):
        assert bounds == {}
        return
    low, high = (pa.py_buffer(bounds[side]) for side in ("lower_bounds", "upper_bounds"))
    decoded = [pa.Array.from_buffers(t, 1, [None, data])[0].as_py() for data in (low, high)]
    assert all(decoded[0] <= v <= decoded[1] for v in kept)
    assert str(decoded[0]) != "0.0"
    assert str(decoded[1]) != "-0.0"


@given(st.lists(st.decimals(-(10**20), 10**20, allow_nan=False, places=10), min_size=1, max_size=4))
def test_bounds_of_decimals(values: list[Decimal]) -> None:
    bounds = _bounds(pa.array(values, pa.decimal128(38, 10)))
    low, high = (
        int.from_bytes(bounds[side], "big", signed=True) for side in ("lower_bounds", "upper_bounds")
    )
    assert low == min(int(Fraction(v) * 10**10) for v in values)
    assert high == max(int(Fraction(v) * 10**10) for v in values)


def _bounds(column: pa.Array) -> dict[str, bytes]:
    """The bounds of the only column of a part, by side."""
    schema = pa.schema(
        [("key", pa.int64()), ("val", column.type), ("time", pa.int64()), ("diff", pa.int64())]
    )
    ints = pa.array([1] * len(column), pa.int64())
    ids = field_ids([schema])
    all_metrics = metrics(
        collect(pa.table([ints, column, ints, ints], schema)), len(column), leaves(schema), ids
    )
    sides = ("lower_bounds", "upper_bounds")
    return {side: all_metrics[side][2] for side in sides if 2 in all_metrics.get(side, {})}


def test_other_bounds() -> None:
    assert bound(None, pa.int64(), is_lower=True) is None
    assert bound(True, pa.bool_(), is_lower=True) == b"\1"
    assert bound(2**62, pa.timestamp("s"), is_lower=False) is None  # beyond 64 bits of microseconds
    assert bound(-1, pa.timestamp("ms"), is_lower=True) == (-1000).to_bytes(8, "little", signed=True)
    assert bound("AA==", pa.binary(2), is_lower=True) is None  # it was cut


@pytest.mark.parametrize(
    ("row_filter", "files", "keys"),
    [
        ("val.f > 100", 2, {2}),  # the file with a NaN has no bounds
        ("val.f = 0.0", 2, {0}),
        ("val.s >= 'y'", 1, {2}),
        ("val.n IS NULL", 1, {0}),
        ("val.n IS NOT NULL", 2, {1, 2}),
        ("key = 1", 1, {1}),
    ],
)
async def test_no_row_is_hidden(tmp_path: Path, row_filter: str, files: int, keys: set[int]) -> None:
    val = pa.struct([("f", pa.float64()), ("s", pa.string()), ("n", pa.int64())])
    schema: Any = ap.Schema(int, val)
    rows = [
        {"f": 0.0, "s": "a", "n": None},
        {"f": float("nan"), "s": "b", "n": 1},
        {"f": 101.0, "s": "z" * 300, "n": 2},
    ]
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        async with client.writer("t", schema) as writer:
            for time, row in enumerate(rows):
                await writer.compare_and_append([(time, row, time, 1)], time, time + 1)
        published = await client.publish("t")
        assert planned(published.metadata, row_filter) == files
        rows_read = by_pyiceberg(published.metadata, row_filter=row_filter)
        assert {key for key, _ in rows_read} == keys
