"""The schema of a shard: its keys, values and times, as Python values and as Arrow columns.

A schema is a value: the fields of key and val (`Field`: a codec and its nullability) and the length of its
times. A shard does not keep the Python types. It keeps their *identity*: the Arrow types with their
nullability, and the names of own codecs by path. So the models of two programs are the same schema if their
columns are equal, and a program without the models reads dicts.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

from aiopersist.base.errors import Corruption, shown
from aiopersist.data.arrays import Buffers, encoder, maker
from aiopersist.data.lazy import ipc, pa
from aiopersist.data.types.codec import BuiltIn, Codec, Field, check_storable

__all__ = ["Codec", "Schema"]

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T", int, tuple[int, ...])


def has_lists(t: pa.DataType) -> bool:
    """Whether the type has lists: polars sorts many rows of them."""
    if pa.types.is_struct(t):
        return any(has_lists(field.type) for field in t)
    return bool(pa.types.is_list(t))


def plain_types(schema: Schema[Any, Any, Any]) -> PlainTypes | None:
    """The types of the columns if all hold bytes, str or int, and no nulls; else `None`."""
    return schema._plain


class PlainTypes(NamedTuple):
    """The Python types of the columns of a schema that has only bytes, str and int."""

    kinds: tuple[type, ...]
    makers: tuple[Callable[[Sequence[Any]], pa.Array], ...]
    """Make the columns."""
    encoders: tuple[Callable[[Sequence[Any]], Buffers], ...] | None
    """Make the buffers of the columns, if all are `made_by_buffers`. Then rows need no imports."""
    templates: dict[int, Any]
    """Templates of messages by their number of rows: see `data/part/message.py`."""


class Schema(Generic[K, V, T]):
    """The types of key, value and time.

    `key` and `val` are Python types (`bytes`, `str`, `int`, `float`, `bool`, `None`, `datetime`, `date`,
    `Decimal`, `UUID`, an `Enum`), lists and optionals of these, pydantic models, dataclasses, NamedTuples and
    TypedDicts (all of these are structs; in a key they must be frozen), Arrow types, fields or schemas, or an
    own `Codec`. An Arrow type is not nullable; a `pyarrow.field` may be. `time=1` are int times, `time=n`
    product times of length n. `TypeError` for a type that cannot be stored.
    """

    key: Field
    val: Field
    time: int
    own: dict[str, str]
    """Names of own codecs by dotted path."""

    @overload
    def __init__(self: Schema[K, V, int], key: type[K], val: type[V], time: Literal[1] = 1) -> None: ...
    @overload
    def __init__(self: Schema[K, None, int], key: type[K], val: None, time: Literal[1] = 1) -> None: ...
    @overload
    def __init__(self: Schema[K, V, tuple[int, ...]], key: type[K], val: type[V], time: int) -> None: ...
    @overload
    def __init__(self: Schema[Any, Any, Any], key: Any, val: Any, time: int = 1) -> None: ...

    def __init__(self, key: Any, val: Any, time: int = 1) -> None:
        from aiopersist.data.types.annotations import field_of  # imports pyarrow

        if type(time) is not int or time < 1:
            raise TypeError(f"time={time!r}: 1 for int times, n for product times of length n")
        self._take(field_of(key, frozen=True), field_of(val, frozen=False), time, {})
        for field in self.arrow_schema:
            check_storable(field.type)

    def _take(self, key: Field, val: Field, time: int, own: dict[str, str]) -> None:
        self.key = key
        self.val = val
        self.time = time
        self.own = {**own, **dict(_own_names("key", key)), **dict(_own_names("val", val))}

    @property
    def time_length(self) -> int | None:
        """The length of product times; `None` for int times."""
        return None if self.time == 1 else self.time

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The columns `key`, `val`, `time`, `diff` of an update, with exact nullability."""
        time = pa.int64() if self.time == 1 else pa.list_(pa.field("element", pa.int64(), False), self.time)
        last: list[Any] = [pa.field("time", time, False), pa.field("diff", pa.int64(), False)]
        return pa.schema([self.key.arrow("key"), self.val.arrow("val"), *last])

    @cached_property
    def contents_schema(self) -> pa.Schema:
        """The columns `key`, `val`, `diff` of contents at one time."""
        return pa.schema([self.arrow_schema.field(name) for name in ("key", "val", "diff")])

    @cached_property
    def _plain(self) -> PlainTypes | None:
        if self.time != 1 or self.own:
            return None
        kinds: list[type] = []
        for field in (self.key, self.val):
            accepted = getattr(field.codec, "accepted", None)
            if field.nullable or accepted not in ((bytes,), (str,), (int,)):
                return None
            kinds.append(accepted[0])
        types = self.arrow_schema.types
        makers = tuple(maker(t) or partial(pa.array, type=t) for t in types)
        encoders = [encode for t in types if (encode := encoder(t)) is not None]
        by_buffers = tuple(encoders) if len(encoders) == len(types) else None
        return PlainTypes((*kinds, int, int), makers, by_buffers, {})

    def same_as(self, other: Schema[Any, Any, Any]) -> bool:
        """Whether both have the same identity: equal Arrow types and nullability, equal own codecs."""
        return self.own == other.own and bool(self.arrow_schema.equals(other.arrow_schema))

    def to_record(self) -> dict[str, Any]:
        """The identity as JSON: readable, and exact (`arrow`, an IPC schema message in base64)."""
        return {
            "key": _text(self.arrow_schema.field("key"), self.own.get("key")),
            "val": _text(self.arrow_schema.field("val"), self.own.get("val")),
            "time": self.time,
            "codecs": dict(self.own),
            "arrow": b64encode(self.arrow_schema.serialize().to_pybytes()).decode(),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Schema[Any, Any, Any]:
        """The schema of a record, by Arrow types: models are dicts, UUIDs bytes, Enums str. `Corruption` for
        anything but a record."""
        from aiopersist.data.types.annotations import of_arrow

        try:
            columns = ipc.read_schema(pa.py_buffer(b64decode(record["arrow"], validate=True)))
            key, val = (of_arrow(f.type, nullable=f.nullable) for f in map(columns.field, ("key", "val")))
            schema: Schema[Any, Any, Any] = cls.__new__(cls)
            schema._take(key, val, int(record["time"]), dict(record["codecs"]))
            if not schema.arrow_schema.field("time").equals(columns.field("time")):
                raise ValueError(
                    f"times of length {schema.time}, and a column of {columns.field('time').type}"
                )
        except (pa.ArrowException, OSError, LookupError, TypeError, ValueError, ArithmeticError) as e:
            raise Corruption(f"no stored schema: {e}") from e
        return schema

    def __repr__(self) -> str:
        fields = map(self.arrow_schema.field, ("key", "val", "time"))
        parts = (f"{f.name}={_text(f, self.own.get(f.name))}" for f in fields)
        return f"Schema({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.same_as(other)

    def __hash__(self) -> int:
        return hash((str(self.arrow_schema), tuple(sorted(self.own.items()))))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.key, self.val, self.time, self.own)


