"""Goal: whichever way an update takes, it is refused by all ways or stored as the same value by all."""

import datetime as dt
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from pydantic import BaseModel, ConfigDict

from aiopersist.base.errors import InvalidUpdate, InvalidUsage
from aiopersist.data.part.inline import decode_inline, encode_inline
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.buffer import Buffer
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.data.updates.convert import ROW, chunks_of, to_table
from aiopersist.data.updates.tiny import PlainRows, tiny
from aiopersist.stash import rows as stash
from aiopersist.table.schema import TableSchema
from tests.data.arrow_fuzz import plain

UTC = dt.UTC
SIZE_MAX = 2**26
REFUSED = "refused"


class Color(enum.IntEnum):
    RED = 1


class Letter(enum.StrEnum):
    A = "a"


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "other"


class Number(int):
    def __index__(self) -> int:
        return 7


class Model(BaseModel):
    model_config = ConfigDict(frozen=True)
    a: int
    b: str | None = None


class Larger(Model):
    c: int = 4


@dataclass(frozen=True)
class Point:
    a: int
    b: float = 0.0


class Pair(NamedTuple):
    a: int
    b: str = "x"


TYPES: list[Any] = [
    *(int, str, bytes, float, bool, dt.datetime, dt.date, dt.time, dt.timedelta, Decimal, UUID),
    *(Color, Letter),
    *(Model, Point, Pair, int | None, str | None, list[int], list[str]),
    *(pa.int8(), pa.uint64(), pa.float32(), pa.large_string(), pa.binary(3), pa.decimal128(5, 2)),
    *(pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.time64("us"), pa.time32("s"), pa.duration("s")),
]

VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 128, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64),
    *(
        Color.RED,
        Letter.A,
        Number(5),
        Text("s"),
        np.int64(5),
        np.float64(1.5),
        np.str_("np"),
        np.bytes_(b"abc"),
    ),
    *(
        "",
        "\0",
        "\ud800",
        "é",
        "x" * 40_000,
        "A",
        "\u2028",
        b"",
        b"abc",
        b"\xff",
        bytearray(b"abc"),
        b"x" * 40_000,
    ),
    *(-0.0, 1.0, 1.5, 0.1, float("nan"), float("-inf"), 1e39, 5e-324, 2.2250738585072011e-308),
    *map(Decimal, ("1", "1.10", "NaN", "sNaN", "1E-10", "1E+28", "1E+29", "-0", "999.99")),
    *(dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, 0, 0, 0, 5, UTC), dt.datetime.max.replace(tzinfo=UTC)),
    dt.datetime(2020, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Paris"), fold=1),
    dt.datetime.max.replace(tzinfo=dt.timezone(-dt.timedelta(hours=2))),
    *(
        dt.date.min,
        dt.date.max,
        dt.time(1, 2),
        dt.time.max,
        dt.time(1, 2, tzinfo=UTC),
        dt.timedelta.max,
        dt.timedelta(days=1),
    ),
    *(UUID(int=5), [], [1], (1,), ["a"], [None], {"a": 1}, object(), pa.scalar(5)),
    *(Model(a=1), Larger(a=1), Model.model_construct(a="x"), Model.model_construct(a=2**70)),
    *(Model.model_construct(b="x"), Model.model_construct(a=True), Model(a=1, b="\ud800")),
    *(Point(1), Point(1, -0.0), Point(1, float("nan")), Point(1, 2), Pair(1), Pair("a", "x"), (1, "x")),
]

Row = tuple[Any, Any, int, int]
Way = Callable[[list[Row]], Any]


