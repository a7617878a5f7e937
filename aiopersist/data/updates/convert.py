"""The updates of a user as one table in the columns of the schema; or `InvalidUpdate`.

Rows (an iterable of tuples) are turned into columns in bulk and encoded by the schema's codecs. Arrow data
(tables, batches, readers, all objects that export a C stream or array) is checked to be sound (`valid.py`)
and cast. Both give a table with exactly the schema's columns. Types, nulls, times (range and length) and
diffs (64 bits) are checked here; no later code checks values.

The table has memory of its own: Arrow data may be a view of memory that its owner fills again, for example a
numpy array. Rows must not change before the user's call returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import datetime
from itertools import chain, islice
from threading import Event
from typing import Any

from pydantic import BaseModel

from aiopersist.base.errors import InvalidUpdate
from aiopersist.base.frontier import TIME_MAX
from aiopersist.data.arrays import bool_scalar, empty_table, int64_array
from aiopersist.data.lazy import ipc, pa, pc
from aiopersist.data.refusal import Refusal, TooMuchText, short
from aiopersist.data.types.cast import cast_column
from aiopersist.data.types.codec import Field
from aiopersist.data.types.schema import Schema
from aiopersist.data.valid import check_table

UPDATE = ("key", "val", "time", "diff")
ROW = ("key", "val", "diff")  # the columns that `write` takes: the time is chosen later
CHUNK_ROWS = 8192  # of an iterator, converted together
CHUNK_BYTES = 8 * 1024 * 1024  # fewer rows are converted together if they are large
ELEMENTS_MEASURED = 1000  # of a list: a longer list is large anyway
_FLAT = {int, float, bool, type(None), datetime}  # most values of one size
COPIED_BYTES = 256 * 1024 * 1024  # of Arrow data, copied together
COPIED_ROWS = 1024  # at least, copied together: a slice counts all bytes that it shares with other slices


def to_table(
    updates: Any,
    schema: Schema[Any, Any, Any],
    *,
    columns: tuple[str, ...] = UPDATE,
    diff: int | None = None,
    row_base: int = 0,
) -> pa.Table:
    """All updates as one table with the given columns of the schema.

    `columns=ROW` is for rows without time. With a `diff` the diffs of the input are optional. `row_base` is
    the number of the first row in errors. `InvalidUpdate` for a value that cannot be stored.
    """
    fields = [schema.arrow_schema.field(name) for name in columns]
    try:
        table = as_table(updates)
        if table is not None:
            return _from_arrow(table, fields, schema, diff)
        return _from_rows(_rows(updates), fields, schema, diff)
    except Refusal as e:
        raise InvalidUpdate(e.reason, row=e.row + row_base if e.row >= 0 else None) from e
    except pa.ArrowMemoryError:
        raise
    except pa.ArrowException as e:  # Arrow validates the data, but cannot work on it
        raise InvalidUpdate(f"Arrow cannot take this data apart: {e}") from e


def rough_bytes(row: Any) -> int:
    """The approximate bytes of text, bytes and lists in a row: enough to tell large rows from small ones."""
    values = row if isinstance(row, tuple | list) else ()
    return sum([len(v) if type(v) is str else _rough(v) for v in values if type(v) not in _FLAT])


def _rough(value: Any, depth: int = 4) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if type(value) in _FLAT or not depth:
        return 0
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        return 16 * len(value)
    size = 16 * len(value) if isinstance(value, list | tuple) else 0
    sample = islice(_parts(value), ELEMENTS_MEASURED)
    return size + sum([_rough(part, depth - 1) for part in sample if type(part) not in _FLAT])


def _parts(value: Any) -> Iterable[Any]:
    """The elements of a list, or the fields of a struct."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, BaseModel):
        return value.__dict__.values()
    if is_dataclass(value):
        return [getattr(value, name, None) for name in value.__dataclass_fields__]
    return value.values() if isinstance(value, dict) else ()


