"""Goal: a filter of a scan gives what a filter of the collected rows gives, for NaN, null, -0.0, decimals and
zones; and it reads little more than the matching rows."""

import datetime as dt
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from decimal import Decimal
from math import inf, nan
from operator import and_, eq, ge, gt, le, lt, ne, or_
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.base.portal import Portal
from aiopersist.parts import fetch as fetching
from aiopersist.read import predicate as module
from aiopersist.read.predicate import FlatColumn, where_of

BERLIN = "Europe/Berlin"
DATES = [
    dt.datetime(2024, 10, 27, hour, tzinfo=dt.UTC).astimezone(ZoneInfo(BERLIN)) for hour in (0, 1, 2, 12)
]
VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "f": (pa.float64(), pl.Float64, [nan, -nan, inf, -inf, -0.0, 0.0, 0.1, 1.5, -2.5, None]),
    "g": (pa.float32(), pl.Float32, [nan, inf, -0.0, 0.0, 0.1, 1.5, None]),
    "i": (pa.int64(), pl.Int64, [0, 1, -1, 7, 2**62, -(2**63), None]),
    "u": (pa.uint16(), pl.UInt16, [0, 1, 255, 65535, None]),
    "s": (pa.string(), pl.String, ["", "a", "ab", "b", "ä", "\U0010ffff", None]),
    "b": (pa.bool_(), pl.Boolean, [True, False, None]),
    "y": (pa.binary(), pl.Binary, [b"", b"a", b"\xff", None]),
    "d": (pa.decimal128(10, 2), pl.Decimal(10, 2), [Decimal("1.25"), Decimal("-0.01"), Decimal(0), None]),
    "t": (pa.timestamp("us", BERLIN), pl.Datetime("us", BERLIN), [*DATES, None]),
    "n": (pa.timestamp("us"), pl.Datetime("us"), [dt.datetime(1969, 7, 1), dt.datetime(2024, 1, 1), None]),
    "day": (pa.date32(), pl.Date, [dt.date(1, 1, 1), dt.date(2024, 2, 29), None]),
}
ROWS = 400
SIGNS = [eq, ne, lt, le, gt, ge]


class Scanned(NamedTuple):
    """A shard whose parts are small, as a scan and in memory."""

    scan: pl.LazyFrame
    frame: pl.DataFrame


@pytest.fixture(scope="module")
def scanned() -> Iterator[Scanned]:
    portal, life = Portal("the portal of a test"), AsyncExitStack()
    yield portal.run(opened, life)
    portal.run(life.aclose)
    portal.end()


