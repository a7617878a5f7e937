"""Sorting and summing: at most one update per (key, val, time), in order, none with a diff of zero.

The rows are sorted, then neighbours are compared once: a group begins at a row that differs from the row
before it, and the sum of a group is a difference of prefix sums. (A hash aggregation takes three times
as long, and its result would have to be sorted, too.)

Sums never wrap. If the magnitudes of all diffs together fit in 62 bits, 64-bit prefix sums cannot
overflow; the greatest diff times the number of rows tells. Else groups are summed in 128 bits. A sum
beyond 64 bits becomes several updates, as few as possible: the greatest diff as often as it fits, and the
rest. So the same updates always give the same rows. For contents, whose sums are final, it is a
`DiffOverflow`.

The size alone decides how the rows are sorted; the result is the same. A few rows are sorted as Python
tuples, since the entry into each kernel takes longer; some thousands by pyarrow; more by polars, which is
then twice as fast, but makes its own copy of the columns. In a child of a fork that came after polars was
imported, pyarrow sorts all of them; lists, which it cannot sort, are refused there (`InvalidUsage`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import reduce
from typing import Any

from aiopersist.data.jsonable import to_json
from aiopersist.data.lazy import pa, pc, pl, polars_works
from aiopersist.data.plain import int64_array, int64_scalar
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.codec import Field
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.order import flatten, row_keys
from aiopersist.errors import DiffOverflow, Unsupported

DIFF_MIN, DIFF_MAX = -(2**63), 2**63 - 1
SMALL_ROWS = 24  # up to this, tuples are faster than the entry into kernels
SLICE_ROWS = 32768
MEDIUM_ROWS = 8192  # up to this, pyarrow is faster than the way to polars and back


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
    with suppress(pa.ArrowInvalid):  # 2 GiB of text in the result, which one array cannot hold
        if table.num_rows <= SMALL_ROWS:
            return _taken(table, _sums(row_keys(table, names), table.column("diff").to_pylist()), final)
        without_polars = table.num_rows <= MEDIUM_ROWS or not polars_works()
        if without_polars and not any(map(has_lists, _types(table, names))):
            return _medium(table, names, final)
    return _large(table, names, final)


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


def _medium(table: pa.Table, names: list[str], final: Schema[Any, Any, Any] | None) -> pa.Table:
    leaves: list[Any] = []
    for name in names:
        flatten(table.column(name), leaves)
    keys = [key for leaf in leaves for key in _sort_keys(leaf)]
    if not keys:
        return _taken(table, [(0, sum(table.column("diff").to_pylist()))], final)
    columns = pa.table(keys, [str(i) for i in range(len(keys))])
    by = [(name, "ascending") for name in columns.column_names]
    order = pc.sort_indices(columns, sort_keys=by)
    same = reduce(pc.and_, [_same_as_next(key.take(order)) for key in keys])
    diffs = table.column("diff").take(order)
    if not pc.any(same).as_py() and not pc.any(pc.equal(diffs, int64_scalar(0))).as_py():
        return table.take(order)
    return _taken(table, _runs(order.to_pylist(), diffs.to_pylist(), same.to_pylist()), final)


def _sort_keys(leaf: Any) -> list[Any]:
    """Columns that pyarrow sorts in our order. It would sort nulls last, with NaN next to them."""
    keys = [pc.is_valid(leaf)] if leaf.null_count else []
    if pa.types.is_floating(leaf.type):
        nan = pc.is_nan(leaf)
        if pc.any(nan).as_py():
            return [*keys, nan, pc.if_else(nan, pa.scalar(0.0, leaf.type), leaf)]
    return [*keys, leaf]


def _same_as_next(key: Any) -> Any:
    """For each row except the last, whether the next row is equal. Nulls are equal."""
    above, below = key.slice(0, len(key) - 1), key.slice(1)
    same = pc.equal(above, below)
    if not key.null_count:
        return same
    return pc.if_else(pc.is_null(same), pc.and_(pc.is_null(above), pc.is_null(below)), same)


def _runs(order: list[int], diffs: list[int], same: list[bool]) -> Iterator[tuple[int, int]]:
    """The first row and the sum of each group of equal neighbours."""
    first, total = order[0], diffs[0]
    for row, diff, equal in zip(order[1:], diffs[1:], same, strict=True):
        if equal:
            total += diff
            continue
        yield first, total
        first, total = row, diff
    yield first, total


def _types(table: pa.Table, names: Iterable[str]) -> Iterator[pa.DataType]:
    return (table.schema.field(name).type for name in names)


def has_lists(t: pa.DataType) -> bool:
    """Whether there are lists in it, which pyarrow cannot sort: more than a few rows need polars."""
    if pa.types.is_struct(t):
        return any(has_lists(field.type) for field in t)
    return bool(pa.types.is_list(t))


def _large(table: pa.Table, names: list[str], final: Schema[Any, Any, Any] | None) -> pa.Table:
    leaves: list[Any] = []
    rebuilds = [flatten(table.column(name), leaves) for name in names]
    keys = [str(i) for i in range(len(leaves))]
    frame = pl.from_arrow(pa.table([*leaves, table.column("diff")], [*keys, "diff"]))
    assert isinstance(frame, pl.DataFrame)
    if keys:
        frame = frame.sort(keys, nulls_last=False)
    frame = _summed(frame, keys)
    if frame.schema["diff"] == pl.Int128:
        over = frame.filter((pl.col("diff") > DIFF_MAX) | (pl.col("diff") < DIFF_MIN))
        if final is not None and over.height:
            raise _overflow(_rebuilt(over.head(1).with_columns(diff=pl.lit(0)), table, rebuilds), final)
        frame = _in_64_bits(frame)
    return _rebuilt(frame, table, rebuilds)


def _in_64_bits(frame: pl.DataFrame) -> pl.DataFrame:
    """Sums of 128 bits as diffs of 64 bits, in several rows if a sum does not fit."""
    over = (pl.col("diff") > DIFF_MAX) | (pl.col("diff") < DIFF_MIN)
    if not frame.select(over.any()).item():
        return frame.with_columns(pl.col("diff").cast(pl.Int64))
    sums = list(map(fewest_diffs, frame["diff"].to_list()))
    rows = [row for row, diffs in enumerate(sums) for _ in diffs]
    return frame[rows].with_columns(diff=pl.Series([d for diffs in sums for d in diffs], dtype=pl.Int64))


def _rebuilt(frame: pl.DataFrame, like: pa.Table, rebuilds: list[Any]) -> pa.Table:
    """The flattened columns and `diff` as a table with the columns and types of `like`. A large table is in
    chunks, so that its consumer can release each chunk after use; and none has 2 GiB of text, which one array
    cannot hold."""
    if frame.height > SLICE_ROWS:
        return pa.concat_tables(_rebuilt(some, like, rebuilds) for some in frame.iter_slices(SLICE_ROWS))
    try:
        return _rebuilt_at_once(frame, like, rebuilds)
    except Refusal:
        if frame.height == 1:
            raise
    halves = frame.iter_slices(-(-frame.height // 2))
    return pa.concat_tables(_rebuilt(some, like, rebuilds) for some in halves)


def _rebuilt_at_once(frame: pl.DataFrame, like: pa.Table, rebuilds: list[Any]) -> pa.Table:
    flat = frame.to_arrow(compat_level=pl.CompatLevel.newest())
    leaves = iter(flat.columns)
    columns = [rebuild(leaves, flat.num_rows) for rebuild in rebuilds] + [flat.column("diff")]
    names = [name for name in like.column_names if name != "diff"] + ["diff"]
    fields = [like.schema.field(name) for name in names]
    return pa.table(columns, pa.schema(fields))


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


def _summed(frame: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """One row per group of equal neighbours with its sum, if that is not zero. `diff` has 128 bits if 64 may
    not be enough."""
    differs = [pl.col(k).ne_missing(pl.col(k).shift(1)) for k in keys]
    first = pl.int_range(pl.len()) == 0
    starts = frame.select(pl.any_horizontal(first, *differs).alias("s")).to_series()
    if starts.all():
        return frame if (frame["diff"] != 0).all() else frame.filter(pl.col("diff") != 0)
    at = starts.arg_true()
    ends = at.shift(-1, fill_value=frame.height) - 1
    wide = _magnitude(frame["diff"]) * frame.height >= 2**62
    totals = frame["diff"].cast(pl.Int128 if wide else pl.Int64).cum_sum().gather(ends)
    sums = (totals - totals.shift(1, fill_value=0)).alias("diff")
    return frame.filter(starts).with_columns(sums).filter(pl.col("diff") != 0)


def _magnitude(diffs: pl.Series) -> int:
    least, greatest = diffs.min(), diffs.max()
    assert isinstance(least, int) and isinstance(greatest, int)
    return max(abs(least), abs(greatest))
