"""Updates in every form in which they may be given, and the errors of refused ones."""

import datetime as dt
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from aiopersist.base.errors import InvalidUpdate
from aiopersist.data.part.inline import decode_inline, encode_inline
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates import sizes
from aiopersist.data.updates.buffer import Buffer
from aiopersist.data.updates.convert import ROW, chunks_of, to_table
from aiopersist.data.updates.tiny import tiny
from aiopersist.data.updates.updates import Update, Updates
from tests.data import data_oracle as oracle

PLAIN = Schema(key=str, val=int)
ROWS = [("a", 1, 0, 1), ("b", 2, 3, -1)]


class Point(BaseModel, frozen=True):
    x: int
    name: str | None = None


class Clash(BaseModel):
    x: int


POINTS = Schema(key=int, val=Point)


class Colour(Enum):
    RED = 1
    CRIMSON = RED  # an alias: rows write it as RED


class Paint(NamedTuple):
    name: str
    colours: list[Colour | None] | None


def plain_table(**changes: Any) -> pa.Table:
    columns = {"key": ["a", "b"], "val": [1, 2], "time": [0, 3], "diff": [1, -1], **changes}
    return pa.table({name: c for name, c in columns.items() if c is not None})


FORMS: list[Any] = [
    ROWS,
    tuple(ROWS),
    (row for row in ROWS),
    [list(row) for row in ROWS],
    [Update(*row) for row in ROWS],
    plain_table(),
    plain_table().to_batches()[0],
    plain_table().to_reader(),
    pl.DataFrame(plain_table()),
    pd.DataFrame({"key": ["a", "b"], "val": [1, 2], "time": [0, 3], "diff": [1, -1]}),
    plain_table(val=pa.array([1, 2], pa.int8()), time=pa.array([0, 3], pa.uint64())),
    plain_table(key=pa.array(["a", "b"], pa.string_view())),
    plain_table(key=pa.array(["a", "b"], pa.large_string())),
    plain_table(key=pa.array(["a", "b"]).dictionary_encode()),
    plain_table().select(["diff", "time", "val", "key"]),
]


@pytest.mark.parametrize("updates", FORMS, ids=lambda f: type(f).__module__ + "." + type(f).__name__)
def test_every_form_is_one_table(updates: Any) -> None:
    table = to_table(updates, PLAIN)
    assert table.schema.equals(PLAIN.arrow_schema)
    assert Updates(table, PLAIN).rows() == [Update(*row) for row in ROWS]


def test_flat_columns_are_those_of_the_struct() -> None:
    flat = pa.table({"key": [1, 2], "x": [5, 6], "name": ["n", None], "time": [0, 0], "diff": [1, 1]})
    nested = to_table([(1, Point(x=5, name="n"), 0, 1), (2, Point(x=6), 0, 1)], POINTS)
    assert to_table(flat, POINTS).equals(nested)
    assert to_table(pl.DataFrame(flat), POINTS).equals(nested)
    assert to_table(pl.DataFrame(nested), POINTS).equals(nested)
    both = Schema(key=Point, val=Clash)
    clash = pa.table({"x": [1], "name": ["a"], "time": [0], "diff": [1]})
    with pytest.raises(InvalidUpdate, match="ambiguous"):
        to_table(clash, both)


@pytest.mark.parametrize("name", ["models", "lists", "optional bool-decimal", "uuid-enum", "date-datetime"])
def test_what_comes_back_can_be_given_again(name: str) -> None:
    case = oracle.CASES[name]
    schema = Schema(key=case.key_type, val=case.val_type, time=case.time)

    @settings(max_examples=20)
    @given(oracle.rows_of(case))
    def check(rows: list[Any]) -> None:
        table = to_table(rows, schema)
        for again in (table, pl.DataFrame(table) if rows else table, table.to_reader()):
            assert oracle.plain(Updates(to_table(again, schema), schema).rows()) == oracle.plain(rows)

    check()


