"""Values of Arrow types as JSON and back, exactly. Single values are for the bounds and keys in a shard's
state, whole columns for the rows that a `Stash` keeps in a database.

Bytes are base64. Temporal values are the integers that Arrow stores. Decimals, and floats that JSON lacks,
are text.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate
from math import isfinite
from typing import Any, NamedTuple

import pydantic_core

from aiopersist.data.arrays import column, compared, int64_array, integer_of, one
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
    """The Python value, which `pa.scalar(..., t)` takes. `ValueError`, `TypeError` or `KeyError` if `to_json`
    does not write this JSON; `OverflowError` or `ValueError` if Python cannot represent a temporal value."""
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
    """The value of a leaf, even if Python cannot represent it."""
    kept = compared(t)
    scalar = one(from_json(value, kept), kept)[0]
    return scalar if kept == t else scalar.cast(t)


def _decimal_text(value: Decimal) -> str:
    """The text, with a capital E in any decimal context."""
    return str(value).upper()


def _is_bytes(t: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_binary(t) or is_.is_large_binary(t) or is_.is_fixed_size_binary(t))


# --- columns ---------------------------------------------------------------------------------------

FEW = 64  # rows: the entry into kernels takes longer
SLICE_ROWS = 8192  # about a millisecond
SLICE_BYTES_MAX = (
    2**24
)  # a column of texts has at most 2 GiB, and a text up to 40 times the bytes of its value
CHUNK_LENGTH_MAX = 2**28  # characters of up to four bytes: an array has less than 2 GiB of them
_ESCAPED = bytes([*range(32), *b'"\\'])  # what JSON does not write as it is

# Separates the elements of a list. JSON escapes it everywhere else, so the text can be split at it.
_SEPARATOR = "\n"
_LEAVES = json.JSONEncoder(ensure_ascii=False, separators=(_SEPARATOR, ":"), allow_nan=False).encode


def column_texts(column: pa.Array | pa.ChunkedArray) -> list[str]:
    """Each value as JSON, in the form of `to_json`. Two texts are equal if and only if the values are equal,
    on every machine and in every version. Python's encoder takes a few rows at once; Arrow's kernels take
    many rows in slices, and other threads run in between."""
    if len(column) <= FEW:
        return _texts(column)
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    texts: list[str] = []
    for chunk in chunks:
        for at in range(0, len(chunk), SLICE_ROWS):
            part = chunk.slice(at, SLICE_ROWS)
            texts += _texts_by_kernels(part) or _texts(part)
    return texts


def _texts(column: pa.Array | pa.ChunkedArray) -> list[str]:
    """As `column_texts`, by Python's encoder."""
    t = column.type
    if pa.types.is_struct(t):
        return _struct_texts(column)
    if pa.types.is_list(t):
        return _list_texts(column)
    values = _plain_values(column)
    return joined_leaves(values) if values else []


def joined_leaves(values: Sequence[Any]) -> list[str]:
    """The JSON of values, encoded together: at least one, and neither lists nor dicts."""
    return _LEAVES(values)[1:-1].split(_SEPARATOR)


@lru_cache(maxsize=256)
def struct_template(names: tuple[str, ...]) -> str:
    """The JSON of a struct with these fields: `%` inserts a tuple of texts, one for each name."""
    fields = (_LEAVES(name).replace("%", "%%") for name in names)
    return "{" + ",".join(f"{name}:%s" for name in fields) + "}"


