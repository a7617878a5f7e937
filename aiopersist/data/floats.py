"""Floats in the form that is stored."""

from __future__ import annotations

from struct import pack, unpack

from aiopersist.data.lazy import pa, pc


def canonical(array: pa.Array) -> pa.Array:
    """The column with the floats at any depth in their stored form: -0.0 becomes 0.0, every NaN the same."""
    t = array.type
    if pa.types.is_floating(t):
        return _canonical_floats(array)
    if not _has_floats(t):
        return array
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(t):
        children = [canonical(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(children, fields=list(t), mask=mask)
    if pa.types.is_fixed_size_list(t):
        values = array.values.slice(array.offset * t.list_size, len(array) * t.list_size)
        return pa.FixedSizeListArray.from_arrays(canonical(values), type=t, mask=mask)
    cls = type(array)
    plain_offsets = pa.concat_arrays([array.offsets])  # Arrow takes no mask with the offset of a slice
    return cls.from_arrays(plain_offsets, canonical(array.values), type=t, mask=mask)


def _has_floats(t: pa.DataType) -> bool:
    if pa.types.is_nested(t):
        return any(_has_floats(t.field(i).type) for i in range(t.num_fields))
    return bool(pa.types.is_floating(t))


def _canonical_floats(array: pa.Array) -> pa.Array:
    array = pc.add(array, pa.scalar(0.0, array.type))  # -0.0 + 0.0 is 0.0
    nans = pc.is_nan(array)
    if pc.any(nans).as_py():
        array = pc.if_else(nans, pa.scalar(float("nan"), array.type), array)
    return array


def narrowed(array: pa.Array, t: pa.DataType) -> pa.Array:
    """The floats rounded to the type `t`; `ValueError` if a finite float would become infinite."""
    if array.type == t:
        return array
    narrow = array.cast(t)
    if pc.any(pc.and_(pc.is_inf(narrow), pc.is_finite(array))).as_py():
        raise ValueError("it is too large")
    return narrow


def exact_float(value: float, t: pa.DataType) -> float:
    """`value` as a float; `ValueError` or `OverflowError` for an int that no float of the type `t` equals."""
    result = float(value)
    stored = unpack("f", pack("f", result))[0] if isinstance(value, int) and t.bit_width == 32 else result
    if stored != value and result == result:
        raise ValueError("the nearest float is another number")
    return result
