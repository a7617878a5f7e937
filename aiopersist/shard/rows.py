"""Rows as columns, out of the loop's way: many are converted slice by slice (`data/slices.py`)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiopersist.data.assemble import concat
from aiopersist.data.codec import Schema
from aiopersist.data.slices import leaf_count, row_slices
from aiopersist.shard.stack import Stack

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


async def columns_of(
    stack: Stack, rows: Any, convert: "Callable[[Any, int], pa.Table]", schema: Schema[Any, Any, Any]
) -> "pa.Table":
    """What `convert` makes of a sequence of rows, or of Arrow data, on worker threads; it is given the number
    of the first row that it gets, too."""
    if not isinstance(rows, Sequence) or not rows:
        return await stack.compute(convert, rows, 0)
    leaves = sum(leaf_count(field.type) for field in schema.arrow_schema)
    tables = [await stack.compute(convert, some, start) for start, some in row_slices(rows, leaves)]
    return concat(tables, schema)