def column_from_texts(texts: Sequence[str], t: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """The column of these texts, in chunks if it is large. `ValueError`, `TypeError` or `KeyError` for texts
    that `column_texts` does not write."""
    if sum(map(len, texts)) <= CHUNK_LENGTH_MAX:
        return _chunk_from_texts(texts, t)
    return pa.chunked_array([_chunk_from_texts(part, t) for part in _chunks(texts)], t)


def scalar_from_text(text: str, t: pa.DataType) -> pa.Scalar:
    """The value of a canonical text; `ValueError` for any other text, which may come from outside."""
    try:
        column = column_from_texts([text], t)
    except (TypeError, LookupError, ArithmeticError, AttributeError, pa.ArrowException) as error:
        raise ValueError(f"not a value of type {t}") from error
    if len(column) != 1:
        raise ValueError(f"not one value of type {t}")
    return column[0]


def _chunk_from_texts(texts: Sequence[str], t: pa.DataType) -> pa.Array:
    return _column(pydantic_core.from_json(f"[{','.join(texts)}]"), t)


def _chunks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in chunks of at most `CHUNK_LENGTH_MAX`, or of one longer text."""
    ends = list(accumulate(map(len, texts), initial=0))
    begin = 0
    while begin < len(texts):
        end = max(bisect_right(ends, ends[begin] + CHUNK_LENGTH_MAX) - 1, begin + 1)
        yield texts[begin:end]
        begin = end


def _struct_texts(column: Any) -> list[str]:
    t = column.type
    children = [_texts(pc.struct_field(column, [i])) for i in range(t.num_fields)]
    row = struct_template(tuple(field.name for field in t))
    texts = [row % values for values in zip(*children, strict=True)]
    return _with_nulls(texts, column)


def _list_texts(column: Any) -> list[str]:
    if isinstance(column, pa.ChunkedArray):
        return [text for chunk in column.chunks for text in _list_texts(chunk)]
    elements = _texts(column.flatten())  # without the elements of absent lists
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
        elements = _column([element for value in lists for element in value], t.value_type)
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
    return column(values, t)


def _absent(values: list[Any]) -> pa.Array | None:
    absent = [value is None for value in values]
    return pa.array(absent, pa.bool_()) if any(absent) else None


# --- by kernels ------------------------------------------------------------------------------------


class _Pieces(NamedTuple):
    """The texts of a column: the parts that differ, and the constant text before, between and after."""

    columns: list[pa.Array]
    around: list[str]
    """One more than columns."""


def _texts_by_kernels(column: pa.Array) -> list[str] | None:
    """As `column_texts`, for a slice with rows: kernels make one text, which is then split. `None` for
    columns that need Python's encoder."""
    pieces = _pieces(column) if column.nbytes <= SLICE_BYTES_MAX else None
    if pieces is None:
        return None
    (texts, *others), (head, *between, tail) = pieces
    if others:
        more = [
            piece for text, other in zip(between, others, strict=True) for piece in (_scalar(text), other)
        ]
        texts = pc.binary_join_element_wise(texts, *more, _scalar(""))
    return f"{head}{_joined(texts, f'{tail}{_SEPARATOR}{head}').as_py()}{tail}".split(_SEPARATOR)


def _pieces(column: pa.Array) -> _Pieces | None:
    """`None` if no kernel gives the same texts as Python's encoder."""
    t = column.type
    if column.null_count:
        return None
    if pa.types.is_struct(t):
        return _struct_pieces(column)
    if pa.types.is_integer(t) or pa.types.is_boolean(t):
        return _Pieces([column.cast(pa.string())], ["", ""])
    if pa.types.is_temporal(t):
        return _Pieces([column.cast(integer_of(t)).cast(pa.string())], ["", ""])
    if pa.types.is_string(t) and not _has_escapes(column):
        return _Pieces([column], ['"', '"'])
    return None


def _struct_pieces(column: pa.Array) -> _Pieces:
    columns, around = [], ["{"]
    for number, field in enumerate(column.type):
        child = pc.struct_field(column, [number])
        own, (head, *rest) = _pieces(child) or _by_python(child)
        around[-1] += f"{',' if number else ''}{_LEAVES(field.name)}:{head}"
        columns += own
        around += rest
    around[-1] += "}"
    return _Pieces(columns, around)


def _by_python(column: pa.Array) -> _Pieces:
    lines = _one(_SEPARATOR.join(_texts(column)))
    return _Pieces([pc.split_pattern(lines, _SEPARATOR).flatten()], ["", ""])


def _has_escapes(texts: pa.Array) -> bool:
    """Whether JSON escapes a character of these texts."""
    data = bytes(_joined(texts, "").as_buffer())
    return len(data.translate(None, _ESCAPED)) < len(data)


def _joined(texts: pa.Array, separator: str) -> pa.Scalar:
    """All texts in one."""
    whole = pa.LargeListArray.from_arrays(int64_array([0, len(texts)]), texts)
    return pc.binary_join(whole, _scalar(separator))[0]


def _scalar(text: str) -> pa.Scalar:
    return _one(text)[0]


def _one(text: str) -> pa.Array:
    """A column of this text, without `pa.array`, as `data/arrays.py` makes those of integers."""
    data = text.encode()
    offsets = pa.py_buffer(array("i", [0, len(data)]))
    return pa.StringArray.from_buffers(1, offsets, pa.py_buffer(data))
