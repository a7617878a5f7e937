"""The size of updates in *goodbytes*: the bytes of their values, without overhead.

A number counts its width, text and bytes their length, a list its elements, a bool one byte; a null
counts as an empty value of its type. `time` and `diff` count 8 bytes per number. Two offsets of an Arrow
column give the length of any range of rows, so the size of a slice needs no pass over the rows, and cuts
are found by bisection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import unpack_from
from typing import Any

from aiopersist.base.errors import InvalidUpdate
from aiopersist.data.lazy import np, pa


def goodbytes(table: pa.Table | pa.RecordBatch) -> int:
    """Goodbytes of all columns of the table, `time` and `diff` included."""
    return sum(column_bytes(column) for column in table.columns)


def payload_bytes(table: pa.Table | pa.RecordBatch) -> int:
    """Goodbytes of key and value alone, which `settings.update_size_max` limits."""
    return column_bytes(table.column("key")) + column_bytes(table.column("val"))


def column_bytes(column: pa.Array | pa.ChunkedArray) -> int:
    """Goodbytes of one column."""
    if isinstance(column, pa.ChunkedArray):
        return sum(_range_bytes(chunk, 0, len(chunk)) for chunk in column.chunks)
    return _range_bytes(column, 0, len(column))


def check_update_size(table: pa.Table, update_size_max: int, *, row_base: int = 0) -> None:
    """`InvalidUpdate` with its row for an update whose key and value are larger than `update_size_max`."""
    size = payload_bytes(table)
    if size <= update_size_max:
        return
    if table.num_rows == 1:
        text = f"an update has {size} bytes of key and val, at most {update_size_max} are allowed"
        raise InvalidUpdate(text, row=row_base)
    half = table.num_rows // 2
    check_update_size(table.slice(0, half), update_size_max, row_base=row_base)
    check_update_size(table.slice(half), update_size_max, row_base=row_base + half)


def cut(table: pa.Table, target_bytes: int) -> Iterator[pa.Table]:
    """The table in slices of at most `target_bytes` goodbytes, or of one larger row."""
    while table.num_rows:
        rows = rows_within(table, target_bytes)
        part, table = table.slice(0, rows), table.slice(rows)
        yield part


def groups(tables: Iterable[pa.Table], target_bytes: int) -> Iterator[pa.Table]:
    """`cut` of all these tables together, which follow each other."""
    rest: pa.Table | None = None
    for table in tables:
        if rest is not None and rest.num_rows:
            table = pa.concat_tables([rest, table])
        *whole, rest = cut(table, target_bytes) if table.num_rows else [table]
        yield from whole
    if rest is not None and rest.num_rows:
        yield rest


def rows_within(table: pa.Table, target_bytes: int) -> int:
    """How many of the first rows have at most `target_bytes` goodbytes; at least one."""
    if goodbytes(table) <= target_bytes:
        return int(table.num_rows)
    fits, over = 1, table.num_rows + 1
    while over - fits > 1:
        middle = (fits + over) // 2
        if goodbytes(table.slice(0, middle)) <= target_bytes:
            fits = middle
        else:
            over = middle
    return fits


def rows_reaching(table: pa.Table, target_bytes: int) -> int:
    """How many of the first rows reach `target_bytes` goodbytes; at least one, at most all."""
    short, reaches = 0, max(int(table.num_rows), 1)
    while reaches - short > 1:
        middle = (short + reaches) // 2
        if goodbytes(table.slice(0, middle)) >= target_bytes:
            reaches = middle
        else:
            short = middle
    return reaches


def row_bytes(column: pa.Array) -> Any:
    """Goodbytes of each row of one column: a numpy array of int64, or a number if all have as many."""
    t = column.type
    if pa.types.is_null(t):
        return 0
    if pa.types.is_struct(t):
        return sum(row_bytes(column.field(i)) for i in range(t.num_fields))
    if pa.types.is_fixed_size_list(t):
        return t.list_size * 8  # of a product time
    if pa.types.is_list(t):
        elements = np.zeros(len(column.values) + 1, np.int64)
        elements[1:] = row_bytes(column.values)
        return np.diff(np.cumsum(elements)[_all_offsets(column, 4)])
    if pa.types.is_string(t) or pa.types.is_binary(t):
        return np.diff(_all_offsets(column, 4))
    if pa.types.is_large_string(t) or pa.types.is_large_binary(t):
        return np.diff(_all_offsets(column, 8))
    return max(t.bit_width // 8, 1)


def _all_offsets(array: pa.Array, width: int) -> Any:
    buffer = array.buffers()[1]
    if buffer is None or buffer.size == 0:
        return np.zeros(len(array) + 1, np.int64)
    offsets = np.frombuffer(buffer, f"<i{width}", len(array) + 1, array.offset * width)
    return offsets.astype(np.int64)


def _range_bytes(array: pa.Array, start: int, stop: int) -> int:
    """Goodbytes of the rows `start:stop` of one array."""
    t = array.type
    if pa.types.is_null(t) or start >= stop:
        return 0
    if pa.types.is_struct(t):
        return sum(_range_bytes(array.field(i), start, stop) for i in range(t.num_fields))
    if pa.types.is_fixed_size_list(t):
        offset = array.offset
        return _range_bytes(array.values, (offset + start) * t.list_size, (offset + stop) * t.list_size)
    if pa.types.is_list(t):
        return _range_bytes(array.values, *_offsets(array, start, stop))
    if pa.types.is_string(t) or pa.types.is_binary(t):
        first, last = _offsets(array, start, stop)
        return last - first
    if pa.types.is_large_string(t) or pa.types.is_large_binary(t):
        first, last = _offsets(array, start, stop, width=8)
        return last - first
    width: int = max(t.bit_width // 8, 1)
    return (stop - start) * width


def _offsets(array: pa.Array, start: int, stop: int, *, width: int = 4) -> tuple[int, int]:
    buffer, kind = array.buffers()[1], "<i" if width == 4 else "<q"
    if buffer is None or buffer.size == 0:
        return 0, 0
    at = [unpack_from(kind, buffer, (array.offset + row) * width)[0] for row in (start, stop)]
    return at[0], at[1]
