"""Sorting and summing: at most one update per (key, val, time), in order, none with a diff of zero.

The rows are ordered, then neighbours are compared once: a group begins at a row that differs from the row
before it. (A hash aggregation takes three times as long, and its result would have to be sorted, too.)

Sums never wrap: the halves of the diffs, of 32 bits, are summed apart where all together might not fit. A sum
beyond 64 bits becomes several updates, as few as possible: the greatest diff as often as it fits, and the
rest. So the same updates always give the same rows. For contents, whose sums are final, it is a
`DiffOverflow`.

The size alone decides how the rows are ordered; the result is the same. A few rows are sorted as Python
tuples, since the entry into each kernel takes longer; more by their codes (`codes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from aiopersist.data.jsonable import to_json
from aiopersist.data.lazy import np, pa, pc
from aiopersist.data.plain import int64_array
from aiopersist.data.types.codec import Field
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.codes import column_of, numbers, ordered, whole
from aiopersist.data.updates.order import flatten, row_keys
from aiopersist.data.updates.sizes import row_bytes
from aiopersist.errors import DiffOverflow, Unsupported

DIFF_MIN, DIFF_MAX = -(2**63), 2**63 - 1
SMALL_ROWS = 24  # up to this, tuples are faster than the entry into kernels
SLICE_ROWS = 32768
DIFF_BYTES = 8


def sort_and_consolidate(table: pa.Table, schema: Schema[Any, Any, Any] | None = None) -> pa.Table:
    """The same updates sorted by all columns but `diff`, in their order, and summed."""
    return _consolidate(table, final=None)


def contents(table: pa.Table, schema: Schema[Any, Any, Any]) -> pa.Table:
    """The sums per (key, val), as columns `key`, `val`, `diff`, in order. Times are ignored: the caller
    filters by them before. `DiffOverflow` if a sum does not fit in 64 bits."""
    return _consolidate(table.select(["key", "val", "diff"]), final=schema)


def sum_columns(table: pa.Table, schema: Schema[Any, Any, Any]) -> pa.Table:
    """As `contents`, over all columns of the table except `diff`: for projections."""
    return _consolidate(table, final=schema)


def diff_sum(table: pa.Table) -> int:
    """The sum of all diffs modulo 2**64, which consolidation does not change."""
    total: int = pc.sum(table.column("diff"), min_count=0).as_py()
    return total % 2**64  # Arrow's sums wrap


def fewest_diffs(total: int) -> list[int]:
    """The fewest diffs of 64 bits with this sum, the greatest magnitudes first."""
    limit = DIFF_MAX if total > 0 else DIFF_MIN
    whole, rest = divmod(total, limit) if total else (0, 0)
    return [limit] * whole + ([rest] if rest else [])


def _consolidate(table: pa.Table, *, final: Schema[Any, Any, Any] | None) -> pa.Table:
    names = [name for name in table.column_names if name != "diff"]
    if table.num_rows > SMALL_ROWS:
        return _by_codes(table, final)
    with suppress(pa.ArrowInvalid):  # 2 GiB of text in the result, which one array cannot hold
        return _taken(table, _sums(row_keys(table, names), table.column("diff").to_pylist()), final)
    return _by_codes(table, final)


def _taken(
    table: pa.Table, groups: Iterable[tuple[int, int]], final: Schema[Any, Any, Any] | None
) -> pa.Table:
    """The table of the groups, each as its first row and its sum."""
    diffs = table.column("diff").to_pylist()
    rows: list[int] = []
    sums: list[int] = []
    for row, total in groups:
        if DIFF_MIN <= total <= DIFF_MAX:
            if total:
                rows.append(row)
                sums.append(total)
            continue
        if final is not None:
            raise _overflow(table.slice(row, 1), final)
        few = fewest_diffs(total)
        rows += [row] * len(few)
        sums += few
    if sums == diffs and rows == list(range(table.num_rows)):
        return table
    taken = table.take(int64_array(rows))
    index = table.schema.get_field_index("diff")
    return taken.set_column(index, table.schema.field(index), int64_array(sums))


def _sums(keys: list[tuple[Any, ...]], diffs: list[int]) -> Iterator[tuple[int, int]]:
    """The first row and the sum of each group of equal keys, in order."""
    order = sorted(range(len(keys)), key=keys.__getitem__)
    start = 0
    while start < len(order):
        first, end = order[start], start + 1
        while end < len(order) and keys[order[end]] == keys[first]:
            end += 1
        yield first, sum(diffs[row] for row in order[start:end])
        start = end


class Consolidated:
    """Rows in their order, each as the number of its row in the columns, and its sum. Tables of them are made
    as they are asked for, so that not all of them are copied at once."""

    def __init__(self, schema: pa.Schema, columns: dict[str, Any], rows: Any, sums: Any) -> None:
        self._schema = schema
        self._columns = columns
        self._rows = rows
        self._sums = sums
        self.in_place = bool(np.all(rows[1:] > rows[:-1]))
        """Whether the rows were in this order before."""

    def __len__(self) -> int:
        return len(self._rows)

    def cuts(self, target_bytes: float) -> list[int]:
        """The ends of the parts that reach so many goodbytes, and of the rest."""
        sizes = sum(row_bytes(column) for column in self._columns.values()) + DIFF_BYTES
        reached = np.cumsum(sizes[self._rows] if np.ndim(sizes) else np.full(len(self), sizes))
        ends, before = [0], 0
        while ends[-1] < len(self):
            end = min(int(np.searchsorted(reached, before + target_bytes)) + 1, len(self))
            before = int(reached[end - 1])
            ends.append(end)
        return ends[1:]

    def tables(self, start: int, stop: int, size: int = SLICE_ROWS) -> Iterator[pa.Table]:
        """These rows, in tables of so many at most."""
        for at in range(start, stop, size):
            yield from self._taken(slice(at, min(at + size, stop)))

    def _taken(self, some: slice) -> list[pa.Table]:
        """One table, or several if their texts have more bytes than one array can hold."""
        rows, sums = self._rows[some], self._sums[some]
        try:
            at, schema = column_of(rows), self._schema
            taken = [_cast(c.take(at), schema.field(name).type) for name, c in self._columns.items()]
            return [pa.table([*taken, column_of(sums)], schema=schema)]
        except pa.ArrowInvalid:
            if len(rows) == 1:
                raise
        half = some.start + len(rows) // 2
        return [t for part in (slice(some.start, half), slice(half, some.stop)) for t in self._taken(part)]


def consolidated(only: list[pa.Table], final: Schema[Any, Any, Any] | None = None) -> Consolidated:
    """The updates of the table in the list `only`, by their codes. It is taken from the list, so that its
    memory is freed column by column."""
    table = only.pop()
    names = [name for name in table.column_names if name != "diff"]
    schema = pa.schema([table.schema.field(name) for name in [*names, "diff"]])
    columns, leaves, count = dict[str, Any](), list[Any](), table.num_rows
    diffs = numbers(whole(table.column("diff")))
    for name in names:
        columns[name] = whole(table.column(name))
        table = table.drop_columns([name])
        flatten(columns[name], leaves)
    order, same = ordered(leaves, count)
    diffs = diffs[order]
    if same.any():
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        rows, sums = order[starts], _summed(diffs, starts)
        if sums.dtype == object:
            rows, sums = _in_64_bits(columns, rows, sums, final)
    else:
        rows, sums = order, diffs
    if not sums.all():
        kept = np.flatnonzero(sums)
        rows, sums = rows[kept], sums[kept]
    return Consolidated(schema, columns, rows, sums)


def _by_codes(table: pa.Table, final: Schema[Any, Any, Any] | None) -> pa.Table:
    found = consolidated([table], final)
    if found.in_place and len(found) == table.num_rows:
        return table
    tables = list(found.tables(0, len(found)))  # in chunks, so that a consumer can release each after use
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables) if tables else table.slice(0, 0)


def _summed(diffs: Any, starts: Any) -> Any:
    """The sums of the groups that begin at `starts`; as Python's ints if 64 bits may not be enough."""
    magnitude = max(-int(diffs.min()), int(diffs.max()))
    if magnitude * len(diffs) < 2**63:
        return np.add.reduceat(diffs, starts)
    high, low = (np.add.reduceat(half, starts) for half in (diffs >> 32, diffs & (2**32 - 1)))
    return high.astype(object) * 2**32 + low