def test_write_rows_have_no_time() -> None:
    rows = [("a", 1), ("b", 2, -3)]
    table = to_table(rows, PLAIN, columns=ROW, diff=7)
    assert table.to_pydict() == {"key": ["a", "b"], "val": [1, 2], "diff": [7, -3]}
    arrow = pa.table({"key": ["a"], "val": [1]})
    assert to_table(arrow, PLAIN, columns=ROW, diff=7)["diff"].to_pylist() == [7]
    assert to_table(arrow.append_column("diff", [[2]]), PLAIN, columns=ROW, diff=7)["diff"].to_pylist() == [2]
    with pytest.raises(InvalidUpdate):
        to_table([("a", 1, 0, 1)], PLAIN, columns=ROW, diff=1)
    with pytest.raises(InvalidUpdate, match="time"):
        to_table(plain_table(), PLAIN, columns=ROW, diff=1)


def test_a_column_of_nulls_that_may_be_a_struct_or_its_field_is_refused() -> None:
    """Goal: an absent val is never stored as a val with an absent field."""
    within = pa.struct([pa.field("val", pa.int64())])
    schema: Schema[Any, Any, Any] = Schema(key=str, val=pa.field("val", within))
    given = plain_table(val=pa.nulls(2))
    with pytest.raises(InvalidUpdate, match="column 'val' of nulls"):
        to_table(given, schema)
    for t, val in ((pa.int64(), {"val": None}), (within, None)):
        table = to_table(given.set_column(1, "val", pa.nulls(2, t)), schema)
        assert table["val"].to_pylist() == [val, val]


BIG = 2**63
REFUSED: list[tuple[str, Any, int | None]] = [
    ("none", None, None),
    ("int", 3, None),
    ("str", "ab", None),
    ("bytes", b"ab", None),
    ("dict", {}, None),
    ("no tuple", [ROWS[0], "abcd"], 1),
    ("short", [ROWS[0], ("a", 1, 2)], 1),
    ("long", [ROWS[0], (*ROWS[0], 1)], 1),
    ("negative time", [ROWS[0], ("a", 1, -1, 1)], 1),
    ("late time", [("a", 1, BIG, 1)], 0),
    ("bool time", [("a", 1, True, 1)], 0),
    ("float time", [("a", 1, 1.0, 1)], 0),
    ("product time", [("a", 1, (1,), 1)], 0),
    ("null diff", [ROWS[0], ("a", 1, 1, None)], 1),
    ("big diff", [("a", 1, 1, BIG)], 0),
    ("small diff", [("a", 1, 1, -BIG - 1)], 0),
    ("arrow: missing", plain_table(diff=None), None),
    ("arrow: unknown", plain_table(more=[1, 2]), None),
    ("arrow: float", plain_table(val=[1.0, 2.0]), None),
    ("arrow: bytes", plain_table(key=[b"a", b"b"]), None),
    ("arrow: null key", plain_table(key=["a", None]), 1),
    ("arrow: null diff", plain_table(diff=[1, None]), 1),
    ("arrow: null time", plain_table(time=[None, 1]), 0),
    ("arrow: negative time", plain_table(time=[0, -1]), 1),
    ("arrow: late time", plain_table(time=pa.array([0, BIG], pa.uint64())), 1),
    ("arrow: big diff", plain_table(diff=pa.array([1, BIG], pa.uint64())), 1),
    ("arrow: twice", pa.table([["a"], ["a"], [1], [1], [1]], ["key", "key", "val", "time", "diff"]), None),
    ("series", pl.Series([1]), None),
]


