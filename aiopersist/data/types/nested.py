"""Lists and structs. A model is a struct: each of its fields is a column, which statistics, projections and
other Parquet readers see.

The fields of the present values are encoded as one column each, then spread out over the absent values, which
have no fields. So a null in a field that is not nullable is refused, and an absent struct is no such null.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields
from itertools import islice, repeat
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from aiopersist.base.errors import Unsupported
from aiopersist.data.lazy import pa
from aiopersist.data.refusal import Refusal, TooMuchText, short, unexpected
from aiopersist.data.types.codec import NONE, BuiltIn, Field, first_failure, scatter
from aiopersist.data.valid import list_of, raise_first

ELEMENT = "element"  # as Parquet names the elements of a list


class Lists(BuiltIn):
    """Lists of one element type."""

    def __init__(self, element: Field) -> None:
        self.element = element
        self.arrow_type = pa.list_(element.arrow(ELEMENT))
        self.name = f"list<{_text(element)}>"

    def build(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        for wrong in {t for t in types if not issubclass(t, list | tuple | NONE)}:
            row = next(i for i, v in enumerate(values) if type(v) is wrong)
            raise Refusal(row, unexpected(values[row], self.name))
        elements: list[Any] = []
        ends = [0]
        for value in values:
            # Each list is read once: another task may change it meanwhile.
            elements += () if value is None else value
            ends.append(len(elements))
        try:
            encoded = _whole(self.element.encode(elements))
        except Refusal as e:
            raise Refusal(bisect_right(ends, e.row) - 1, f"in a list: {e.reason}") from e
        offsets: list[int | None] = [*ends]
        if NONE in types:
            offsets[:-1] = [None if v is None else o for v, o in zip(values, ends, strict=False)]
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), encoded, type=self.arrow_type)

    def check_stored(self, array: pa.Array) -> None:
        try:
            self.element.check_stored(array.flatten())
        except Refusal as e:
            raise Refusal(list_of(array, e.row), f"in a list: {e.reason}") from e

    def decode(self, array: pa.Array) -> list[Any]:
        elements = iter(self.element.decode(array.flatten()))
        lengths = array.value_lengths().to_pylist()
        return [None if n is None else list(islice(elements, n)) for n in lengths]


class Structs(BuiltIn):
    """Dicts with fixed names as a struct."""

    def __init__(self, fields: dict[str, Field]) -> None:
        if not fields:
            raise TypeError("cannot store a struct without fields")
        self.fields = fields
        self.arrow_type = pa.struct([field.arrow(name) for name, field in fields.items()])
        self.name = "struct<" + ", ".join(f"{n}: {_text(f)}" for n, f in fields.items()) + ">"

    def build(self, values: Sequence[Any], types: set[type]) -> pa.Array:
        self.check(values, types)
        rows = [i for i, v in enumerate(values) if v is not None] if NONE in types else None
        present = values if rows is None else [values[i] for i in rows]
        children = [self._child(name, field, present, rows) for name, field in self.fields.items()]
        array = pa.StructArray.from_arrays(children, fields=list(self.arrow_type))
        return array if rows is None else scatter(array, [v is not None for v in values])

    def check_stored(self, array: pa.Array) -> None:
        refusals = []
        for (name, field), child in zip(self.fields.items(), array.flatten(), strict=True):
            try:
                field.check_stored(child)
            except Refusal as e:
                refusals.append(Refusal(e.row, f"field {name!r}: {e.reason}"))
        raise_first(refusals)

    def decode(self, array: pa.Array) -> list[Any]:
        columns = [
            field.decode(child) for field, child in zip(self.fields.values(), array.flatten(), strict=True)
        ]
        names = list(self.fields)
        values = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        return list(self._absent_as_none(array, values))

    def check(self, values: Sequence[Any], types: set[type]) -> None:
        """`Refusal` unless all values are dicts with the fields and no others."""
        required = {name for name, field in self.fields.items() if not field.nullable}
        for row, value in enumerate(values):
            if value is None:
                continue
            if not isinstance(value, dict):
                raise Refusal(row, unexpected(value, f"a dict for {self.name}"))
            if not required <= value.keys() <= self.fields.keys():
                missing, unknown = required - value.keys(), value.keys() - self.fields.keys()
                fault = f"lacks {sorted(missing)}" if missing else f"has unknown {sorted(unknown, key=str)}"
                raise Refusal(row, f"{short(value)} {fault} of {self.name}")

    def getter(self, name: str) -> Callable[[Any], Any]:
        """The function that gets the field `name` of a value."""
        return lambda value: value.get(name)

    def _child(self, name: str, field: Field, present: Sequence[Any], rows: list[int] | None) -> pa.Array:
        try:
            return _whole(field.encode(self._values(name, present)))
        except Refusal as e:
            raise Refusal(e.row if rows is None else rows[e.row], f"field {name!r}: {e.reason}") from e

    def _values(self, name: str, present: Sequence[Any]) -> list[Any]:
        """The field of all values. `Refusal` of a value without it: a model that was not validated."""
        get = self.getter(name)
        try:
            return list(map(get, present))
        except AttributeError as e:
            row, reason = first_failure(present, lambda part: list(map(get, part)))
            raise Refusal(row, reason) from e

    def _absent_as_none(self, array: pa.Array, values: Iterator[Any]) -> Iterator[Any]:
        if not array.null_count:
            return values
        valid = array.is_valid().to_pylist()
        return (value if v else None for v, value in zip(valid, values, strict=True))


class Instances(Structs):
    """Instances of a class that takes its fields as arguments: a dataclass, a named tuple."""

    def __init__(self, cls: type[Any], fields: dict[str, Field]) -> None:
        super().__init__(fields)
        self.cls = cls
        self.name = cls.__name__
        self._changeable = [name for name, field in fields.items() if _is_changeable(field)]

    def check(self, values: Sequence[Any], types: set[type]) -> None:
        if types <= {self.cls, NONE}:
            return
        for row, value in enumerate(values):
            if value is None:
                continue
            if not isinstance(value, self.cls):
                raise Refusal(row, unexpected(value, self.name))
            if more := sorted(_fields_of(type(value)) - self.fields.keys()):
                raise Refusal(row, f"{short(value)} ({type(value).__name__}) has {more}, {self.name} has not")

    def getter(self, name: str) -> Callable[[Any], Any]:
        # `attrgetter` takes a dot for a path through several objects, not for a part of a name.
        return attrgetter(name) if "." not in name else lambda value: getattr(value, name)

    def make(self, fields: dict[str, Any]) -> Any:
        """The instance with exactly these fields, even if its class changes arguments: a reader gets the
        stored values, so it can retract them."""
        try:
            instance = self.cls(**self.lent(fields))
            changed = {name: v for name, v in fields.items() if getattr(instance, name, instance) is not v}
        except Exception:  # its arguments differ from its fields: it parses text, for example
            instance, changed = object.__new__(self.cls), fields
        for name, value in changed.items():
            object.__setattr__(instance, name, value)  # a frozen dataclass refuses `setattr`
        if changed:
            self._check_made(instance, fields)
        return instance

    def _check_made(self, instance: Any, fields: dict[str, Any]) -> None:
        """`Unsupported` if the class has a property that keeps another value than it is given."""
        for name, value in fields.items():
            kept = getattr(instance, name)
            if kept is not value and kept != value:
                text = f"{self.name}.{name} makes {short(kept)} of {short(value)}: read it without its class"
                raise Unsupported(text)

    def lent(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields for the code of the class. Lists and dicts are copied: the class may change them."""
        if not self._changeable:
            return fields
        return {**fields, **{name: copy(fields[name]) for name in self._changeable}}

    def make_all(self, many: Sequence[dict[str, Any]]) -> list[Any]:
        """`make` of each."""
        return list(map(self.make, many))

    def decode(self, array: pa.Array) -> list[Any]:
        values = super().decode(array)
        if not array.null_count:
            return self.make_all(values)
        instances = iter(self.make_all([value for value in values if value is not None]))
        return [None if value is None else next(instances) for value in values]


