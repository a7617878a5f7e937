"""Arrow data from outside as columns of a schema: a value is cast if it stays the same, else refused.

Widths, views, large types, dictionaries and units may differ. Kinds may not: text is not bytes, a
float is no int even if it is whole, a naive timestamp has no time zone. A null is refused where the
schema has none, at any depth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from aiopersist.data.arrays import bool_scalar
from aiopersist.data.floats import canonical
from aiopersist.data.lazy import pa, pc
from aiopersist.data.refusal import Refusal, short
from aiopersist.data.valid import list_of, null_where_none_may_be

Array = Any


def cast_column(column: Any, field: pa.Field) -> Any:
    """The column in the type of `field`. Raises `Refusal`, also for a null where `field` is not nullable; a
    row of -1 means the column as a whole."""
    if not isinstance(column, pa.ChunkedArray):
        column = pa.chunked_array([column])
    chunks, start = [], 0
    for chunk in column.chunks:
        try:
            chunks.append(_cast_chunk(chunk, field))
        except Refusal as e:
            raise Refusal(e.row if e.row < 0 else start + e.row, e.reason) from e
        start += len(chunk)
    return pa.chunked_array(chunks, field.type)


def retyped(column: Any, to: pa.DataType) -> Any:
    """The column in a type with the same values (views, large types, other nullability), unchecked."""
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([_cast(chunk, to) for chunk in column.chunks], to)
    return _cast(column, to)


def _cast_chunk(array: Array, field: pa.Field) -> Array:
    array = canonical(_cast(array, field.type))
    row = null_where_none_may_be(array, field)
    if row is not None:
        raise Refusal(row, f"null in {field.name!r}, which is {field.type} not null")
    return array


def _cast(array: Array, to: pa.DataType) -> Array:
    is_ = pa.types
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    array = _decoded(array)
    if array.type == to:
        same = not _has_fields(to) or array.type.equals(to, check_metadata=True)
        return array if same else pa.array(_Retyped(array, to))
    if is_.is_null(array.type):
        return pa.nulls(len(array), to)
    if is_.is_struct(to) and is_.is_struct(array.type):
        return _cast_struct(array, to)
    if is_.is_list(to) and _is_list(array.type):
        return _cast_list(array, to)
    if is_.is_fixed_size_list(to) and _is_list(array.type):
        return _cast_fixed(array, to)
    if not same_kind(array.type, to):
        raise Refusal(-1, f"expected {to}, got {array.type}")
    return _cast_leaf(array, to)


def _decoded(array: Array) -> Array:
    """The values of a dictionary, of runs or of views as a plain array. A few bytes may stand for gigabytes
    of text, and Arrow does not notice that 32-bit offsets wrap, so text of the result has 64-bit offsets."""
    is_, t = pa.types, array.type
    if is_.is_dictionary(t):
        entries = _wide(array.dictionary)
        return pa.DictionaryArray.from_arrays(array.indices, entries, safe=False).dictionary_decode()
    if is_.is_run_end_encoded(t):
        runs = [array.run_ends, _wide(array.values)]
        kind = pa.run_end_encoded(*(run.type for run in runs))
        return pc.run_end_decode(pa.Array.from_buffers(kind, len(array), [None], 0, array.offset, runs))
    return _wide(array) if is_.is_string_view(t) or is_.is_binary_view(t) else array


def _wide(array: Array) -> Array:
    """Text and bytes with 64-bit offsets; other types unchanged."""
    is_, t = pa.types, array.type
    if is_.is_string(t) or is_.is_string_view(t):
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if is_.is_binary(t) or is_.is_binary_view(t) else array


def _cast_leaf(array: Array, to: pa.DataType) -> Array:
    try:
        return _cast_safely(array, to)
    except pa.ArrowException as e:
        row = _first_lossy(array, to)
        if row < 0:
            raise Refusal(row, f"{len(array)} values in one chunk: {e}: give smaller chunks") from e
        raise Refusal(row, f"{_text(array[row])} does not fit {to}: {e}") from e


def _text(value: pa.Scalar) -> str:
    try:
        return short(value.as_py())
    except (OverflowError, ValueError):  # Python cannot represent it
        return f"{value.type} {value.value}"


def _cast_safely(array: Array, to: pa.DataType) -> Array:
    is_ = pa.types
    if array.offset and (is_.is_large_string(array.type) or is_.is_large_binary(array.type)):
        array = pa.concat_arrays([array])  # Arrow refuses a short slice, too, if it lies beyond 2 GiB
    if is_.is_fixed_size_binary(to):  # Arrow has no other cast to it
        array = array.cast(pa.binary())
    return array.cast(to)


def _first_lossy(array: Array, to: pa.DataType) -> int:
    """The first row that cannot be cast, found by halving; -1 if each can be cast by itself."""
    start, size = 0, len(array)
    while size > 1:
        half = size // 2
        if _casts(array.slice(start, half), to):
            start, size = start + half, size - half
        else:
            size = half
    return -1 if _casts(array.slice(start, size), to) else start


def _casts(array: Array, to: pa.DataType) -> bool:
    try:
        _cast_safely(array, to)
    except pa.ArrowException:
        return False
    return True


def _cast_struct(array: Array, to: pa.DataType) -> Array:
    """By the names of the fields. A missing optional field is null, as in a row."""
    names = [field.name for field in array.type]
    fields = {field.name: field.nullable for field in to}
    lacks = [name for name, optional in fields.items() if name not in names and not optional]
    if lacks or len(set(names)) < len(names) or not fields.keys() >= {*names}:
        raise Refusal(-1, f"a struct of {sorted(names)} where the fields are {sorted(fields)}")
    parts = dict(zip(names, array.flatten(), strict=True))
    absent = pa.nulls(len(array))
    children = [_cast(parts.get(field.name, absent), field.type) for field in to]
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(to), mask=mask)


def _cast_list(array: Array, to: pa.DataType) -> Array:
    """Rebuild the lists from their lengths, so that slices and all kinds of lists are one case."""
    try:
        elements = _cast(array.flatten(), to.value_type)
    except Refusal as e:
        raise Refusal(_list_of(array, e.row), f"in a list: {e.reason}") from e
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())  # sums of 32 bits would wrap
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends.cast(pa.int32())])
    # Drop the validity buffer: older pyarrow takes no mask together with one, even without nulls.
    offsets = pa.Array.from_buffers(pa.int32(), len(offsets), [None, offsets.buffers()[1]], 0, offsets.offset)
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(offsets, elements, type=to, mask=mask)


def _cast_fixed(array: Array, to: pa.DataType) -> Array:
    """Product times: lists of one length, none null."""
    lengths = pc.list_value_length(array)
    row = pc.index(pc.fill_null(pc.equal(lengths, to.list_size), False), bool_scalar(False)).as_py()
    if row >= 0:
        raise Refusal(row, f"{array[row].as_py()} is no tuple of {to.list_size}")
    try:
        elements = _cast(array.flatten(), to.value_type)
    except Refusal as e:
        raise Refusal(e.row if e.row < 0 else e.row // to.list_size, e.reason) from e
    return pa.FixedSizeListArray.from_arrays(elements, type=to)


def _list_of(array: Array, element: int) -> int:
    """As `list_of`; -1 (the whole column) stays -1."""
    return element if element < 0 else list_of(array, element)


class _Retyped(NamedTuple):
    """An array in a type that differs in metadata or the names of elements, by Arrow's C data interface."""

    array: Array
    type: pa.DataType

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        _, data = self.array.__arrow_c_array__()
        return self.type.__arrow_c_schema__(), data


