"""Checks that Arrow data from outside is sound: its bytes are values of its types.

Arrow trusts the program that made an array. The array may have bytes that are no UTF-8, decimals beyond their
precision, a time of 24:00:00, or offsets that go back, which no code notices until it reads them. So all data
is checked first.

Arrow's `validate(full=True)` checks leaf columns. For a nested array it would check all elements of the
children, even if the array is a slice: a table cut into many batches would be checked whole for each batch.
So a nested array is first checked with nulls in place of its children; then the used part of the children is
checked.

A null row must be sound, too: the bytes beneath it are stored.
"""

from __future__ import annotations

from typing import Any

from aiopersist.data.arrays import bool_scalar
from aiopersist.data.lazy import pa, pc
from aiopersist.data.refusal import Refusal

Array = Any


def check_table(table: pa.Table) -> None:
    """`Refusal` of the first row that is not sound, with its column."""
    try:
        table.validate()  # lengths, and sizes of buffers: all other checks rely on them
    except pa.ArrowException as e:
        raise Refusal(-1, f"invalid Arrow data: {e}") from e
    refusals = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            check_column(column)
        except Refusal as e:
            refusals.append(Refusal(e.row, f"{name}: {e.reason}"))
    raise_first(refusals)


def check_column(column: Array) -> None:
    """`Refusal` of the first row of an array, chunked or not, that is not sound."""
    start = 0
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        try:
            check_array(chunk)
        except Refusal as e:
            raise Refusal(e.row if e.row < 0 else start + e.row, e.reason) from e
        start += len(chunk)


def check_array(array: Array) -> None:
    """`Refusal` of the first row that is not sound, or of the array as a whole (-1)."""
    try:
        array.validate()
    except pa.ArrowException as e:
        raise Refusal(-1, f"invalid Arrow data: {e}") from e
    _check(array)


def _check(array: Array) -> None:
    is_, t = pa.types, array.type
    if isinstance(array, pa.ExtensionArray):
        _check(array.storage)
    elif is_.is_struct(t):
        _check_level(array)
        _check_fields(array)
    elif is_.is_list(t) or is_.is_large_list(t) or is_.is_map(t):
        _check_level(array)
        _check_elements(array)
    elif is_.is_fixed_size_list(t):
        _check_level(array)
        _check_fixed(array)
    elif is_.is_list_view(t) or is_.is_large_list_view(t):
        _check_level(array)
        _within(array.flatten(), "in a list", lambda at: list_of(array, at))
    elif is_.is_dictionary(t):
        _check_dictionary(array)
    elif is_.is_run_end_encoded(t):
        _check_runs(array)
    else:
        _check_whole(array)


def _check_level(array: Array) -> None:
    """Check the nulls and offsets of a nested array, without its children."""
    try:
        hollow = _hollow(array)
    except pa.ArrowException as e:  # Arrow checks the array as it makes it
        raise Refusal(-1, f"invalid Arrow data: {e}") from e
    _check_whole(hollow)


def _hollow(array: Array) -> Array:
    """The array with nulls in place of its children."""
    is_, t = pa.types, array.type
    buffers = array.buffers()
    if is_.is_struct(t):
        return pa.Array.from_buffers(pa.struct([]), len(array), buffers[:1], array.null_count, array.offset)
    size = len(array.keys if is_.is_map(t) else array.values)
    kind = _hollow_type(t)
    form = len(array), buffers[: kind.num_buffers], array.null_count, array.offset
    return pa.Array.from_buffers(kind, *form, [pa.nulls(size)])


def _hollow_type(t: pa.DataType) -> pa.DataType:
    is_ = pa.types
    if is_.is_fixed_size_list(t):
        return pa.list_(pa.null(), t.list_size)
    if is_.is_large_list(t):
        return pa.large_list(pa.null())
    if is_.is_list_view(t):
        return pa.list_view(pa.null())
    return pa.large_list_view(pa.null()) if is_.is_large_list_view(t) else pa.list_(pa.null())


def _check_fields(array: Array) -> None:
    refusals = []
    for number, field in enumerate(array.type):
        try:
            _check(array.field(number))
        except Refusal as e:
            refusals.append(Refusal(e.row, f"field {field.name!r}: {e.reason}"))
    raise_first(refusals)


def raise_first(refusals: list[Refusal]) -> None:
    """Raise the refusal of the least row, if there is any."""
    if refusals:
        raise min(refusals, key=lambda e: e.row)


