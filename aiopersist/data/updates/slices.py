"""How many rows are turned into Python values, or back, at one time.

Whoever does so holds the interpreter's lock, on whatever thread: a kernel of Arrow lets go of it, making
objects does not. The event loop stands still as long as one such step takes. So large conversions go in
slices of about a millisecond, each a call of its own on a worker thread, between which the loop runs.

The collector of cycles stops all threads, too, and looks at every object again and again as their number
grows: half a million models took it longer than it took to make them. `grow_old` spares those that are
kept.
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
    """The rows of the table, so many at a time. Without a copy."""
    rows = _rows(table) if table.num_rows > ROWS_MAX // 8 else ROWS_MAX
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)


def row_slices(rows: Sequence[Any], columns: int) -> Iterator[tuple[int, Sequence[Any]]]:
    """Rows of so many leaf columns, so many at a time, each time with the number of the first."""
    step = max(min(ROWS_MAX, VALUES // columns), 1)
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step]


def grow_old() -> None:
    """Have the collector take all objects that there are for old ones, which it seldom looks at, without
    looking at them now. For rows that a caller is to keep, not for those that come and go: what is garbage
    by now, of the application, too, waits for the next full collection. Where the application has frozen
    objects nothing is done, since they would thaw."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def leaf_count(t: pa.DataType) -> int:
    """How many columns without parts a column of the type has."""
    if not pa.types.is_nested(t):
        return 1
    parts: int = sum(leaf_count(t.field(number).type) for number in range(t.num_fields))
    return parts or 1


def _rows(table: pa.Table | pa.RecordBatch) -> int:
    leaves = sum(leaf_count(field.type) for field in table.schema)
    width: int = max(goodbytes(table) // table.num_rows, 1)
    return max(min(ROWS_MAX, VALUES // leaves, BYTES // width), 1)
