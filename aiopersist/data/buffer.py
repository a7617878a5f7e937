"""Updates gathered until they are worth a part, in the order they came.

Single rows of plain types are kept as tuples and become columns some hundreds at a time; everything
else comes as tables. What reaches the target is cut off without copying: slices of the tables that
came, found by bisection, so a cut takes no time worth a thread, and an await stands nowhere between
taking from the buffer and giving to the upload.
"""

from __future__ import annotations

from typing import Any

from aiopersist.data.codec import Schema
from aiopersist.data.convert import to_table
from aiopersist.data.lazy import pa
from aiopersist.data.sizes import goodbytes, rows_reaching

ROWS_AT_ONCE = 512  # rows converted together: under a millisecond
BYTES_AT_ONCE = 256 * 1024
FEW_ROWS = 64  # tables of fewer rows are joined, since a table costs a kilobyte however little it holds
FEW_TABLES = 64

Row = tuple[Any, Any, Any, int]


class Buffer:
    """See the header. `goodbytes` and `rows` are those of what is in it."""

    def __init__(self, schema: Schema[Any, Any, Any]) -> None:
        self._schema = schema
        self._tables: list[tuple[pa.Table, int]] = []
        self._rows: list[Row] = []
        self._rows_bytes = 0
        self._few = 0
        self.goodbytes = 0
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        """Updates as columns of the schema."""
        self._convert()
        self._add(table, goodbytes(table))

    def add_row(self, row: Row, size: int) -> None:
        """One update of `size` goodbytes that surely can be converted."""
        self._rows.append(row)
        self._rows_bytes += size
        self.rows += 1
        self.goodbytes += size
        if len(self._rows) >= ROWS_AT_ONCE or self._rows_bytes >= BYTES_AT_ONCE:
            self._convert()

    def take_reaching(self, target: int) -> pa.Table:
        """The first updates that together reach `target` goodbytes; the update that reaches it is the
        last of them. There are as many."""
        self._convert()
        taken, size = [], 0
        while size < target:
            table, table_size = self._tables.pop(0)
            if size + table_size >= target:
                rows = rows_reaching(table, target - size)
                if rows < table.num_rows:
                    rest = table.slice(rows)
                    self._tables.insert(0, (rest, goodbytes(rest)))
                    table, table_size = table.slice(0, rows), table_size - self._tables[0][1]
            taken.append(table)
            size += table_size
            self.rows -= table.num_rows
            self.goodbytes -= table_size
        self._few = 0
        return pa.concat_tables(taken)

    def take(self) -> pa.Table:
        """All of it, which is at least one table."""
        self._convert()
        table = pa.concat_tables([table for table, _ in self._tables])
        self._tables, self._few = [], 0
        self.rows = self.goodbytes = 0
        return table

    def _convert(self) -> None:
        if self._rows:
            rows, size = self._rows, self._rows_bytes
            self._rows, self._rows_bytes = [], 0
            self.rows -= len(rows)
            self.goodbytes -= size
            self._add(to_table(rows, self._schema), size)

    def _add(self, table: pa.Table, size: int) -> None:
        self._tables.append((table, size))
        self.rows += table.num_rows
        self.goodbytes += size
        self._few = self._few + 1 if table.num_rows < FEW_ROWS else 0
        if self._few == FEW_TABLES:
            few = self._tables[-FEW_TABLES:]
            joined = pa.concat_tables([table for table, _ in few]).combine_chunks()
            self._tables[-FEW_TABLES:] = [(joined, sum(size for _, size in few))]
            self._few = 0
