"""Goal: a prefilter keeps each row that the engine keeps, and bounds in statistics still exclude rows. Polars
judges: on floats with NaN and -0.0 it says what Spark says."""

import datetime as dt
from decimal import Decimal
from functools import reduce
from math import inf, nan
from operator import and_, eq, ge, gt, le, lt, ne, or_
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.data.part.prefilter import COMPARED_MAX, among, compared, starting
from aiopersist.data.part.select import apply_where, prune
from aiopersist.data.part.stats import collect

SIGNS = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
VALUES: dict[Any, list[Any]] = {
    pa.float64(): [nan, inf, -inf, -0.0, 0.0, 1.5, 2.5, -3.25, None],
    pa.float32(): [nan, inf, -inf, -0.0, 0.0, 0.5, -3.25, None],
    pa.int64(): [0, 1, -1, 2**62, -(2**63), None],
    pa.uint8(): [0, 1, 255, None],
    pa.string(): ["", "a", "ab", "b", "\U0010ffff", "\ud7ff", "\ue000", None],
    pa.binary(): [b"", b"a", b"\xff", None],
    pa.bool_(): [True, False, None],
    pa.decimal128(10, 2): [Decimal("1.25"), Decimal("-0.01"), Decimal(0), None],
    pa.timestamp("us", "UTC"): [dt.datetime(2024, 1, n, tzinfo=dt.UTC) for n in (1, 2)] + [None],
    pa.timestamp("us"): [dt.datetime(1969, 1, 2), dt.datetime(2024, 1, 2), None],
    pa.date32(): [dt.date(1, 1, 1), dt.date(2024, 1, 2), None],
}
TYPES = st.sampled_from(list(VALUES))


def shard_of(t: Any) -> ap.Schema[Any, Any, Any]:
    return ap.Schema(pa.int64(), pa.struct([pa.field("x", t)]))


def rows_of(t: Any, values: list[Any]) -> pa.Table:
    vals = pa.StructArray.from_arrays([pa.array(values, t)], fields=[pa.field("x", t)])
    numbers = pa.array(range(len(values)), pa.int64())
    return pa.table({"key": numbers, "val": vals, "time": numbers, "diff": numbers})


@st.composite
def conditions(draw: st.DrawFn, t: Any, depth: int = 2) -> tuple[Any, Any]:
    """A condition of polars, and its prefilter."""
    kinds = ["compared", "among"] + (["and", "or", "not"] if depth else [])
    kind, column = draw(st.sampled_from(kinds)), pl.col("x")
    values = st.sampled_from([value for value in VALUES[t] if value is not None])
    if kind == "compared":
        sign, value = draw(st.sampled_from(list(SIGNS))), draw(values)
        literal = pa.scalar(value, t)
        polars = SIGNS[sign](column, pl.lit(pl.from_arrow(pa.array([value], t))).first())
        return polars, compared(("val", "x"), t, sign, literal)
    if kind == "among":
        several = draw(st.lists(values, min_size=1, max_size=3))
        polars = column.is_in(pl.from_arrow(pa.array(several, t)).implode())  # type: ignore[union-attr]
        return polars, among(("val", "x"), t, [pa.scalar(value, t) for value in several])
    left, right = draw(conditions(t, depth - 1)), draw(conditions(t, depth - 1))
    if kind == "not":
        return ~left[0], None if left[1] is None else ~left[1]
    join = and_ if kind == "and" else or_
    both = None if left[1] is None or right[1] is None else join(left[1], right[1])
    return join(left[0], right[0]), both


@given(data=st.data(), t=TYPES)
def test_no_row_of_the_engine_is_lost(data: st.DataObject, t: Any) -> None:
    values = data.draw(st.lists(st.sampled_from(VALUES[t]), min_size=1, max_size=6))
    polars, prefilter = data.draw(conditions(t))
    if prefilter is None:
        return
    schema, rows = shard_of(t), rows_of(t, values)
    frame = pl.DataFrame(
        {"key": range(len(values)), "x": pl.from_arrow(rows["val"].combine_chunks().field(0))}
    )
    wanted = set(frame.filter(polars)["key"])
    assert wanted <= set(apply_where(rows, prefilter, schema)["key"].to_pylist())
    for number in wanted:  # nor the part of a row
        one = rows.slice(number, 1)
        assert prune(prefilter, [collect(one)], schema) == [True]


@pytest.mark.parametrize("t", [pa.float64(), pa.float32(), pa.int64()])
@pytest.mark.parametrize("nulls", [[], [None]], ids=["", "null"])
def test_bounds_exclude(t: Any, nulls: list[None]) -> None:
    """Goal: a condition on floats still excludes the parts without NaN."""
    schema, path = shard_of(t), ("val", "x")
    stats = collect(rows_of(t, [1, 2, 3, *nulls]))
    for sign, number in [(">", 3), (">=", 4), ("<", 1), ("<=", 0), ("==", 4)]:
        condition = compared(path, t, sign, pa.scalar(number, t))
        assert prune(condition, [stats], schema) == [False], sign
    assert prune(~compared(path, t, "<=", pa.scalar(3, t)), [stats], schema) == [False]
    assert prune(among(path, t, [pa.scalar(n, t) for n in (0, 7)]), [stats], schema) == [False]


