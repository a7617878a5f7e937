"""Updates in the order they came, until there are enough for a part.

Single rows of plain types are kept as tuples and become columns some hundreds at a time; all other updates
come as tables. Taking the first updates copies nothing: it slices the tables, at a row found by bisection. So
it needs no thread and no await, and no other call comes between the buffer and the upload.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.sizes import goodbytes, rows_reaching

TUPLES_MAX = 512  # rows that wait as tuples: converted in under a millisecond
TUPLES_BYTES_MAX = 256 * 1024
JOIN_TABLES = 64  # small neighbouring tables to join: each costs kilobytes of its own
JOIN_BYTES = 512 * 1024  # of fewer small tables to join, which takes less than a millisecond
SMALL_ROWS = 8192  # a small table has fewer rows, and fewer bytes than `JOIN_BYTES`

Row = tuple[Any, Any, Any, int]


class Buffer:
    """See the header. `goodbytes` and `rows` count the updates in the buffer."""

    def __init__(self, schema: Schema[Any, Any, Any]) -> None:
        self._schema = schema
        self._tables: deque[tuple[pa.Table, int]] = deque()  # with their goodbytes
        self._rows: list[Row] = []
        self._rows_bytes = 0
        self._small: list[tuple[pa.Table, int]] = []
        self._small_bytes = 0
        self.goodbytes = 0
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        """Add updates as columns of the schema."""
        self._convert()
        self._add(table, goodbytes(table))

    def add_row(self, row: Row, size: int) -> None:
        """Add one update of `size` goodbytes that is known to be valid."""
        self._rows.append(row)
        self._rows_bytes += size
        self.rows += 1
        self.goodbytes += size
        if len(self._rows) >= TUPLES_MAX or self._rows_bytes >= TUPLES_BYTES_MAX:
            self._convert()

    def take_reaching(self, target: int) -> pa.Table:
        """Take the first updates until they reach `target` goodbytes, which the buffer must have."""
        self._convert()
        self._join()
        tables, size = [], 0
        while size < target:
            table, table_size = self._tables.popleft()
            if size + table_size >= target:
                rows = rows_reaching(table, target - size)
                if rows < table.num_rows:
                    table, rest = table.slice(0, rows), table.slice(rows)
                    self._tables.appendleft((rest, rest_size := goodbytes(rest)))
                    table_size -= rest_size
            tables.append(table)
            size += table_size
            self.rows -= table.num_rows
            self.goodbytes -= table_size
        return pa.concat_tables(tables)

    def take(self) -> pa.Table:
        """Take all updates. The buffer must not be empty."""
        self._convert()
        self._join()
        table = pa.concat_tables([table for table, _ in self._tables])
        self._tables.clear()
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
        self.rows += table.num_rows
        self.goodbytes += size
        if table.num_rows >= SMALL_ROWS or size >= JOIN_BYTES:
            self._join()
            self._tables.append((table, size))
            return
        self._small.append((table, size))
        self._small_bytes += size
        if len(self._small) >= JOIN_TABLES or self._small_bytes >= JOIN_BYTES:
            self._join()

    def _join(self) -> None:
        """Join the small tables that came last."""
        if len(self._small) == 1:
            self._tables += self._small
        elif self._small:
            joined = pa.concat_tables([table for table, _ in self._small]).combine_chunks()
            self._tables.append((joined, self._small_bytes))
        self._small, self._small_bytes = [], 0
