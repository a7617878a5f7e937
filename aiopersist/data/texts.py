"""Values as canonical JSON and back, without Arrow: for single keys, and for some thousand rows of a stash.

It handles the types whose values JSON has: str, int, float, bool, and structs of these. `writer_of` and
`reader_of` return functions for single values; `texts_of` and `values_of` take many values. The results equal
those of `data/jsonable.py` for a column. For other values they return `None`; then the caller makes a column,
which also checks the values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from math import isfinite
from typing import Any

from pydantic_core import from_json

from aiopersist.data.jsonable import joined_leaves, struct_template
from aiopersist.data.lazy import pa
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.codec import Field, Plain
from aiopersist.data.types.nested import Instances

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

INT64 = range(-(2**63), 2**63)
TEXTS_AT_ONCE = 4096  # about a millisecond: other threads run between the slices

Plainly = Callable[[Any], Any]
"""From a value to one that `json` writes, or back. `LookupError` for a value that needs a column."""


def writer_of(field: Field) -> Callable[[Any], str | None]:
    """A function from a value to its text."""
    if type(field.codec) is Plain and not field.nullable:
        (kind, *_) = _kinds(field.codec.arrow_type) or (None,)
        if kind is int:
            return _text_of_int
        if kind is str:
            return _text_of_text
    to_plain = _to_plain(field)
    if to_plain is None:
        return lambda value: None

    def text_of(value: Any) -> str | None:
        try:
            text = _dumps(to_plain(value))
            text.encode()
        except (LookupError, ValueError, AttributeError, Refusal):  # also a lone surrogate
            return None
        return text

    return text_of


def _text_of_int(value: Any) -> str | None:
    return int.__repr__(value) if type(value) is int and value in INT64 else None


def _text_of_text(value: Any) -> str | None:
    if type(value) is not str:
        return None
    try:
        value.encode()
    except UnicodeError:  # a lone surrogate
        return None
    return encode_basestring(value)


def reader_of(field: Field) -> Callable[[str], Any] | None:
    """A function from a text to its value; `None` for types that need a column."""
    of_plain = _of_plain(field)
    if of_plain is _as_it_is:
        return from_json
    return None if of_plain is None else lambda text: of_plain(from_json(text))


def _as_it_is(plain: Any) -> Any:
    return plain


def _kinds(t: pa.DataType) -> tuple[type, ...]:
    if pa.types.is_string(t):
        return (str,)
    if pa.types.is_int64(t):
        return (int,)
    if pa.types.is_boolean(t):
        return (bool,)
    return (float,) if pa.types.is_float64(t) else ()


def _to_plain(field: Field) -> Plainly | None:
    codec = field.codec
    if isinstance(codec, Instances):
        return _struct_to_plain(codec, nullable=field.nullable)
    kinds = _kinds(codec.arrow_type) if type(codec) is Plain else ()
    if not kinds:
        return None
    kind: Any = kinds[0]
    nullable = field.nullable

    def leaf(value: Any) -> Any:
        if value is None and nullable:
            return None
        if type(value) is not kind or (kind is int and value not in INT64):
            raise LookupError
        if kind is not float:
            return value
        if not isfinite(value):
            raise LookupError
        return value + 0.0  # -0.0 is stored as 0.0

    return leaf


def _struct_to_plain(codec: Instances, *, nullable: bool) -> Plainly | None:
    fields = [(name, codec.getter(name), _to_plain(field)) for name, field in codec.fields.items()]
    if any(to_plain is None for _, _, to_plain in fields):
        return None

    def struct(value: Any) -> Any:
        if type(value) is not codec.cls:
            if value is None and nullable:
                return None
            raise LookupError
        codec.check([value], {codec.cls})
        return {name: to_plain(get(value)) for name, get, to_plain in fields}  # type: ignore[misc]

    return struct


def _of_plain(field: Field) -> Plainly | None:
    codec = field.codec
    if isinstance(codec, Instances):
        fields = {name: _of_plain(inner) for name, inner in codec.fields.items()}
        if None in fields.values():
            return None
        make = codec.make
        return lambda plain: (
            None
            if plain is None
            else make({name: of_plain(plain[name]) for name, of_plain in fields.items()})  # type: ignore[misc]
        )
    kinds = _kinds(codec.arrow_type) if type(codec) is Plain else ()
    if not kinds:
        return None
    if kinds == (float,):
        return lambda plain: None if plain is None else float(plain)
    return _as_it_is


# --- many values -----------------------------------------------------------------------------------


def texts_of(field: Field, values: Sequence[Any]) -> list[str] | None:
    """The texts of all `values`; `None` if one of them needs a column."""
    texts: list[str] = []
    try:
        for at in range(0, len(values), TEXTS_AT_ONCE):
            texts += _texts(field, values[at : at + TEXTS_AT_ONCE])
    except (LookupError, ValueError, AttributeError, Refusal):  # also a lone surrogate
        return None
    return texts


def values_of(field: Field, texts: Sequence[str]) -> list[Any] | None:
    """The values of all `texts`; `None` if one of them needs a column."""
    values: list[Any] = []
    try:
        for at in range(0, len(texts), TEXTS_AT_ONCE):
            part = texts[at : at + TEXTS_AT_ONCE]
            plain = from_json(f"[{','.join(part)}]")
            if len(plain) != len(part):
                return None
            values += _values(field, plain)
    except (LookupError, ValueError, TypeError):
        return None
    return values


def _texts(field: Field, values: Sequence[Any]) -> list[str]:
    """`LookupError`, or the error of a value, if the values need a column."""
    codec, types = field.codec, set(map(type, values))
    if not isinstance(codec, Instances):
        return joined_leaves(_leaves(codec, values, types))
    if types != {codec.cls}:
        raise LookupError
    codec.check(values, types)
    fields = codec.fields.items()
    columns = [_texts(inner, list(map(codec.getter(name), values))) for name, inner in fields]
    row = struct_template(tuple(codec.fields))
    return [row % texts for texts in zip(*columns, strict=True)]


def _values(field: Field, plain: Sequence[Any]) -> Sequence[Any]:
    codec, types = field.codec, set(map(type, plain))
    if not isinstance(codec, Instances):
        return _leaves(codec, plain, types)
    if types != {dict} or set(map(tuple, plain)) != {tuple(codec.fields)}:
        raise LookupError
    for name, inner in codec.fields.items():
        values = _values(inner, [row[name] for row in plain])
        if isinstance(inner.codec, Instances):
            for row, value in zip(plain, values, strict=True):
                row[name] = value
    return codec.make_all(plain)


def _leaves(codec: Any, values: Sequence[Any], types: set[type]) -> Sequence[Any]:
    """The values of a leaf in their JSON form; `LookupError` unless all of them have its type."""
    kinds = _kinds(codec.arrow_type) if type(codec) is Plain else ()
    if not kinds or types != {*kinds}:
        raise LookupError
    if kinds == (int,) and not (min(values) in INT64 and max(values) in INT64):
        raise LookupError
    if kinds == (str,):
        "".join(values).encode()
    if kinds != (float,):
        return values
    if not all(map(isfinite, values)):
        raise LookupError
    return [value + 0.0 for value in values]  # -0.0 is stored as 0.0
