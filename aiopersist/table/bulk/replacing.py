"""The updates of a large put, of its entries and the contents, both in key order. No I/O."""

from __future__ import annotations

from typing import Any

from aiopersist.data.arrays import empty_table, int64_scalar
from aiopersist.data.lazy import np, pa
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import at_time, column_of, concat, numbers
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.data.updates.many import by_values
from aiopersist.data.updates.merge import rows_below, rows_of_last_key
from aiopersist.data.updates.order import row_key

KEY = ("key",)


def numbered(entries: pa.Table, first: int, schema: Schema[Any, Any, Any]) -> pa.Table:
    """Entries as updates, whose times are their numbers from `first` on."""
    rows = entries.num_rows
    times, ones = column_of(first + np.arange(rows)), column_of(np.ones(rows, np.int64))
    columns = [entries.column("key"), entries.column("val"), times, ones]
    return pa.Table.from_arrays(columns, schema=schema.arrow_schema)


class Replacing:
    """Takes entries, numbered, in order of (key, value, number), and contents in key order. Gives the updates
    at `time` that replace the contents by the entries. The entries of the greatest key wait, since more of
    them may come; so do contents beyond them."""

    def __init__(self, schema: Schema[Any, Any, Any], time: int) -> None:
        self._schema = schema
        self._time = time
        self._waiting: pa.Table = empty_table(schema.arrow_schema)
        self._final: pa.Table = self._waiting
        self._old: list[pa.Table] = []
        self._batch: pa.RecordBatch | None = None
        self._is_at_end = False

    def add(self, entries: pa.Table | None) -> None:
        """Take the next entries; `None` at their end."""
        if entries is None:
            self._final, self._waiting = self._waiting, self._waiting.slice(0, 0)
        elif entries.num_rows:
            entries = pa.concat_tables([self._waiting, entries])
            rows = entries.num_rows - rows_of_last_key(entries)
            self._final, self._waiting = _last_only(entries.slice(0, rows)), _last_only(entries.slice(rows))
        else:
            self._final = entries
        self._old = []
        if self._final.num_rows:
            self._match()

    @property
    def needs_old(self) -> bool:
        """Whether the next contents may have keys of the entries."""
        if self._is_at_end or not self._final.num_rows:
            return False
        return self._batch is None or row_key(self._batch, -1, KEY) < row_key(self._final, -1, KEY)

    def add_old(self, batch: pa.RecordBatch | None) -> None:
        """Take the next contents; `None` at their end."""
        self._batch, self._is_at_end = batch, batch is None
        self._match()

    def _match(self) -> None:
        """Find the old values in the contents at hand."""
        if self._batch is not None:
            rows = pa.Table.from_batches([self._batch])
            self._old.append(_rows(rows, _in(self._final, rows)))

    def take_deletions(self) -> pa.Table:
        """The updates of keys without entries: they stay."""
        return empty_table(self._schema.arrow_schema)

    def take(self) -> pa.Table:
        """The updates of keys with entries: none for an equal value."""
        new = at_time(self._final, self._time, self._schema)
        return sort_and_consolidate(concat([new, *map(self._retracted, self._old)], self._schema))

    def _retracted(self, contents: pa.Table) -> pa.Table:
        deletions = pa.repeat(int64_scalar(-1), contents.num_rows)
        field = self._schema.arrow_schema.field("diff")
        return at_time(contents.set_column(2, field, deletions), self._time, self._schema)


class ReplacingAll(Replacing):
    """The same for entries that replace all contents: other keys are deleted."""

    def __init__(self, schema: Schema[Any, Any, Any], time: int) -> None:
        super().__init__(schema, time)
        self._deletions: list[pa.Table] = []
        self._matched_rows = 0
        """Rows of the contents at hand that were matched."""
        self._has_all = False

    def add(self, entries: pa.Table | None) -> None:
        self._has_all = entries is None
        super().add(entries)

    @property
    def needs_old(self) -> bool:
        return (self._has_all and not self._is_at_end) or super().needs_old

    def add_old(self, batch: pa.RecordBatch | None) -> None:
        self._matched_rows = 0
        super().add_old(batch)

    def _match(self) -> None:
        """Find the contents at hand up to the last entry; after all entries, also the others."""
        if self._batch is None:
            return
        rows = pa.Table.from_batches([self._batch]).slice(self._matched_rows)
        if not self._has_all:
            last = row_key(self._final, -1, KEY)
            below = rows_below(rows, last, KEY)
            while below < rows.num_rows and row_key(rows, below, KEY) == last:
                below += 1
            rows = rows.slice(0, below)
        self._matched_rows += rows.num_rows
        if rows.num_rows:
            stays = _in(self._final, rows)
            self._old.append(_rows(rows, stays))
            self._deletions.append(_rows(rows, ~stays))

    def take_deletions(self) -> pa.Table:
        """The updates that delete keys, since the last call."""
        deletions, self._deletions = self._deletions, []
        return concat([*map(self._retracted, deletions)], self._schema)


def _last_only(entries: pa.Table) -> pa.Table:
    """The last entry of each key, so that a repeated key takes no memory."""
    order, same = by_values(entries.column("key"))
    if not same.any():
        return entries
    groups = np.cumsum(np.concatenate([[False], ~same]))
    times = np.concatenate([numbers(chunk) for chunk in entries.column("time").chunks])
    last = np.lexsort((times[order], groups))[np.flatnonzero(np.concatenate([~same, [True]]))]
    return entries.take(column_of(order[last]))


def _in(entries: pa.Table, contents: pa.Table) -> Any:
    """Whether each row of the contents has a key of the entries."""
    keys = [*entries.column("key").chunks, *contents.column("key").chunks]
    order, same = by_values(pa.chunked_array(keys, contents.schema.field("key").type))
    begins = np.concatenate([[True], ~same])
    has_entry = np.logical_or.reduceat(order < entries.num_rows, np.flatnonzero(begins))
    matches = np.empty(len(order), bool)
    matches[order] = has_entry[np.cumsum(begins) - 1]
    return matches[entries.num_rows :]


def _rows(table: pa.Table, mask: Any) -> pa.Table:
    return table if mask.all() else table.take(column_of(np.flatnonzero(mask)))
