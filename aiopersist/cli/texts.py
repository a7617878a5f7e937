"""Values that CSV and JSON have no form for, as texts: bytes, instants, dates, times of day, durations. Pure.

A file is read with texts in their place, and as wide as it may be written: `read_type` tells. `from_texts`
makes of such a column one of the wanted type, in bulk, or refuses it with `ValueError`: nothing is cut off,
and nothing is guessed.
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
    """The type that a column is read in. Arrow's readers know instants, dates and times of day in CSV; in
    JSON they take some of them, and an instant without a zone for one in UTC, so these are texts. In structs
    each field may be absent there: whether it may be is told where rows are known."""
    is_ = pa.types
    if is_bytes(of) or is_.is_duration(of) or (is_json and is_.is_temporal(of)):
        return pa.string()
    if is_.is_struct(of):
        fields = [pa.field(field.name, read_type(field.type, is_json=is_json)) for field in of]
        return pa.struct(fields)
    if is_.is_list(of):
        return pa.list_(read_type(of.value_type, is_json=is_json))
    return _written(of)


def from_texts(column: Any, wanted: pa.DataType) -> Any:
    """The array in the wanted type, where it was read in another. `ValueError`, also Arrow's, for a text that
    stands for no value of it; what is of an unknown shape is left to the check of rows."""
    if column.type == wanted:
        return column
    is_, read = pa.types, column.type
    if is_.is_struct(wanted) and is_.is_struct(read):
        return _structs(column, wanted)
    if is_.is_list(wanted) and is_.is_list(read):
        return _lists(column, wanted)
    if is_.is_string(read) and (parse := _parser(wanted)):
        return parse(column, wanted)
    return pc.cast(column, wanted) if read == _written(wanted) else column


def instants_of(guessed: pa.DataType, texts: Any) -> pa.DataType:
    """The type of a column of an unknown type. Arrow guesses instants, but neither fractions nor zones. If
    all texts are days, it is one of days; if all are instants, with a zone or without as these are."""
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
    """The first of some rows that `parse` refuses with `ValueError`, and why, if it refuses all of them
    together: by halves. `None` if it refuses no row alone. `parse` takes the first row and the one behind."""
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
    """The bytes that URL-safe base64 says. `ValueError`, also for a character that is none of it: decoding
    would leave it out."""
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is no URL-safe base64") from None


def named_type(name: str) -> pa.DataType:
    """The type that a user names: as Python does, `decimal(12,2)`, or as Arrow does. `ValueError`."""
    if found := NAMED.get(name):
        return found()
    if decimal := DECIMAL.fullmatch(name):
        return pa.decimal128(*map(int, decimal.groups()))
    return pa.type_for_alias(name)


def said(of: pa.DataType) -> str:
    """The name of a type as a user would give it."""
    return next((name for name in ("str", "bool", *NAMED) if named_type(name) == of), str(of))


def _written(of: pa.DataType) -> pa.DataType:
    """Texts of instants and of times of day have microseconds, whatever the unit of their column."""
    is_ = pa.types
    if is_.is_timestamp(of):
        return pa.timestamp("us", of.tz)
    return pa.time64("us") if is_.is_time(of) else of


def _parser(wanted: pa.DataType) -> Callable[[Any, pa.DataType], Any] | None:
    is_ = pa.types
    if is_bytes(wanted):
        return _bytes
    if is_.is_duration(wanted):
        return _durations
    if is_.is_time(wanted):
        return _times_of_day
    return _moments if is_.is_temporal(wanted) else None


def _bytes(texts: Any, wanted: pa.DataType) -> Any:
    made = pa.large_binary() if pa.types.is_large_binary(wanted) else pa.binary()  # of any width: rows tell
    return pa.array([None if text is None else bytes_of(text) for text in texts.to_pylist()], made)


def _durations(texts: Any, wanted: pa.DataType) -> Any:
    """ISO 8601, as `PT1H30M`, exactly: pydantic leaves out what is less than a microsecond."""
    given = texts.to_pylist()
    if finer := [text for text in given if text is not None and FINER.search(text)]:
        raise ValueError(f"{finer[0][:40]!r} is finer than a microsecond")
    try:
        found = DURATIONS.validate_python(given)
    except pydantic_core.ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{str(first['input'])[:40]!r} is no duration as PT1H30M: {first['msg']}") from None
    return pc.cast(pa.array(found, pa.duration("us")), wanted)


def _moments(texts: Any, wanted: pa.DataType) -> Any:
    return pc.cast(pc.cast(texts, _written(wanted)), wanted)


def _times_of_day(texts: Any, wanted: pa.DataType) -> Any:
    """Arrow casts no text to one, but to an instant of a day."""
    joined = pc.binary_join_element_wise(pa.scalar(EPOCH), texts, pa.scalar(""))
    try:
        return pc.cast(pc.cast(pc.cast(joined, pa.timestamp("us")), pa.time64("us")), wanted)
    except pa.ArrowInvalid as error:
        text = str(error).replace(EPOCH, "").replace("scalar of type timestamp[us]", "time of day")
        raise ValueError(text) from None


def _structs(column: Any, wanted: pa.DataType) -> Any:
    inner = {field.name: field.type for field in wanted}
    parts = [
        from_texts(part, inner.get(field.name, field.type))
        for part, field in zip(column.flatten(), column.type, strict=True)
    ]
    return pa.StructArray.from_arrays(parts, [field.name for field in column.type], mask=column.is_null())


def _lists(column: Any, wanted: pa.DataType) -> Any:
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()  # of a slice, not of the whole
    elements = from_texts(column.values[first:last], wanted.value_type)
    offsets = pc.subtract(column.offsets, pa.scalar(first, pa.int32()))
    return pa.ListArray.from_arrays(offsets, elements, mask=column.is_null())
