"""Texts for values that CSV and JSON lack: bytes, instants, dates, times of day, durations. Pure.

`read_type` says in which type a column of a file is read: a text, or a wider type. `from_texts` converts the
column to the target type, in bulk, or raises `ValueError`: it cuts nothing and guesses nothing.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import pydantic_core
from pydantic_core import core_schema

from aiopersist.data.lazy import pa, pc
from aiopersist.web.rows import is_bytes

DURATIONS = pydantic_core.SchemaValidator(
    core_schema.list_schema(core_schema.nullable_schema(core_schema.timedelta_schema()))
)

FINER = re.compile(r"[.,]\d{6}\d*[1-9]")
DECIMAL = re.compile(r"decimal\((\d{1,3}), ?(\d{1,3})\)")
NAMED: dict[str, Callable[[], Any]] = {
    "float": lambda: pa.float64(),
    "int": lambda: pa.int64(),
    "bytes": lambda: pa.binary(),
    "decimal": lambda: pa.decimal128(38, 9),
    "date": lambda: pa.date32(),
    "datetime": lambda: pa.timestamp("us", "UTC"),
    "time": lambda: pa.time64("us"),
    "timedelta": lambda: pa.duration("us"),
}
EPOCH = "1970-01-01T"


def read_type(of: pa.DataType, *, is_json: bool) -> pa.DataType:
    """The type in which a column is read. Arrow's reader of CSV parses instants, dates and times of day. Its
    reader of JSON parses only some, and takes instants without a zone for UTC, so in JSON they are read as
    texts. There each field of a struct may be absent; a later check of rows finds missing ones."""
    is_ = pa.types
    if is_bytes(of) or is_.is_duration(of) or (is_json and is_.is_temporal(of)):
        return pa.string()
    if is_.is_struct(of):
        fields = [pa.field(field.name, read_type(field.type, is_json=is_json)) for field in of]
        return pa.struct(fields)
    if is_.is_list(of):
        return pa.list_(read_type(of.value_type, is_json=is_json))
    return _parsed_type(of)


def from_texts(column: Any, target: pa.DataType) -> Any:
    """The column in the target type. `ValueError`, also Arrow's, for a text that is no value of it. Columns
    of another shape stay unchanged; the check of rows refuses them."""
    if column.type == target:
        return column
    is_, read = pa.types, column.type
    if is_.is_struct(target) and is_.is_struct(read):
        return _structs(column, target)
    if is_.is_list(target) and is_.is_list(read):
        return _lists(column, target)
    if is_.is_string(read) and (parse := _parser(target)):
        return parse(column, target)
    return pc.cast(column, target) if read == _parsed_type(target) else column


def instants_of(guessed: pa.DataType, texts: Any) -> pa.DataType:
    """The type of a column of a new shard, since Arrow guesses instants without fractions and zones only. If
    all texts are days, it is a date; if all are instants, a timestamp, with a zone if they have zones."""
    is_ = pa.types
    if is_.is_struct(guessed) and is_.is_struct(texts.type):
        parts = zip(guessed, texts.flatten(), strict=True)
        return pa.struct([(field.name, instants_of(field.type, part)) for field, part in parts])
    if is_.is_list(guessed) and is_.is_list(texts.type):
        return pa.list_(instants_of(guessed.value_type, texts.flatten()))
    if not is_.is_string(texts.type) or not (is_.is_timestamp(guessed) or is_.is_string(guessed)):
        return guessed
    kinds = (pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"))
    return next((kind for kind in kinds if _can_be(texts, kind)), pa.string())


def _can_be(texts: Any, kind: pa.DataType) -> bool:
    try:
        return bool(pc.cast(texts, kind).null_count < len(texts))
    except pa.ArrowInvalid:
        return False


def first_refused(count: int, parse: Callable[[int, int], object]) -> tuple[int, ValueError] | None:
    """The first row that `parse` refuses with `ValueError`, and the error, by bisection; `None` if it refuses
    no single row. `parse` takes the first row and the end of a range, and refuses the whole range."""
    begin, end = 0, count
    while end - begin > 1:
        middle = (begin + end) // 2
        try:
            parse(begin, middle)
            begin = middle
        except ValueError:
            end = middle
    try:
        parse(begin, end)
    except ValueError as error:
        return begin, error
    return None


def bytes_of(text: str) -> bytes:
    """The bytes in URL-safe base64. `ValueError` also for foreign characters."""
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is no URL-safe base64") from None


def named_type(name: str) -> pa.DataType:
    """The type with a name of Python or Arrow, or `decimal(12,2)`; else `ValueError`."""
    if make := NAMED.get(name):
        return make()
    if decimal := DECIMAL.fullmatch(name):
        return pa.decimal128(*map(int, decimal.groups()))
    return pa.type_for_alias(name)


def type_name(of: pa.DataType) -> str:
    """The name of a type that `named_type` takes."""
    return next((name for name in ("str", "bool", *NAMED) if named_type(name) == of), str(of))


def _parsed_type(of: pa.DataType) -> pa.DataType:
    """The type in which texts are parsed: instants and times of day always in microseconds."""
    is_ = pa.types
    if is_.is_timestamp(of):
        return pa.timestamp("us", of.tz)
    return pa.time64("us") if is_.is_time(of) else of


def _parser(target: pa.DataType) -> Callable[[Any, pa.DataType], Any] | None:
    is_ = pa.types
    if is_bytes(target):
        return _bytes
    if is_.is_duration(target):
        return _durations
    if is_.is_time(target):
        return _times_of_day
    return _moments if is_.is_temporal(target) else None


def _bytes(texts: Any, target: pa.DataType) -> Any:
    binary = pa.large_binary() if pa.types.is_large_binary(target) else pa.binary()  # rows check the width
    return pa.array([None if text is None else bytes_of(text) for text in texts.to_pylist()], binary)


def _durations(texts: Any, target: pa.DataType) -> Any:
    """ISO 8601, like `PT1H30M`. Fractions of microseconds are refused, since pydantic would drop them."""
    strings = texts.to_pylist()
    if finer := [text for text in strings if text is not None and FINER.search(text)]:
        raise ValueError(f"{finer[0][:40]!r} is finer than a microsecond")
    try:
        durations = DURATIONS.validate_python(strings)
    except pydantic_core.ValidationError as error:
        first = error.errors()[0]
        text = f"{str(first['input'])[:40]!r} is no duration like PT1H30M: {first['msg']}"
        raise ValueError(text) from None
    return pc.cast(pa.array(durations, pa.duration("us")), target)


def _moments(texts: Any, target: pa.DataType) -> Any:
    return pc.cast(pc.cast(texts, _parsed_type(target)), target)


def _times_of_day(texts: Any, target: pa.DataType) -> Any:
    """Arrow casts texts to instants but not to times of day, so a date is put before them."""
    joined = pc.binary_join_element_wise(pa.scalar(EPOCH), texts, pa.scalar(""))
    try:
        return pc.cast(pc.cast(pc.cast(joined, pa.timestamp("us")), pa.time64("us")), target)
    except pa.ArrowInvalid as error:
        text = str(error).replace(EPOCH, "").replace("scalar of type timestamp[us]", "time of day")
        raise ValueError(text) from None


def _structs(column: Any, target: pa.DataType) -> Any:
    inner = {field.name: field.type for field in target}
    parts = [
        from_texts(part, inner.get(field.name, field.type))
        for part, field in zip(column.flatten(), column.type, strict=True)
    ]
    return pa.StructArray.from_arrays(parts, [field.name for field in column.type], mask=column.is_null())


def _lists(column: Any, target: pa.DataType) -> Any:
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()  # of the slice
    elements = from_texts(column.values[first:last], target.value_type)
    offsets = pc.subtract(column.offsets, pa.scalar(first, pa.int32()))
    return pa.ListArray.from_arrays(offsets, elements, mask=column.is_null())
