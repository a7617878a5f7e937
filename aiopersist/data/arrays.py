"""Arrow columns of Python values, made without `pa.array` and `pa.scalar`: their first use imports pandas, if
it is installed, which takes a second. Reads, and appends of plain values, do without."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, TypeAlias

from aiopersist.data.lazy import pa

Buffers: TypeAlias = tuple[bytes, ...]
"""The buffers of a column without nulls, but for the validity: offsets and bytes of texts, or ints."""


def int64_array(values: Iterable[int]) -> pa.Int64Array:
    """The values as a column."""
    data = array("q", values)
    return pa.Array.from_buffers(pa.int64(), len(data), [None, pa.py_buffer(data)])


def made_by_buffers(t: pa.DataType) -> bool:
    """Whether `plain_array` makes columns of the type."""
    return maker(t) is not None


def is_text(t: pa.DataType) -> bool:
    return bool(pa.types.is_string(t) or pa.types.is_large_string(t))


def plain_array(values: Sequence[Any], t: pa.DataType) -> pa.Array:
    """A column of values, all of them int, str or bytes as in `t`. `OverflowError` for an int beyond 64 bits
    or for bytes beyond the offsets of `t`, `UnicodeError` for a text without UTF-8."""
    make = maker(t)
    assert make is not None
    return make(values)


def maker(t: pa.DataType) -> Callable[[Sequence[Any]], pa.Array] | None:
    """`plain_array` of one type, for many calls; `None` for types that it does not make."""
    encode = encoder(t)
    return None if encode is None else partial(_by_buffers, t, encode)


def encoder(t: pa.DataType) -> Callable[[Sequence[Any]], Buffers] | None:
    """Makes the buffers of a column without nulls; `None` as for `maker`. Errors as for `plain_array`."""
    is_ = pa.types
    if is_.is_int64(t):
        return _ints
    if not (is_text(t) or is_.is_binary(t) or is_.is_large_binary(t)):
        return None
    offset = "q" if is_.is_large_string(t) or is_.is_large_binary(t) else "i"
    return partial(_texts if is_text(t) else _bytes, offset)


def assembled(t: pa.DataType, rows: int, buffers: Buffers) -> pa.Array:
    """The column with these buffers."""
    return pa.Array.from_buffers(t, rows, [None, *map(pa.py_buffer, buffers)])


def _by_buffers(
    t: pa.DataType, encode: Callable[[Sequence[Any]], Buffers], values: Sequence[Any]
) -> pa.Array:
    return assembled(t, len(values), encode(values))


def _ints(values: Sequence[int]) -> Buffers:
    return (array("q", values).tobytes(),)


def _bytes(offset: str, values: Sequence[bytes]) -> Buffers:
    return array(offset, accumulate(map(len, values), initial=0)).tobytes(), b"".join(values)


def _texts(offset: str, values: Sequence[str]) -> Buffers:
    return _bytes(offset, [value.encode() for value in values])


def empty_table(schema: pa.Schema) -> pa.Table:
    """A table of the schema without rows."""
    return pa.table([pa.nulls(0, field.type) for field in schema], schema=schema)


def column(values: Sequence[Any], t: pa.DataType) -> pa.Array:
    """`pa.array` of the values; `plain_array` where it makes the same."""
    make = maker(t)
    kind = int if pa.types.is_int64(t) else str if is_text(t) else bytes
    is_plain = make is not None and {*map(type, values)} <= {kind}
    return make(values) if make is not None and is_plain else pa.array(values, t)


def one(value: Any, t: pa.DataType) -> pa.Array:
    """A column of this one value, which may be `None`."""
    return pa.nulls(1, t) if value is None else column([value], t)


def bool_scalar(value: bool) -> pa.BooleanScalar:
    """The value as an argument of kernels."""
    return pa.Array.from_buffers(pa.bool_(), 1, [None, pa.py_buffer(b"\1" if value else b"\0")])[0]


def integer_of(t: pa.DataType) -> pa.DataType:
    """The integer type in which Arrow stores values of the temporal type `t`."""
    return pa.int32() if t.bit_width == 32 else pa.int64()


def compared(t: pa.DataType) -> pa.DataType:
    """The type in which values of a leaf are compared and kept as bounds: integers for temporal types.
    Python's datetimes cover fewer years, and in a time zone they show some times twice."""
    return integer_of(t) if pa.types.is_temporal(t) else t


@lru_cache(maxsize=1024)
def int64_scalar(value: int) -> pa.Int64Scalar:
    """The value as an argument of kernels."""
    return int64_array([value])[0]