def test_a_part_with_nan_is_kept() -> None:
    t = pa.float64()
    stats = collect(rows_of(t, [1.0, nan]))
    assert prune(compared(("val", "x"), t, ">", pa.scalar(5.0)), [stats], shard_of(t)) == [True]


PREFIXES = ["", "a", "ab", "\U0010ffff", "a\U0010ffff", "\ud7ff", "z"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(prefix: str) -> None:
    values = [a + b for a in PREFIXES for b in PREFIXES] + ["\ue000", "b", None]
    rows, schema = rows_of(pa.string(), values), shard_of(pa.string())
    kept = apply_where(rows, starting(("val", "x"), pa.string(), prefix), schema)["key"].to_pylist()
    assert [values[n] for n in kept] == [v for v in values if v is not None and v.startswith(prefix)]


def test_many_values() -> None:
    path, many = ("val", "x"), range(COMPARED_MAX + 1)
    schema, rows = shard_of(pa.int64()), rows_of(pa.int64(), [1, 99, None])
    kept = apply_where(rows, among(path, pa.int64(), [pa.scalar(n) for n in many]), schema)
    assert kept["key"].to_pylist() == [0]
    assert among(path, pa.float64(), [pa.scalar(float(n)) for n in many]) is None


@pytest.mark.parametrize(
    ("t", "by"),
    [
        (pa.int64(), pa.int64()),
        (pa.date32(), pa.int32()),
        (pa.timestamp("us", "UTC"), pa.int64()),
        (pa.duration("us"), pa.int64()),
        (pa.decimal128(21, 2), pa.int64()),
        (pa.string(), pa.string()),
        (pa.binary(), pa.string()),
    ],
)
def test_many_values_exclude_parts(t: pa.DataType, by: pa.DataType) -> None:
    """Goal: by the range of the values, since Arrow excludes nothing by a set."""
    values = pa.array(range(200, 800), pa.int32()).cast(by).cast(t).to_pylist()
    where = among(("val", "x"), t, [pa.scalar(value, t) for value in values[:100]])
    parts = [collect(rows_of(t, values[begin : begin + 100])) for begin in range(0, 600, 100)]
    assert prune(where, parts, shard_of(t)) == [True, *[False] * 5]


@pytest.mark.parametrize(
    ("t", "literal"),
    [
        (pa.int64(), pa.scalar(1.0)),  # an engine rounds the column
        (pa.int8(), pa.scalar(300)),
        (pa.float32(), pa.scalar(0.1)),
        (pa.float64(), pa.scalar(2**53 + 1)),
        (pa.float64(), pa.scalar(nan)),
        (pa.float64(), pa.scalar(Decimal("0.1"))),
        (pa.int64(), pa.scalar(None, pa.int64())),
        (pa.string(), pa.scalar(1)),
        (pa.decimal128(10, 2), pa.scalar(Decimal("0.125"))),
        (pa.timestamp("us"), pa.scalar(dt.datetime(2024, 1, 1), pa.timestamp("us", "UTC"))),
        (pa.timestamp("s"), pa.scalar(1, pa.timestamp("us"))),
    ],
    ids=str,
)
def test_what_the_type_lacks_has_no_prefilter(t: Any, literal: Any) -> None:
    assert compared(("val", "x"), t, "<", literal) is None
    assert among(("val", "x"), t, [literal]) is None


def test_other_types_of_the_same_value() -> None:
    rows, schema = rows_of(pa.timestamp("us"), [1_000_000, 2_000_000]), shard_of(pa.timestamp("us"))
    seconds = pa.scalar(2, pa.timestamp("s"))
    condition = compared(("val", "x"), pa.timestamp("us"), "<", seconds)
    assert apply_where(rows, condition, schema)["key"].to_pylist() == [0]
    assert reduce(
        and_, (compared(("key",), pa.int64(), sign, pa.scalar(1, pa.int8())) is not None for sign in SIGNS)
    )


@pytest.mark.parametrize("t", [pa.float64(), pa.float32()], ids=str)
@pytest.mark.parametrize("sign", list(SIGNS))
def test_nan_is_greater_than_any_number(t: Any, sign: str) -> None:
    """Goal: exactly the rows of polars, also of the negation."""
    values = [nan, 2.0, 1.5, 1.0, -inf, inf]
    schema, rows, literal = shard_of(t), rows_of(t, values), pa.scalar(1.5, t)
    frame = pl.DataFrame({"key": range(len(values)), "x": pl.from_arrow(pa.array(values, t))})
    polars, prefilter = SIGNS[sign](pl.col("x"), 1.5), compared(("val", "x"), t, sign, literal)
    for engine, arrow in [(polars, prefilter), (~polars, ~prefilter)]:
        assert apply_where(rows, arrow, schema)["key"].to_pylist() == frame.filter(engine)["key"].to_list()