def _rebuild(key: Field, val: Field, time: int, own: dict[str, str]) -> Schema[Any, Any, Any]:
    schema: Schema[Any, Any, Any] = Schema.__new__(Schema)
    schema._take(key, val, time, own)
    return schema


def with_fields(schema: Schema[K, V, T], key: Field, val: Field) -> Schema[K, V, T]:
    """The schema with these fields, and the same times and own codecs."""
    return _rebuild(key, val, schema.time, schema.own)


def _own_names(path: str, field: Field) -> Iterator[tuple[str, str]]:
    """The own codecs at `path` and below it, by dotted path."""
    codec = field.codec
    if not isinstance(codec, BuiltIn):
        yield path, codec.name
    for name, child in getattr(codec, "fields", {}).items():
        yield from _own_names(f"{path}.{name}", child)
    if hasattr(codec, "element"):
        yield from _own_names(f"{path}.element", codec.element)


def _text(field: pa.Field, own: str | None) -> str:
    text = str(field.type) if own is None else f"{own} ({field.type})"
    return text if field.nullable or field.name == "time" else f"{text} not null"


def checked_schema(schema: object) -> Schema[Any, Any, Any]:
    """`schema`, if it is one; else `TypeError`."""
    if not isinstance(schema, Schema):
        raise TypeError(f"{shown(schema)} is not an aiopersist.Schema")
    return schema
