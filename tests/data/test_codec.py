"""Schemas: the types that they take and refuse, and their identity when read again."""

import datetime as dt
import enum
import json
import pickle
import typing
from decimal import Decimal
from typing import Annotated, Any, Literal, NewType, Optional, TypedDict
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AwareDatetime, BaseModel, PositiveInt

from aiopersist.base.errors import Corruption, IncompatibleSchema, InvalidUpdate
from aiopersist.data.types.evolve import adapt, check_evolution, compatible_evolution
from aiopersist.data.types.schema import Codec, Schema
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.updates import Updates
from tests.data import data_oracle as oracle


class Money(Codec):
    """Cents of a text such as `1.23`."""

    name = "money"
    arrow_type = pa.int64()

    def encode(self, values: Any) -> pa.Array:
        return pa.array([int(v.replace(".", "")) for v in values], pa.int64())

    def decode(self, array: pa.Array) -> list[Any]:
        return [f"{v // 100}.{v % 100:02}" for v in array.to_pylist()]


class Flags(enum.Flag):
    A = 1
    B = 2


class Loose(BaseModel):
    x: int


class Extra(BaseModel, extra="allow"):
    x: int


class Bare(BaseModel):
    pass


class Recursive(BaseModel):
    child: "Recursive | None" = None


class Priced(BaseModel):
    price: Annotated[str, Money()]
    prices: list[Annotated[str, Money()] | None] = []


class Hidden(BaseModel):
    x: int
    _seen: int = 7


class Numbers(list[int]):
    pass


TableSchema = NewType("TableSchema", str)


def roundtrip(key_type: Any, values: list[Any]) -> list[Any]:
    schema = Schema(key=None, val=key_type)
    return [u.val for u in Updates(to_table([(None, v, 0, 1) for v in values], schema), schema)]


@pytest.mark.parametrize("case", oracle.CASES.values(), ids=oracle.CASES.keys())
def test_values_come_back(case: oracle.Case) -> None:
    schema = Schema(key=case.key_type, val=case.val_type, time=case.time)

    @settings(max_examples=20)
    @given(oracle.rows_of(case))
    def check(rows: list[Any]) -> None:
        back = Updates(to_table(rows, schema), schema).rows()
        assert oracle.plain(back) == oracle.plain(rows)
        assert all(
            type(a) is type(b) for u, r in zip(back, rows, strict=True) for a, b in zip(u, r, strict=True)
        )

    check()


TAKEN: list[tuple[Any, list[Any]]] = [
    (Optional[int], [1, None]),  # noqa: UP045  # as users may write it
    (TableSchema, ["a"]),
    (Literal["a", "b"], ["a"]),
    (PositiveInt, [3]),
    (AwareDatetime, [dt.datetime(2020, 1, 1, tzinfo=dt.UTC)]),
    (list[list[int]], [[[1], []], []]),
    (list[int], [Numbers([1, 2]), Numbers()]),
    (pa.int8(), [127, -128]),
    (pa.field("x", pa.string()), ["a", None]),
    (pa.schema([pa.field("a", pa.int64(), False), ("b", pa.string())]), [{"a": 1, "b": None}]),
    (pa.timestamp("ms"), [dt.datetime(2020, 1, 1)]),  # a type without a zone
    (pa.decimal128(10, 2), [Decimal("1.25")]),
    (pa.large_string(), ["a"]),
    (pa.list_(pa.int32()), [[1, None]]),
    (Money(), ["1.23", "0.05"]),
    (Annotated[str, Money()] | None, ["1.23", None, "0.05"]),
    (Priced, [Priced(price="1.20", prices=["0.10", None])]),
    (float, [float("inf"), 2**60, True + 0.5]),
]


@pytest.mark.parametrize(("val", "values"), TAKEN, ids=lambda v: str(v)[:40])
def test_types_that_are_stored(val: Any, values: list[Any]) -> None:
    assert roundtrip(val, values) == values


