"""Goal: values of classes with ways of their own (constructors that change or parse what they are given,
codecs that use their memory again, zones without a hash) are read as they were given."""

import array
import datetime as dt
import enum
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import pytest
from pydantic import AfterValidator, BaseModel, BeforeValidator, create_model
from pydantic.dataclasses import dataclass as validated

from aiopersist.base.errors import InvalidUpdate, Unsupported
from aiopersist.data.types.schema import Codec, Schema
from aiopersist.data.updates.convert import chunks_of, to_table
from aiopersist.data.updates.updates import Updates


@validated(frozen=True, slots=True)
class Salted:
    text: Annotated[str, AfterValidator(lambda text: f"{text}!")]


@validated
class Stripped:
    number: Annotated[int, BeforeValidator(lambda text: int(text.strip()))]


@dataclass
class InCents:
    cents: int

    def __init__(self, cents: int) -> None:
        self.cents = 100 * cents


@dataclass
class Parsed:
    day: dt.date
    note: str = ""

    def __post_init__(self) -> None:
        self.day = dt.date.fromisoformat(self.day)  # type: ignore[arg-type]


class Pair(NamedTuple):
    left: int


class Doubled(Pair):
    __slots__ = ()

    def __new__(cls, left: int) -> "Doubled":
        return super().__new__(cls, 2 * left)


class Told(BaseModel):
    day: dt.date
    by: str = ""

    def model_post_init(self, context: Any) -> None:
        self.by = context["by"]


class Counting(BaseModel, validate_assignment=True):
    opened: int = 0

    def model_post_init(self, context: Any) -> None:
        self.opened += 1


@dataclass
class Sorted:
    names: list[str]

    def __post_init__(self) -> None:
        self.names.sort()


class Tagged(BaseModel):
    tags: list[str]

    def model_post_init(self, context: Any) -> None:
        self.tags.append("new")


def _unsorted() -> Sorted:
    value = Sorted(["b"])
    value.names.append("a")
    return value