@pytest.mark.parametrize(("updates", "row"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refusals_name_the_row_or_the_table(updates: Any, row: int | None) -> None:
    with pytest.raises(InvalidUpdate) as e:
        to_table(updates, PLAIN)
    assert e.value.row == row
    if row is not None:
        with pytest.raises(InvalidUpdate) as e:
            to_table(updates, PLAIN, row_base=100)
        assert e.value.row == row + 100


@pytest.mark.parametrize(
    ("time", "row"),
    [
        ((1,), 1),
        (1, 1),
        ((1, 2, 3), 1),
        ((1, -1), 1),
        ((1, BIG), 1),
        ((1, None), 1),
        ([1, 2], 1),
        ((1, True), 1),
    ],
)
def test_product_times_have_one_length(time: Any, row: int) -> None:
    schema = Schema(key=int, val=None, time=2)
    with pytest.raises(InvalidUpdate) as e:
        to_table([(1, None, (0, 0), 1), (1, None, time, 1)], schema)
    assert e.value.row == row


def test_product_times_from_arrow() -> None:
    schema = Schema(key=int, val=None, time=2)
    columns = {"key": [1, 2], "val": pa.nulls(2), "diff": [1, 1]}
    table = to_table(pa.table({**columns, "time": [[1, 2], [3, 4]]}), schema)
    assert [u.time for u in Updates(table, schema)] == [(1, 2), (3, 4)]
    for bad in ([[1, 2], [3]], [[1, 2], None], [[1, 2], [3, None]], [[1, 2], [3, -1]]):
        with pytest.raises(InvalidUpdate) as e:
            to_table(pa.table({**columns, "time": bad}), schema)
        assert e.value.row == 1


def test_nulls_within_are_found_at_their_row() -> None:
    points = pa.array([{"x": 1, "name": None}, {"x": None, "name": "a"}])
    with pytest.raises(InvalidUpdate) as e:
        to_table(pa.table({"key": [1, 2], "val": points, "time": [0, 0], "diff": [1, 1]}), POINTS)
    assert e.value.row == 1
    lists = Schema(key=int, val=list[int] | None)
    table = pa.table({"key": [1, 2, 3], "val": [None, [1], [2, None]], "time": [0] * 3, "diff": [1] * 3})
    with pytest.raises(InvalidUpdate) as e:
        to_table(table, lists)
    assert e.value.row == 2
    optional = Schema(key=int, val=Point | None)
    rows = [(1, None, 0, 1), (2, Point(x=1), 0, 1)]
    assert Updates(to_table(to_table(rows, optional), optional), optional).rows() == rows


def test_moments_of_other_units_and_zones() -> None:
    schema = Schema(key=int, val=dt.datetime)
    columns = {"key": [1], "time": [0], "diff": [1]}
    moment = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    for t in (pa.timestamp("s", "UTC"), pa.timestamp("ns", "Europe/Berlin")):
        table = to_table(pa.table({**columns, "val": pa.array([moment], t)}), schema)
        assert [u.val for u in Updates(table, schema)] == [moment]
    for values in (pa.array([1], pa.timestamp("ns", "UTC")), pa.array([1], pa.timestamp("us"))):
        with pytest.raises(InvalidUpdate):
            to_table(pa.table({**columns, "val": values}), schema)


def test_floats_of_arrow_are_canonical() -> None:
    schema = Schema(key=int, val=list[float])
    table = pa.table({"key": [1], "val": [[-0.0, 1.5]], "time": [0], "diff": [1]})
    assert str(to_table(table, schema)["val"][0].as_py()) == "[0.0, 1.5]"


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["row", "table"]), st.integers(0, 40)), max_size=150),
    st.integers(1, 400),
)
def test_a_buffer_is_cut_where_the_target_is_reached(kinds: list[tuple[str, int]], target: int) -> None:
    """Goal: however updates come, the same parts are cut, and no update is lost or moved."""
    buffer, rows, expected, sizes_so_far = Buffer(PLAIN), [], [], 0
    for number, (kind, length) in enumerate(kinds):
        some = [("x" * length, number, 0, 1)] * (1 if kind == "row" else 3)
        if kind == "row":
            buffer.add_row(some[0], length + 24)
        else:
            buffer.add(to_table(some, PLAIN))
        rows += some
    current: list[Any] = []
    for row in rows:
        current.append(row)
        sizes_so_far += len(row[0]) + 24
        if sizes_so_far >= target:
            expected.append(current)
            current, sizes_so_far = [], 0
    cut = []
    while buffer.goodbytes >= target:
        cut.append(Updates(buffer.take_reaching(target), PLAIN).rows())
    assert cut == expected
    assert (buffer.rows, buffer.goodbytes) == (len(current), sizes_so_far)
    if current:
        assert Updates(buffer.take(), PLAIN).rows() == current
    assert (buffer.rows, buffer.goodbytes) == (0, 0)


