"""Many rows, sorted and summed as columns, by their codes. See `codes.py` and `consolidate.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from aiopersist.data.lazy import np, pa
from aiopersist.data.updates.assemble import column_of, numbers, whole
from aiopersist.data.updates.codes import ordered
from aiopersist.data.updates.order import flatten
from aiopersist.data.updates.sizes import row_bytes

SORTED_AT_ONCE = 32768
DIFF_BYTES = 8

Fit = Callable[[dict[str, Any], Any, Any], tuple[Any, Any]]
"""From columns, row numbers and sums to row numbers and diffs."""


class Consolidated:
    """Sorted rows: their numbers in the columns, and their sums. `tables` copies some rows at a time."""

    def __init__(self, schema: pa.Schema, columns: _ColumnsOnDemand, rows: Any, sums: Any) -> None:
        self._schema = schema
        self._columns = columns
        self._rows = rows
        self._sums = sums
        self.in_place = bool(np.all(rows[1:] > rows[:-1]))
        """Whether the rows were in this order before."""

    def __len__(self) -> int:
        return len(self._rows)

    def gather(self) -> None:
        """Afterwards several threads may call `tables`."""
        self._columns.all()

    def cuts(self, target_bytes: float) -> list[int]:
        """The ends of slices that reach so many goodbytes, and of the rest."""
        sizes = sum(row_bytes(column) for column in self._columns.all().values()) + DIFF_BYTES
        reached = np.cumsum(sizes[self._rows] if np.ndim(sizes) else np.full(len(self), sizes))
        ends, before = [0], 0
        while ends[-1] < len(self):
            end = min(int(np.searchsorted(reached, before + target_bytes)) + 1, len(self))
            before = int(reached[end - 1])
            ends.append(end)
        return ends[1:]

    def tables(self, start: int, stop: int, size: int = SORTED_AT_ONCE) -> Iterator[pa.Table]:
        """These rows, in tables of at most so many rows."""
        for at in range(start, stop, size):
            yield from self._gathered(slice(at, min(at + size, stop)))

    def _gathered(self, span: slice) -> list[pa.Table]:
        """One table, or several if their texts have more bytes than one array can hold."""
        rows, sums = self._rows[span], self._sums[span]
        try:
            at, schema = column_of(rows), self._schema
            columns = [_cast(c.take(at), schema.field(name).type) for name, c in self._columns.all().items()]
            return [pa.table([*columns, column_of(sums)], schema=schema)]
        except pa.ArrowInvalid:
            if len(rows) == 1:
                raise
        half = span.start + len(rows) // 2
        return [t for part in (slice(span.start, half), slice(half, span.stop)) for t in self._gathered(part)]


class _ColumnsOnDemand(dict[str, Any]):
    """The columns of a table. Each becomes one array when it is first needed: if all rows are in order, only
    keys are. The table then drops the column, so its memory may be freed."""

    def __init__(self, table: pa.Table, names: list[str]) -> None:
        self._table = table
        self._names = names

    def __missing__(self, name: str) -> Any:
        column = self[name] = whole(self._table.column(name))
        self._table = self._table.drop_columns([name])
        return column

    def leaves(self) -> Iterator[Any]:
        """The leaves of all columns, in order."""
        for name in self._names:
            leaves = list[Any]()
            flatten(self[name], leaves)
            yield from leaves

    def all(self) -> dict[str, Any]:
        """All columns, in order."""
        return {name: self[name] for name in self._names}


def by_values(column: Any) -> tuple[Any, Any]:
    """`ordered` by the values of a column."""
    leaves = list[Any]()
    flatten(whole(column), leaves)
    return ordered(leaves, len(column)) if len(column) else (np.arange(0), np.zeros(0, bool))


def consolidated(only: list[pa.Table], fit: Fit) -> Consolidated:
    """The updates of the table in the list `only`, sorted by their codes. The table is removed from the list,
    so that its memory is freed column by column. `fit` turns sums, perhaps beyond 64 bits, into diffs."""
    table = only.pop()
    names = [name for name in table.column_names if name != "diff"]
    schema = pa.schema([table.schema.field(name) for name in [*names, "diff"]])
    diffs, count = numbers(whole(table.column("diff"))), table.num_rows
    columns = _ColumnsOnDemand(table, names)
    del table
    order, same = ordered(columns.leaves(), count)
    diffs = diffs[order]
    if same.any():
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        rows, sums = order[starts], _summed(diffs, starts)
        if sums.dtype == object:
            rows, sums = fit(columns.all(), rows, sums)
    else:
        rows, sums = order, diffs
    if not sums.all():
        kept = np.flatnonzero(sums)
        rows, sums = rows[kept], sums[kept]
    return Consolidated(schema, columns, rows, sums)


def _summed(diffs: Any, starts: Any) -> Any:
    """The sums of the groups that begin at `starts`; as Python ints if 64 bits may not be enough."""
    magnitude = max(-int(diffs.min()), int(diffs.max()))
    if magnitude * len(diffs) < 2**63:
        return np.add.reduceat(diffs, starts)
    high, low = (np.add.reduceat(half, starts) for half in (diffs >> 32, diffs & (2**32 - 1)))
    return high.astype(object) * 2**32 + low


def _cast(column: Any, t: pa.DataType) -> Any:
    return column if column.type == t else column.cast(t)
