"""Merging sorted runs slab by slab, in bounded memory, into globally consolidated output.

A pure object: it names the runs to load, takes their next slabs, and returns final updates. The caller does
I/O:

    merge = Merge(len(runs), schema)
    while not merge.done:
        for run in merge.needs():
            merge.push(run, <the next slab of the run, or None at its end>)
        emit(merge.pop())

*Bound*: each run that is not at its end has a last loaded row; the least of these rows is the bound. No row
below the bound can still come, so all rows strictly below it are sorted, consolidated and returned. Rows
equal to it wait, since a run may continue with them.

A run is loaded again when half of its last slab is used up, not when it is the least run: so each `pop`
returns much of every run, and each row is sorted once. Memory holds at most one and a half slabs per run, and
the copies that a `pop` sorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from aiopersist.data.arrays import empty_table
from aiopersist.data.lazy import pa, pc
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import DIFF_MAX, DIFF_MIN, contents, sort_and_consolidate
from aiopersist.data.updates.order import row_key


@dataclass
class _Run:
    pending: pa.Table
    last: Any = None  # the row key of the last loaded row
    slab_rows: int = 0
    at_end: bool = False


class Merge:
    """Merges `runs` runs of tables in the columns of the schema.

    `final`: returns contents (`key`, `val`, `diff`) and ignores times; `DiffOverflow` if a sum does not fit.
    Product times need not be in order within a (key, value): advancing them breaks their order.
    """

    def __init__(self, runs: int, schema: Schema[Any, Any, Any], *, final: bool = False) -> None:
        empty = empty_table(schema.arrow_schema)
        self._runs = [_Run(empty) for _ in range(runs)]
        self._schema = schema
        self._final = final
        self._order = ("key", "val") if final or schema.time > 1 else ("key", "val", "time")
        self._stuck = False

    @property
    def done(self) -> bool:
        """Whether all updates were returned."""
        return all(run.at_end and not run.pending.num_rows for run in self._runs)

    @property
    def rows_held(self) -> int:
        """Rows that were pushed and not returned yet."""
        return sum(run.pending.num_rows for run in self._runs)

    def needs(self) -> list[int]:
        """The runs whose next slab must be pushed before the next `pop`."""
        needs = {i for i, run in enumerate(self._runs) if not run.at_end and _is_low(run)}
        if self._stuck:
            bound = self._bound()
            needs |= {i for i, run in enumerate(self._runs) if not run.at_end and run.last == bound}
        return sorted(needs)

    def push(self, run: int, slab: pa.Table | None) -> None:
        """Take the next slab of a run, sorted, perhaps empty (all filtered out); `None` at its end."""
        state = self._runs[run]
        if slab is None:
            state.at_end = True
        elif slab.num_rows:
            state.last = row_key(slab, -1, self._order)
            state.slab_rows = slab.num_rows
            state.pending = pa.concat_tables([state.pending, slab]) if state.pending.num_rows else slab

    def pop(self) -> pa.Table:
        """The final updates that were not returned yet, perhaps none: sorted, consolidated, and above all
        updates that were returned before."""
        if any(run.last is None and not run.at_end for run in self._runs):
            return self._summed([])
        bound = self._bound()
        tables = []
        for run in self._runs:
            rows = run.pending.num_rows if bound is None else rows_below(run.pending, bound, self._order)
            tables.append(run.pending.slice(0, rows))
            run.pending = run.pending.slice(rows)
        self._stuck = not any(table.num_rows for table in tables)
        return self._summed(tables)

    def _bound(self) -> Any:
        return min((run.last for run in self._runs if not run.at_end and run.last is not None), default=None)

    def _summed(self, tables: list[pa.Table]) -> pa.Table:
        table = pa.concat_tables([empty_table(self._schema.arrow_schema), *tables])
        return contents(table, self._schema) if self._final else sort_and_consolidate(table)


def _is_low(run: _Run) -> bool:
    rows: int = run.pending.num_rows
    return rows * 2 <= run.slab_rows


def are_sums(tables: Sequence[pa.Table]) -> bool:
    """Whether each sorted table lies beyond the one before, and no sum beyond 64 bits has several rows."""
    filled, order = [table for table in tables if table.num_rows], ("key", "val")
    return all(row_key(a, -1, order) < row_key(b, 0, order) for a, b in pairwise(filled)) and not any(
        {DIFF_MIN, DIFF_MAX} & {*pc.min_max(table.column("diff")).as_py().values()} for table in filled
    )


def rows_of_last_key(table: pa.Table | pa.RecordBatch) -> int:
    """How many rows of a sorted table have the key of the last one."""
    return int(table.num_rows) - rows_below(table, row_key(table, -1, ("key",)), ("key",))


def rows_below(table: pa.Table | pa.RecordBatch, bound: Any, order: tuple[str, ...]) -> int:
    """How many rows of a sorted table lie strictly below the bound."""
    rows: int = table.num_rows
    below, above = 0, rows  # rows before `below` lie below the bound, rows at and after `above` do not
    if above and row_key(table, -1, order) < bound:
        return rows
    while below < above:
        middle = (below + above) // 2
        if row_key(table, middle, order) < bound:
            below = middle + 1
        else:
            above = middle
    return below
