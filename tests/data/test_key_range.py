"""Goal: the ranges of a read are disjoint, cover every row, and hold about as many updates each; one task
does not get all rows of a hot key; conditions and bounds agree, for every type, null and NaN."""

from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopersist.data.part.key_range import (
    Block,
    Bound,
    KeyRange,
    bounds_of,
    condition,
    from_stored,
    leaves,
    overlaps,
    plan_key_ranges,
    to_stored,
)
from aiopersist.data.part.select import apply_where, prune
from aiopersist.data.part.stats import collect
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.convert import to_table


def block(*bounds: tuple[Any, Any], updates: int = 10) -> Block:
    return Block(tuple(Bound(low, high, False) for low, high in bounds), updates)


def holds(keys: KeyRange, row: tuple[Any, ...]) -> bool:
    """Whether the row is in the range, by its definition."""
    if row[: len(keys.prefix)] != keys.prefix:
        return False
    if keys.lower is None and keys.upper is None:
        return True
    value = row[len(keys.prefix)]
    above = keys.lower is None or (value > keys.lower if keys.after else value >= keys.lower)
    return above and (keys.upper is None or value < keys.upper)


span = st.tuples(st.integers(0, 12), st.integers(0, 3)).map(lambda s: (s[0], s[0] + s[1]))
blocks = st.lists(
    st.builds(lambda spans, n: block(*spans, updates=n), st.lists(span, max_size=3), st.integers(1, 100)),
    max_size=40,
)
rows = st.tuples(*[st.integers(-1, 17)] * 3)


@given(blocks, st.integers(1, 12), st.lists(rows, max_size=20))
def test_every_row_is_in_one_range(found: list[Block], tasks: int, some: list[tuple[int, ...]]) -> None:
    ranges = plan_key_ranges(found, tasks)
    for row in some:
        assert sum(holds(keys, row) for keys in ranges) == 1
    order = [next(i for i, keys in enumerate(ranges) if holds(keys, row)) for row in sorted(some)]
    assert order == sorted(order)


@given(blocks, st.integers(1, 12), rows)
def test_no_block_is_passed_over_that_holds_a_row(found: list[Block], tasks: int, row: Any) -> None:
    within = [b for b in found if all(v.low <= x <= v.high for x, v in zip(row, b.bounds, strict=False))]
    for keys in plan_key_ranges(found, tasks):
        if holds(keys, row):
            assert all(overlaps(keys, b.bounds) for b in within)


def begun(ranges: list[KeyRange], found: list[Block]) -> list[int]:
    """Updates of the blocks that begin in each range."""
    return [sum(b.updates for b in found if holds(r, tuple(v.low for v in b.bounds))) for r in ranges]


@pytest.mark.parametrize("runs", [1, 8])
def test_ranges_are_about_equal(runs: int) -> None:
    """Goal: also where every run covers all keys."""
    found = [block((k * 10, k * 10 + 9), updates=1000) for _ in range(runs) for k in range(40)]
    sizes = begun(plan_key_ranges(found, 8), found)
    assert len(sizes) == 8
    assert max(sizes) <= 1.3 * min(sizes)


def test_a_hot_key_is_divided_by_what_comes_next() -> None:
    hot = [block(("hot", "hot"), (n, n + 1), updates=1000) for n in range(20)]
    found = [block(("a", "f"), (0, 9), updates=100), *hot, block(("hot", "z"), (0, 9), updates=100)]
    ranges = plan_key_ranges(found, 5)
    shares = [r for r in ranges if r.prefix == ("hot",)]
    assert len(shares) >= 4
    assert max(begun(ranges, found)) <= 1.5 * 20_200 / 5
    assert all(a.upper == b.lower for a, b in pairwise(shares))
    assert KeyRange((), "hot", None, after=True) in ranges


def test_a_hot_row_is_not_divided() -> None:
    """Goal: there is nothing to divide it by, and no end is looked for."""
    blocks = [block((1, 1), (2, 2))] * 50
    assert plan_key_ranges(blocks, 4) == plan_key_ranges(blocks, 4)
    assert plan_key_ranges([block((1, 1))] * 50, 4) == [KeyRange()]


def test_what_is_not_known_is_one_range() -> None:
    assert plan_key_ranges([], 8) == [KeyRange()]
    assert plan_key_ranges([Block((), 5), Block((), 5)], 8) == [KeyRange()]
    assert plan_key_ranges([block((1, 2)), block((5, 6))], 1) == [KeyRange()]


