"""Rows as columns, converted on worker threads in slices (`data/updates/slices.py`): the loop runs on."""

from collections.abc import Callable, Sequence
from typing import Any

from aiopersist.base.errors import InvalidUpdate
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.slices import leaf_count, row_slices
from aiopersist.shard.stack import Stack


async def columns_of(
    stack: Stack, rows: Any, convert: "Callable[[Any, int], pa.Table]", schema: Schema[Any, Any, Any]
) -> "pa.Table":
    """Convert a sequence of rows, or Arrow data. `convert` gets a slice and the number of its first row.
    `InvalidUpdate` if the number of rows changes meanwhile, since some of them would be missing."""
    if not isinstance(rows, Sequence) or not rows:
        return await stack.compute(convert, rows, 0)
    leaves = sum(leaf_count(field.type) for field in schema.arrow_schema)
    count = len(rows)
    tables = [await stack.compute(convert, part, start) for start, part in row_slices(rows, leaves)]
    if len(rows) != count:
        raise InvalidUpdate(f"the {count} rows became {len(rows)} while they were converted: give a copy")
    return concat(tables, schema)
