"""A value is read again as it was given, or it is refused: no value is cut, rounded or left out."""

import datetime as dt
import enum
from dataclasses import InitVar, dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]  # its stubs are a package of their own
import pyarrow as pa
import pytest
from pydantic import BaseModel

from aiopersist.base.errors import InvalidUpdate
from aiopersist.base.frontier import Antichain, Description
from aiopersist.data.part.part import PartWriter, decode_part
from aiopersist.data.refusal import short
from aiopersist.data.types.schema import Codec, Schema
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.updates import Updates

NOON = dt.datetime(2026, 7, 1, 12)
UTC = NOON.replace(tzinfo=dt.UTC)
AHEAD, BEHIND = (dt.timezone(dt.timedelta(hours=hours)) for hours in (5, -5))
ODD = dt.timezone(dt.timedelta(microseconds=7))


class Animal(BaseModel):
    name: str


class Dog(Animal):
    breed: str


class Quiet(Animal):
    """Has no field more."""


@dataclass
class Spot:
    x: int


@dataclass
class Spot3(Spot):
    z: int


class Pair(NamedTuple):
    a: int
    b: int


class Open(Animal, extra="allow"):
    """Takes more than its fields."""


def _with_more() -> Animal:
    """As `model_validate(..., extra="allow")` makes it, which older versions of pydantic lack."""
    animal = Animal(name="a")
    object.__setattr__(animal, "__pydantic_extra__", {"breed": "b"})
    return animal


class Named(enum.Enum):
    """Each member says that it is the first."""

    FIRST = "a"
    SECOND = "b"

    @property
    def name(self) -> str:
        return "FIRST"


class Money(Decimal):
    """Its text is rounded."""

    def __str__(self) -> str:
        return f"{Decimal(self):.2f}"


class Turned(Pair):
    """A field's name has another meaning than the value at its position."""

    __slots__ = ()

    @property
    def a(self) -> int:
        return -Pair.a.__get__(self)  # type: ignore[attr-defined,no-any-return]


class Moved(dt.tzinfo):
    """Its distance from UTC has a fraction, or is unknown, before 2000."""

    def __init__(self, early: dt.timedelta | None) -> None:
        self.early = early

    def utcoffset(self, moment: dt.datetime | None) -> dt.timedelta | None:
        return self.early if moment is not None and moment.year < 2000 else dt.timedelta(hours=1)

    def dst(self, moment: dt.datetime | None) -> None:
        return None

    def tzname(self, moment: dt.datetime | None) -> str:
        return "moved"


ZONES = [Moved(None), Moved(dt.timedelta(microseconds=7))]


class Absent(Codec):
    """Gives null in a field that has none, for 0."""

    name = "absent"
    arrow_type = pa.struct([pa.field("a", pa.list_(pa.field("element", pa.int64(), nullable=False)))])

    def encode(self, values: Any) -> pa.Array:
        inner = pa.array([[v or None] for v in values], pa.list_(pa.int64()))
        lists = pa.ListArray.from_arrays(inner.offsets, inner.values, type=self.arrow_type.field("a").type)
        return pa.StructArray.from_arrays([lists], fields=list(self.arrow_type))

    def decode(self, array: pa.Array) -> list[Any]:
        return [v["a"][0] for v in array.to_pylist()]


class Seconds(Codec):
    """Points in time, some of which Parquet, which counts milliseconds, has not."""

    name = "seconds"
    arrow_type = pa.timestamp("s")

    def encode(self, values: Any) -> pa.Array:
        return pa.array(values, pa.int64()).cast(self.arrow_type)

    def decode(self, array: pa.Array) -> list[Any]:
        return list(array.cast(pa.int64()).to_pylist())