def test_one_update_has_a_largest_size() -> None:
    schema = Schema(key=bytes, val=bytes)
    table = to_table([(b"k", b"v" * n, 0, 1) for n in (1, 5, 10, 11, 3, 12)], schema)
    sizes.check_update_size(table.slice(0, 2), 11)
    with pytest.raises(InvalidUpdate) as e:
        sizes.check_update_size(table, 11, row_base=10)
    assert e.value.row == 13


RUNS = pa.run_end_encoded(pa.int32(), pa.int64())


@pytest.mark.parametrize(
    ("t", "plain"),
    [
        (pa.dictionary(pa.int8(), pa.date32()), pa.date32()),
        (RUNS, int),
        (pa.struct([pa.field("x", RUNS)]), pa.struct([pa.field("x", pa.int64())])),
    ],
    ids=["dictionary", "runs", "struct of runs"],
)
def test_a_table_without_batches_is_no_updates(t: pa.DataType, plain: Any) -> None:
    """Goal: also of types of which Arrow makes no array without values."""
    schema = pa.schema({"key": t, "val": pa.int64(), "time": pa.int64(), "diff": pa.int64()})
    nothing = pa.table([pa.chunked_array([], field.type) for field in schema], schema)
    (piece,) = chunks_of(nothing)
    assert to_table(piece, Schema(key=plain, val=int)).num_rows == 0
    if not pa.types.is_struct(t):
        with pytest.raises(InvalidUpdate):
            to_table(piece, Schema(key=bytes, val=int))


def test_pieces_of_an_iterator_are_bounded_in_bytes_too() -> None:
    """Goal: memory is bounded however large the rows are."""
    large = ((i, b"x" * 1_000_000, 0, 1) for i in range(40))
    sizes = [len(piece) for piece in chunks_of(large)]
    assert sum(sizes) == 40
    assert max(sizes) <= 9
    small = ((i, b"x", 0, 1) for i in range(20_000))
    assert [len(piece) for piece in chunks_of(small)] == [8192, 8192, 20_000 - 2 * 8192]