class RowBuffer:
    """Rows of an iterator, gathered until there are enough for a conversion."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._bytes = 0

    def add(self, row: Any) -> bool:
        """Add a copy of the row, since an iterator may reuse one list. Returns whether the buffer is full."""
        self.rows.append(tuple(row) if isinstance(row, list) else row)
        self._bytes += rough_bytes(row)
        return len(self.rows) >= CHUNK_ROWS or self._bytes >= CHUNK_BYTES

    def take(self) -> list[Any]:
        rows, self.rows, self._bytes = self.rows, [], 0
        return rows


def chunks_of(updates: Any, stopped: Event | None = None) -> Iterator[Any]:
    """The input in chunks that `to_table` takes: batches of Arrow data, lists of rows. Once another thread
    sets `stopped`, no further item is taken."""
    if is_arrow(updates):
        yield from _reader(updates)
        return
    gathered = RowBuffer()
    for item in _iterable(updates):
        if is_arrow(item):
            if gathered.rows:
                yield gathered.take()
            yield from _reader(item)
        elif gathered.add(item):
            yield gathered.take()
        if stopped is not None and stopped.is_set():
            return
    if gathered.rows:
        yield gathered.take()


def is_arrow(value: Any) -> bool:
    """Whether the value is Arrow data, or exports it."""
    return hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")


def _reader(value: Any) -> Iterator[Any]:
    """Arrow data as batches that are small to copy. They are measured by their buffers: `nbytes` follows
    offsets, which may point anywhere until they are checked. `InvalidUpdate` for data without columns, and
    for a stream whose batches Arrow cannot read."""
    try:
        yield from _in_slices(_batches(value))
    except pa.ArrowMemoryError:
        raise
    except pa.ArrowException as e:
        raise InvalidUpdate(f"no table of updates: {e}") from e


def _in_slices(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        rows = max(COPIED_BYTES * batch.num_rows // max(batch.get_total_buffer_size(), 1), COPIED_ROWS)
        for start in range(0, max(batch.num_rows, 1), rows):
            yield batch.slice(start, rows)


def _batches(value: Any) -> Any:
    """Arrow data as an iterable of batches, or of tables of several batches."""
    if isinstance(value, pa.RecordBatch):
        return [value]
    if isinstance(value, pa.Table):
        batches = value.to_batches()
        return _as_tables(batches) if batches else [_no_rows(value)]
    try:
        if hasattr(value, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(value)
        rows = pa.array(value)
        if rows.null_count:  # Arrow would make a row of nulls of a null struct
            at = pc.index(rows.is_null(), bool_scalar(True)).as_py()
            raise InvalidUpdate(f"no table of updates: row {at} of an array of structs is null")
        return [pa.RecordBatch.from_struct_array(rows)]
    except (TypeError, ValueError) as e:
        raise InvalidUpdate(f"no table of updates: {e}") from e


def _as_tables(batches: Iterable[Any]) -> Iterator[pa.Table]:
    """Small batches as fewer tables, since each one is sent to a thread and back. Not for streams, which may
    reuse the memory of a batch for the next."""
    group: list[Any] = []
    size = 0
    for batch in batches:
        size += batch.get_total_buffer_size()
        if group and size > COPIED_BYTES:
            yield pa.Table.from_batches(group)
            group, size = [], batch.get_total_buffer_size()
        group.append(batch)
    yield pa.Table.from_batches(group)


def _no_rows(table: pa.Table) -> Any:
    """A batch without rows, so that types are checked; the table itself if Arrow cannot make such a batch."""
    try:
        return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in table.schema], schema=table.schema)
    except pa.ArrowException:
        return table


def as_table(value: Any) -> pa.Table | None:
    """Arrow data as a table; `None` for anything else."""
    if isinstance(value, pa.Table):
        return value
    if not is_arrow(value):
        return None
    try:
        return pa.Table.from_batches([value]) if isinstance(value, pa.RecordBatch) else pa.table(value)
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise Refusal(-1, f"no table of updates: {e}") from e


def _iterable(updates: Any) -> Iterable[Any]:
    if isinstance(updates, str | bytes | bytearray | Mapping | type) or not hasattr(updates, "__iter__"):
        kind = "an async iterator" if hasattr(updates, "__aiter__") else type(updates).__name__
        raise InvalidUpdate(f"updates are tuples or Arrow data, not {kind}")
    rows: Iterable[Any] = updates
    return rows


def _rows(updates: Any) -> Sequence[Any]:
    """The rows as a list or tuple: a subclass may have another length and truth than its rows."""
    if isinstance(updates, list | tuple) and type(updates) in (list, tuple):
        return updates
    return [tuple(row) if isinstance(row, list) else row for row in _iterable(updates)]


def _from_rows(
    rows: Sequence[Any], fields: list[pa.Field], schema: Schema[Any, Any, Any], diff: int | None
) -> pa.Table:
    if not rows:
        return empty_table(pa.schema(fields))
    names = [field.name for field in fields]
    columns = _columns(rows, names, diff)
    arrays = [_encode(name, values, schema) for name, values in zip(names, columns, strict=True)]
    return pa.table(arrays, pa.schema(fields))


def _columns(rows: Sequence[Any], names: list[str], diff: int | None) -> list[Sequence[Any]]:
    """The rows turned into columns; a missing diff is `diff`."""
    if any(is_arrow(row) for row in islice(rows, 1)):
        raise Refusal(-1, "Arrow data among rows: give an iterator of tables, or one table")
    wrong_type = set(map(type, rows)) - {tuple, list}
    if wrong_type:
        for i, row in enumerate(rows):
            if not isinstance(row, tuple | list):
                raise Refusal(i, f"{short(row)} is no tuple of ({', '.join(names)})")
    lengths_allowed = {len(names)} if diff is None else {len(names) - 1, len(names)}
    lengths = set(map(len, rows))
    if not lengths <= lengths_allowed:
        at = next(i for i, row in enumerate(rows) if len(row) not in lengths_allowed)
        raise Refusal(at, f"{len(rows[at])} values where ({', '.join(names)}) are wanted")
    if lengths == {len(names)}:
        return list(zip(*rows, strict=True))
    full = (row if len(row) == len(names) else (*row, diff) for row in rows)
    return list(zip(*full, strict=True))


def _encode(name: str, values: Sequence[Any], schema: Schema[Any, Any, Any]) -> pa.Array | pa.ChunkedArray:
    if name == "time":
        return _encode_times(values, schema)
    if name == "diff":
        return _encode_ints(values, -TIME_MAX - 1, "diff")
    field = schema.key if name == "key" else schema.val
    try:
        return _column(values, field)
    except Refusal as e:
        raise Refusal(e.row, f"{name}: {e.reason}") from e


def _column(values: Sequence[Any], field: Field) -> pa.Array | pa.ChunkedArray:
    """The column of the values; in halves if structs or lists have too much text for one array."""
    try:
        return field.encode(values)
    except TooMuchText as e:
        if len(values) == 1:
            raise Refusal(0, "2 GiB of text or bytes in one value") from e
    half = len(values) // 2
    first = _column(values[:half], field)
    try:
        second = _column(values[half:], field)
    except Refusal as e:
        raise Refusal(half + e.row, e.reason) from e
    chunks = [c.chunks if isinstance(c, pa.ChunkedArray) else [c] for c in (first, second)]
    return pa.chunked_array([*chunks[0], *chunks[1]])


def _encode_ints(values: Sequence[Any], least: int, name: str) -> pa.Array:
    """Encode ints in `[least, 2**63)`; `least` is 0 for times."""
    if set(map(type, values)) != {int} or min(values) < least or max(values) > TIME_MAX:
        for row, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= TIME_MAX:
                low = "0" if least == 0 else "-2**63"
                raise Refusal(row, f"{name} {short(value)} is no int in [{low}, 2**63)")
    return int64_array(values)


def _encode_times(values: Sequence[Any], schema: Schema[Any, Any, Any]) -> pa.Array:
    length = schema.time
    if length == 1:
        return _encode_ints(values, 0, "time")
    for row, value in enumerate(values):
        if not isinstance(value, tuple) or len(value) != length:
            raise Refusal(row, f"time {short(value)} is no tuple of {length} ints")
    try:
        flat = _encode_ints(list(chain.from_iterable(values)), 0, "time")
    except Refusal as e:
        raise Refusal(e.row // length, e.reason) from e
    return pa.FixedSizeListArray.from_arrays(flat, type=schema.arrow_schema.field("time").type)


def _from_arrow(
    table: pa.Table, fields: list[pa.Field], schema: Schema[Any, Any, Any], diff: int | None
) -> pa.Table:
    check_table(table)
    if diff is not None and "diff" not in table.column_names:
        table = table.append_column("diff", _encode_ints([diff] * table.num_rows, -(2**63), "diff"))
    nested = _nested(table, fields)
    columns = []
    for field in fields:
        try:
            columns.append(cast_column(nested[field.name], field))
            if field.name in ("key", "val"):
                (schema.key if field.name == "key" else schema.val).check_stored(columns[-1])
        except Refusal as e:
            raise Refusal(e.row, f"{field.name}: {e.reason}") from e
    result = _copied(pa.table(columns, pa.schema(fields)))
    if "time" in result.column_names:
        _check_times(result.column("time"))
    return result


def _copied(table: pa.Table) -> pa.Table:
    """The table in memory of its own. IPC is faster than a filter, but fails for lists: an empty one may have
    a child array whose offset lies beyond its buffers."""
    if not table.num_rows:
        return empty_table(table.schema)
    if any(_has_lists(field.type) for field in table.schema):
        return table.filter(pa.repeat(bool_scalar(True), table.num_rows))
    batches = [ipc.read_record_batch(b.serialize(), table.schema) for b in table.to_batches()]
    return pa.Table.from_batches(batches, table.schema)


def _has_lists(t: pa.DataType) -> bool:
    if pa.types.is_struct(t):
        return any(_has_lists(field.type) for field in t)
    return bool(pa.types.is_nested(t))


def _nested(table: pa.Table, fields: list[pa.Field]) -> dict[str, Any]:
    """The columns by the names of the fields. A struct is one column, or a *flat* column for each field."""
    names = table.column_names
    if len(set(names)) < len(names):
        raise Refusal(-1, f"a column name appears twice: {names}")
    columns: dict[str, Any] = {}
    used: list[str] = []
    for field in fields:
        if field.name in names and not _is_flat(table.schema.field(field.name), field):
            columns[field.name] = table.column(field.name)
            used.append(field.name)
        elif pa.types.is_struct(field.type):
            flat = [f.name for f in field.type if f.name in names]
            used += flat
            columns[field.name] = table.select(flat).to_struct_array() if flat else None
    missing = [f.name for f in fields if f.name not in columns or columns[f.name] is None]
    unknown = sorted(name for name in {*names} - {*used} if not name.startswith("__index_level_"))  # pandas'
    if missing or unknown or len(set(used)) < len(used):
        expected = ", ".join(f"{f.name}: {f.type}" for f in fields)
        fault = f"no column for {missing}" if missing else f"unknown columns {unknown}"
        fault = fault if missing or unknown else "ambiguous flat columns"
        raise Refusal(-1, f"{fault}: the columns are {names}, wanted are {expected}")
    return columns


def _is_flat(column: pa.Field, field: pa.Field) -> bool:
    """Whether `column` is the field of that name within the struct `field`, and not the struct."""
    t = field.type
    if not pa.types.is_struct(t) or t.get_field_index(field.name) < 0:
        return False
    if pa.types.is_null(column.type) and field.nullable and t.num_fields == 1:
        reason = f"column {column.name!r} of nulls may be {t} or the field in it: give it a type"
        raise Refusal(-1, reason)
    return not pa.types.is_struct(column.type)


def _check_times(times: Any) -> None:
    """`Refusal` of the first time that is negative."""
    is_product = pa.types.is_fixed_size_list(times.type)
    flat = pa.chunked_array([chunk.flatten() for chunk in times.chunks], pa.int64()) if is_product else times
    least = pc.min(flat).as_py()
    if least is not None and least < 0:
        at = pc.index(pc.less(flat, 0), bool_scalar(True)).as_py()
        row = at // times.type.list_size if is_product else at
        raise Refusal(row, f"time {times[row].as_py()} is not in [0, 2**63)")