CASES: list[tuple[Any, Any, Any]] = [
    (pa.timestamp("s"), NOON, NOON.replace(microsecond=1)),
    (pa.timestamp("ms", "UTC"), UTC.replace(microsecond=1000), UTC.replace(microsecond=1)),
    (pa.duration("s"), dt.timedelta(seconds=1), dt.timedelta(microseconds=1)),
    (pa.duration("ms"), dt.timedelta(milliseconds=-1), dt.timedelta(microseconds=-1)),
    (pa.time32("s"), dt.time(1, 2, 3), dt.time(1, 2, 3, 4)),
    (pa.time32("ms"), dt.time(1, 2, 3, 4000), dt.time(1, 2, 3, 4)),
    (pa.time64("us"), dt.time(1, 2, 3, 4), dt.time(1, 2, 3, 4, tzinfo=dt.UTC)),
    (dt.datetime, UTC, dt.datetime.min.replace(tzinfo=AHEAD)),
    (dt.datetime, UTC, dt.datetime.max.replace(tzinfo=BEHIND)),
    (pa.timestamp("us", "+05:00"), UTC, dt.datetime.max.replace(tzinfo=dt.UTC)),
    (dt.datetime, UTC, NOON.replace(tzinfo=ODD)),
    (dt.datetime, pd.Timestamp(1_000, unit="ns", tz="UTC"), pd.Timestamp(1, unit="ns", tz="UTC")),
    (pa.duration("us"), pd.Timedelta(1_000, unit="ns"), pd.Timedelta(1, unit="ns")),
    (pa.float32(), float("inf"), 1e300),
    (pa.float32(), 2**24, 2**24 + 1),
    (pa.float32(), 2**100, 2**200),
    (Animal, Animal(name="a"), Dog(name="a", breed="b")),
    (list[Spot], [Spot(1)], [Spot3(1, 2)]),
    (Animal, Animal(name="a"), Open(name="a", breed="b")),
    (Animal, Animal(name="a"), _with_more()),
    (Pair, Turned(1, 2), tuple.__new__(Pair, (1, 2, 3))),
    (Turned, Turned(1, 2), Pair(1, 2)),
    (Named, Named.SECOND, "b"),
    (Decimal, Money("1.999"), Money("1.9999999999")),
    (pa.timestamp("us"), pd.Timestamp("2024-05-06"), pd.Timestamp(np.datetime64("20000-01-01", "s"))),
    (dt.datetime, UTC, pd.Timestamp(np.datetime64("-0001-01-01", "s")).tz_localize("UTC")),
    (pa.duration("s"), dt.timedelta(1), pd.Timedelta(np.timedelta64(10**14, "s"))),
    *[(dt.datetime, NOON.replace(tzinfo=zone), NOON.replace(1990, tzinfo=zone)) for zone in ZONES],
    (Absent(), 1, 0),
    (Seconds(), 1, 2**62),
]


@pytest.mark.parametrize(("val", "good", "bad"), CASES, ids=lambda v: short(v).partition(" object at")[0])
def test_what_would_come_back_as_something_else_is_refused(val: Any, good: Any, bad: Any) -> None:
    schema: Schema[Any, Any, Any] = Schema(key=int, val=val)
    with pytest.raises(InvalidUpdate) as e:
        to_table([(0, good, 0, 1), (1, bad, 0, 1), (2, good, 0, 1)], schema)
    assert e.value.row == 1
    (back,) = Updates(to_table([(0, good, 0, 1)], schema), schema).rows()
    assert back.val == good


def test_a_subclass_without_fields_of_its_own_is_taken() -> None:
    schema = Schema(key=int, val=Animal)
    (back,) = Updates(to_table([(0, Quiet(name="a"), 0, 1)], schema), schema).rows()
    assert back.val == Animal(name="a")


def test_a_class_that_is_not_made_of_its_fields_is_refused() -> None:
    @dataclass
    class Secret:
        a: int
        salt: InitVar[int]

    class Sum(Pair):
        def __new__(cls, a: int) -> "Sum":
            return super().__new__(cls, a, a)

    for val in (Secret, Sum):
        with pytest.raises(TypeError, match="not made of its fields"):
            Schema(key=int, val=val)


@pytest.mark.parametrize("t", [pa.time32("s"), pa.timestamp("s"), pa.duration("s")], ids=str)
def test_lists_of_nulls_beside_seconds_are_read_again(t: pa.DataType) -> None:
    # Parquet has no seconds, and a cast of the whole table makes unsound lists of nulls.
    schema: Schema[Any, Any, Any] = Schema(key=t, val=pa.field("val", pa.list_(pa.null())))
    lists = pa.array([[None, None, None], None, [None]] * 20, pa.list_(pa.null()))
    keys = pa.array(range(60), pa.int32() if t.bit_width == 32 else pa.int64()).cast(t)
    numbers = pa.array([1] * 60, pa.int64())
    table = to_table(pa.table([keys, lists, numbers, numbers], ["key", "val", "time", "diff"]), schema)
    bounds = Description(Antichain(0), Antichain(2), Antichain(0))
    part = PartWriter(schema, bounds).whole(table, 100)
    assert decode_part(bytes(part.data), part, schema) == table
