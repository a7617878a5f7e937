"""Which rows of a table of updates are shown, and which of them are too many.

A data file shows each of its rows once, whatever its time and diff. So a row that is not of the time of the
publication, or a retraction, is deleted by its position. Every other row counts as one. What is missing then
is the *difference* per (key, value): `diff - 1` for a row that is shown, `diff` for a retraction and for a
row that is inline. Where the sum is above zero, copies are missing, and go to a file of their own. Where it
is below, so many copies are a surplus, whose positions are deleted.

All of this works on columns, by the library's own order of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiopersist.base.frontier import Time
from aiopersist.data.arrays import empty_table
from aiopersist.data.lazy import np, pa, pc
from aiopersist.data.part.wanted_keys import WantedKeys
from aiopersist.data.types.evolve import adapt
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import column_of, numbers, whole
from aiopersist.data.updates.codes import ordered
from aiopersist.data.updates.consolidate import contents
from aiopersist.data.updates.order import flatten
from aiopersist.data.updates.times import advance, filter_times
from aiopersist.state.record import HollowPart

POSITION = "position"
ROW = ("key", "val")
Positions = Any
"""Numbers of rows in a file, a numpy array."""


def placed(table: pa.Table, first: int, schema: Schema[Any, Any, Any]) -> pa.Table:
    """The rows of a stored table in the types of the schema, with their positions; the first row of the table
    has the position `first`."""
    positions = column_of(np.arange(first, first + table.num_rows))
    return adapt(table, schema).append_column(POSITION, positions)


def visible(table: pa.Table, part: HollowPart, as_of: Time) -> pa.Table:
    """The placed rows of `part` that a reader sees at `as_of`."""
    if part.rewrite is not None:
        table = advance(table, part.rewrite)
    if part.truncated is not None:
        lower, upper = part.truncated
        table = filter_times(table, lower=lower, upper=upper)
    return filter_times(table, as_of=as_of)


def hidden(table: pa.Table, seen: pa.Table) -> Positions:
    """The positions of placed rows that are deleted in any case: those that are not among the visible rows
    `seen`, and retractions."""
    return np.setdiff1d(_numbers(table, POSITION), _numbers(_insertions(seen), POSITION), assume_unique=True)


def differences(table: pa.Table) -> pa.Table:
    """The differences of visible rows, as columns `key`, `val`, `diff`, without zeros."""
    diffs = _numbers(table, "diff")
    diffs = np.where(diffs > 0, diffs - 1, diffs)
    rows = table.select([*ROW, "diff"])
    rows = rows.set_column(2, rows.schema.field("diff"), column_of(diffs))
    return rows.filter(pc.not_equal(rows.column("diff"), 0))


def summed(tables: list[pa.Table], schema: Schema[Any, Any, Any]) -> pa.Table:
    """The sums of differences, in order. `DiffOverflow` for a sum beyond 64 bits."""
    return contents(pa.concat_tables([empty_table(schema.contents_schema), *tables]), schema)


@dataclass(eq=False)
class Surplus:
    """Rows with copies that are too many, and how many of each must still be deleted."""

    rows: pa.Table
    """The columns `key` and `val`; each row once."""
    needed: Any
    """For each row a number of copies."""
    keys: WantedKeys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = WantedKeys(whole(self.rows.column("key")))

    @classmethod
    def of(cls, sums: pa.Table) -> Surplus | None:
        """Those of the sums of differences; `None` without any."""
        negative = sums.filter(pc.less(sums.column("diff"), 0))
        return cls(negative.select(ROW), -_numbers(negative, "diff")) if negative.num_rows else None

    def first_needed(self) -> int | None:
        """The first row of which copies must still be deleted; `None` if there is none."""
        rows = np.flatnonzero(self.needed)
        return int(rows[0]) if len(rows) else None

    def take(self, table: pa.Table) -> Positions:
        """The positions of copies among visible rows; they count as deleted."""
        shown = _insertions(table)
        copies = self.keys.of(shown) if shown.num_rows else shown
        if not copies.num_rows:
            return np.zeros(0, np.int64)
        count = self.rows.num_rows
        groups = _groups(pa.concat_tables([self.rows, copies.select(ROW)]))
        needed = np.zeros(groups.max() + 1, np.int64)
        needed[groups[:count]] = self.needed
        candidates = groups[count:]
        by_group = np.argsort(candidates, kind="stable")
        ordered_groups = candidates[by_group]
        begins = np.searchsorted(ordered_groups, ordered_groups)
        chosen = by_group[np.arange(len(by_group)) - begins < needed[ordered_groups]]
        deleted = np.bincount(candidates[chosen], minlength=len(needed))
        self.needed = self.needed - deleted[groups[:count]]
        return np.sort(_numbers(copies, POSITION)[chosen])


def _insertions(table: pa.Table) -> pa.Table:
    return table.filter(pc.greater(table.column("diff"), 0))


def _groups(rows: pa.Table) -> Any:
    """For each row a number, equal for equal rows."""
    leaves = list[Any]()
    for name in rows.column_names:
        flatten(whole(rows.column(name)), leaves)
    order, same = ordered(leaves, rows.num_rows)
    groups = np.empty(rows.num_rows, np.int64)
    groups[order] = np.cumsum(np.concatenate([[False], ~same]))
    return groups


def _numbers(table: pa.Table, name: str) -> Any:
    return numbers(whole(table.column(name)))
