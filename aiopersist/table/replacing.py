"""Which vals a large put replaces: its entries beside the contents, both in key order. No I/O."""

from __future__ import annotations

from typing import Any

from aiopersist.data.lazy import pa
from aiopersist.data.part.wanted import WantedKeys
from aiopersist.data.plain import empty_table, int64_array
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.merge import rows_below
from aiopersist.data.updates.order import row_key
from aiopersist.table.kind import Kind

KEY = ("key",)


def numbered(entries: pa.Table, first: int, schema: Schema[Any, Any, Any]) -> pa.Table:
    """Entries as updates, whose times are their numbers from `first` on."""
    rows = entries.num_rows
    numbers, ones = int64_array(range(first, first + rows)), int64_array([1] * rows)
    columns = [entries.column("key"), entries.column("val"), numbers, ones]
    return pa.Table.from_arrays(columns, schema=schema.arrow_schema)


class Replacing:
    """Takes entries, numbered, in order of (key, val, number), and contents in key order. The entries of the
    greatest key wait, since it may go on; so do contents beyond them."""

    def __init__(self, kind: Kind[Any, Any]) -> None:
        self._kind = kind
        self._waiting: pa.Table = empty_table(kind.schema.arrow_schema)
        self._settled: pa.Table = self._waiting
        self._new: dict[str, str | None] = {}
        self._old: dict[str, str | None] = {}
        self._batch: pa.RecordBatch | None = None
        self._is_at_end = False

    def add(self, entries: pa.Table | None) -> None:
        """Take the next entries; `None` at their end."""
        if entries is None:
            self._settled, self._waiting = self._waiting, self._waiting.slice(0, 0)
        elif entries.num_rows:
            whole = pa.concat_tables([self._waiting, entries])
            rows = rows_below(whole, row_key(whole, -1, KEY), KEY)
            self._settled, self._waiting = whole.slice(0, rows), _last_only(whole.slice(rows))
        else:
            self._settled = entries
        self._new, self._old = {}, {}
        if self._settled.num_rows:
            keys, vals = self._kind.texts(self._settled.sort_by("time"))
            self._new = dict(zip(keys, vals, strict=True))
            self._find()

    @property
    def needs_old(self) -> bool:
        """Whether the next contents may have keys of the entries."""
        if self._is_at_end or not self._settled.num_rows:
            return False
        return self._batch is None or row_key(self._batch, -1, KEY) < row_key(self._settled, -1, KEY)

    def add_old(self, batch: pa.RecordBatch | None) -> None:
        """Take the next contents; `None` at their end."""
        self._batch, self._is_at_end = batch, batch is None
        self._find()

    def _find(self) -> None:
        """The old vals in the contents at hand."""
        if self._batch is not None:
            keys = pa.concat_arrays(self._settled.column("key").chunks)
            found = WantedKeys(keys).of(pa.Table.from_batches([self._batch]))
            if found.num_rows:
                self._old.update(zip(*self._kind.texts(found), strict=True))

    def take_gone(self) -> tuple[dict[str, str | None], dict[str, str | None]]:
        """What `take` gives, of keys that are not among the entries: they stay."""
        return {}, {}

    def take(self) -> tuple[dict[str, str | None], dict[str, str | None]]:
        """The new vals of the keys that change, and their old ones."""
        old = self._old
        changes = {key: val for key, val in self._new.items() if old.get(key) != val}
        return changes, {key: old.get(key) for key in changes}


class ReplacingAll(Replacing):
    """The same for entries that replace all contents: those of other keys are gone."""

    def __init__(self, kind: Kind[Any, Any]) -> None:
        super().__init__(kind)
        self._gone: dict[str, str] = {}
        self._found_rows = 0
        """Rows of the contents at hand that were taken."""
        self._has_all = False

    def add(self, entries: pa.Table | None) -> None:
        self._has_all = entries is None
        super().add(entries)

    @property
    def needs_old(self) -> bool:
        return (self._has_all and not self._is_at_end) or super().needs_old

    def add_old(self, batch: pa.RecordBatch | None) -> None:
        self._found_rows = 0
        super().add_old(batch)

    def _find(self) -> None:
        """The contents at hand up to the last entry, after it also the others."""
        if self._batch is None:
            return
        rows = pa.Table.from_batches([self._batch]).slice(self._found_rows)
        if not self._has_all:
            last = row_key(self._settled, -1, KEY)
            below = rows_below(rows, last, KEY)
            while below < rows.num_rows and row_key(rows, below, KEY) == last:
                below += 1
            rows = rows.slice(0, below)
        self._found_rows += rows.num_rows
        for key, val in zip(*self._kind.texts(rows), strict=True):
            (self._old if key in self._new else self._gone)[key] = val

    def take_gone(self) -> tuple[dict[str, str | None], dict[str, str | None]]:
        """What `take` gives, of the keys that are gone, since it was taken last."""
        gone, self._gone = self._gone, {}
        return dict.fromkeys(gone), {**gone}


def _last_only(entries: pa.Table) -> pa.Table:
    """Of the entries of one key the last; so a key that comes often takes no memory."""
    return entries.sort_by("time").slice(entries.num_rows - 1)
