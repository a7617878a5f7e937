"""Rows as cells of a page: columns of key and value, values as short texts. Pure.

Long values are cut before they become Python objects: each of fifty rows may hold a megabyte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pydantic_core

from aiopersist.data.lazy import pa, pc
from aiopersist.data.types.schema import Schema
from aiopersist.web.words import size_text

TEXT_MAX = 200  # characters of a cell
BYTES_MAX = 48  # of a cell, each as two digits


class Column(NamedTuple):
    """A column of a page: the key or the value, or one field of a struct."""

    name: str
    path: tuple[str, ...]
    type: str
    is_number: bool


class Cell(NamedTuple):
    """A value as text, perhaps cut."""

    text: str
    is_null: bool = False
    more: str = ""
    """The length of the whole value, if the text is cut."""


def columns_of(schema: Schema[Any, Any, Any]) -> tuple[Column, ...]:
    """The columns that the rows of a shard have."""
    columns: list[Column] = []
    for half in ("key", "val"):
        t = schema.arrow_schema.field(half).type
        if pa.types.is_struct(t) and t.num_fields:
            columns += [_column((half, field.name), field.type) for field in t]
        else:
            columns.append(_column((half,), t))
    return tuple(columns)


def _column(path: tuple[str, ...], t: pa.DataType) -> Column:
    is_number = pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t)
    return Column(".".join(path), path, str(t), bool(is_number))


def cells(table: Any, columns: Sequence[Column]) -> list[tuple[Cell, ...]]:
    """The rows of a table or batch, in these columns."""
    texts = [_cells_of(values(table, column)) for column in columns]
    return list(zip(*texts, strict=True)) if texts else []


def values(table: Any, column: Column) -> Any:
    """The values of a column."""
    column_values = table.column(column.path[0])
    for name in column.path[1:]:
        column_values = pc.struct_field(column_values, [column_values.type.get_field_index(name)])
    return column_values


def _cells_of(column: Any) -> list[Cell]:
    t = column.type
    if pa.types.is_string(t) or pa.types.is_large_string(t):
        cut = pc.utf8_slice_codeunits(column, 0, TEXT_MAX).to_pylist()
        lengths = pc.utf8_length(column).to_pylist()
        return [_text_cell(text, length) for text, length in zip(cut, lengths, strict=True)]
    if is_bytes(t):
        cut = pc.binary_slice(column.cast(pa.large_binary()), 0, BYTES_MAX).to_pylist()
        lengths = pc.binary_length(column).to_pylist()
        return [_bytes_cell(data, length) for data, length in zip(cut, lengths, strict=True)]
    return [_other_cell(scalar) for scalar in column]


def _text_cell(text: str | None, length: int) -> Cell:
    if text is None:
        return NULL
    return Cell(text, more=f"{length:,} characters" if length > TEXT_MAX else "")


def _bytes_cell(data: bytes | None, length: int) -> Cell:
    if data is None:
        return NULL
    return Cell(f"0x{data.hex()}", more=size_text(length) if length > BYTES_MAX else "")


def _other_cell(scalar: Any) -> Cell:
    if not scalar.is_valid:
        return NULL
    text = whole_text(scalar)
    more = f"{len(text):,} characters" if len(text) > TEXT_MAX else ""
    return Cell(text[:TEXT_MAX], more=more)


NULL = Cell("null", is_null=True)


def whole_text(scalar: Any) -> str:
    """The text of a value that is neither text nor bytes."""
    t = scalar.type
    try:
        value = scalar.as_py()
    except (ValueError, OverflowError):  # a point in time that Python cannot represent
        return f"{scalar.value} ({t})"
    if pa.types.is_nested(t):
        return pydantic_core.to_json(
            value, bytes_mode="base64", inf_nan_mode="strings", fallback=str
        ).decode()
    if pa.types.is_temporal(t) and hasattr(value, "isoformat"):
        return str(value.isoformat(" ") if pa.types.is_timestamp(t) else value.isoformat())
    return str(value).lower() if isinstance(value, bool) else str(value)


def whole(scalar: Any) -> str | bytes:
    """The whole value, to be sent unchanged."""
    t = scalar.type
    if not scalar.is_valid:
        return "null"
    is_text = pa.types.is_string(t) or pa.types.is_large_string(t)
    value: str | bytes = scalar.as_py() if is_text or is_bytes(t) else whole_text(scalar)
    return value


def is_bytes(t: pa.DataType) -> bool:
    """Whether values of the type are bytes."""
    is_ = pa.types
    return bool(is_.is_binary(t) or is_.is_large_binary(t) or is_.is_fixed_size_binary(t))


# --- keys that people write --------------------------------------------------------------------------------


def parse_key(text: str, t: pa.DataType) -> Any:
    """The key in a text, as a scalar of the type of keys. Texts stand for themselves, bytes are `0x...`,
    numbers and instants as pages show them, structs JSON. Otherwise `ValueError`."""
    try:
        return _parse_key(text, t)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(f"not a key of type {t}") from error


def _parse_key(text: str, t: pa.DataType) -> Any:
    if pa.types.is_string(t) or pa.types.is_large_string(t):
        return pa.scalar(text, t)
    if is_bytes(t):
        return pa.scalar(bytes.fromhex(text[2:]) if text.startswith("0x") else text.encode(), t)
    if pa.types.is_nested(t):
        value = pydantic_core.from_json(text)
        if not isinstance(value, dict) or {field.name for field in t} != value.keys():
            raise ValueError(f"not a JSON object with {', '.join(field.name for field in t)}")
        return pa.scalar(value, t)
    return pa.array([text]).cast(t)[0]


def with_prefix(text: str, t: pa.DataType) -> tuple[Any, Any]:
    """The first key with a prefix, and the condition for all of them; `ValueError` if keys have none."""
    if not (pa.types.is_string(t) or pa.types.is_binary(t)):
        raise ValueError(f"keys of type {t} have no prefixes")
    first = parse_key(text, t)
    return first, pc.starts_with(pc.field("key"), pattern=first.as_py())


# --- which parts a page needs ------------------------------------------------------------------------------


class KeyBounds(NamedTuple):
    """The bounds of the keys of a part, or of their first field; `None` if there are none."""

    low: Any
    high: Any
    rows: int
    nulls: int = 0


def last_needed(parts: Sequence[KeyBounds], start: Any, rows: int) -> Any:
    """A key up to which there are at least `rows` rows at or after `start` (`None`: the first key), by the
    statistics of parts: parts beyond it need not be read. `None` if all parts must be read."""
    count = 0
    for part in sorted((part for part in parts if part.high is not None), key=lambda part: part.high):
        within = part.low is not None and (start is None or start <= part.low)
        count += part.rows if within else 0
        if count >= rows:
            return part.high
    return None
