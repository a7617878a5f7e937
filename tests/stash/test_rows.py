"""Goal: rows that are read and written without columns are what columns make of them."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopersist.base.errors import DiffOverflow
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.convert import to_table
from aiopersist.stash import rows


class Pair(NamedTuple):
    a: int
    b: str | None


DIFF = st.integers(-2, 2) | st.sampled_from([2**63 - 1, -(2**63), 2**63])
KEYS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.sampled_from(["", "a", "ä", "\U0001f600", "\uffff"]),
    int: st.integers(-2, 2),
    float: st.sampled_from([0.0, -0.0, 1.5]),
    Pair: st.builds(Pair, st.integers(0, 1), st.sampled_from(["x", "y", None])),
}
VALS = {int: st.integers(0, 1), Pair: KEYS[Pair], str: KEYS[str], bool: st.booleans()}
TYPES = [(str, int), (int, Pair), (float, str), (Pair, bool)]


@pytest.mark.parametrize("types", TYPES, ids=lambda t: f"{t[0].__name__}-{t[1].__name__}")
@given(data=st.data())
def test_rows_without_columns(types: tuple[Any, Any], data: Any) -> None:
    """Also where keys have several vals, sums are zero or beyond 64 bits, and values are refused."""
    schema: Schema[Any, Any, Any] = Schema(*types)
    row = st.tuples(st.tuples(KEYS[types[0]], VALS[types[1]]), st.integers(0, 2), DIFF)
    entries = data.draw(st.lists(row, min_size=1, max_size=8))
    flat = [(*pair, time, diff) for pair, time, diff in entries]
    plain = rows._rows_in_python(flat, schema)
    if any(abs(diff) > 2**63 - 1 and diff != -(2**63) for *_, diff in flat):
        assert plain is None
        return
    table = to_table(flat, schema)
    texts = [rows.column_texts(table.column(name)) for name in ("key", "val")]
    stored = rows.StoredRows(*texts, *([row[at] for row in flat] for at in (2, 3)))
    assert plain is None or [list(column) for column in plain.columns] == list(map(list, stored.columns))
    try:
        expected = rows._contents(stored, schema)
    except DiffOverflow:
        assert rows._contents_in_python(stored, schema) is None
        return
    found = rows._contents_in_python(stored, schema)
    assert found is None or [list(column) for column in found] == [list(column) for column in expected]


def test_rows_in_python_need_no_columns() -> None:
    """The test above would hold if all went by columns. An upsert leaves one val per key."""
    schema: Schema[Any, Any, Any] = Schema(str, Pair)
    flat = [
        ("b", Pair(1, "x"), 0, 1),
        ("a", Pair(1, "x"), 1, 1),
        ("b", Pair(1, "x"), 1, -1),
        ("b", Pair(2, "y"), 1, 1),
    ]
    stored = rows._rows_in_python(flat, schema)
    assert stored is not None
    found = rows._contents_in_python(stored, schema)
    assert found is not None
    assert (list(found.keys), list(found.vals), list(found.diffs)) == (
        ["a", "b"],
        [Pair(1, "x"), Pair(2, "y")],
        [1, 1],
    )


def test_damage_is_told_by_columns() -> None:
    """A text that is no value of its codec is no value of another type."""
    schema: Schema[Any, Any, Any] = Schema(str, int)
    for key, val in (("1", "1"), ('"a"', '"b"'), ('"a"', str(2**63)), ('"a"', "1,2"), ('"a"', "null")):
        assert rows._contents_in_python(rows.StoredRows([key], [val], [0], [1]), schema) is None


def test_several_vals_of_a_key_are_ordered_by_columns() -> None:
    """Goal: vals have an order, too, which their texts do not have."""
    schema: Schema[Any, Any, Any] = Schema(str, int)
    stored = rows.StoredRows(['"a"'] * 2, ["10", "9"], [0, 0], [1, 1])
    assert rows.decode_at(stored, schema, 0) == [("a", 9, 1), ("a", 10, 1)]