def _in_64_bits(
    columns: dict[str, Any], rows: Any, sums: Any, final: Schema[Any, Any, Any] | None
) -> tuple[Any, Any]:
    """Sums as diffs of 64 bits, in several rows if a sum does not fit."""
    over = np.flatnonzero((sums > DIFF_MAX) | (sums < DIFF_MIN))
    if final is not None and len(over):
        row = {name: column.slice(int(rows[over[0]]), 1) for name, column in columns.items()}
        raise _overflow(pa.table(row), final)
    if len(over):
        few = [fewest_diffs(total) for total in sums]
        rows, sums = np.repeat(rows, list(map(len, few))), [diff for diffs in few for diff in diffs]
    return rows, np.asarray(sums, np.int64)


def _cast(column: Any, t: pa.DataType) -> Any:
    return column if column.type == t else column.cast(t)


def _overflow(row: pa.Table, schema: Schema[Any, Any, Any]) -> DiffOverflow:
    """The error with the key and the val of the row, as far as a projection has them."""
    names = row.column_names
    key = _shown(schema.key, row.column("key")) if "key" in names else None
    val = _shown(schema.val, row.column("val")) if "val" in names else None
    return DiffOverflow(key, val)


def _shown(field: Field, column: Any) -> Any:
    """The value of one row; in its JSON form if Python cannot represent it."""
    try:
        return field.decode(column)[0]
    except Unsupported:
        return to_json(column[0])