def _has_fields(t: pa.DataType) -> bool:
    return bool(pa.types.is_nested(t))


def _is_list(t: pa.DataType) -> bool:
    is_ = pa.types
    views = is_.is_list_view(t) or is_.is_large_list_view(t)
    return bool(is_.is_list(t) or is_.is_large_list(t) or is_.is_fixed_size_list(t) or views)


def same_kind(source: pa.DataType, to: pa.DataType) -> bool:
    """Whether a safe cast between the types keeps the meaning of every value it accepts."""
    is_ = pa.types
    if is_.is_floating(to):
        wide_enough = is_.is_floating(source) and source.bit_width <= to.bit_width
        return bool(wide_enough or is_.is_integer(source))
    if is_.is_timestamp(to):
        return is_.is_timestamp(source) and (source.tz is None) is (to.tz is None)
    is_fixed = is_.is_fixed_size_binary
    kinds = [
        is_.is_integer,
        lambda t: is_.is_string(t) or is_.is_large_string(t) or is_.is_string_view(t),
        lambda t: is_.is_binary(t) or is_.is_large_binary(t) or is_.is_binary_view(t) or is_fixed(t),
        is_.is_date,
        is_.is_time,
        is_.is_duration,
        is_.is_decimal,
        is_.is_boolean,
    ]
    return any(kind(source) and kind(to) for kind in kinds)
