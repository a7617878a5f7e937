"""Sorting and summing: at most one update per (key, value, time), in order, none with a diff of zero.

The rows are ordered; then each row is compared with the row before it, and a group begins where they differ.
(A hash aggregation takes three times as long, and its result would have to be sorted, too.)

Sums never wrap: where the total might not fit in 64 bits, the upper and lower 32 bits of the diffs are summed
apart. A sum beyond 64 bits becomes several updates, as few as possible: the greatest diff as often as it
fits, and the rest. So the same updates always give the same rows. For contents, whose sums are final, it is a
`DiffOverflow`.

The number of rows alone decides how they are ordered; the result is the same. A few rows are sorted as Python
tuples, since the entry into each kernel takes longer; more rows by their codes (`many.py`, `codes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from aiopersist.base.errors import DiffOverflow, Unsupported
from aiopersist.data.arrays import int64_array
from aiopersist.data.jsonable import to_json
from aiopersist.data.lazy import np, pa, pc
from aiopersist.data.types.codec import Field
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.order import row_keys

if TYPE_CHECKING:
    from aiopersist.data.updates.many import Consolidated

DIFF_MIN, DIFF_MAX = -(2**63), 2**63 - 1
TUPLE_ROWS_MAX = 24  # up to this many rows, tuples are faster than the entry into kernels


def sort_and_consolidate(table: pa.Table, schema: Schema[Any, Any, Any] | None = None) -> pa.Table:
    """The same updates sorted by all columns but `diff`, in their order, and summed."""
    return _consolidate(table, final=None)


def contents(table: pa.Table, schema: Schema[Any, Any, Any]) -> pa.Table:
    """The sums per (key, value), as columns `key`, `val`, `diff`, in order. Times are ignored: the caller
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
    if table.num_rows > TUPLE_ROWS_MAX:
        return _by_codes(table, final)
    with suppress(pa.ArrowInvalid):  # 2 GiB of text in the result, which one array cannot hold
        return _with_sums(table, _sums(row_keys(table, names), table.column("diff").to_pylist()), final)
    return _by_codes(table, final)


def _with_sums(
    table: pa.Table, groups: Iterable[tuple[int, int]], final: Schema[Any, Any, Any] | None
) -> pa.Table:
    """The table of the groups: each is the number of its first row, and its sum."""
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
    firsts = table.take(int64_array(rows))
    index = table.schema.get_field_index("diff")
    return firsts.set_column(index, table.schema.field(index), int64_array(sums))


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


def sorted_rows(only: list[pa.Table]) -> Consolidated:
    """As `sort_and_consolidate`, but the result makes tables when they are needed. Removes the table from the
    list `only`, so that its memory can be freed."""
    from aiopersist.data.updates.many import consolidated

    result = consolidated(only, partial(_in_64_bits, None))
    result.gather()
    return result


def _by_codes(table: pa.Table, final: Schema[Any, Any, Any] | None) -> pa.Table:
    from aiopersist.data.updates.many import consolidated  # imported late: small reads do not need it

    result = consolidated([table], partial(_in_64_bits, final))
    if result.in_place and len(result) == table.num_rows:
        return table
    tables = list(result.tables(0, len(result)))  # in chunks, so that a consumer can release each after use
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables) if tables else table.slice(0, 0)


def _in_64_bits(
    final: Schema[Any, Any, Any] | None, columns: dict[str, Any], rows: Any, sums: Any
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


def _overflow(row: pa.Table, schema: Schema[Any, Any, Any]) -> DiffOverflow:
    """The error with the key and the value of the row, if the table has these columns."""
    names = row.column_names
    key = _shown(schema.key, row.column("key")) if "key" in names else None
    val = _shown(schema.val, row.column("val")) if "val" in names else None
    return DiffOverflow(key, val)


def _shown(field: Field, column: Any) -> Any:
    """The value of one row; its JSON form if Python cannot represent it."""
    try:
        return field.decode(column)[0]
    except Unsupported:
        return to_json(column[0])
