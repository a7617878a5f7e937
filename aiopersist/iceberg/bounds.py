"""From the statistics of a part to the metrics of a data file, by which engines skip files."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from decimal import Decimal
from struct import pack
from typing import Any

from aiopersist.data.lazy import pa
from aiopersist.data.types.field_ids import Path
from aiopersist.iceberg.types import Ids, primitive

Leaves = Mapping[str, tuple[Path, pa.DataType]]
"""See `types.leaves`."""

MICROS = {"s": 10**6, "ms": 1000, "us": 1}
FORMATS = {"int": "<i", "long": "<q", "float": "<f", "double": "<d", "date": "<i"}


def metrics(
    stats: Mapping[str, Any] | None, rows: int, columns: Leaves, ids: Ids
) -> dict[str, dict[int, Any]]:
    """The counts and bounds of a data file. A column without statistics, or with a NaN as a bound, has no
    bounds: engines do not skip the file by it."""
    counted: dict[str, dict[int, Any]] = {"value_counts": {}, "null_value_counts": {}}
    bounds: dict[str, dict[int, Any]] = {"lower_bounds": {}, "upper_bounds": {}}
    for name, entry in (stats or {}).items():
        if name not in columns:
            continue
        path, t = columns[name]
        counted["value_counts"][ids[path]] = rows
        counted["null_value_counts"][ids[path]] = entry["nulls"]
        both = _has_nan(entry["max"], t), _has_nan(entry["min"], t)
        for end, side in (("min", "lower_bounds"), ("max", "upper_bounds")):
            data = None if any(both) else bound(entry[end], t, is_lower=end == "min")
            if data is not None:
                bounds[side][ids[path]] = data
    return {name: values for name, values in (counted | bounds).items() if values}


def bound(stored: Any, t: pa.DataType, *, is_lower: bool) -> bytes | None:
    """A stored bound as Iceberg's single value; `None` without one. Zero becomes the zero with the sign that
    includes both: some engines order them."""
    if stored is None:
        return None
    is_, name = pa.types, primitive(t)
    if name == "string":
        return str(stored).encode()
    if name == "boolean":
        return b"\1" if stored else b"\0"
    if is_.is_fixed_size_binary(t) or name == "binary":
        data = b64decode(stored)
        return data if name == "binary" or len(data) == t.byte_width else None
    if is_.is_decimal(t):
        unscaled = _unscaled(Decimal(stored), t.scale)
        return unscaled.to_bytes((unscaled.bit_length() + 8) // 8, "big", signed=True)
    if is_.is_timestamp(t):
        micros = int(stored) * MICROS[t.unit]
        return pack("<q", micros) if -(2**63) <= micros < 2**63 else None
    if is_.is_floating(t):
        stored = float(stored) or (-0.0 if is_lower else 0.0)
    return None if name is None else pack(FORMATS[name], stored)


def _unscaled(value: Decimal, scale: int) -> int:
    """`value * 10**scale`; Python's own product is rounded to 28 digits."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    unsigned: int = int("".join(map(str, digits))) * 10 ** (exponent + scale)
    return -unsigned if sign else unsigned


def _has_nan(stored: Any, t: pa.DataType) -> bool:
    return stored is not None and bool(pa.types.is_floating(t)) and float(stored) != float(stored)
