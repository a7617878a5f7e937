"""Values of Arrow types as JSON and back, exactly: single values for the bounds and keys in a shard's state,
whole columns for the rows that a `Stash` keeps in a database.

Bytes are base64; temporal values are the integers that Arrow stores; decimals, and the floats that JSON
lacks, are text.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from decimal import Decimal
from itertools import accumulate
from math import isfinite
from typing import Any

import pydantic_core

from aiopersist.data.int64 import compared, integer_of
from aiopersist.data.lazy import pa, pc


def to_json(scalar: pa.Scalar) -> Any:
    """The value of an Arrow scalar as JSON."""
    t = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_struct(t):
        return {name: to_json(child) for name, child in scalar.items()}
    if pa.types.is_list(t):
        return [to_json(element) for element in scalar.values]
    if pa.types.is_temporal(t):
        return scalar.value
    value = scalar.as_py()
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Decimal):
        return _decimal_text(value)
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def from_json(value: Any, t: pa.DataType) -> Any:
    """The Python value again, as `pa.scalar(..., t)` takes it. `ValueError`, `TypeError` or `KeyError` for
    JSON that `to_json` does not give; `OverflowError` or `ValueError` for a temporal value that Python cannot
    represent."""
    if value is None:
        return None
    if pa.types.is_struct(t):
        return {field.name: from_json(value.get(field.name), field.type) for field in t}
    if pa.types.is_list(t):
        return [from_json(element, t.value_type) for element in value]
    if pa.types.is_floating(t):
        return float(value)
    if pa.types.is_decimal(t):
        return Decimal(value)
    if pa.types.is_temporal(t):
        return pa.scalar(value, integer_of(t)).cast(t).as_py()
    if pa.types.is_string(t) or pa.types.is_large_string(t) or not _is_bytes(t):
        return value
    return b64decode(value, validate=True)


def scalar_from_json(value: Any, t: pa.DataType) -> pa.Scalar:
    """The value of a leaf again, even if Python cannot represent it."""
    kept = compared(t)
    scalar = pa.scalar(from_json(value, kept), kept)
    return scalar if kept == t else scalar.cast(t)


def _decimal_text(value: Decimal) -> str:
    """Its text, with a capital E whatever the decimal context says."""
    return str(value).upper()


def _is_bytes(t: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_binary(t) or is_.is_large_binary(t) or is_.is_fixed_size_binary(t))


# --- columns ---------------------------------------------------------------------------------------

# Separates the elements of a list, so that the text can be taken apart again: JSON escapes it everywhere
# else.
_SEPARATOR = "\n"
_LEAVES = json.JSONEncoder(ensure_ascii=False, separators=(_SEPARATOR, ":"), allow_nan=False).encode


def column_texts(column: pa.Array | pa.ChunkedArray) -> list[str]:
    """Each value as JSON, in the forms of `to_json`. Two texts are equal if and only if the values are, on
    every machine and in every version. A leaf column is encoded in one call, not value by value."""
    t = column.type
    if pa.types.is_struct(t):
        return _struct_texts(column)
    if pa.types.is_list(t):
        return _list_texts(column)
    values = _plain_values(column)
    return _LEAVES(values)[1:-1].split(_SEPARATOR) if values else []


def column_from_texts(texts: Sequence[str], t: pa.DataType) -> pa.Array:
    """The column again. `ValueError`, `TypeError` or `KeyError` for any other texts."""
    return _column(pydantic_core.from_json(f"[{','.join(texts)}]"), t)


def _struct_texts(column: Any) -> list[str]:
    t = column.type
    children = [column_texts(pc.struct_field(column, [i])) for i in range(t.num_fields)]
    names = (_LEAVES(field.name).replace("%", "%%") for field in t)
    row = "{" + ",".join(f"{name}:%s" for name in names) + "}"
    texts = [row % values for values in zip(*children, strict=True)]
    return _with_nulls(texts, column)


def _list_texts(column: Any) -> list[str]:
    if isinstance(column, pa.ChunkedArray):
        return [text for chunk in column.chunks for text in _list_texts(chunk)]
    elements = column_texts(column.flatten())  # leaves out the elements of absent lists
    ends = list(accumulate(pc.fill_null(pc.list_value_length(column), 0).to_pylist()))
    texts = [f"[{','.join(elements[begin:end])}]" for begin, end in zip([0, *ends], ends, strict=False)]
    return _with_nulls(texts, column)


def _with_nulls(texts: list[str], column: Any) -> list[str]:
    if not column.null_count:
        return texts
    return [
        text if valid else "null" for text, valid in zip(texts, column.is_valid().to_pylist(), strict=True)
    ]


def _plain_values(column: Any) -> list[Any]:
    """The values of a leaf column in their JSON form."""
    t = column.type
    if pa.types.is_temporal(t):
        column = column.cast(integer_of(t))
    values: list[Any] = column.to_pylist()
    if pa.types.is_decimal(t):
        return [None if value is None else _decimal_text(value) for value in values]
    if _is_bytes(t):
        return [None if value is None else b64encode(value).decode() for value in values]
    if pa.types.is_floating(t) and not all(value is None or isfinite(value) for value in values):
        return [value if value is None or isfinite(value) else str(value) for value in values]
    return values


def _column(values: list[Any], t: pa.DataType) -> pa.Array:
    if pa.types.is_struct(t):
        present = [{} if value is None else value for value in values]
        children = [_column([value.get(field.name) for value in present], field.type) for field in t]
        return pa.StructArray.from_arrays(children, fields=list(t), mask=_absent(values))
    if pa.types.is_list(t):
        lists = [[] if value is None else value for value in values]
        elements = _column([element for some in lists for element in some], t.value_type)
        offsets = pa.array(accumulate(map(len, lists), initial=0), pa.int32())
        return pa.ListArray.from_arrays(offsets, elements, type=t, mask=_absent(values))
    return _leaf_column(values, t)


def _leaf_column(values: list[Any], t: pa.DataType) -> pa.Array:
    if pa.types.is_temporal(t):
        return pa.array(values, integer_of(t)).cast(t)
    if pa.types.is_decimal(t):
        values = [None if value is None else Decimal(value) for value in values]
    elif _is_bytes(t):
        values = [None if value is None else b64decode(value, validate=True) for value in values]
    elif pa.types.is_floating(t):
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, t)


def _absent(values: list[Any]) -> pa.Array | None:
    absent = [value is None for value in values]
    return pa.array(absent, pa.bool_()) if any(absent) else None