KEYS: dict[str, tuple[Any, list[Any]]] = {
    "int": (int, [-5, 0, 3, 9, 2**60]),
    "text": (str, ["", "a", "ab", "b", "ä", "\U0001f600"]),
    "bytes": (bytes, [b"", b"\0", b"a", b"\xff"]),
    "float": (float, [-1.5, 0.0, 2.5, float("inf"), float("nan")]),
    "bool": (bool, [False, True]),
    "decimal": (Decimal, [Decimal("-1.5"), Decimal(0), Decimal("2.25")]),
    "date": (date, [date(1969, 1, 1), date(2020, 5, 5), date(2030, 1, 1)]),
    "datetime": (datetime, [datetime(1960, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC)]),
    "optional text": (str | None, [None, "a", "b", "c"]),
    "optional float": (float | None, [None, 0.5, 1.5, float("nan")]),
    "fixed bytes": (pa.binary(2), [b"aa", b"ab", b"zz"]),
    "uint64": (pa.uint64(), [0, 5, 2**64 - 1]),
    "timestamp": (pa.timestamp("us"), [datetime(2020, 1, 1), datetime(2021, 1, 1)]),
}


@pytest.mark.parametrize("kind", KEYS)
def test_conditions_tell_what_statistics_may_pass_over(kind: str) -> None:
    """Goal: for every type each row is in one range, also after the range travelled as JSON; and neither our
    bounds nor Arrow's pruning passes over a row."""
    key, values = KEYS[kind]
    schema: Schema[Any, Any, int] = Schema(key=key, val=int)
    table = to_table(
        pa.table(
            [
                pa.array(values * 2, schema.arrow_schema.field("key").type),
                [0] * len(values) + [1] * len(values),
            ],
            ["key", "val"],
        )
        .append_column("time", pa.array([0] * 2 * len(values)))
        .append_column("diff", pa.array([1] * 2 * len(values))),
        schema,
    )
    order = leaves(schema)
    records = [collect(table.slice(row, 1)) for row in range(table.num_rows)] * 3
    ranges = plan_key_ranges([Block(bounds_of(record, order), 10) for record in records], len(values) * 2)
    assert len(ranges) > 1
    seen = []
    for keys in ranges:
        back = from_stored(to_stored(keys, order), order)
        assert back == keys
        where = condition(back, order)
        found = apply_where(table, where, schema)
        seen += found.to_pylist()
        kept = prune(where, records, schema)
        for row, record in enumerate(records[: table.num_rows]):
            matches = apply_where(table.slice(row, 1), where, schema).num_rows == 1
            if matches:
                assert kept[row]
                assert overlaps(keys, bounds_of(record, order))
    assert sorted(map(repr, seen)) == sorted(map(repr, table.to_pylist()))


def test_hot_keys_of_a_table() -> None:
    schema: Schema[Any, Any, int] = Schema(key=str, val=int)
    table = to_table([("hot", n, 0, 1) for n in range(100)] + [("a", 1, 0, 1), ("z", 1, 0, 1)], schema)
    order = leaves(schema)
    records = [collect(table.slice(row, 1)) for row in range(table.num_rows)]
    ranges = plan_key_ranges([Block(bounds_of(record, order), 1) for record in records], 5)
    sizes = [apply_where(table, condition(keys, order), schema).num_rows for keys in ranges]
    assert sum(sizes) == table.num_rows
    assert max(sizes) <= 30


def test_leaves_end_where_nothing_can_be_divided_by() -> None:
    inner = pa.struct(
        [pa.field("a", pa.int64()), pa.field("b", pa.list_(pa.int64())), pa.field("c", pa.int64())]
    )
    schema: Schema[Any, Any, int] = Schema(key=inner, val=int)
    assert [leaf.path for leaf in leaves(schema)] == [("key", "a")]
    assert leaves(Schema(key=None, val=str))[0].path == ("val",)


@pytest.mark.parametrize(
    "stored", [{"prefix": [1, 2, 3], "after": False}, {"prefix": [1, 2], "lower": 3, "after": False}]
)
def test_a_range_of_no_columns_is_refused(stored: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_stored(stored, leaves(Schema(key=int, val=int)))
