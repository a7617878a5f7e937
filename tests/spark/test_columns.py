"""Goal: every schema has one fixed form that Spark takes; values arrive unchanged, rows as often as the
shard has them; a type without a counterpart in Spark is refused before anything runs."""

import datetime as dt
from collections import Counter
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

import aiopersist as ap
from aiopersist.data.updates.convert import to_table
from aiopersist.spark.columns import BYTES_MAX, ROWS_MAX, Columns, in_bounds, repeated


class Place(BaseModel):
    model_config = ConfigDict(frozen=True)
    id: UUID
    city: str | None = None


class Reading(BaseModel):
    id: int
    at: dt.datetime
    price: Decimal
    tags: list[str]
    near: Place | None = None


AT = dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC)


def test_fields_of_key_and_val_are_columns() -> None:
    schema = ap.Schema(Place, Reading)
    columns = Columns(schema, time=True, expand=False)
    names = ["key_id", "city", "val_id", "at", "price", "tags", "near", "_time", "_diff"]
    assert columns.arrow_schema.names == names
    assert all(field.nullable for field in columns.arrow_schema)
    key = Place(id=UUID(int=7), city="Ulm")
    val = Reading(id=3, at=AT, price=Decimal("1.5"), tags=["a", "b"], near=Place(id=UUID(int=8)))
    table = columns.of(to_table([(key, val, 4, 2)], schema))
    assert table.schema.equals(columns.arrow_schema)
    assert table.to_pylist() == [
        {
            "key_id": UUID(int=7).bytes,
            "city": "Ulm",
            "val_id": 3,
            "at": AT,
            "price": Decimal("1.5"),
            "tags": ["a", "b"],
            "near": {"id": UUID(int=8).bytes, "city": None},
            "_time": 4,
            "_diff": 2,
        }
    ]


@pytest.mark.parametrize(
    ("key", "val", "names"),
    [
        (str, int, ["key", "val"]),
        (str, None, ["key"]),
        (None, None, []),
        (Place, None, ["id", "city"]),
        (pa.struct([("ID", pa.string())]), pa.struct([("id", pa.string())]), ["key_ID", "val_id"]),
        (str, pa.field("v", pa.struct([("a", pa.int64())]), nullable=True), ["key", "val"]),
    ],
)
def test_names(key: Any, val: Any, names: list[str]) -> None:
    """Goal: Spark does not tell names apart by case; a val that may be null as a whole is one column."""
    assert Columns(ap.Schema(key, val)).arrow_schema.names == names


TYPES: list[tuple[pa.DataType, pa.DataType, Any]] = [
    (pa.uint8(), pa.int16(), 255),
    (pa.uint16(), pa.int32(), 65535),
    (pa.uint32(), pa.int64(), 2**32 - 1),
    (pa.uint64(), pa.decimal128(20, 0), 2**64 - 1),
    (pa.int8(), pa.int8(), -128),
    (pa.float32(), pa.float32(), 0.5),
    (pa.large_string(), pa.string(), "ä"),
    (pa.binary(3), pa.binary(), b"abc"),
    (pa.timestamp("s"), pa.timestamp("us"), AT.replace(tzinfo=None, microsecond=0)),
    (pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("us", "UTC"), AT.replace(microsecond=7000)),
    (pa.duration("ms"), pa.duration("us"), dt.timedelta(milliseconds=5)),
    (pa.decimal128(38, 9), pa.decimal128(38, 9), Decimal("1.000000001")),
    (pa.date32(), pa.date32(), dt.date(1, 1, 1)),
    (pa.list_(pa.uint8()), pa.list_(pa.field("element", pa.int16())), [1, None, 255]),
]


@pytest.mark.parametrize(("stored", "seen", "value"), TYPES, ids=[str(stored) for stored, _, _ in TYPES])
def test_values_arrive_in_the_types_that_spark_has(stored: Any, seen: Any, value: Any) -> None:
    schema = ap.Schema(str, pa.field("v", stored, nullable=True))
    columns = Columns(schema)
    assert columns.arrow_schema.field("val").type == seen
    table = pa.table(
        {"key": ["a", "b"], "val": pa.array([value, None], stored), "time": [0, 0], "diff": [1, 1]}
    )
    assert columns.of(to_table(table, schema)).column("val").to_pylist() == [value, None]


@pytest.mark.parametrize(
    ("key", "val", "said"),
    [
        (str, pa.time64("us"), r"'val' has type time64\[us\]"),
        (str, pa.struct([("a", pa.list_(pa.time32("s")))]), r"'a\[\]' has type time32\[s\]"),
        (pa.struct([("_diff", pa.int64())]), int, "several columns would have the name '_diff'"),
        (
            pa.struct([("val", pa.int64())]),
            pa.struct([("val", pa.int64()), ("key_val", pa.int64())]),
            "'key_val'",
        ),
    ],
)
def test_what_spark_cannot_be_told_is_refused(key: Any, val: Any, said: str) -> None:
    with pytest.raises(ap.InvalidUsage, match=said) as found:
        Columns(ap.Schema(key, val), expand=False)
    assert found.value.kind == "INVALID_COLUMN"


