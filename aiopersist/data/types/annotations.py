"""The fields of a schema from annotations: Python types, models, Arrow types and codecs."""

from __future__ import annotations

import datetime as dt
import types
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from inspect import signature
from typing import (
    Annotated,
    Any,
    Literal,
    NewType,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from uuid import UUID

from pydantic import AwareDatetime, BaseModel

from aiopersist.data.lazy import pa
from aiopersist.data.types.codec import NONE, Codec, Field, Units, plain
from aiopersist.data.types.nested import Instances, Lists, Models, Structs, Tuples
from aiopersist.data.types.objects import Enums, Uuids

KNOWN = (
    "a schema takes bytes, str, int, float, bool, None, datetime, date, time, timedelta, Decimal, UUID, "
    "Enums, list[T] and T | None of these, pydantic models, dataclasses, NamedTuples and TypedDicts (as "
    "structs), Arrow types, and own codecs"
)


def field_of(annotation: Any, *, frozen: bool, within: tuple[type, ...] = ()) -> Field:
    """The field of `annotation`. `frozen`: its models must be frozen, as in a key. `within`: the models
    around it. `TypeError` for a type that cannot be stored."""
    if isinstance(annotation, Codec):
        return Field(_own(annotation), nullable=False)
    if annotation is None or annotation is NONE:
        return Field(Units(), nullable=True)
    if isinstance(annotation, NewType):
        return field_of(annotation.__supertype__, frozen=frozen, within=within)
    if type(annotation).__name__ == "TypeAliasType":  # `type X = ...`, from Python 3.12 on
        return field_of(annotation.__value__, frozen=frozen, within=within)
    if get_origin(annotation) is not None:
        return _of_generic(annotation, frozen=frozen, within=within)
    if isinstance(annotation, type):
        return _of_class(annotation, frozen=frozen, within=within)
    if isinstance(annotation, pa.Field):
        return of_arrow(annotation.type, nullable=annotation.nullable)
    if isinstance(annotation, pa.Schema):
        return of_arrow(pa.struct(list(annotation)), nullable=False)
    if isinstance(annotation, pa.DataType):
        return of_arrow(annotation, nullable=False)
    raise TypeError(f"cannot store {annotation!r}: {KNOWN}")


def of_arrow(arrow_type: pa.DataType, *, nullable: bool) -> Field:
    """The field of an Arrow type; its structs are read as dicts."""
    is_ = pa.types
    if is_.is_struct(arrow_type):
        names = [field.name for field in arrow_type]
        if len(set(names)) < len(names):
            raise TypeError(f"cannot store {arrow_type}: two of its fields have the same name")
        fields = {f.name: of_arrow(f.type, nullable=f.nullable) for f in arrow_type}
        return Field(Structs(fields), nullable)
    if is_.is_list(arrow_type):
        element = arrow_type.value_field
        return Field(Lists(of_arrow(element.type, nullable=element.nullable)), nullable)
    return Field(plain(arrow_type), nullable or is_.is_null(arrow_type))


def _of_generic(annotation: Any, *, frozen: bool, within: tuple[type, ...]) -> Field:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        own = [a for a in arguments[1:] if isinstance(a, Codec)]
        return field_of(own[-1] if own else arguments[0], frozen=frozen, within=within)
    if origin is Union or origin is types.UnionType:
        members = [a for a in arguments if a is not NONE]
        if len(members) == 1 and len(members) < len(arguments):
            return field_of(members[0], frozen=frozen, within=within)._replace(nullable=True)
        raise TypeError(f"cannot store {annotation!r}: the only union with a column is `T | None`")
    if origin is list and arguments:  # `typing.List` alone has none
        return Field(Lists(field_of(arguments[0], frozen=frozen, within=within)), nullable=False)
    if origin is Literal and len(set(map(type, arguments))) == 1:
        return field_of(type(arguments[0]), frozen=frozen, within=within)
    raise TypeError(f"cannot store {annotation!r}: {KNOWN}")


def _of_class(cls: type, *, frozen: bool, within: tuple[type, ...]) -> Field:
    if cls in _PLAIN:
        return Field(plain(_PLAIN[cls]()), nullable=False)
    if cls is UUID:
        return Field(Uuids(), nullable=False)
    if issubclass(cls, Enum):
        return Field(Enums(cls), nullable=False)
    if issubclass(cls, BaseModel):
        return Field(_model(cls, frozen=frozen, within=within), nullable=False)
    if is_typeddict(cls) or is_dataclass(cls) or _is_named_tuple(cls):
        return Field(_record(cls, frozen=frozen, within=within), nullable=False)
    raise TypeError(f"cannot store {cls.__qualname__}: {KNOWN}")


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _record(cls: type, *, frozen: bool, within: tuple[type, ...]) -> Structs:
    """The struct of a class, whose annotations are the fields."""
    if frozen and not _is_named_tuple(cls) and not _is_frozen(cls):
        text = f"{cls.__qualname__} is part of a key, so it must be a frozen dataclass or a NamedTuple"
        raise TypeError(text)
    struct_fields = _fields_of(cls, _annotations(cls), frozen=frozen, within=within)
    for name, field in struct_fields.items():
        if name in getattr(cls, "__optional_keys__", ()) and not field.nullable:
            raise TypeError(f"field {name!r} of {cls.__qualname__} may be absent, so it must be optional")
    if is_typeddict(cls):
        return Structs(struct_fields)
    _check_made_of(cls, struct_fields)
    return Tuples(cls, struct_fields) if _is_named_tuple(cls) else Instances(cls, struct_fields)


def _fields_of(
    cls: type, annotations: dict[str, Any], *, frozen: bool, within: tuple[type, ...]
) -> dict[str, Field]:
    if cls in within:
        raise TypeError(f"cannot store {cls.__qualname__}: it contains itself")
    field_by_name = {}
    for name, annotation in annotations.items():
        try:
            field_by_name[name] = field_of(annotation, frozen=frozen, within=(*within, cls))
        except TypeError as e:
            raise TypeError(f"field {name!r} of {cls.__qualname__}: {e}") from e
    return field_by_name


def _check_made_of(cls: type, names: Iterable[str]) -> None:
    """`TypeError` unless an instance can be made from its fields alone."""
    try:
        signature(cls).bind(**dict.fromkeys(names))
    except TypeError as e:
        raise TypeError(f"cannot store {cls.__qualname__}: it is not made of its fields alone ({e})") from e


def _annotations(cls: Any) -> dict[str, Any]:
    """The types of the fields, in order."""
    name = cls.__qualname__
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError as e:
        raise TypeError(f"cannot store {name}: {e}") from e
    if is_typeddict(cls):
        return {key: _without_mark(hint) for key, hint in hints.items()}
    if not is_dataclass(cls):
        if missing := [name for name in cls._fields if name not in hints]:
            raise TypeError(f"cannot store {name}: its fields {missing} have no types")
        return {key: hints[key] for key in cls._fields}
    if hidden := [field.name for field in fields(cls) if not field.init]:
        raise TypeError(f"cannot store {name}: its constructor does not take the fields {hidden}")
    return {field.name: hints[field.name] for field in fields(cls)}


def _without_mark(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) in (Required, NotRequired) else annotation


def _is_frozen(cls: Any) -> bool:
    parameters = getattr(cls, "__dataclass_params__", None)  # only dataclasses have them
    return parameters is not None and bool(parameters.frozen)


def _model(cls: type[BaseModel], *, frozen: bool, within: tuple[type, ...]) -> Models:
    if frozen and not cls.model_config.get("frozen"):
        raise TypeError(f"{cls.__qualname__} is part of a key, so it must be frozen")
    if cls.model_config.get("extra") == "allow":
        raise TypeError(f"cannot store {cls.__qualname__}: its extra fields have no columns")
    if not cls.model_fields:
        raise TypeError(f"cannot store {cls.__qualname__}: it has no fields")
    hints = {}
    for name, info in cls.model_fields.items():
        own = [m for m in info.metadata if isinstance(m, Codec)]
        hints[name] = own[-1] if own else info.annotation
    return Models(cls, _fields_of(cls, hints, frozen=frozen, within=within))


def _own(codec: Codec) -> Codec:
    if not isinstance(getattr(codec, "name", None), str) or not codec.name:
        raise TypeError(f"{type(codec).__qualname__} needs a class attribute `name`")
    if not isinstance(getattr(codec, "arrow_type", None), pa.DataType):
        raise TypeError(f"codec {codec.name} needs a class attribute `arrow_type`, an Arrow DataType")
    of_arrow(codec.arrow_type, nullable=False)  # refuses a type that cannot be stored
    return codec


_PLAIN: dict[type, Callable[[], Any]] = {
    bytes: lambda: pa.binary(),
    str: lambda: pa.string(),
    int: lambda: pa.int64(),
    float: lambda: pa.float64(),
    bool: lambda: pa.bool_(),
    dt.datetime: lambda: pa.timestamp("us", "UTC"),
    AwareDatetime: lambda: pa.timestamp("us", "UTC"),
    dt.date: lambda: pa.date32(),
    dt.time: lambda: pa.time64("us"),
    dt.timedelta: lambda: pa.duration("us"),
    Decimal: lambda: pa.decimal128(38, 9),
}
