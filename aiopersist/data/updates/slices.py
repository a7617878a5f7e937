"""Slices of rows that are converted to Python values, or back, in one step.

Making Python objects holds the interpreter's lock, on any thread; a kernel of Arrow releases it. So the event
loop stands still during one step. Large conversions therefore go in slices of about a millisecond, each as
its own call on a worker thread; the loop runs in between.

The collector of cycles also stops all threads, and visits all objects again and again as their number grows.
For half a million models that took longer than making them. `grow_old` excludes kept objects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

from aiopersist.data.lazy import pa
from aiopersist.data.updates.sizes import goodbytes

VALUES = 4096  # of all columns together: about a millisecond
BYTES = 256 * 1024  # of long texts and lists
ROWS_MAX = 1024


def slices(table: pa.Table | pa.RecordBatch) -> Iterator[Any]:
    """The rows of the table, slice by slice, without a copy."""
    rows = _rows(table) if table.num_rows > ROWS_MAX // 8 else ROWS_MAX
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)


def row_slices(rows: Sequence[Any], columns: int) -> Iterator[tuple[int, Sequence[Any]]]:
    """Rows with so many leaf columns, slice by slice, each with the number of its first row."""
    step = max(min(ROWS_MAX, VALUES // columns), 1)
    for start in range(0, len(rows), step):
        if isinstance(rows, list | tuple):
            yield start, rows[start : start + step]
        else:  # other sequences may not support slices, or may reuse one list for each row
            part = (rows[at] for at in range(start, min(start + step, len(rows))))
            yield start, [tuple(row) if isinstance(row, list) else row for row in part]


def grow_old() -> None:
    """Make all objects old for the collector, which seldom visits old objects, without visiting them now. Use
    it for rows that the caller keeps: all present garbage, also the application's, then waits for the next
    full collection. Does nothing if the application has frozen objects, since they would thaw."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def leaf_count(t: pa.DataType) -> int:
    """How many leaf columns a column of the type has."""
    if not pa.types.is_nested(t):
        return 1
    parts: int = sum(leaf_count(t.field(number).type) for number in range(t.num_fields))
    return parts or 1


def _rows(table: pa.Table | pa.RecordBatch) -> int:
    leaves = sum(leaf_count(field.type) for field in table.schema)
    width: int = max(goodbytes(table) // table.num_rows, 1)
    return max(min(ROWS_MAX, VALUES // leaves, BYTES // width), 1)
