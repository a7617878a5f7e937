"""An oracle for the data layer, on plain rows: dicts, `sorted`, nothing of the package.

Also the schemas and rows that the tests are run with: the least and the greatest of everything.
"""

import datetime as dt
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import strategies as st
from pydantic import BaseModel

from aiopersist.data.types.schema import Schema
from tests.support.schemas import INT_MAX


class Color(Enum):
    RED = 1
    BLUE = 2


class Inner(BaseModel, frozen=True):
    text: str
    score: float | None = None


class Key(BaseModel, frozen=True):
    name: str
    number: int | None
    inner: Inner | None = None


class Val(BaseModel):
    amount: Decimal
    at: dt.datetime
    day: dt.date
    color: Color
    ref: UUID | None = None
    scores: list[float | None] = []
    inners: list[Inner | None] | None = None
    flag: bool = False
    unit: None = None
    opens: dt.time = dt.time(0)
    wait: dt.timedelta | None = None


class Case(NamedTuple):
    """Arguments of a Schema, and what its keys and vals are."""

    key_type: Any
    val_type: Any
    time: int
    keys: st.SearchStrategy[Any]
    vals: st.SearchStrategy[Any]


floats = st.sampled_from([0.0, -0.0, 1.5, -1.5, float("nan"), float("inf"), float("-inf"), 5e-324, 1e308])
ints = st.sampled_from([0, 1, -1, INT_MAX, -(2**63), 255, 256])
binaries = st.sampled_from([b"", b"\x00", b"\xff", b"\xff\xff", b"a", b"ab", b"\x7f", b"\x80", b"b" * 300])
texts = st.sampled_from(
    ["", "a", "ab", "\x00", "é", "\ud7ff", "\ue000", "\uffff", "\U00010000", "😀", "z" * 300]
)
moments = st.datetimes(
    min_value=dt.datetime(1, 1, 3),  # hypothesis adds the zone
    max_value=dt.datetime(9999, 12, 29),
    timezones=st.sampled_from([dt.UTC]),
)
LONGEST = dt.timedelta(microseconds=INT_MAX)
times_of_day = st.sampled_from([dt.time(0), dt.time(12, 30, 0, 1), dt.time.max])
durations = st.sampled_from([dt.timedelta(0), dt.timedelta(days=-400, microseconds=1), LONGEST])
decimals = st.sampled_from(
    [Decimal(0), Decimal("-1.5"), Decimal("0.000000001"), Decimal(10**28), Decimal("1.5")]
)
inners = st.builds(Inner, text=texts, score=st.none() | floats)
keys = st.builds(Key, name=texts, number=st.none() | ints, inner=st.none() | inners)
vals = st.builds(
    Val,
    amount=decimals,
    at=moments,
    day=st.dates(),
    color=st.sampled_from(Color),
    ref=st.none() | st.sampled_from([UUID(int=0), UUID(int=2**128 - 1)]),
    opens=times_of_day,
    wait=st.none() | durations,
    scores=st.lists(st.none() | floats, max_size=3),
    inners=st.none() | st.lists(st.none() | inners, max_size=2),
    flag=st.booleans(),
)

CASES = {
    "bytes-str": Case(bytes, str, 1, binaries, texts),
    "int-unit": Case(int, None, 1, ints, st.none()),
    "float-optional float": Case(float, float | None, 1, floats, st.none() | floats),
    "models": Case(Key, Val | None, 1, keys, st.none() | vals),
    "lists": Case(
        list[str],
        list[int | None] | None,
        2,
        st.lists(texts, max_size=2),
        st.none() | st.lists(st.none() | ints, max_size=3),
    ),
    "optional bool-decimal": Case(bool | None, Decimal, 3, st.none() | st.booleans(), decimals),
    "uuid-enum": Case(
        UUID, Color, 2, st.sampled_from([UUID(int=i) for i in (0, 1, 2**127)]), st.sampled_from(Color)
    ),
    "timedelta-optional time": Case(dt.timedelta, dt.time | None, 1, durations, st.none() | times_of_day),
    "date-datetime": Case(dt.date, dt.datetime, 1, st.dates(), moments),
    "optional model": Case(int, Inner | None, 1, st.sampled_from([1, 2]), st.none() | inners),
}