VALUES = [
    Salted("a"),
    Stripped(" 7 "),  # type: ignore[arg-type]
    InCents(3),
    Parsed("2024-05-06"),  # type: ignore[arg-type]
    Doubled(4),
    Told.model_validate({"day": "2024-05-06"}, context={"by": "ada"}),
    Counting(),
    _unsorted(),
    Tagged(tags=["a"]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_class_that_makes_other_values_of_its_arguments(value: Any) -> None:
    """A reader gets the fields as they were, also where the class refuses them as arguments."""
    schema: Schema[Any, Any, Any] = Schema(key=int, val=type(value))
    table = to_table([(1, value, 0, 1)], schema)
    (row,) = Updates(table, schema).rows()
    assert row.val == value
    assert type(row.val) is type(value)
    assert to_table([row], schema).equals(table)


class Inner(BaseModel):
    city: str


def test_a_field_whose_name_looks_like_a_way_to_another() -> None:
    names: dict[str, Any] = {"address": (Inner, ...), "address.city": (str, ...)}
    model = create_model("Dotted", **names)
    value = model(**{"address": Inner(city="inner"), "address.city": "outer"})
    schema: Schema[Any, Any, Any] = Schema(key=int, val=model)
    (row,) = Updates(to_table([(1, value, 0, 1)], schema), schema).rows()
    assert row.val == value


class Scratch(Codec):
    """Gives views of its own memory, which it fills again; and as many values as it likes."""

    name = "scratch"
    arrow_type = pa.int64()

    def __init__(self, more: int = 0) -> None:
        self.memory = array.array("q", [0] * 100)
        self.more = more

    def encode(self, values: Any) -> pa.Array:
        self.memory[: len(values)] = array.array("q", values)
        return pa.Array.from_buffers(self.arrow_type, len(values), [None, pa.py_buffer(self.memory)])

    def decode(self, array: pa.Array) -> list[Any]:
        values: list[Any] = array.to_pylist()
        return values + [0] * self.more


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_codec_that_uses_its_memory_again(wrapped: bool) -> None:
    codec = Scratch()
    schema: Schema[Any, Any, Any] = Schema(key=int, val=list[Annotated[int, codec]] if wrapped else codec)
    first, second = ([(i, [val] if wrapped else val, 0, 1) for i in range(10)] for val in (1, 2))
    table = to_table(first, schema)
    to_table(second, schema)
    assert Updates(table, schema).rows() == first


@pytest.mark.parametrize("vals", [[[1], [2, 3]], [[None, 1], [2]]], ids=str)
def test_a_codec_that_gives_more_values_than_there_are(vals: list[Any]) -> None:
    schemas = [Schema(key=int, val=list[Annotated[int, Scratch(more)] | None]) for more in (0, 1)]
    table = to_table([(i, val, 0, 1) for i, val in enumerate(vals)], schemas[0])
    with pytest.raises(TypeError, match="codec scratch gave"):
        Updates(table, schemas[1]).rows()


class Greatest(Codec):
    """Looks for the greatest value, as a codec of vectors looks at the first: without any it fails."""

    name = "greatest"
    arrow_type = pa.int64()

    def encode(self, values: Any) -> pa.Array:
        assert max(values) < 100
        return pa.array(values, self.arrow_type)

    def decode(self, array: pa.Array) -> list[Any]:
        values: list[Any] = array.to_pylist()
        assert max(values) < 100
        return values


def test_a_codec_that_needs_a_value() -> None:
    for kind, val in ((Annotated[int, Greatest()] | None, None), (list[Annotated[int, Greatest()]], [])):
        schema: Schema[Any, Any, Any] = Schema(key=int, val=kind)
        table = to_table([(1, val, 0, 1)], schema)
        assert Updates(table, schema).rows() == [(1, val, 0, 1)]
        assert Updates(table.slice(1), schema).rows() == []


class NoHash(dt.tzinfo):
    """A zone as those of dateutil are: without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def utcoffset(self, moment: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(hours=2)

    def dst(self, moment: dt.datetime | None) -> None:
        return None

    def tzname(self, moment: dt.datetime | None) -> str:
        return "no hash"


def test_zones_without_a_hash() -> None:
    moment = dt.datetime(2024, 5, 6, 7, tzinfo=NoHash())
    schema = Schema(key=dt.datetime, val=int)
    (row,) = Updates(to_table([(moment, 0, 0, 1)], schema), schema).rows()
    assert row.key == moment
    with pytest.raises(InvalidUpdate, match="has a time zone"):
        to_table([(moment, 0, 0, 1)], Schema(key=pa.timestamp("us"), val=int))
    with pytest.raises(InvalidUpdate, match="has a time zone"):
        to_table([(moment.timetz(), 0, 0, 1)], Schema(key=pa.time64("us"), val=int))


class Before(enum.Enum):
    RED = 1


class After(enum.Enum):
    RED = 1
    BLUE = 2


def test_a_member_of_a_later_version_of_an_enum() -> None:
    """Its text can be read."""
    schema: Schema[Any, Any, Any] = Schema(key=int, val=After)
    table = to_table([(1, After.BLUE, 0, 1)], schema)
    with pytest.raises(Unsupported, match="'BLUE' is no member of Before"):
        Updates(table, Schema(key=int, val=Before)).rows()
    assert Updates(table, Schema(key=int, val=str)).rows() == [(1, "BLUE", 0, 1)]


class Renamed(enum.Enum):
    SCARLET = 1
    RED = SCARLET  # the old name, now an alias


class AlsoNamed(enum.Enum):
    RED = 1
    SCARLET = RED


def test_a_member_that_was_renamed() -> None:
    """Goal: a reader gets no member that rows write by another name, since a row with it would not retract
    the stored one, nor be the same key. The new name as an alias is both."""
    old: Schema[Any, Any, Any] = Schema(key=Before, val=int)
    table = to_table([(Before.RED, 1, 0, 1)], old)
    with pytest.raises(Unsupported, match="make RED the member, and SCARLET its alias"):
        Updates(table, Schema(key=Renamed, val=int)).rows()
    new: Schema[Any, Any, Any] = Schema(key=AlsoNamed, val=int)
    assert Updates(table, new).rows() == [(AlsoNamed.SCARLET, 1, 0, 1)]
    assert to_table([(AlsoNamed.SCARLET, 1, 0, 1)], new) == table


class Unsure(list[int]):
    """Its truth says nothing about its elements."""

    def __bool__(self) -> bool:
        return False


def test_a_list_is_read_by_its_elements() -> None:
    schema: Schema[Any, Any, Any] = Schema(key=int, val=list[int])
    table = to_table([(1, Unsure([1, 2]), 0, 1), (2, [3], 0, 1)], schema)
    assert Updates(table, schema).rows() == [(1, [1, 2], 0, 1), (2, [3], 0, 1)]


class Rows(tuple[Any, ...]):
    """Its truth says nothing about its rows."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


def test_rows_are_those_that_are_iterated() -> None:
    schema: Schema[Any, Any, Any] = Schema(key=int, val=int)
    assert to_table(Rows([(1, 2, 0, 1)]), schema).num_rows == 1


@dataclass
class Rising:
    """A property that keeps another value than it is given."""

    x: int

    @property  # type: ignore[no-redef]
    def x(self) -> int:
        return self._x

    @x.setter
    def x(self, value: int) -> None:
        self._x = value + 1


def test_a_class_that_cannot_be_made_with_its_value_is_not_made_with_another() -> None:
    schema: Schema[Any, Any, Any] = Schema(key=int, val=Rising)
    table = to_table([(1, Rising(1), 0, 1)], schema)
    with pytest.raises(Unsupported, match=r"Rising\.x makes 3 of 2"):
        Updates(table, schema).rows()
    plain: Schema[Any, Any, Any] = Schema.from_record(schema.to_record())
    assert Updates(table, plain).rows() == [(1, {"x": 2}, 0, 1)]


@dataclass
class Document:
    number: int
    texts: list[str]


@pytest.mark.parametrize("wrap", [lambda doc: doc, vars, lambda doc: [doc], lambda doc: (0, doc)])
def test_structs_of_much_text_are_converted_few_at_a_time(wrap: Any) -> None:
    """Goal: the memory of an iterator is bounded however large its rows are."""
    text = "x" * 1_000_000
    sizes = [len(chunk) for chunk in chunks_of((i, wrap(Document(i, [text])), 0, 1) for i in range(40))]
    assert sum(sizes) == 40
    assert max(sizes) <= 9


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wrapped", [False, True])
def test_structs_and_lists_of_more_text_than_one_array_holds(wrapped: bool) -> None:
    texts = ["x" * 2**26] * 33
    vals = [[text] if wrapped else Document(i, [text]) for i, text in enumerate(texts)]
    schema: Schema[Any, Any, Any] = Schema(key=int, val=list[str] if wrapped else Document)
    column = to_table([(i, val, 0, 1) for i, val in enumerate(vals)], schema)["val"]
    assert len(column) == 33
    assert all(column[i].as_py() == (val if wrapped else vars(val)) for i, val in enumerate(vals))
    with pytest.raises(InvalidUpdate) as e:
        to_table([*((i, val, 0, 1) for i, val in enumerate(vals)), (33, 5, 0, 1)], schema)
    assert e.value.row == 33
