"""Tables of updates put together: from several tables, or from rows and one time for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiopersist.base.frontier import Time
from aiopersist.data.arrays import empty_table, int64_scalar
from aiopersist.data.lazy import np, pa
from aiopersist.data.types.schema import Schema

JOINED_BYTES_MAX = 4 * 1024 * 1024  # copied in about a millisecond


def concat(tables: Sequence[pa.Table], schema: Schema[Any, Any, Any]) -> pa.Table:
    """The updates of all tables, table after table, without a copy; an empty table for none."""
    if not tables:
        return empty_table(schema.arrow_schema)
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def joined(tables: Sequence[pa.Table], schema: Schema[Any, Any, Any]) -> pa.Table:
    """As `concat`; small results are copied into one chunk, since work on many chunks costs more."""
    table = concat(tables, schema)
    return table.combine_chunks() if len(tables) > 1 and table.nbytes <= JOINED_BYTES_MAX else table


def at_time(table: pa.Table, time: Time, schema: Schema[Any, Any, Any]) -> pa.Table:
    """Rows of `key`, `val`, `diff` as updates at `time`."""
    field = schema.arrow_schema.field("time")
    scalar = int64_scalar(time) if isinstance(time, int) else pa.scalar(time, field.type)
    rows = table.num_rows
    column = pa.repeat(scalar, rows) if rows else pa.nulls(0, field.type)  # `repeat` makes no empty lists
    columns = [table.column("key"), table.column("val"), column, table.column("diff")]
    return pa.table(columns, schema=schema.arrow_schema)


def whole(column: Any) -> pa.Array:
    """The column as one array; texts get 64-bit offsets if 32 bits are not enough."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks != 1:
        t = column.type
        if column.nbytes >= 2**31 and (pa.types.is_string(t) or pa.types.is_binary(t)):
            column = column.cast(pa.large_string() if pa.types.is_string(t) else pa.large_binary())
        column = _rejoined(column.chunks) or column.combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def _rejoined(chunks: Sequence[pa.Array]) -> pa.Array | None:
    """The chunks as one array without a copy, if they are adjacent slices of one array."""
    if not chunks or pa.types.is_nested(chunks[0].type):
        return None
    memory, end = _memory(chunks[0]), chunks[0].offset
    for chunk in chunks:
        if chunk.offset != end or _memory(chunk) != memory:
            return None
        end += len(chunk)
    start = chunks[0].offset
    return pa.Array.from_buffers(chunks[0].type, end - start, chunks[0].buffers(), offset=start)


def _memory(chunk: pa.Array) -> list[tuple[int, int] | None]:
    return [None if buffer is None else (buffer.address, buffer.size) for buffer in chunk.buffers()]


def numbers(column: pa.Array) -> Any:
    """The numbers of a column without nulls. No copy."""
    t = column.type
    kind = "f" if pa.types.is_floating(t) else "u" if pa.types.is_unsigned_integer(t) else "i"
    dtype = np.dtype(f"{kind}{t.bit_width // 8}")
    return np.frombuffer(column.buffers()[1], dtype, len(column), column.offset * dtype.itemsize)


def column_of(ints: Any) -> pa.Int64Array:
    """The numbers as a column. No copy of an array of int64."""
    ints = np.ascontiguousarray(ints, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(ints), [None, pa.py_buffer(ints)])
