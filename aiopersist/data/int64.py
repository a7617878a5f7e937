"""Integers as Arrow values, without `pa.array` and `pa.scalar`: their first use imports pandas if it is
installed, which takes a second. A process that only reads never pays that."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache

from aiopersist.data.lazy import pa


def int64_array(values: Iterable[int]) -> pa.Int64Array:
    """The values as a column."""
    data = array("q", values)
    return pa.Array.from_buffers(pa.int64(), len(data), [None, pa.py_buffer(data)])


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