def test_changes_need_int_times() -> None:
    with pytest.raises(ap.InvalidUsage, match="product times"):
        Columns(ap.Schema(str, int, time=2), time=True)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.just(0), st.integers(0, 4)), max_size=8)
)
def test_rows_are_there_as_often_as_they_are(rows: list[Any]) -> None:
    schema = ap.Schema(str, int)
    found = Columns(schema).of(to_table(rows, schema)).to_pylist()
    wanted = [{"key": key, "val": val} for key, val, _, diff in rows for _ in range(diff)]
    assert found == wanted


def test_a_row_that_is_there_less_than_no_times_is_refused() -> None:
    schema = ap.Schema(str, int)
    table = to_table([("a", 1, 0, 1), ("b", 1, 0, -2)], schema)
    with pytest.raises(ap.InvalidUpdate, match="its diff is -2") as found:
        Columns(schema).of(table)
    assert found.value.row == 1
    assert Counter(Columns(schema, expand=False).of(table).column("_diff").to_pylist()) == {1: 1, -2: 1}


@pytest.mark.parametrize("often", [1, 40, 200, 70_000])
@pytest.mark.parametrize("at", [0, 50, 100])
def test_a_large_row_among_small_ones_is_repeated_in_bounds(often: int, at: int) -> None:
    """Goal: a batch has bounded memory, and less text than one array holds, whichever row has the diff."""
    texts, diffs = ["x"] * 101, [1] * 101
    texts[at], diffs[at] = "x" * 2**18, often
    diffs[60] += 100_000
    table = pa.table({"key": range(101), "val": texts, "diff": diffs})
    found: Counter[int] = Counter()
    for piece in in_bounds(table):
        counts = piece["diff"].to_pylist()
        lengths = pc.binary_length(piece["val"]).to_pylist()
        if sum(counts) > len(counts):
            assert sum(n * size for n, size in zip(counts, lengths, strict=True)) <= BYTES_MAX
            assert sum(counts) <= ROWS_MAX
        found.update(dict(zip(piece["key"].to_pylist(), counts, strict=True)))
    assert found == Counter(dict(enumerate(diffs)))


def test_repeating_costs_nothing_where_each_row_is_there_once() -> None:
    table = pa.table({"key": ["a"], "diff": [1]})
    assert repeated(table) is table
    empty = table.slice(0, 0)
    assert repeated(empty) is empty


@pytest.mark.parametrize("diffs", [[1, 1, 1], [3, 0, 2], [200_000, 1, 70_000], [5] * 50_000, []], ids=str)
def test_rows_that_are_there_often_are_handed_on_in_bounded_batches(diffs: list[int]) -> None:
    schema = ap.Schema(key=int, val=None)
    table = to_table([(n, None, 0, diff) for n, diff in enumerate(diffs)], schema)
    found: Counter[int] = Counter()
    for batch in Columns(schema).batches(table):
        assert batch.num_rows <= 65_536
        found.update(batch.column("key").to_pylist())
    assert found == Counter({n: diff for n, diff in enumerate(diffs) if diff})


def test_a_large_row_that_is_there_often_is_not_all_in_memory() -> None:
    schema = ap.Schema(key=str, val=None)
    table = to_table([("x" * 1_000_000, None, 0, 100)], schema)
    sizes = [batch.num_rows for batch in Columns(schema).batches(table)]
    assert sum(sizes) == 100
    assert max(sizes) <= 9


def test_names_that_look_like_paths_are_names() -> None:
    fields = [pa.field(name, pa.int64(), nullable=False) for name in ("a", ".a", "[0]", "a.b")]
    schema: ap.Schema[Any, Any, Any] = ap.Schema(key=pa.struct(fields), val=None)
    key = {field.name: number for number, field in enumerate(fields)}
    assert Columns(schema).of(to_table([(key, None, 0, 1)], schema)).to_pylist() == [key]


def test_lists_of_nulls_stay_sound_beside_what_is_widened() -> None:
    # Arrow's own cast of the struct gives lists that are longer than what they are of.
    inner = pa.struct([pa.field("none", pa.list_(pa.null())), pa.field("small", pa.uint8())])
    schema: ap.Schema[Any, Any, Any] = ap.Schema(key=int, val=pa.list_(inner))
    rows = [(n, [{"none": [None] * 3, "small": n}, None], 0, 1) for n in range(3)]
    found = Columns(schema).of(to_table(rows, schema))
    found.validate(full=True)
    assert found.column("val").to_pylist() == [val for _, val, _, _ in rows]
