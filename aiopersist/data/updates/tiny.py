"""A few rows of plain types, turned directly into a sorted, consolidated batch.

The entry into an Arrow kernel costs microseconds, even for ten rows. So a few rows are checked, sorted and
summed as tuples, and Arrow is entered once, to build the batch. For other rows the result is `None`; the
caller then uses the general way, which also raises the errors of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple

from aiopersist.base.frontier import TIME_MAX
from aiopersist.data.arrays import Buffers
from aiopersist.data.lazy import pa
from aiopersist.data.part.inline import encode_inline
from aiopersist.data.part.message import batch_of, template_of
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.cast import same_kind
from aiopersist.data.types.schema import PlainTypes, Schema, plain_types
from aiopersist.data.updates.consolidate import DIFF_MAX, DIFF_MIN
from aiopersist.data.updates.convert import UPDATE, as_table

_NAMES = list(UPDATE)
TINY_ROWS = 128  # for more rows kernels are faster
TINY_ROWS_MAX = 32  # of one call: more are converted in bulk in less time
TIME_AND_DIFF_BYTES = 16
TINY_BYTES = 32 * 1024  # of keys, and of vals: copying more takes a thread


class Tiny(NamedTuple):
    """A sorted, consolidated batch, and facts about the input rows."""

    rows: int
    """Of the batch; there may be none."""
    columns: tuple[Buffers, ...] | pa.RecordBatch
    """The buffers of the columns, if all columns are made by buffers; else the batch."""
    schema: Schema[Any, Any, Any]
    least_time: int
    greatest_time: int
    goodbytes: int
    """The goodbytes of the input rows: at least those of the batch."""

    @property
    def batch(self) -> pa.RecordBatch:
        """The rows as a record batch."""
        if not isinstance(self.columns, tuple):
            return self.columns
        return batch_of(self.columns, self.schema.arrow_schema, self.rows)

    @property
    def table(self) -> pa.Table:
        """The rows as a table."""
        return pa.Table.from_batches([self.batch])

    def message(self) -> bytes:
        """The rows as an inline part."""
        plain = plain_types(self.schema)
        if plain is not None and isinstance(self.columns, tuple):
            template = template_of(plain, self.schema.arrow_schema, self.rows)
            if template is not None:
                return template.message(self.columns)
        return encode_inline(self.batch)


def tiny(updates: Any, schema: Schema[Any, Any, Any]) -> Tiny | None:
    """The updates as `sort_and_consolidate(to_table(...))` would give them, if they are a short list of valid
    `(key, val, time, diff)` tuples of bytes, str and int, or a short table of such columns; else `None`."""
    plain = plain_types(schema)
    if plain is None:
        return None
    columns = _of_rows(updates) if type(updates) is list else _of_arrow(updates, schema)
    if columns is None:
        return None
    size = 0
    for column, kind in zip(columns, plain.kinds, strict=True):
        if set(map(type, column)) != {kind}:
            return None
        width = 8 * len(column) if kind is int else sum(map(len, column))
        if width > TINY_BYTES:
            return None
        size += width
    _, _, times, diffs = columns
    least, greatest = min(times), max(times)
    if least < 0 or greatest > TIME_MAX or min(diffs) < DIFF_MIN or max(diffs) > DIFF_MAX:
        return None
    rows = _summed(updates if type(updates) is list else list(zip(*columns, strict=True)), columns)
    if rows is None:
        return None
    try:
        if str in plain.kinds:
            size = sum(map(_width, plain.kinds[:2], columns)) + TIME_AND_DIFF_BYTES * len(columns[0])
        return Tiny(len(rows), _columns(rows, plain, schema), schema, least, greatest, size)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return None


def _of_rows(updates: list[Any]) -> list[Sequence[Any]] | None:
    """The columns of a short list of tuples of four."""
    if not 0 < len(updates) <= TINY_ROWS or not set(map(type, updates)) <= {tuple}:
        return None
    return list(zip(*updates, strict=True)) if set(map(len, updates)) == {4} else None


def _of_arrow(updates: Any, schema: Schema[Any, Any, Any]) -> list[Sequence[Any]] | None:
    """The columns of a short table or frame that can be read twice, since the general way reads it again. The
    data is checked before any of it becomes a Python value."""
    if not isinstance(updates, Sized) or not 0 < len(updates) <= TINY_ROWS:
        return None
    if not isinstance(updates, pa.RecordBatch) and not hasattr(updates, "__arrow_c_stream__"):
        return None  # rows of an array of structs may be null
    try:
        table = as_table(updates)
        if table is None:
            return None
        names = table.schema
        if names.names != _NAMES:
            if len(names.names) != len(UPDATE) or set(names.names) != set(UPDATE):
                return None
            table = table.select(_NAMES)
            names = table.schema
        types = names.types
        if types != schema.arrow_schema.types and not all(map(same_kind, types, schema.arrow_schema.types)):
            return None
        table.validate()  # offsets lie within the buffers: `nbytes` follows them
        if not _is_light(table):
            return None
        table.validate(full=True)
        return [_values(column) for column in table.columns]
    except (Refusal, pa.ArrowException, ValueError):
        return None


def _values(column: pa.ChunkedArray) -> Sequence[Any]:
    """The Python values. One chunk takes a hundredth of the time that several take."""
    values: Sequence[Any] = column.chunk(0).to_pylist() if column.num_chunks == 1 else column.to_pylist()
    return values


def _is_light(table: pa.Table) -> bool:
    """Whether its values have few bytes. A slice may be light although its buffers are not. Many views may
    share the same bytes, so views are measured by their buffers."""
    if table.get_total_buffer_size() <= TINY_BYTES:
        return True
    is_ = pa.types
    has_views = any(is_.is_string_view(t) or is_.is_binary_view(t) for t in table.schema.types)
    return not has_views and bool(table.nbytes <= 2 * TINY_BYTES + 16 * TINY_ROWS)


class PlainRows:
    """Measures single updates that are small, valid and of plain types: they can surely be converted later,
    together with others."""

    def __init__(self, schema: Schema[Any, Any, Any]) -> None:
        plain = plain_types(schema)
        self._kinds = plain.kinds if plain is not None and plain.encoders else None

    def size(self, row: tuple[Any, Any, Any, Any]) -> int | None:
        """The goodbytes of the update; `None` if it must go the general way."""
        if self._kinds is None or tuple(map(type, row)) != self._kinds:
            return None
        key, val, time, diff = row
        if any(type(value) is not int and len(value) > TINY_BYTES for value in (key, val)):
            return None
        if not 0 <= time <= TIME_MAX or not DIFF_MIN <= diff <= DIFF_MAX:
            return None
        key_size, val_size = _SIZES[self._kinds[0]](key), _SIZES[self._kinds[1]](val)
        return None if key_size is None or val_size is None else key_size + val_size + TIME_AND_DIFF_BYTES

    def few(self, rows: Any, diff: int, size_max: int) -> list[tuple[Any, Any, int]] | None:
        """A copy of a short list of `(key, val)` or `(key, val, diff)`, each with its diff. `None` unless all
        of them can surely be converted later, and each has at most `size_max` goodbytes of key and value."""
        if type(rows) is not list or len(rows) > TINY_ROWS_MAX:
            return None
        updates: list[tuple[Any, Any, int]] = []
        for row in rows:
            if type(row) is not tuple or not 2 <= len(row) <= 3:
                return None
            update = row if len(row) == 3 else (*row, diff)
            size = self.size((update[0], update[1], 0, update[2]))
            if size is None or size - TIME_AND_DIFF_BYTES > size_max:
                return None
            updates.append(update)
        return updates


def _text_size(value: str) -> int | None:
    if value.isascii():
        return len(value)
    try:
        return len(value.encode())
    except UnicodeError:
        return None


_SIZES: dict[type, Callable[[Any], int | None]] = {
    bytes: len,
    str: _text_size,
    int: lambda value: 8 if DIFF_MIN <= value <= DIFF_MAX else None,
}


def _width(kind: type, values: Sequence[Any]) -> int:
    if kind is bytes:
        return sum(map(len, values))
    return 8 * len(values) if kind is int else sum(map(len, map(str.encode, values)))


def _summed(
    updates: list[tuple[Any, Any, int, int]], columns: list[Sequence[Any]]
) -> list[tuple[Any, Any, int, int]] | None:
    """The updates, which have these columns, sorted and summed; `None` if a sum is beyond 64 bits."""
    keys, _, _, diffs = columns
    if len(set(keys)) == len(keys) or len({update[:3] for update in updates}) == len(updates):
        return sorted(updates if all(diffs) else [update for update in updates if update[3]])
    sums = dict.fromkeys((update[:3] for update in updates), 0)
    for key, val, time, diff in updates:
        sums[key, val, time] += diff
    if min(sums.values()) < DIFF_MIN or max(sums.values()) > DIFF_MAX:
        return None
    return sorted((*row, diff) for row, diff in sums.items() if diff)


def _columns(
    rows: list[tuple[Any, Any, int, int]], plain: PlainTypes, schema: Schema[Any, Any, Any]
) -> tuple[Buffers, ...] | pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    if plain.encoders is not None:
        return tuple([encode(column) for encode, column in zip(plain.encoders, columns, strict=True)])
    arrays = [make(column) for make, column in zip(plain.makers, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema)
