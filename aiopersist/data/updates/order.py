"""The order of updates, by (key, value, time), the same on every machine: unsigned bytes for binary
and UTF-8, numbers by value, false before true, nulls first, NaN last; structs field by field, an
absent struct first; lists element by element, a prefix first.

The order is implemented twice, and tests compare the two. Tables are *flattened*: structs become their
validity and their fields, product times their components, and the leaves have codes (`codes.py`). Single rows
become *row keys*, Python tuples that compare in the same order: for tiny tables, for bisection in sorted
tables, and to decide whether a part continues a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from aiopersist.data.arrays import compared, integer_of
from aiopersist.data.lazy import pa, pc
from aiopersist.data.updates.times import components

Column = Any  # an Array or a ChunkedArray


def flatten(column: Column, leaves: list[Column]) -> None:
    """Append the leaves of a column to `leaves`, the most significant first."""
    t = column.type
    if pa.types.is_null(t):
        return
    if pa.types.is_fixed_size_list(t):
        leaves.extend(components(column))
    elif pa.types.is_struct(t):
        if column.null_count:
            leaves.append(pc.is_valid(column))
        for i in range(t.num_fields):  # a field of an absent struct is null
            flatten(pc.struct_field(column, [i]), leaves)
    elif pa.types.is_temporal(t):  # as integers: polars knows neither every unit nor every zone
        leaves.append(column.cast(integer_of(t)))
    else:
        leaves.append(_viewed(column, _without_moments(t)))


def row_keys(table: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """A tuple per row. The tuples compare as the rows do, by these columns."""
    keys = [_column_keys(table.column(name), table.schema.field(name).nullable) for name in columns]
    return list(zip(*keys, strict=True)) if keys else [()] * table.num_rows


def row_key(
    table: pa.Table | pa.RecordBatch, row: int, columns: Sequence[str] = ("key", "val", "time")
) -> tuple[Any, ...]:
    """The row key of one row, which may be negative to count from the end."""
    return row_keys(table.slice(row % table.num_rows, 1), columns)[0]


def _without_moments(t: pa.DataType) -> pa.DataType:
    """The type with integers in place of temporal types, at any depth."""
    if pa.types.is_list(t):
        return pa.list_(t.value_field.with_type(_without_moments(t.value_type)))
    if pa.types.is_struct(t):
        return pa.struct([field.with_type(_without_moments(field.type)) for field in t])
    return compared(t)


def _viewed(column: Column, t: pa.DataType) -> Column:
    """The same bytes as values of the type `t`."""
    if column.type == t:
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([_viewed(chunk, t) for chunk in column.chunks], t)
    if not pa.types.is_nested(t):
        return column.view(t)
    mask = column.is_null() if column.null_count else None
    if pa.types.is_list(t):
        offsets = pa.concat_arrays([column.offsets])  # Arrow takes no mask with the offset of a slice
        return pa.ListArray.from_arrays(offsets, _viewed(column.values, t.value_type), type=t, mask=mask)
    parts = [_viewed(part, field.type) for part, field in zip(column.flatten(), t, strict=True)]
    return pa.StructArray.from_arrays(parts, fields=list(t), mask=mask)


def _column_keys(column: Column, nullable: bool) -> list[Any]:
    """The keys of one column. Their form depends on whether it *may* have nulls, not on whether it has some:
    they must compare with the keys of other tables."""
    if pa.types.is_nested(column.type) and _has_temporal(column.type):
        return _nested_keys(column)
    if pa.types.is_temporal(column.type):
        column = column.cast(integer_of(column.type))
    values: list[Any] = column.to_pylist()
    if not nullable and _natural(column.type):
        return values
    return list(map(_comparable(column.type), values))


def _nested_keys(column: Column) -> list[Any]:
    """The keys of a nested column with temporal values, as integers: Python's own cover fewer years. It is
    converted leaf by leaf, since Arrow aborts the process when it casts some structs."""
    t = column.type
    valid = column.is_valid().to_pylist()
    if pa.types.is_struct(t):
        parts = [_column_keys(pc.struct_field(column, [i]), True) for i in range(t.num_fields)]
        rows = zip(*parts, strict=True)
        return [(row,) if is_valid else () for is_valid, row in zip(valid, rows, strict=True)]
    elements = iter(_column_keys(pc.list_flatten(column), True))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
    lists = [tuple(islice(elements, n)) for n in lengths]
    return [(row,) if is_valid else () for is_valid, row in zip(valid, lists, strict=True)]


def _comparable(t: pa.DataType) -> Callable[[Any], Any]:
    """The function from a value to its key: a null is (), which is less than any (x,)."""
    if pa.types.is_floating(t):
        return lambda v: () if v is None else (v != v, v if v == v else 0.0)
    if pa.types.is_struct(t):
        fields = [(field.name, _comparable(field.type)) for field in t]
        return lambda v: () if v is None else (tuple(c(v[name]) for name, c in fields),)
    if pa.types.is_list(t):
        element = _comparable(t.value_type)
        return lambda v: () if v is None else (tuple(map(element, v)),)
    return lambda v: () if v is None else (v,)


def _natural(t: pa.DataType) -> bool:
    """Whether Python's own order of the values is the order of updates."""
    if pa.types.is_fixed_size_list(t):
        return True  # of ints
    return not (pa.types.is_nested(t) or pa.types.is_floating(t))


def _has_temporal(t: pa.DataType) -> bool:
    if pa.types.is_nested(t):
        return any(_has_temporal(t.field(i).type) for i in range(t.num_fields))
    return bool(pa.types.is_temporal(t))