components = st.sampled_from([0, 1, 2, 3, INT_MAX - 1, INT_MAX])
diffs = st.sampled_from([1, -1, 2, -2, 0, INT_MAX, -(2**63), 2**62, -(2**62)])
small_diffs = st.sampled_from([1, -1, 2, -2, 3])


def times(length: int) -> st.SearchStrategy[Any]:
    return components if length == 1 else st.tuples(*[components] * length)


def rows_of(case: Case, diffs: st.SearchStrategy[int] = diffs, max_size: int = 30) -> st.SearchStrategy[Any]:
    """Updates of which many meet: keys and vals come from a small pool."""
    pool = st.tuples(st.lists(case.keys, min_size=1, max_size=3), st.lists(case.vals, min_size=1, max_size=3))
    return pool.flatmap(
        lambda p: st.lists(
            st.tuples(st.sampled_from(p[0]), st.sampled_from(p[1]), times(case.time), diffs),
            max_size=max_size,
        )
    )


def rank(value: Any) -> Any:
    """Sorts as the library promises: nulls first, NaN last, unsigned bytes, fields one by one."""
    if value is None:
        return (0,)
    if isinstance(value, float) and value != value:
        return (2,)
    if isinstance(value, BaseModel):
        return (1, [rank(getattr(value, name)) for name in type(value).model_fields])
    if isinstance(value, dict):
        return (1, [rank(v) for v in value.values()])
    if isinstance(value, list | tuple):
        return (1, [rank(v) for v in value])
    if isinstance(value, str):
        return (1, list(value.encode("utf-8")))
    if isinstance(value, Enum):
        return (1, list(value.name.encode()))
    if isinstance(value, UUID):
        return (1, list(value.bytes))
    return (1, value)


def canonical(value: Any) -> Any:
    """Hashable, equal for equal values; NaN equals NaN, -0.0 is 0.0."""
    return repr(_plain(rank(value)))


def _plain(ranked: Any) -> Any:
    if isinstance(ranked, list | tuple):
        return [_plain(r) for r in ranked]
    if isinstance(ranked, bytes):
        return list(ranked)
    if isinstance(ranked, float) and ranked == 0:
        return 0.0
    if isinstance(ranked, dt.datetime):
        return ranked.astimezone(dt.UTC).isoformat()
    if isinstance(ranked, Decimal):
        return ranked.as_integer_ratio()
    return ranked


def split_sum(total: int) -> list[int]:
    """The fewest 64-bit diffs with this sum."""
    found = []
    while total:
        piece = min(max(total, -(2**63)), INT_MAX)
        found.append(piece)
        total -= piece
    return found


def consolidated(rows: list[Any], columns: int = 3) -> list[Any]:
    """Rows `(canonical key, ..., diff)`, sorted and summed by the first `columns` columns."""
    sums: dict[Any, int] = {}
    example: dict[Any, Any] = {}
    for row in rows:
        name = tuple(map(canonical, row[:columns]))
        sums[name] = sums.get(name, 0) + row[-1]
        example.setdefault(name, row)
    order = sorted(sums, key=lambda name: [rank(v) for v in example[name][:columns]])
    return [(*name, diff) for name in order for diff in split_sum(sums[name])]


def plain(rows: list[Any], columns: int = 3) -> list[Any]:
    """Rows in a form that compares with `consolidated`."""
    return [(*map(canonical, row[:columns]), row[-1]) for row in rows]


def less_equal(a: Any, b: Any) -> bool:
    return a <= b if isinstance(a, int) else all(x <= y for x, y in zip(a, b, strict=True))


def beyond(time: Any, elements: list[Any]) -> bool:
    return any(less_equal(e, time) for e in elements)


def advanced(time: Any, elements: list[Any]) -> Any:
    """The meet over the elements of their joins with the time."""
    if isinstance(time, int):
        return min(max(time, e) for e in elements)
    joins = [tuple(max(t, f) for t, f in zip(time, e, strict=True)) for e in elements]
    return tuple(min(column) for column in zip(*joins, strict=True))


cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def schema_of(case: Case) -> Schema[Any, Any, Any]:
    return Schema(key=case.key_type, val=case.val_type, time=case.time)
