"""Rows as cells of a page: columns of key and value, values as short texts. Pure.

Long values are cut before they become Python objects: a page of fifty rows may have a megabyte in each.
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
    """A column of a page: key or value, or a field of it if that is a struct."""

    name: str
    path: tuple[str, ...]
    type: str
    is_number: bool


class Cell(NamedTuple):
    """A value, perhaps cut."""

    text: str
    is_null: bool = False
    more: str = ""
    """How long the whole value is, if the text is cut."""


def columns_of(schema: Schema[Any, Any, Any]) -> tuple[Column, ...]:
    """The columns that the rows of a shard have."""
    found: list[Column] = []
    for half in ("key", "val"):
        t = schema.arrow_schema.field(half).type
        if pa.types.is_struct(t) and t.num_fields:
            found += [_column((half, field.name), field.type) for field in t]
        else:
            found.append(_column((half,), t))
    return tuple(found)


def _column(path: tuple[str, ...], t: pa.DataType) -> Column:
    is_number = pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t)
    return Column(".".join(path), path, str(t), bool(is_number))


def cells(table: Any, columns: Sequence[Column]) -> list[tuple[Cell, ...]]:
    """The rows of a table or batch, in these columns."""
    texts = [_cells_of(values(table, column)) for column in columns]
    return list(zip(*texts, strict=True)) if texts else []


def values(table: Any, column: Column) -> Any:
    """The values of a column."""
    found = table.column(column.path[0])
    for name in column.path[1:]:
        found = pc.struct_field(found, [found.type.get_field_index(name)])
    return found


def _cells_of(found: Any) -> list[Cell]:
    t = found.type
    if pa.types.is_string(t) or pa.types.is_large_string(t):
        cut = pc.utf8_slice_codeunits(found, 0, TEXT_MAX).to_pylist()
        lengths = pc.utf8_length(found).to_pylist()
        return [_text_cell(text, length) for text, length in zip(cut, lengths, strict=True)]
    if is_bytes(t):
        some = pc.binary_slice(found.cast(pa.large_binary()), 0, BYTES_MAX).to_pylist()
        lengths = pc.binary_length(found).to_pylist()
        return [_bytes_cell(data, length) for data, length in zip(some, lengths, strict=True)]
    return [_other_cell(scalar) for scalar in found]


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
    """A value that is neither text nor bytes, as it is written."""
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
    """A value whole, to be sent as it is."""
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


def key_given(text: str, t: pa.DataType) -> Any:
    """The key that a text says, as a scalar of the type of keys; `ValueError` for others. A text is itself,
    bytes are `0x...`, numbers and instants are as they are shown, and structs are JSON."""
    try:
        return _given(text, t)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(f"not a key of type {t}") from error


def _given(text: str, t: pa.DataType) -> Any:
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
    """The first key that begins with a text, and the condition for all that do; `ValueError` for keys that
    have no prefixes."""
    if not (pa.types.is_string(t) or pa.types.is_binary(t)):
        raise ValueError(f"keys of type {t} have no prefixes")
    first = key_given(text, t)
    return first, pc.starts_with(pc.field("key"), pattern=first.as_py())


# --- which parts a page needs ------------------------------------------------------------------------------


class KeyBounds(NamedTuple):
    """The bounds of the keys of a part, or of the first field of them; `None` for none, as for nulls."""

    low: Any
    high: Any
    rows: int
    nulls: int = 0


def last_needed(parts: Sequence[KeyBounds], start: Any, rows: int) -> Any:
    """A bound up to which there are at least so many rows from `start` on (`None`: from the first on), by the
    statistics of parts: those beyond it need not be read. `None` if all parts must be."""
    count = 0
    for part in sorted((part for part in parts if part.high is not None), key=lambda part: part.high):
        within = part.low is not None and (start is None or start <= part.low)
        count += part.rows if within else 0
        if count >= rows:
            return part.high
    return None
