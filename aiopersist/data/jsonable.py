"""Values of Arrow types as JSON and back, exactly: for bounds and keys that are kept in the state.

Bytes are base64, points in time and durations the integers that Arrow stores, decimals and the
floats that JSON lacks are text.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from decimal import Decimal
from math import isfinite
from typing import Any

from aiopersist.data.lazy import pa


def to_json(scalar: pa.Scalar) -> Any:
    """The value of an Arrow scalar as JSON."""
    t = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_struct(t):
        return {name: to_json(child) for name, child in scalar.items()}
    if pa.types.is_list(t):
        return [to_json(element) for element in scalar.values]
    if pa.types.is_temporal(t):
        return scalar.value
    value = scalar.as_py()
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Decimal) or (isinstance(value, float) and not isfinite(value)):
        return str(value)
    return value


def from_json(value: Any, t: pa.DataType) -> Any:
    """The Python value again, as `pa.scalar(..., t)` takes it. `ValueError`, `TypeError` or `KeyError`
    for what `to_json` does not give."""
    if value is None:
        return None
    if pa.types.is_struct(t):
        return {field.name: from_json(value.get(field.name), field.type) for field in t}
    if pa.types.is_list(t):
        return [from_json(element, t.value_type) for element in value]
    if pa.types.is_floating(t):
        return float(value)
    if pa.types.is_decimal(t):
        return Decimal(value)
    if pa.types.is_temporal(t):
        return pa.scalar(value, pa.int32() if t.bit_width == 32 else pa.int64()).cast(t).as_py()
    if pa.types.is_string(t) or pa.types.is_large_string(t) or not _is_bytes(t):
        return value
    return b64decode(value, validate=True)


def _is_bytes(t: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_binary(t) or is_.is_large_binary(t) or is_.is_fixed_size_binary(t))
