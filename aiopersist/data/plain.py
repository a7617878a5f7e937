"""Plain Python values as Arrow values, without `pa.array` and `pa.scalar`: their first use imports pandas if
it is installed, which takes a second. A process that reads, or appends plain values, never pays that."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from aiopersist.data.lazy import pa


def int64_array(values: Iterable[int]) -> pa.Int64Array:
    """The values as a column."""
    data = array("q", values)
    return pa.Array.from_buffers(pa.int64(), len(data), [None, pa.py_buffer(data)])


def made_by_buffers(t: pa.DataType) -> bool:
    """Whether `plain_array` makes columns of the type."""
    is_ = pa.types
    return bool(is_.is_int64(t) or is_text(t) or is_.is_binary(t) or is_.is_large_binary(t))


def is_text(t: pa.DataType) -> bool:
    return bool(pa.types.is_string(t) or pa.types.is_large_string(t))


def plain_array(values: Sequence[Any], t: pa.DataType) -> pa.Array:
    """The values, all of them int, str or bytes as `t` says, as a column. `OverflowError` for an int beyond
    64 bits or for bytes beyond the offsets of `t`, `UnicodeError` for a text that has no UTF-8."""
    if pa.types.is_int64(t):
        return int64_array(values)
    if is_text(t):
        values = [value.encode() for value in values]
    is_large = pa.types.is_large_string(t) or pa.types.is_large_binary(t)
    offsets = array("q" if is_large else "i", accumulate(map(len, values), initial=0))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(t, len(values), buffers)


def empty_table(schema: pa.Schema) -> pa.Table:
    """A table of the schema without rows."""
    return pa.table([pa.nulls(0, field.type) for field in schema], schema=schema)


def one(value: Any, t: pa.DataType) -> pa.Array:
    """The value, which may be `None`, as a column of type `t`."""
    if value is None:
        return pa.nulls(1, t)
    return plain_array([value], t) if made_by_buffers(t) else pa.array([value], t)


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
