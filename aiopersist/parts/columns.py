"""Rows as columns, out of the loop's way: many are converted slice by slice (`data/updates/slices.py`)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.slices import leaf_count, row_slices
from aiopersist.errors import InvalidUpdate
from aiopersist.shard.stack import Stack

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


async def columns_of(
    stack: Stack, rows: Any, convert: "Callable[[Any, int], pa.Table]", schema: Schema[Any, Any, Any]
) -> "pa.Table":
    """What `convert` makes of a sequence of rows, or of Arrow data, on worker threads; it is given the number
    of the first row that it gets, too. `InvalidUpdate` if there are more or fewer rows in the end than there
    were: a part of them must not pass for all."""
    if not isinstance(rows, Sequence) or not rows:
        return await stack.compute(convert, rows, 0)
    leaves = sum(leaf_count(field.type) for field in schema.arrow_schema)
    given = len(rows)
    tables = [await stack.compute(convert, some, start) for start, some in row_slices(rows, leaves)]
    if len(rows) != given:
        raise InvalidUpdate(f"the {given} rows became {len(rows)} while they were converted: give a copy")
    return concat(tables, schema)