REFUSED_TYPES = [
    object,
    Any,
    dict,
    list,
    typing.List,  # noqa: UP006
    dict[str, int],
    int | str,
    tuple[int, str],
    Extra,
    Bare,
    Recursive,
    complex,
    pa.timestamp("ns"),
    pa.map_(pa.string(), pa.int64()),
    pa.float16(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.struct([]),
    pa.struct([("a", pa.int8()), ("a", pa.int8())]),
    pa.date64(),
    "int",
    3,
]


@pytest.mark.parametrize("val", REFUSED_TYPES, ids=lambda v: str(v)[:40])
def test_types_that_cannot_be_stored(val: Any) -> None:
    with pytest.raises(TypeError):
        Schema(key=bytes, val=val)


@pytest.mark.parametrize("time", [0, -1, True, "1", None, 1.0])
def test_times_have_a_length(time: Any) -> None:
    with pytest.raises(TypeError):
        Schema(key=bytes, val=bytes, time=time)


def test_models_of_keys_are_frozen() -> None:
    with pytest.raises(TypeError, match="frozen"):
        Schema(key=Loose, val=None)
    with pytest.raises(TypeError, match="frozen"):
        Schema(key=list[Loose], val=None)
    Schema(key=None, val=Loose)


NAIVE = dt.datetime(2020, 1, 1)  # what is refused
REFUSED_VALUES: list[tuple[Any, Any, Any]] = [
    (int, 1, True),
    (int, 1, 1.5),
    (int, 1, 1.0),
    (int, 1, 2**63),
    (int, 1, -(2**63) - 1),
    (int, 1, "1"),
    (int, 1, None),
    (int | None, None, 1.5),
    (float, 1.0, True),
    (float, 1, "1"),
    (float, 1, 2**53 + 1),
    (float, 1.0, 10**400),
    (bytes, b"", ""),
    (bytes, b"", bytearray()),
    (str, "", b""),
    (str, "", "\ud800"),
    (bool, True, 1),
    (None, None, 0),
    (dt.date, dt.date(1, 1, 1), dt.datetime(1, 1, 1, tzinfo=dt.UTC)),
    (dt.datetime, dt.datetime(2020, 1, 1, tzinfo=dt.UTC), NAIVE),
    (dt.datetime, dt.datetime.max.replace(tzinfo=dt.UTC), dt.date(1, 1, 1)),
    (pa.timestamp("us"), NAIVE, NAIVE.replace(tzinfo=dt.UTC)),
    (Decimal, Decimal(1), Decimal("1e-10")),
    (Decimal, Decimal(1), 1),
    (Decimal, Decimal(1), Decimal("NaN")),
    (Decimal, Decimal(1), Decimal("Infinity")),
    (Decimal, Decimal(1), Decimal(10**30)),
    (UUID, UUID(int=1), UUID(int=1).bytes),
    (oracle.Color, oracle.Color.RED, "RED"),
    (Flags, Flags.A, Flags.A | Flags.B),
    (Flags, Flags.A, Flags(0)),  # it has no name, which would be stored as null
    (list[Flags | None], [None], [None, Flags(0)]),
    (list[int], [1], [1, None]),
    (list[int], (1, 2), [1, "a"]),
    (list[int], [], "ab"),
    (list[int], [], {1}),
    (list[str], [], 3),
    (Loose, Loose(x=1), {"x": 1}),
    (Loose, Loose(x=1), Loose.model_construct(x="a")),
    (Loose, Loose(x=1), Loose.model_construct()),
    (Loose, Loose(x=1), None),
    (pa.struct([("a", pa.int8())]), {"a": 1}, {"b": 1}),
    (pa.struct([("a", pa.int8())]), {}, {"a": 128}),
    (pa.uint64(), 0, -1),
    (Money(), "1.00", "x"),
    (Money(), "1.00", None),
    (pa.binary(2), b"ab", b"a"),
]


@pytest.mark.parametrize(("val", "good", "bad"), REFUSED_VALUES, ids=lambda v: str(v)[:30])
def test_values_that_are_refused_name_their_row(val: Any, good: Any, bad: Any) -> None:
    schema = Schema(key=int, val=val)
    rows = [(0, good, 0, 1), (1, good, 0, 1), (2, bad, 0, 1), (3, good, 0, 1), (4, bad, 0, 1)]
    with pytest.raises(InvalidUpdate) as e:
        to_table(rows, schema)
    assert e.value.row == 2
    assert "val" in str(e.value)
    assert len(to_table([rows[0], rows[3]], schema)) == 2


def test_moments_are_stored_in_utc() -> None:
    summer = dt.datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    late = dt.datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
    back = roundtrip(dt.datetime, [summer, late])
    assert back == [summer.astimezone(dt.UTC), late.astimezone(dt.UTC)]
    assert all(b.utcoffset() == dt.timedelta(0) for b in back)


def test_models_come_back_whole() -> None:
    (back,) = roundtrip(Hidden, [Hidden(x=1)])
    assert back == Hidden(x=1) and back._seen == 7 and back.model_fields_set == {"x"}
    (key,) = roundtrip(oracle.Key, [oracle.Key(name="a", number=None, inner=oracle.Inner(text="b"))])
    assert hash(key) == hash(oracle.Key(name="a", number=None, inner=oracle.Inner(text="b")))
    assert type(key.inner) is oracle.Inner


def test_without_the_types_values_are_those_of_arrow() -> None:
    schema = Schema(key=oracle.Key, val=list[UUID])
    ref = uuid4()
    table = to_table([(oracle.Key(name="a", number=1), [ref], 0, 1)], schema)
    stored = Schema.from_record(json.loads(json.dumps(schema.to_record())))
    (update,) = Updates(table, stored)
    assert update.key == {"name": "a", "number": 1, "inner": None}
    assert update.val == [ref.bytes]
    assert stored.same_as(schema) and schema == stored and hash(stored) == hash(schema)
    assert repr(stored) == repr(schema)


def test_identity_is_the_arrow_type_with_nullability() -> None:
    class Other(BaseModel):
        x: int

    same = [
        (int, pa.int64()),
        (Loose, Other),
        (UUID, pa.binary(16)),
        (oracle.Color, str),
        (str | None, pa.field("", pa.string())),
    ]
    differ = [
        (str, str | None),
        (list[int], list[int | None]),
        (int, float),
        (Money(), int),
        (Loose, Priced),
        (bytes, str),
    ]
    for a, b in same:
        assert Schema(key=int, val=a).same_as(Schema(key=int, val=b)), (a, b)
    for a, b in differ:
        assert not Schema(key=int, val=a).same_as(Schema(key=int, val=b)), (a, b)
    assert not Schema(key=int, val=int).same_as(Schema(key=int, val=int, time=2))


def test_records_keep_own_codecs_and_garbage_is_corruption() -> None:
    schema = Schema(key=Money(), val=Priced, time=2)
    record = schema.to_record()
    assert record["codecs"] == {"key": "money", "val.price": "money", "val.prices.element": "money"}
    assert Schema.from_record(record) == schema
    for bad in ({}, {**record, "arrow": "AAAA"}, {**record, "arrow": "!"}, {**record, "time": "x"}):
        with pytest.raises(Corruption):
            Schema.from_record(bad)
    assert pickle.loads(pickle.dumps(Schema(key=int, val=Loose))) == Schema(key=int, val=Loose)


def test_reprs_tell_the_columns() -> None:
    schema = Schema(key=str, val=Loose | None)
    assert repr(schema) == "Schema(key=string not null, val=struct<x: int64 not null>, time=int64)"
    assert "key=money (int64) not null" in repr(Schema(key=Money(), val=None))


class V1(BaseModel):
    a: int
    inner: Loose | None = None


class Deep(BaseModel):
    new: str | None = None
    x: int


class V2(BaseModel):
    first: str | None = None
    a: int
    inner: Deep | None = None
    last: list[float] | None = None


class Required(BaseModel):
    a: int
    inner: Loose | None = None
    b: int


class Reordered(BaseModel):
    inner: Loose | None = None
    a: int


class Narrowed(BaseModel):
    a: int | None
    inner: Loose | None = None


def test_schemas_evolve_by_optional_fields_alone() -> None:
    old = Schema(key=int, val=V1)
    check_evolution(old, Schema(key=int, val=V2))
    check_evolution(Schema(key=int, val=list[Loose]), Schema(key=int, val=list[Deep]))
    check_evolution(old, old)
    others: list[Any] = [Required, Reordered, Narrowed, V1 | None, int, Loose]
    for val in others:
        with pytest.raises(IncompatibleSchema):
            check_evolution(old, Schema(key=int, val=val))
    assert not compatible_evolution(Schema(key=int, val=V2), old)
    assert not compatible_evolution(old, Schema(key=int, val=V1, time=2))
    assert not compatible_evolution(Schema(key=int, val=int), Schema(key=int, val=Money()))


class Cents(Money):
    name = "cents"


def test_a_codec_stays_though_its_field_has_dots() -> None:
    old, new = (
        Schema(key=int, val=TypedDict("Dotted", {"a.b": Annotated[str, codec]}))
        for codec in (Money(), Cents())
    )
    assert old.arrow_schema == new.arrow_schema
    assert not compatible_evolution(old, new)
    assert compatible_evolution(old, old)


def test_columns_are_widened_and_narrowed() -> None:
    old, new = Schema(key=int, val=V1 | None), Schema(key=int, val=V2 | None)
    vals = [V1(a=1, inner=Loose(x=2)), None, V1(a=3)]
    narrow = to_table([(i, v, 0, 1) for i, v in enumerate(vals)], old)
    wide = adapt(narrow, new)
    assert wide.schema.equals(new.arrow_schema)
    assert [u.val for u in Updates(wide, new)] == [V2(a=1, inner=Deep(x=2)), None, V2(a=3)]
    full = to_table([(0, V2(first="f", a=1, inner=Deep(new="n", x=2), last=[1.5]), 0, 1)], new)
    assert [u.val for u in Updates(adapt(full, old), old)] == vals[:1]
    assert adapt(wide, old).equals(narrow)


@settings(max_examples=30)
@given(st.lists(st.none() | st.lists(st.none() | oracle.inners, max_size=3), max_size=6), st.integers(0, 6))
def test_slices_of_nested_columns_decode(values: list[Any], start: int) -> None:
    schema = Schema(key=None, val=list[oracle.Inner | None] | None)
    table = to_table([(None, v, 0, 1) for v in values], schema).slice(start)
    got = [u.val for u in Updates(table, schema)]
    assert list(map(oracle.canonical, got)) == list(map(oracle.canonical, values[start:]))
