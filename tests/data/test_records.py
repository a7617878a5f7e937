"""Goal: dataclasses, named tuples and typed dicts are structs, as models are; the error for another type
names the types that can be stored."""

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import pyarrow as pa
import pytest
from pydantic import BaseModel

from aiopersist.base.errors import InvalidUpdate
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.updates import Updates


@dataclass(frozen=True)
class Point:
    x: int
    label: str | None = None


@dataclass
class Mutable:
    x: int


class Pair(NamedTuple):
    left: int
    right: Point | None = None


class Options(TypedDict):
    name: str
    limit: NotRequired[int | None]


class Model(BaseModel, frozen=True):
    x: int
    label: str | None = None


STRUCT = pa.struct([pa.field("x", pa.int64(), False), pa.field("label", pa.string())])
VALUES: list[tuple[Any, Any]] = [
    (Point, [Point(1, "a"), Point(2)]),
    (Pair, [Pair(1, Point(2)), Pair(3)]),
    (Mutable, [Mutable(1), Mutable(2)]),
    (Options, [{"name": "a", "limit": 1}, {"name": "b", "limit": None}]),
    (list[Point], [[Point(1)], []]),
    (Pair | None, [None, Pair(1)]),
]


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=lambda v: str(v)[:40])
def test_records_come_back_as_they_went(kind: Any, values: list[Any]) -> None:
    schema: Schema[Any, Any, Any] = Schema(key=int, val=kind)
    rows = [(i, value, 0, 1) for i, value in enumerate(values)]
    found = Updates(to_table(rows, schema), schema).rows()
    assert [row.val for row in found] == values
    assert [type(row.val) for row in found] == [type(value) for value in values]


@dataclass(frozen=True, slots=True)
class Rounded:
    x: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x + 1)


class Counted(BaseModel):
    x: int

    def model_post_init(self, context: Any) -> None:
        self.x += 1


@pytest.mark.parametrize("kind", [Rounded, Counted])
def test_what_is_read_is_what_is_stored_whatever_a_class_makes_of_its_fields(kind: Any) -> None:
    """Goal: a value that was read can be retracted."""
    schema: Schema[Any, Any, Any] = Schema(key=int, val=kind)
    table = to_table([(1, kind(x=1), 0, 1)], schema)
    (row,) = Updates(table, schema).rows()
    assert row.val.x == 2
    assert to_table([row], schema).equals(table)


def test_a_dataclass_and_a_model_of_the_same_fields_are_one_schema() -> None:
    assert Schema(key=Point, val=Pair).same_as(Schema(key=Model, val=Pair))
    assert Schema(key=Point, val=int).arrow_schema.field("key").type == STRUCT


def test_an_absent_key_of_a_typed_dict_is_none() -> None:
    schema: Schema[Any, Any, Any] = Schema(key=int, val=Options)
    (row,) = Updates(to_table([(1, {"name": "a"}, 0, 1)], schema), schema).rows()
    assert row.val == {"name": "a", "limit": None}


def test_values_of_another_kind_are_refused() -> None:
    for kind, wrong in ((Point, (1, "a")), (Pair, (1, None)), (Options, {"name": "a", "more": 1})):
        with pytest.raises(InvalidUpdate) as e:
            to_table([(1, wrong, 0, 1)], Schema(key=int, val=kind))
        assert e.value.row == 0


@dataclass
class Hidden:
    x: int = field(init=False, default=1)


@dataclass(frozen=True)
class Loop:
    again: "Loop | None"


class Absent(TypedDict):
    limit: NotRequired[int]


class Own:
    pass


@pytest.mark.parametrize(
    "kind", [dict[str, int], dict, set[int], tuple[int, str], Own, int | str, list], ids=str
)
def test_what_cannot_be_stored_is_told_with_what_can(kind: Any) -> None:
    with pytest.raises(TypeError, match="cannot store") as e:
        Schema(key=int, val=kind)
    assert "TypedDict" in str(e.value) or "T | None" in str(e.value)


@pytest.mark.parametrize(
    ("key", "val", "why"),
    [
        (Mutable, int, "part of a key"),
        (Options, int, "part of a key"),
        (int, Hidden, "does not take the fields"),
        (int, Loop, "contains itself"),
        (int, Absent, "may be absent"),
        (int, namedtuple("Bare", "a b"), "no types"),  # that is what it is about
        (int, Annotated[dict[str, int], "x"], "TypedDict"),
    ],
)
def test_records_that_cannot_be_stored_are_refused_with_the_reason(key: Any, val: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        Schema(key=key, val=val)
