"""`texts.py` says exactly what `data/jsonable.py` says, and reads it back."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from aiopersist.data.jsonable import column_from_texts, column_texts
from aiopersist.data.refusal import Refusal
from aiopersist.data.texts import reader_of, writer_of
from aiopersist.data.types.schema import Schema


class Inner(BaseModel, frozen=True):
    a: int | None
    text: str


@dataclass
class Data:
    number: float
    maybe: float | None
    flag: bool


class Outer(BaseModel):
    name: str
    inner: Inner
    other: Inner | None
    data: Data
    last: bool | None = None


TEXT = st.text(st.characters(), max_size=8)
INT = st.integers(-(2**63) - 2, 2**63 + 2) | st.booleans()
FLOAT = st.floats() | st.integers(-5, 5) | st.just(-0.0)
BOOL = st.booleans() | st.sampled_from([0, 1])
INNER = st.builds(Inner.model_construct, a=INT | st.none(), text=TEXT)
DATA = st.builds(Data, number=FLOAT, maybe=FLOAT | st.none(), flag=BOOL)
OUTER = st.builds(
    Outer.model_construct,
    name=TEXT,
    inner=INNER,
    other=INNER | st.none(),
    data=DATA,
    last=BOOL | st.none(),
)
ANY = st.none() | TEXT | INT | FLOAT | BOOL | INNER | DATA | OUTER
TYPES: dict[Any, Any] = {
    str: TEXT,
    int: INT,
    float: FLOAT,
    bool: BOOL,
    Inner: INNER,
    Data: DATA,
    Outer: OUTER,
}


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.__name__)
@given(data=st.data())
def test_same_as_a_column(type_: Any, data: Any) -> None:
    """What it writes is what a column writes; what it leaves to a column may be anything; it takes nothing
    that a column refuses."""
    value = data.draw(TYPES[type_] | ANY)
    field = Schema(str, type_).val
    text = writer_of(field)(value)
    try:
        (expected,) = column_texts(field.encode([value]))
    except Refusal:
        assert text is None
        return
    assert text in (None, expected)
    read = reader_of(field)
    assert read is not None
    (again,) = field.decode(column_from_texts([expected], field.codec.arrow_type))
    found = read(expected)
    assert repr(found) == repr(again)
    assert type(found) is type(again)


class Pair(NamedTuple):
    a: int
    b: int


class Turned(Pair):
    """A field's name has another meaning than the value at its position."""

    __slots__ = ()

    @property
    def a(self) -> int:
        return -Pair.a.__get__(self)  # type: ignore[attr-defined,no-any-return]


def _with_more() -> Inner:
    """As `model_validate(..., extra="allow")` makes it, which older versions of pydantic lack."""
    inner = Inner(a=1, text="")
    object.__setattr__(inner, "__pydantic_extra__", {"more": 1})
    return inner


@pytest.mark.parametrize("value", [_with_more(), tuple.__new__(Pair, (1, 2, 3)), Inner.model_construct(a=1)])
def test_a_value_with_more_or_less_than_its_fields_is_left_to_a_column(value: Any) -> None:
    """A column refuses it, with its reason."""
    assert writer_of(Schema(str, type(value)).val)(value) is None


def test_a_tuple_is_written_by_position() -> None:
    """As in a column, whatever its class makes of the names."""
    assert writer_of(Schema(str, Turned).val)(Turned(1, 2)) == '{"a":1,"b":2}'


def test_plain_values_take_the_short_way() -> None:
    """The short way is taken where it can be: else it is useless."""
    values = [
        "x",
        5,
        1.5,
        True,
        Inner(a=None, text="é"),
        Outer(name="n", inner=Inner(a=1, text=""), other=None, data=Data(0.0, None, False)),
    ]
    for value in values:
        assert writer_of(Schema(str, type(value)).val)(value) is not None