def _check_elements(array: Array) -> None:
    """Check the elements from the first offset to the last. The offsets were checked before: they rise."""
    offsets = array.offsets
    start, end = (offsets[at].as_py() for at in (0, len(array)))

    def row(at: int) -> int:
        return _last_at_most(offsets, start + at)

    halves = (array.keys, array.items) if pa.types.is_map(array.type) else (array.values,)
    for half in halves:
        _within(half.slice(start, end - start), "in a list", row)


def _check_fixed(array: Array) -> None:
    size = array.type.list_size
    values = array.values.slice(array.offset * size, len(array) * size)
    _within(values, "in a list", lambda at: at // size)


def _check_dictionary(array: Array) -> None:
    """Check the indices, and the entries that rows use."""
    entries, indices = array.dictionary, array.indices
    _check_whole(pa.DictionaryArray.from_arrays(indices, pa.nulls(len(entries)), safe=False))
    try:
        _check(entries)
    except Refusal as e:
        faulty = [at for at in range(len(entries)) if not _is_sound(entries.slice(at, 1))]
        rows = pc.is_in(indices, pa.array(faulty, indices.type))
        row = pc.index(rows, bool_scalar(True)).as_py()
        if row >= 0:
            raise Refusal(row, f"in a dictionary: {e.reason}") from e


def _is_sound(array: Array) -> bool:
    try:
        _check(array)
    except Refusal:
        return False
    return True


def _check_runs(array: Array) -> None:
    ends = array.run_ends
    nothing = pa.nulls(len(ends))
    kind = pa.run_end_encoded(ends.type, nothing.type)
    _check_whole(pa.Array.from_buffers(kind, len(array), [None], 0, array.offset, [ends, nothing]))
    first, runs = array.find_physical_offset(), array.find_physical_length()

    def row(run: int) -> int:
        return max(ends[first + run - 1].as_py() - array.offset, 0) if run else 0

    _within(array.values.slice(first, runs), "in a run", row)


def _within(elements: Array, where: str, row: Any) -> None:
    try:
        _check(elements)
    except Refusal as e:
        raise Refusal(e.row if e.row < 0 else row(e.row), f"{where}: {e.reason}") from e


def _check_whole(array: Array) -> None:
    if (fault := _fault(array)) is not None:
        raise Refusal(_first_faulty(array), f"invalid Arrow data: {fault}") from fault


def _fault(array: Array) -> Any:
    """The error of an array that is not sound, else `None`."""
    try:
        array.validate(full=True)
        if pa.types.is_timestamp(array.type) and array.type.unit == "s":
            array.cast(pa.timestamp("ms", array.type.tz))  # Parquet and polars have no seconds
        if pa.types.is_duration(array.type) and array.type.unit == "s":
            array.cast(pa.duration("ms"))
    except pa.ArrowException as e:
        return e
    return None


def _first_faulty(array: Array) -> int:
    """The first unsound row of an unsound array, found by halving; -1 if each half is sound by itself."""
    start, size = 0, len(array)
    while size > 1:
        half = size // 2
        if _fault(array.slice(start, half)) is not None:
            size = half
        else:
            start, size = start + half, size - half
    return start if size and _fault(array.slice(start, 1)) is not None else -1


def _last_at_most(offsets: Array, at: int) -> int:
    """The row of the list that has the element `at`: the last row that begins at or before it."""
    low, high = 0, len(offsets) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if offsets[middle].as_py() <= at:
            low = middle
        else:
            high = middle
    return low


def list_of(array: Array, element: int) -> int:
    """The row of the list that has an element of the flattened array; for any kind of list."""
    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64()))
    row: int = pc.index(pc.greater(ends, element), bool_scalar(True)).as_py()
    return row


# --- nulls -----------------------------------------------------------------------------------------


def null_where_none_may_be(array: Array, field: pa.Field) -> int | None:
    """The first row with a null where the field, or a field within it, is not nullable."""
    if array.null_count and not field.nullable:
        row: int = pc.index(array.is_null(), bool_scalar(True)).as_py()
        return row
    if pa.types.is_struct(field.type):
        return _null_in_struct(array, field)
    if pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type):
        at = null_where_none_may_be(array.flatten(), field.type.value_field)
        return None if at is None else list_of(array, at)
    return None


def _null_in_struct(array: Array, field: pa.Field) -> int | None:
    """As `null_where_none_may_be`, among the present structs: the fields of an absent struct are null."""
    present = array.is_valid() if array.null_count else None
    rows = None if present is None else pc.indices_nonzero(present)
    inner = array if present is None else array.filter(present)
    firsts = [null_where_none_may_be(c, f) for c, f in zip(inner.flatten(), field.type, strict=True)]
    first = min((row for row in firsts if row is not None), default=None)
    return first if first is None or rows is None else rows[first].as_py()
