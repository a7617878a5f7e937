"""Goal: what is remembered of a stream of updates instead of the updates (their least and maximal times, the
size of each) tells the same as the updates themselves."""

import random
from typing import Any

import pyarrow as pa
import pytest

from aiopersist.base.frontier import TIME_MAX, Antichain
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates import sizes, times
from aiopersist.data.updates.assemble import at_time
from aiopersist.data.updates.consolidate import DIFF_MAX, DIFF_MIN
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.tiny import TINY_BYTES, PlainRows, tiny


def table_of(given: list[Any]) -> pa.Table:
    length = len(given[0]) if isinstance(given[0], tuple) else 1
    schema = Schema(key=int, val=None, time=length)
    return to_table([(i, None, time, 1) for i, time in enumerate(given)], schema)


@pytest.mark.parametrize("seed", range(20))
def test_the_first_time_below_a_bound(seed: int) -> None:
    rng = random.Random(seed)
    runs = [[rng.randrange(30) for _ in range(rng.randrange(1, 9))] for _ in range(rng.randrange(1, 5))]
    halves = times.Seen(), times.Seen()
    for at, run in enumerate(runs):
        halves[2 * at >= len(runs)].add(table_of(run))
    seen, later = halves
    seen.add(table_of([1]).slice(0, 0))  # no rows change nothing
    seen.merge(later)
    every = [time for run in runs for time in run]
    assert (seen.least, seen.greatest) == (min(every), max(every))
    for bound in range(32):
        assert seen.first_below(bound) == next((time for time in every if time < bound), None)


def test_the_greatest_int() -> None:
    greatest, other = times.Greatest(), times.Greatest()
    assert greatest.beyond(Antichain(0)) is None
    for run in ([4, 7], [5]):
        greatest.add(table_of(run))
    other.add(table_of([6]))
    greatest.merge(other)
    assert greatest.beyond(Antichain(7)) == 7
    assert greatest.beyond(Antichain(8)) is None
    assert greatest.beyond(Antichain()) is None


def test_rows_after_since() -> None:
    """Goal: an update at since itself is not loose: nothing will move it."""
    assert times.rows_after(table_of([3, 4, 5, 6]), Antichain(4)) == 2
    assert times.rows_after(table_of([3]).slice(0, 0), Antichain(4)) == 0
    assert times.rows_after(table_of([(3, 3)]), Antichain((0, 0))) is None


@pytest.mark.parametrize(("length", "time"), [(1, 7), (1, TIME_MAX), (2, (3, 4))])
def test_rows_get_one_time(length: int, time: Any) -> None:
    schema = Schema(key=int, val=str, time=length)
    given = to_table([(1, "a", time, 2), (2, "b", time, -1)], schema)
    assert at_time(given.drop_columns("time"), time, schema).equals(given)
    assert at_time(given.drop_columns("time").slice(0, 0), time, schema).equals(given.slice(0, 0))


@pytest.mark.parametrize(
    ("row", "size"),
    [
        ((b"ab", "cde", 0, 1), 21),
        ((b"", "é", TIME_MAX, DIFF_MIN), 18),
        ((b"x" * TINY_BYTES, "", 0, DIFF_MAX), TINY_BYTES + 16),
        ((b"x" * (TINY_BYTES + 1), "", 0, 1), None),
        ((b"", "x" * (TINY_BYTES + 1), 0, 1), None),
        ((b"", "\ud800", 0, 1), None),
        ((b"", "", -1, 1), None),
        ((b"", "", TIME_MAX + 1, 1), None),
        ((b"", "", 0, DIFF_MAX + 1), None),
        ((b"", "", 0, DIFF_MIN - 1), None),
        ((b"", "", 0, True), None),
        (("", "", 0, 1), None),
        ((b"", "", 0), None),
    ],
)
def test_which_update_is_measured_at_once(row: Any, size: int | None) -> None:
    """Goal: one that has a size can be stored; any other goes the way that says what is wrong with it."""
    assert PlainRows(Schema(key=bytes, val=str)).size(row) == size


def test_ints_and_columns_that_are_not_plain_have_their_sizes() -> None:
    ints = PlainRows(Schema(key=int, val=int))
    assert ints.size((1, DIFF_MAX, 0, 1)) == 32
    assert ints.size((1, DIFF_MAX + 1, 0, 1)) is None
    assert PlainRows(Schema(key=float, val=int)).size((1.0, 1, 0, 1)) is None
    assert PlainRows(Schema(key=int, val=int, time=2)).size((1, 1, (0, 0), 1)) is None


@pytest.mark.parametrize(
    "rows",
    [
        [(b"ab", "cde", 4, 1), (b"", "é", 5, -1)],
        [(b"x", "", 0, 1)],
        [(b"x", "y", 3, 1), (b"x", "y", 3, -1)],
    ],
    ids=["several", "one", "nothing stays"],
)
def test_a_few_rows_are_measured_as_one_by_one(rows: list[Any]) -> None:
    schema = Schema(key=bytes, val=str)
    made = tiny(rows, schema)
    assert made is not None
    assert made.goodbytes == sum(PlainRows(schema).size(row) or 0 for row in rows)
    assert (made.least_time, made.greatest_time) == (min(r[2] for r in rows), max(r[2] for r in rows))


def test_a_few_rows_of_ints_are_measured_as_one_by_one() -> None:
    schema = Schema(key=int, val=int)
    made = tiny([(1, 2, 3, 4), (5, 6, 7, 8)], schema)
    assert made is not None and made.goodbytes == 64


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary()], ids=str)
def test_bytes_of_texts_of_any_width_of_offsets(kind: Any) -> None:
    """Goal: of a slice, only what lies in it."""
    values = ["ab", "cde", "f", None, "ghij"]
    column = pa.array(values, pa.string()).cast(kind)
    assert sizes.column_bytes(column) == 10
    assert sizes.column_bytes(column.slice(1, 2)) == 4
    assert sizes.column_bytes(column.slice(2)) == 5
    assert sizes.column_bytes(column.slice(5)) == 0
    assert sizes.column_bytes(pa.chunked_array([column, column.slice(4)])) == 14