def test_small_chunks_of_a_table_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a table of many small chunks takes few trips to a thread; one chunk takes a bounded copy; errors
    count the rows of the whole table."""
    small = pa.table({"key": [1, 2], "val": [b"x", b"y"], "time": [0, 0], "diff": [1, 1]})
    (piece,) = chunks_of(pa.concat_tables([small] * 500))
    assert piece.num_rows == 1000
    large = pa.table({"key": [1] * 20, "val": [bytes(1_000_000)] * 20, "time": [0] * 20, "diff": [1] * 20})
    monkeypatch.setattr("aiopersist.data.updates.convert.COPIED_BYTES", 32_000_000)
    pieces = list(chunks_of(pa.concat_tables([large.combine_chunks()] * 4)))
    assert [piece.num_rows for piece in pieces] == [20] * 4
    wrong = pa.concat_tables([small, small.set_column(1, "val", [pa.array([b"x", None])])])
    with pytest.raises(InvalidUpdate) as caught:
        to_table(next(chunks_of(wrong)), Schema(key=int, val=bytes))
    assert caught.value.row == 3


def test_an_empty_list_whose_child_lies_beyond_its_buffers() -> None:
    """Goal: Arrow takes it for valid, and writes a message of it that no reader can decode."""
    child = pa.Array.from_buffers(pa.int32(), 0, [None, pa.py_buffer(b"")], 0, 9)
    element = pa.field("element", pa.int32(), nullable=False)
    offsets = pa.py_buffer(bytes(8))
    keys = pa.Array.from_buffers(pa.list_(element), 1, [None, offsets], 0, 0, [child])
    keys.validate(full=True)
    schema = Schema(key=pa.list_(element), val=int)
    table = to_table(pa.table({"key": keys, "val": [1], "time": [0], "diff": [1]}), schema)
    assert decode_inline(encode_inline(table), schema, None).to_pylist() == table.to_pylist()
    assert table["key"].to_pylist() == [[]]


def test_offsets_that_point_beyond_their_elements() -> None:
    """Goal: they are refused, and nothing follows them before, not even to measure the data."""
    offsets = np.array([0, 1, 1], np.int32)
    lists = pa.list_(pa.string())
    children = [pa.array(["a"])]
    keys = pa.Array.from_buffers(lists, 2, [None, pa.py_buffer(offsets)], children=children)
    columns = [keys, pa.array([1, 1]), pa.array([0, 0]), pa.array([1, 1])]
    batch = pa.RecordBatch.from_arrays(columns, ["key", "val", "time", "diff"])
    offsets[:] = 2**30, 2**30, 2**30 + 5
    with pytest.raises(InvalidUpdate, match="invalid Arrow data"):
        [to_table(chunk, Schema(key=lists, val=int)) for chunk in chunks_of(batch)]


@pytest.mark.parametrize("name", ["MAUVE", "CRIMSON"])
def test_arrow_text_that_is_no_member_of_an_enum(name: str) -> None:
    """Goal: no reader could make a member of it, or none that rows retract; so it is refused with its row, in
    keys and vals, at any depth and in any chunk."""
    known = plain_table(val=["RED", "RED"])
    other = plain_table(val=["RED", name])
    with pytest.raises(InvalidUpdate, match=f"row 3: val: '{name}' is no member of Colour"):
        to_table(pa.concat_tables([known, other]), Schema(key=str, val=Colour))
    with pytest.raises(InvalidUpdate, match=f"row 1: key: '{name}' is no member of Colour"):
        to_table(plain_table(key=["RED", name]), Schema(key=Colour | None, val=int))
    vals = [{"name": "p", "colours": colours} for colours in (None, ["RED", None], [], ["RED", name])]
    deep = pa.table({"key": list("abcd"), "val": vals, "time": [0] * 4, "diff": [1] * 4})
    paints = Schema(key=str, val=Paint)
    with pytest.raises(InvalidUpdate, match="row 3: val: field 'colours': in a list: "):
        to_table(deep, paints)
    assert to_table(deep.slice(0, 3), paints)["val"].to_pylist() == vals[:3]


def test_lists_with_more_elements_than_an_offset_counts() -> None:
    """Goal: they are refused; offsets of 32 bits that wrap would give each row the elements of others."""
    size = 2**22
    lists = pa.FixedSizeListArray.from_arrays(pa.nulls(size * 1024), size)
    table = pa.table({"key": range(1024), "val": lists, "time": [0] * 1024, "diff": [1] * 1024})
    with pytest.raises(InvalidUpdate, match="not in range"):
        to_table(table, Schema(key=int, val=list[None]))


def test_text_that_is_no_unicode_and_cancels_out() -> None:
    """Goal: a few rows whose sum is nothing are refused as others are, with a typed error."""
    rows = [("\ud800", 1, 0, 1), ("\ud800", 1, 0, -1)]
    assert tiny(rows, PLAIN) is None
    with pytest.raises(InvalidUpdate, match="row 0"):
        to_table(rows, PLAIN)
