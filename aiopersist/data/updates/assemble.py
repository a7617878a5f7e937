"""Tables of updates put together: from several tables, or from rows and one time for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiopersist.data.lazy import pa
from aiopersist.data.plain import empty_table, int64_scalar
from aiopersist.data.types.schema import Schema
from aiopersist.frontier import Time

JOINED_BYTES_MAX = 4 * 1024 * 1024  # copied in about a millisecond


def concat(tables: Sequence[pa.Table], schema: Schema[Any, Any, Any]) -> pa.Table:
    """The updates of all tables, table after table, without a copy; an empty table for none."""
    if not tables:
        return empty_table(schema.arrow_schema)
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def joined(tables: Sequence[pa.Table], schema: Schema[Any, Any, Any]) -> pa.Table:
    """As `concat`, copied into one chunk if that is small: work on columns of many chunks costs more."""
    whole = concat(tables, schema)
    return whole.combine_chunks() if len(tables) > 1 and whole.nbytes <= JOINED_BYTES_MAX else whole


def at_time(table: pa.Table, time: Time, schema: Schema[Any, Any, Any]) -> pa.Table:
    """Rows of `key`, `val`, `diff` as updates at `time`."""
    field = schema.arrow_schema.field("time")
    scalar = int64_scalar(time) if isinstance(time, int) else pa.scalar(time, field.type)
    rows = table.num_rows
    column = pa.repeat(scalar, rows) if rows else pa.nulls(0, field.type)  # Arrow repeats no list zero times
    columns = [table.column("key"), table.column("val"), column, table.column("diff")]
    return pa.table(columns, schema=schema.arrow_schema)
