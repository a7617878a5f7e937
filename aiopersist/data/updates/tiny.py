"""A few rows of plain types, straight to a sorted, consolidated batch.

Entering a kernel costs microseconds, however few the rows, so ten rows are checked, sorted and summed as
tuples, and Arrow is entered once, to build the batch. Rows that do not fit here (`None`) go the general
way, which also reports the fault of a row: here no row is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import DIFF_MAX, DIFF_MIN
from aiopersist.frontier import TIME_MAX

TINY_ROWS = 128  # for more rows kernels are faster
TINY_BYTES = 32 * 1024  # of keys, and of vals: copying more takes a thread


class Tiny(NamedTuple):
    """A sorted, consolidated batch, and facts about the rows as they were given."""

    batch: pa.RecordBatch
    """May be empty."""
    least_time: int
    greatest_time: int
    goodbytes: int
    """The goodbytes of the given rows: at least those of the batch."""


def tiny(updates: Any, schema: Schema[Any, Any, Any]) -> Tiny | None:
    """The updates as `sort_and_consolidate(to_table(...))` would give them, if they are a short list of valid
    `(key, val, time, diff)` tuples of bytes, str and int; else `None`."""
    kinds = _kinds(schema)
    if kinds is None or type(updates) is not list or not 0 < len(updates) <= TINY_ROWS:
        return None
    if not set(map(type, updates)) <= {tuple} or set(map(len, updates)) != {4}:
        return None
    columns = list(zip(*updates, strict=True))
    if any(set(map(type, c)) != {kind} for c, kind in zip(columns, kinds, strict=True)):
        return None
    if any(sum(map(len, c)) > TINY_BYTES for c, kind in zip(columns, kinds, strict=True) if kind is not int):
        return None
    _, _, times, diffs = columns
    least, greatest = min(times), max(times)
    if least < 0 or greatest > TIME_MAX or min(diffs) < DIFF_MIN or max(diffs) > DIFF_MAX:
        return None
    rows = _summed(updates)
    if rows is None:
        return None
    try:
        return Tiny(_batch(rows, schema), least, greatest, sum(map(_width, kinds, columns)))
    except (pa.ArrowException, OverflowError, UnicodeError):
        return None


class PlainRows:
    """Measures a single update that is small, valid and of plain types: surely it can be converted later,
    together with others."""

    def __init__(self, schema: Schema[Any, Any, Any]) -> None:
        kinds, is_ = _kinds(schema), pa.types
        types = [schema.arrow_schema.field(name).type for name in ("key", "val")]
        varies = (is_.is_binary, is_.is_large_binary, is_.is_string, is_.is_large_string, is_.is_int64)
        self._kinds = kinds if kinds and all(any(is_of(t) for is_of in varies) for t in types) else None

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
        return None if key_size is None or val_size is None else key_size + val_size + 16


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


def _width(kind: type, values: tuple[Any, ...]) -> int:
    if kind is bytes:
        return sum(map(len, values))
    return 8 * len(values) if kind is int else sum(len(value.encode()) for value in values)


def _kinds(schema: Schema[Any, Any, Any]) -> tuple[type, ...] | None:
    """The Python types of the columns, if all are plain and not nullable; else `None`."""
    if schema.time != 1 or schema.own:
        return None
    kinds = []
    for field in (schema.key, schema.val):
        exact = getattr(field.codec, "accepted", None)
        if field.nullable or exact not in ((bytes,), (str,), (int,)):
            return None
        kinds.append(exact[0])
    return (*kinds, int, int)


def _summed(updates: list[tuple[Any, Any, int, int]]) -> list[tuple[Any, Any, int, int]] | None:
    """The updates sorted and summed; `None` if a sum is beyond 64 bits."""
    distinct = {update[:3] for update in updates}
    if len(distinct) == len(updates):
        return sorted(update for update in updates if update[3])
    sums = dict.fromkeys(distinct, 0)
    for key, val, time, diff in updates:
        sums[key, val, time] += diff
    if min(sums.values()) < DIFF_MIN or max(sums.values()) > DIFF_MAX:
        return None
    return sorted((*row, diff) for row, diff in sums.items() if diff)


def _batch(rows: list[tuple[Any, Any, int, int]], schema: Schema[Any, Any, Any]) -> pa.RecordBatch:
    columns = schema.arrow_schema
    values = zip(*rows, strict=True) if rows else ((), (), (), ())
    return pa.RecordBatch.from_arrays([pa.array(c, t) for c, t in zip(values, columns.types)], schema=columns)
