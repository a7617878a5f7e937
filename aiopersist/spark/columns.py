"""From updates and contents to the columns of a DataFrame.

A DataFrame is flat (`data/part/flat.py`). Spark has fewer types than Arrow, and all its columns are
nullable. So each schema has *one* form in Spark: columns of the types of `spark_type`, nullable. Types
without a counterpart, and names that Spark cannot distinguish, are refused before anything runs.

Each row appears as often as its diff says, or once with a column `_diff`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from aiopersist.base.errors import InvalidUpdate
from aiopersist.data.arrays import bool_scalar
from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.flat import ColumnSource, invalid, sources
from aiopersist.data.types.schema import Schema
from aiopersist.spark.maps import as_maps, shown_type

TIME, DIFF = "_time", "_diff"
ROWS_MAX, BYTES_MAX = 65_536, 8 * 1024 * 1024  # of a batch whose rows are repeated
UINT64_DIGITS = 20


def spark_type(t: pa.DataType, path: str) -> pa.DataType:
    """The Arrow type in Spark for values of type `t`: the same type, or one that holds all its values.
    `InvalidUsage` of kind `INVALID_COLUMN` names the column if there is none."""
    is_ = pa.types
    if is_.is_struct(t):
        return pa.struct([pa.field(f.name, spark_type(f.type, f"{path}.{f.name}")) for f in t])
    if is_.is_list(t):
        return pa.list_(pa.field("element", spark_type(t.value_type, f"{path}[]")))
    if is_.is_map(t):
        return pa.map_(spark_type(t.key_type, f"{path}[]"), spark_type(t.item_type, f"{path}[]"))
    for type_, applies in _leaf_types(t):
        if applies:
            return type_
    raise invalid(f"column {path!r} has type {t}, for which Spark has none", path)


def _leaf_types(t: pa.DataType) -> list[tuple[pa.DataType, bool]]:
    is_ = pa.types
    return [
        (t, is_.is_boolean(t) or is_.is_signed_integer(t) or is_.is_date32(t) or is_.is_null(t)),
        (t, is_.is_float32(t) or is_.is_float64(t)),
        (pa.int16(), is_.is_uint8(t)),
        (pa.int32(), is_.is_uint16(t)),
        (pa.int64(), is_.is_uint32(t)),
        (pa.decimal128(UINT64_DIGITS, 0), is_.is_uint64(t)),
        (pa.string(), is_.is_string(t) or is_.is_large_string(t)),
        (pa.binary(), is_.is_binary(t) or is_.is_large_binary(t) or is_.is_fixed_size_binary(t)),
        (pa.timestamp("us", "UTC"), is_.is_timestamp(t) and t.unit != "ns" and t.tz is not None),
        (pa.timestamp("us"), is_.is_timestamp(t) and t.unit != "ns" and t.tz is None),
        (pa.duration("us"), is_.is_duration(t) and t.unit != "ns"),
        (t, is_.is_decimal128(t) and 0 <= t.scale <= t.precision),
    ]


class Columns:
    """The columns of a DataFrame of a shard. `time` adds `_time`, for changes. `expand=False` adds `_diff`,
    and repeats no rows. `only`: only these columns of key and value, in this order."""

    def __init__(
        self,
        schema: Schema[Any, Any, Any],
        *,
        time: bool = False,
        expand: bool = True,
        only: Sequence[str] | None = None,
    ) -> None:
        if time and schema.time_length is not None:
            raise invalid("a shard of product times has no column of times: read a snapshot", TIME)
        self._expand = expand
        self._time = time
        self._sources = _chosen(sources(schema), only)
        fields = []
        for name, source in self._sources.items():
            path = source.half if source.field is None else f"{source.half}.{source.field}"
            fields.append(pa.field(name, spark_type(shown_type(source.stored.type, path, schema.own), name)))
        fields += [pa.field(TIME, pa.int64())] if time else []
        fields += [] if expand else [pa.field(DIFF, pa.int64())]
        self.arrow_schema: pa.Schema = pa.schema(fields)
        """The names and types of every batch; all nullable."""
        duplicates = [name for name, n in Counter(f.name.lower() for f in fields).items() if n > 1]
        if duplicates:
            raise invalid(f"several columns would have the name {duplicates[0]!r}", duplicates[0])

    def batches(self, table: pa.Table | pa.RecordBatch, at: int | None = None) -> Iterator[pa.RecordBatch]:
        """`of` in bounded batches, even with large diffs."""
        for piece in in_bounds(table) if self._expand else [table]:
            yield from self.of(piece, at).to_batches()

    def of(self, table: pa.Table | pa.RecordBatch, at: int | None = None) -> pa.Table:
        """The columns of updates, or of contents at `at`. `InvalidUpdate` for a negative diff to repeat."""
        if self._expand:
            table = repeated(table)
        arrays_by_name = {name: source.of(table) for name, source in self._sources.items()}
        if self._time:
            arrays_by_name[TIME] = table.column("time") if at is None else pa.repeat(at, table.num_rows)
        if not self._expand:
            arrays_by_name[DIFF] = table.column("diff")
        arrays = [as_maps(arrays_by_name[field.name], field.type) for field in self.arrow_schema]
        if not arrays:  # neither key nor value has columns
            return pa.table({"": pa.nulls(table.num_rows)}).select([])
        return pa.table(arrays, schema=self.arrow_schema)


def in_bounds(table: pa.Table | pa.RecordBatch) -> Iterator[pa.Table | pa.RecordBatch]:
    """The table in pieces that stay bounded when their rows are repeated: pieces are halved until they are
    bounded with their greatest diff for all rows. A row with a large diff is divided."""
    diffs = table.column("diff")
    least, greatest = (bound.as_py() for bound in pc.min_max(diffs).values())
    rows, size = table.num_rows, max(table.nbytes, 1)
    if not rows or least < 0 or (greatest * rows <= ROWS_MAX and greatest * size <= BYTES_MAX):
        yield table
    elif rows > 1:
        yield from in_bounds(table.slice(0, rows // 2))
        yield from in_bounds(table.slice(rows // 2))
    else:
        yield from _divided(table, greatest, max(min(ROWS_MAX, BYTES_MAX // size), 1))


def _divided(row: Any, diff: int, diff_max: int) -> Iterator[pa.Table | pa.RecordBatch]:
    """A single row in pieces with a diff of at most `diff_max`."""
    column = row.schema.get_field_index("diff")
    for rest in range(diff, 0, -diff_max):
        diffs = pa.array([min(rest, diff_max)], pa.int64())
        yield row.set_column(column, row.schema.field(column), diffs)


def repeated(table: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
    """Each row as often as its diff says; the diffs of the result are meaningless."""
    diffs = table.column("diff")
    least, greatest = (bound.as_py() for bound in pc.min_max(diffs).values())
    if least is None or least == greatest == 1:
        return table
    if least < 0:
        row = pc.index(pc.less(diffs, 0), bool_scalar(True)).as_py()
        text = f"its diff is {diffs[row]}, so it cannot be repeated: use expand=false, with a column {DIFF}"
        raise InvalidUpdate(text, row=row)
    counts = diffs.combine_chunks() if isinstance(diffs, pa.ChunkedArray) else diffs
    ends = pc.cumulative_sum(counts)
    # A list per row, with as many elements as the diff says: the parent of each element is the row.
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    lists = pa.LargeListArray.from_arrays(offsets, pa.nulls(ends[-1].as_py()))
    return table.take(pc.list_parent_indices(lists))


def _chosen(by_name: dict[str, ColumnSource], only: Sequence[str] | None) -> dict[str, ColumnSource]:
    if only is None:
        return by_name
    names = {name.lower(): name for name in by_name}
    for name in only:
        if not isinstance(name, str) or name.lower() not in names:
            raise invalid(f"no column {name!r}; the columns are {', '.join(by_name)}", str(name))
    return {names[name.lower()]: by_name[names[name.lower()]] for name in only}