def val_of(key: int) -> dict[str, Any]:
    numbered = enumerate(VALUES.items(), 1)
    return {name: vals[(key // 40 * n + key % 3) % len(vals)] for n, (name, (*_, vals)) in numbered}


async def opened(life: AsyncExitStack) -> Scanned:
    fields = [pa.field(name, t) for name, (t, _, _) in VALUES.items()]
    settings = ap.Settings(blob_target_size=4000, row_group_bytes=1000, inline_writes_single_max_bytes=0)
    client = await life.enter_async_context(ap.open("mem://", settings=settings, maintenance=False))
    writer = await life.enter_async_context(
        client.writer("s", ap.Schema(int, pa.field("val", pa.struct(fields), False)))
    )
    for time in range(4):  # rows that are near each other are alike, so that bounds exclude
        rows = [(key, val_of(key), time, 1) for key in range(time, ROWS, 4)]
        await writer.append(rows, time, time + 1)
    reader = await life.enter_async_context(client.reader("s"))
    snapshot = await life.enter_async_context(reader.snapshot())
    scan = await snapshot.scan()
    return Scanned(scan, await scan.collect_async())


IN_DUCKDB = (
    pl.when(pl.col("i").is_null())
    .then(pl.lit(None, dtype=pl.Boolean))
    .otherwise(pl.col("i").is_in(pl.lit(pl.Series([[1, 7]]))))
)


@st.composite
def predicates(draw: st.DrawFn, depth: int = 2) -> pl.Expr:
    kinds = ["compared", "among", "between", "null", "own"] + (["and", "or", "not"] * 2 if depth else [])
    kind, name = draw(st.sampled_from(kinds)), draw(st.sampled_from(list(VALUES)))
    _, dtype, values = VALUES[name]
    column = pl.col(name)
    literals = st.sampled_from([value for value in values if value is not None])

    def plain() -> pl.Expr:
        return pl.lit(draw(literals), dtype=dtype)

    match kind:
        case "compared":
            value = draw(literals)
            free = draw(st.sampled_from([pl.lit(value, dtype=dtype), pl.lit(value)]))
            return draw(st.sampled_from(SIGNS))(column, free)  # type: ignore[no-any-return]
        case "among":
            several = draw(st.lists(st.sampled_from(values), max_size=4))
            return column.is_in(pl.Series(several, dtype=dtype).implode())
        case "between":
            closed = draw(st.sampled_from(["both", "left", "right", "none"]))
            return column.is_between(plain(), plain(), closed=closed)
        case "null":
            return draw(st.sampled_from([column.is_null(), column.is_not_null()]))
        case "own":
            return draw(
                st.sampled_from(
                    [
                        pl.col("b"),
                        IN_DUCKDB,
                        pl.col("s").str.starts_with("a"),
                        pl.col("s").str.len_chars() > 1,
                        pl.col("f").is_nan(),
                        pl.col("f") > 2,
                        pl.col("i") > 0.5,
                        pl.col("key") < 40,
                        pl.col("key") + 1 > pl.col("i"),
                        pl.col("f") == pl.col("g"),
                        pl.col("i").eq_missing(pl.lit(None)),
                    ]
                )
            )
        case "not":
            return ~draw(predicates(depth - 1))
    join = and_ if kind == "and" else or_
    return join(draw(predicates(depth - 1)), draw(predicates(depth - 1)))  # type: ignore[no-any-return]


@given(predicate=predicates(), rows=st.integers(0, ROWS))
def test_a_filter_of_the_first_rows(scanned: Scanned, predicate: pl.Expr, rows: int) -> None:
    """`head` comes before `filter`, and after it."""
    scan, frame = scanned
    assert scan.head(rows).filter(predicate).collect().equals(frame.head(rows).filter(predicate))
    assert scan.filter(predicate).head(rows).collect().equals(frame.filter(predicate).head(rows))


@given(predicate=predicates())
def test_a_filter_equals_that_of_the_collected_rows(scanned: Scanned, predicate: pl.Expr) -> None:
    want = scanned.frame.filter(predicate)
    assert scanned.scan.filter(predicate).collect().equals(want)
    assert scanned.scan.filter(predicate).select("key").collect(engine="in-memory").equals(want.select("key"))


COLUMNS = {
    "key": FlatColumn(("key",), pa.int64()),
    **{name: FlatColumn(("val", name), t) for name, (t, _, _) in VALUES.items()},
    "pair": FlatColumn(("val", "pair"), pa.struct([pa.field("x", pa.int64())])),
}
FIELDS = [pa.field(column.path[1], column.type) for name, column in COLUMNS.items() if name != "key"]
SCHEMA = ap.Schema(int, pa.field("val", pa.struct(FIELDS), False))
FIRST = pl.col("key") == 1


def where_in_a_plan(predicate: pl.Expr) -> str:
    """The prefilter of a predicate in the form in which polars gives it to a source, in short."""
    found: list[Any] = []

    def source(_: Any, predicate: pl.Expr, *rest: Any) -> Iterator[pl.DataFrame]:
        found.append(where_of(predicate, COLUMNS, SCHEMA))
        yield empty

    from polars.io.plugins import register_io_source

    empty = pl.DataFrame(pl.from_arrow(SCHEMA.arrow_schema.empty_table()))
    empty = empty.select("key", pl.col("val").struct.unnest())
    register_io_source(source, schema=empty.schema).filter(predicate).collect()
    return re.sub(r"FieldRef.Nested\(FieldRef.Name\(val\) FieldRef.Name\((\w+)\)\)", r"\1", str(found[0]))


@pytest.mark.parametrize(
    ("predicate", "prefilter"),
    [
        (pl.col("f") > 1.5, "invert((f <= 1.5))"),
        (~(pl.col("f") > 1.5), "(f <= 1.5)"),
        (pl.col("i") == 7, "(i == 7)"),
        (pl.lit(7) < pl.col("i"), "(i > 7)"),
        (pl.col("d") > Decimal("1.25"), "(d > 1.25)"),
        (pl.col("t") <= DATES[1], "(t <= 2024-10-27 01:00:00.000000Z)"),
        (pl.col("day") == dt.date(2024, 2, 29), "(day == 2024-02-29)"),
        (pl.col("y") == b"a", '(y == "61")'),
        (pl.col("s").is_in(["a", "b"]), '((s == "a") or (s == "b"))'),
        (pl.col("s").str.starts_with("a"), '((s >= "a") and (s < "b"))'),
        (pl.col("b"), "b"),
        (IN_DUCKDB, "((i == 1) or (i == 7))"),
        (FIRST & (pl.col("s").str.len_chars() > 1), "(key == 1)"),
        (FIRST & ((pl.col("i") > 7) | pl.col("b")), "(((i > 7) or b) and (key == 1))"),
        (FIRST | (pl.col("s").str.len_chars() > 1), "None"),
        (pl.col("i") > 0.5, "None"),
        (pl.col("f") < nan, "None"),
        (pl.col("i").eq_missing(1), "None"),
        (~pl.col("s").is_in(["a", None]), "None"),
    ],
    ids=str,
)
def test_prefilters(predicate: pl.Expr, prefilter: str) -> None:
    """Polars may change its form: then some are `None`, and this test says which."""
    assert where_in_a_plan(predicate) == prefilter


def test_a_field_within_a_column() -> None:
    assert "FieldRef.Name(pair) FieldRef.Name(x)) > 1" in where_in_a_plan(
        pl.col("pair").struct.field("x") > 1
    )


FORMS = ["", "[]", "{}", '{"BinaryExpr": 1}', '{"Column": "none"}', '{"Column": "i"}']


@pytest.mark.parametrize("text", FORMS)
def test_another_form_has_no_prefilter(scanned: Scanned, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    want = scanned.frame.filter(pl.col("i") > 0)
    loads = json.loads
    monkeypatch.setattr(module.json, "loads", lambda _: loads(text))
    assert scanned.scan.filter(pl.col("i") > 0).collect().equals(want)


def test_without_the_form_there_is_no_prefilter(scanned: Scanned, monkeypatch: pytest.MonkeyPatch) -> None:
    want = scanned.frame.filter(pl.col("i") > 0)
    monkeypatch.delattr(type(pl.col("i").meta), "serialize")
    assert scanned.scan.filter(pl.col("i") > 0).collect().equals(want)


@pytest.mark.parametrize(
    ("predicate", "matches"),
    [(pl.col("key") < 5, 5), (pl.col("key").is_in([7, 391]), 2), (pl.col("key") > 1000, 0)],
    ids=str,
)
def test_little_more_is_read_than_matches(
    scanned: Scanned, monkeypatch: pytest.MonkeyPatch, predicate: pl.Expr, matches: int
) -> None:
    """Goal: at most a row group per run beyond the matching rows; here are four runs."""
    rows, group_rows = 0, 30
    whole = fetching.iter_row_groups

    def counted(*args: Any) -> Iterator[pa.Table]:
        nonlocal rows
        for table in whole(*args):
            assert table.num_rows <= group_rows
            rows += table.num_rows
            yield table

    monkeypatch.setattr(fetching, "iter_row_groups", counted)
    assert scanned.scan.filter(predicate).collect().height == matches
    assert rows <= matches + 4 * group_rows
    assert scanned.scan.filter(pl.col("key") >= 0).collect().height == ROWS
    assert rows >= ROWS