def ways(schema: Schema[Any, Any, Any], kind: TableSchema[Any, Any] | None) -> Iterator[tuple[str, Way]]:
    """By name, functions from updates with different keys, in order, to a table or batch of them; `None` if
    the way does not take them."""

    def by_tiny(rows: list[Row]) -> Any:
        found = tiny(rows, schema)
        return None if found is None else found.batch

    def one_by_one(rows: list[Row]) -> Any:
        measure, buffer = PlainRows(schema), Buffer(schema)
        sizes = [measure.size(row) for row in rows]
        for row, size in zip(rows, sizes, strict=True):
            if size is None:
                return None
            buffer.add_row(row, size)
        try:
            return buffer.take()
        except InvalidUpdate as error:  # too late: it is acknowledged
            raise AssertionError("a measured update cannot be converted") from error

    def without_times(rows: list[Row]) -> Any:
        return to_table([row[:2] for row in rows], schema, columns=ROW, diff=1)

    def by_iterator(rows: list[Row]) -> Any:
        return pa.concat_tables(to_table(chunk, schema) for chunk in chunks_of(map(list, rows)))

    def in_a_stash(rows: list[Row]) -> Any:
        entries = [((key, val), time, diff) for key, val, time, diff in rows]
        return stash._table(stash.encode(entries, schema, "c"), schema)

    def inline(rows: list[Row]) -> Any:
        return decode_inline(encode_inline(sort_and_consolidate(to_table(rows, schema))), schema, None)

    yield "tiny", by_tiny
    yield "one by one", one_by_one
    yield "without times", without_times
    yield "iterator", by_iterator
    yield "stash", in_a_stash
    yield "inline", inline
    if kind is None:
        return

    def as_entries(rows: list[Row]) -> Any:
        entries = kind.entries([row[:2] for row in rows], SIZE_MAX)
        return kind.updates(entries, dict.fromkeys(entries), 3)

    def each_entry(rows: list[Row]) -> Any:
        entries = dict(kind.entry(*row[:2], SIZE_MAX) for row in rows)
        return kind.updates(entries, dict.fromkeys(entries), 3)

    def read_again(rows: list[Row]) -> Any:
        entries = dict(kind.entry(*row[:2], SIZE_MAX) for row in rows)
        keys = kind.keys(list(entries))
        return to_table([(k, kind.val(v), 3, 1) for k, v in zip(keys, entries.values(), strict=True)], schema)

    yield "entries", as_entries
    yield "entry", each_entry
    yield "read again", read_again


def outcome(way: Way, rows: list[Row]) -> Any:
    """The stored keys and vals; `REFUSED`; or `None` if the way does not take them."""
    try:
        found = way(rows)
    except InvalidUpdate:
        return REFUSED
    if found is None:
        return None
    return [tuple(map(repr, row)) for row in plain(pa.table(found).select(["key", "val"]))]  # 0.0 == -0.0


def kind_of(key: Any, val: Any) -> TableSchema[Any, Any] | None:
    try:
        return TableSchema("t", key, val)
    except InvalidUsage:
        return None


@pytest.mark.parametrize("number", range(len(TYPES)))
def test_all_ways_agree(number: int) -> None:
    """Goal: value by value, and among others."""
    schema: Schema[Any, Any, Any] = Schema(int, TYPES[number])

    def in_columns(rows: list[Row]) -> Any:
        return to_table(rows, schema)

    taken = list(ways(schema, kind_of(int, TYPES[number])))
    stored, refused = [], []
    for value in VALUES:
        rows: list[Row] = [(1, value, 3, 1)]
        expected = outcome(in_columns, rows)
        for name, way in taken:
            assert outcome(way, rows) in (expected, None), (name, value)
        if expected == REFUSED:
            refused.append(value)
        else:
            stored.append((value, expected[0][1]))
    rng = Random(number)
    for size in (2, 20, 70, 200):
        some = rng.choices(stored, k=size)
        rows = [(key, value, 3, 1) for key, (value, _) in enumerate(some)]
        expected = [(repr(key), val) for key, (_, val) in enumerate(some)]
        for name, way in [("columns", in_columns), *taken]:
            assert outcome(way, rows) in (expected, None), name
        at = rng.randrange(size)
        rows[at] = (at, rng.choice(refused), 3, 1)
        with pytest.raises(InvalidUpdate) as error:
            in_columns(rows)
        assert error.value.row == at