class Tuples(Instances):
    """Instances of a `NamedTuple`, by position: a class may override the attribute of a field."""

    def check(self, values: Sequence[Any], types: set[type]) -> None:
        super().check(values, types)
        for row, value in enumerate(values):
            if value is not None and tuple.__len__(value) != len(self.fields):
                raise Refusal(row, f"{short(value)} has {tuple.__len__(value)} values, {self.name} has not")

    def make(self, fields: dict[str, Any]) -> Any:
        return tuple.__new__(self.cls, fields.values())

    def getter(self, name: str) -> Callable[[Any], Any]:
        at = list(self.fields).index(name)
        return lambda value: tuple.__getitem__(value, at)


class Models(Instances):
    """Instances of a pydantic model class. They are validated when they are made, and their fields are
    checked when they are stored, so a read makes them without validation."""

    def check(self, values: Sequence[Any], types: set[type]) -> None:
        super().check(values, types)
        for row, value in enumerate(values):
            if more := getattr(value, "__pydantic_extra__", None):  # a subclass or a validator allows them
                raise Refusal(row, f"{short(value)} has {sorted(more)}, {self.name} has not")

    def make(self, fields: dict[str, Any]) -> Any:
        if not self.cls.__pydantic_post_init__:
            return _instance(self.cls, fields)
        model = _instance(self.cls, self.lent(dict(fields)))
        with suppress(Exception):  # for example, a validator parses text
            model.model_post_init(None)
        model.__dict__.update(fields)  # where assignments are validated, each of them makes a new `__dict__`
        return model

    def make_all(self, many: Sequence[dict[str, Any]]) -> list[Any]:
        return super().make_all(many) if self.cls.__pydantic_post_init__ else _instances(self.cls, many)


_SLOTS = [
    BaseModel.__dict__[name].__set__
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
]


def _instances(cls: type[BaseModel], many: Sequence[dict[str, Any]]) -> list[BaseModel]:
    """`_instance` of each, in a third of the time: no Python code runs for each of them."""
    models = list(map(cls.__new__, repeat(cls, len(many))))
    values = many, map(set, many), repeat(None), repeat(None)
    for put, each in zip(_SLOTS, values, strict=True):
        deque(map(put, models, each), maxlen=0)
    return models


def _instance(cls: type[BaseModel], fields: dict[str, Any]) -> BaseModel:
    """As `model_construct`, but without aliases, defaults and `model_post_init`."""
    model = cls.__new__(cls)
    put = object.__setattr__  # a frozen model refuses `setattr`
    put(model, "__dict__", fields)
    put(model, "__pydantic_fields_set__", set(fields))
    put(model, "__pydantic_extra__", None)
    put(model, "__pydantic_private__", None)
    return model


def _whole(child: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(child, pa.ChunkedArray):
        raise TooMuchText
    return child


def _is_changeable(field: Field) -> bool:
    """Whether its values are lists or dicts."""
    codec = field.codec
    return isinstance(codec, Lists | Structs) and not isinstance(codec, Instances)


def _fields_of(cls: Any) -> set[str]:
    """The names of the fields of a model, a named tuple or a dataclass."""
    if issubclass(cls, BaseModel):
        return set(cls.model_fields)
    return set(cls._fields) if issubclass(cls, tuple) else {field.name for field in fields(cls)}


def _text(field: Field) -> str:
    return field.codec.name if field.nullable else f"{field.codec.name} not null"
