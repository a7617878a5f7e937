"""How columns lie in a Parquet file: compression, encodings, and a restriction of Parquet's writer.

If values repeat, a dictionary halves the file. If they do not, the dictionary costs a quarter of the
writing and half of the reading, and the writer drops it once it is full. So a sample decides for each
column. Integers that do not repeat are stored as differences, which suits growing times and ids. Any Parquet
reader can read the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from aiopersist.data.lazy import pa, pc

SAMPLE_ROWS = 16384
REPEATED = 0.6  # values repeat if at most this share of the sample is distinct


def layout(table: pa.Table) -> dict[str, Any]:
    """The options of Parquet's writer for the table."""
    repeated, integers = [], []
    sample = table.slice(0, SAMPLE_ROWS)
    leaves = [leaf for name in table.column_names for leaf in _leaves(name, sample.column(name))]
    times = Counter(path for path, _ in leaves)
    for path, leaf in leaves:
        if times[path] > 1:  # names may have dots: an encoding for one of two columns may fail for the other
            continue
        if pc.count_distinct(leaf).as_py() <= REPEATED * len(leaf):
            repeated.append(path)
        elif leaf.type in (pa.int64(), pa.int32()) or pa.types.is_timestamp(leaf.type):
            integers.append(path)
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": repeated,
        "column_encoding": dict.fromkeys(integers, "DELTA_BINARY_PACKED") or None,
    }


def writable(table: pa.Table) -> pa.Table:
    """The table in a form that Parquet's writer takes. The writer refuses nulls in a field that is not
    nullable, even in an absent struct, so the validity bits are left out there."""
    fields = table.schema
    if not any(map(_may_have_idle_nulls, fields)):
        return table
    columns = [
        pa.chunked_array([_without_idle_nulls(chunk, field) for chunk in column.chunks], field.type)
        for column, field in zip(table.columns, fields, strict=True)
    ]
    return pa.table(columns, fields)


def _may_have_idle_nulls(field: pa.Field, absent: bool = False) -> bool:
    """Whether it has a field that is not nullable within a struct that is nullable, or `absent`."""
    of = field.type
    if absent and not field.nullable:
        return True
    if pa.types.is_struct(of):
        return any(_may_have_idle_nulls(inner, absent or field.nullable) for inner in of)
    return pa.types.is_list(of) and _may_have_idle_nulls(of.value_field)


def _without_idle_nulls(array: pa.Array, field: pa.Field) -> pa.Array:
    if not pa.types.is_struct(field.type) and not pa.types.is_list(field.type):
        if field.nullable or not array.null_count:
            return array
        buffers = [None, *array.buffers()[1:]]
        return pa.Array.from_buffers(array.type, len(array), buffers, 0, array.offset)
    mask = array.is_null() if field.nullable and array.null_count else None
    if pa.types.is_list(field.type):
        elements = _without_idle_nulls(array.values, field.type.value_field)
        offsets = pa.concat_arrays([array.offsets])  # Arrow takes no mask with the offset of a slice
        return pa.ListArray.from_arrays(offsets, elements, type=field.type, mask=mask)
    parts = [_without_idle_nulls(c, f) for c, f in zip(array.flatten(), field.type, strict=True)]
    return pa.StructArray.from_arrays(parts, fields=list(field.type), mask=mask)


def _leaves(path: str, column: Any) -> Iterator[tuple[str, Any]]:
    """The leaf columns by their paths in Parquet, lists included."""
    t = column.type
    if pa.types.is_struct(t):
        for i, field in enumerate(t):
            yield from _leaves(f"{path}.{field.name}", pc.struct_field(column, [i]))
    elif pa.types.is_list(t) or pa.types.is_fixed_size_list(t):
        yield from _leaves(f"{path}.list.element", pc.list_flatten(column))
    elif not pa.types.is_null(t):
        yield path, column
