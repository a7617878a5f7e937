"""A predicate of polars as a prefilter (`data/part/prefilter.py`).

Polars writes a predicate as JSON, in a form that may change with each version. What is not exactly of a form
that is known here has no prefilter: then all rows are read, and polars alone decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Context, Decimal
from typing import Any, NamedTuple

from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.prefilter import among, compared, starting
from aiopersist.data.part.select import check_where
from aiopersist.data.types.schema import Schema

DIGITS = Context(prec=38)
VALUES_MAX = 1000  # of a list; more exclude little
_SIGNS = {"Eq": "==", "NotEq": "!=", "Lt": "<", "LtEq": "<=", "Gt": ">", "GtEq": ">="}
_CLOSED = {"Both": (">=", "<="), "Left": (">=", "<"), "Right": (">", "<="), "None": (">", "<")}
_UNITS = {"Milliseconds": "ms", "Microseconds": "us", "Nanoseconds": "ns"}
_INTEGERS = {f"{sign}Int{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)}


class FlatColumn(NamedTuple):
    """A column that a predicate may name."""

    path: tuple[str, ...]
    type: pa.DataType


def where_of(predicate: Any, columns: Mapping[str, FlatColumn], schema: Schema[Any, Any, Any]) -> Any:
    """The prefilter of a predicate over columns of these names; `None` if there is none."""
    try:
        where = _of_all(json.loads(predicate.meta.serialize(format="json")), columns)
        if where is not None:
            check_where(where, schema)
        return where
    except Exception:  # the form has changed: all rows are read
        return None


def _of_all(node: Any, columns: Mapping[str, FlatColumn]) -> Any:
    """The prefilter of those conditions of a conjunction that have one."""
    match node:
        case {"BinaryExpr": {"left": left, "op": "And" | "LogicalAnd", "right": right, **rest}} if not rest:
            parts = [_of_all(side, columns) for side in (left, right)]
            kept = [part for part in parts if part is not None]
            return kept[0] & kept[1] if len(kept) == 2 else next(iter(kept), None)
    return _of(node, columns)


def _of(node: Any, columns: Mapping[str, FlatColumn]) -> Any:
    match node:
        case {"BinaryExpr": {"left": left, "op": op, "right": right, **rest}} if not rest:
            return _of_two(left, op, right, columns)
        case {"Function": {"input": [column, *others], "function": function, **rest}} if not rest:
            return _of_function(column, others, function, columns)
        case {"Ternary": {"truthy": {"Literal": {"Scalar": {"Null": _}}}, "falsy": inner, **rest}}:
            # Null, or the inner condition: as DuckDB writes IN.
            return _of(inner, columns) if rest.keys() == {"predicate"} else None
        case {"Column": str(name)} if pa.types.is_boolean(columns[name].type):
            return pc.field(*columns[name].path)
    return None


def _of_two(left: Any, op: str, right: Any, columns: Mapping[str, FlatColumn]) -> Any:
    if op in ("And", "LogicalAnd", "Or", "LogicalOr"):
        one, other = _of(left, columns), _of(right, columns)
        if one is None or other is None:
            return None
        return one & other if op.endswith("And") else one | other
    column = _column(left, columns)
    return None if column is None or op not in _SIGNS else _compared(column, _SIGNS[op], right)


def _of_function(node: Any, others: list[Any], function: Any, columns: Mapping[str, FlatColumn]) -> Any:
    if function == {"Boolean": "Not"}:
        inner = _of(node, columns)
        return None if inner is None else ~inner
    column = _column(node, columns)
    if column is None:
        return None
    if function == {"Boolean": "IsNull"}:
        return pc.field(*column.path).is_null()
    if function == {"Boolean": "IsNotNull"}:
        return pc.field(*column.path).is_valid()
    if function == {"Boolean": {"IsIn": {"nulls_equal": False}}}:
        values = _literals(*others)
        return among(*column, values) if len(values) <= VALUES_MAX else None
    if function == {"StringExpr": "StartsWith"}:
        (prefix,) = map(_literal, others)
        return None if prefix is None else starting(*column, prefix.as_py())
    for closed, signs in _CLOSED.items():
        if function == {"Boolean": {"IsBetween": {"closed": closed}}}:
            low, high = (_compared(column, *bound) for bound in zip(signs, others, strict=True))
            return None if low is None or high is None else low & high
    return None


def _compared(column: FlatColumn, sign: str, node: Any) -> Any:
    value = _literal(node)
    return None if value is None else compared(*column, sign, value)


def _column(node: Any, columns: Mapping[str, FlatColumn]) -> FlatColumn | None:
    """A column, or a field within it."""
    match node:
        case {"Column": str(name)}:
            return columns[name]
        case {"Function": {"input": [inner], "function": {"StructExpr": {"FieldByName": str(name)}}}}:
            outer = _column(inner, columns)
            return None if outer is None else FlatColumn((*outer.path, name), outer.type.field(name).type)
    return None


def _literal(node: Any) -> Any:
    """The value of a literal as a scalar of Arrow; `None` for null, and for NaN and infinities, which JSON
    does not have."""
    match node:
        case {"Literal": {"Scalar": {"Boolean": bool(x)} | {"String": str(x)}}}:
            return pa.scalar(x)
        case {"Literal": {"Scalar": {"Binary": list(x)}}}:
            return pa.scalar(bytes(x))
        case {"Literal": {"Scalar": {"Float32": float(x)}}}:
            return pa.scalar(x, pa.float32())
        case {"Literal": {"Scalar": {"Float64": float(x)}}}:
            return pa.scalar(x)
        case {"Literal": {"Scalar": {"Date": int(x)}}}:
            return pa.scalar(x, pa.int32()).cast(pa.date32())
        case {"Literal": {"Scalar": {"Time": int(x)}}}:
            return pa.scalar(x, pa.time64("ns"))
        case {"Literal": {"Scalar": {"Duration": [int(x), unit]}}}:
            return pa.scalar(x, pa.duration(_UNITS[unit]))
        case {"Literal": {"Scalar": {"Datetime": [int(x), unit, None]}}}:
            return pa.scalar(x, pa.timestamp(_UNITS[unit]))
        case {"Literal": {"Scalar": {"Datetime": [int(x), unit, {"inner": str()}]}}}:
            return pa.scalar(x, pa.timestamp(_UNITS[unit], "UTC"))  # the same moment in any zone
        case {"Literal": {"Scalar": {"Decimal": [int(x), _, int(scale)]}}}:
            return pa.scalar(Decimal(x).scaleb(-scale, DIGITS), pa.decimal128(38, scale))
        case {"Literal": {"Scalar": dict(integer)}}:
            ((kind, number),) = integer.items()
            return pa.scalar(number, getattr(pa, _INTEGERS[kind])()) if type(number) is int else None
    return None


def _literals(node: Any) -> list[Any]:
    """The values of a literal list, which polars writes as the bytes of an Arrow stream."""
    match node:
        case {"Literal": {"Scalar": {"List": list(data)}}}:
            return _values(_streamed(data))
        case {"Literal": {"Series": list(data)}}:
            (values,) = _streamed(data)
            return _values(values.values)
    return []


def _streamed(data: list[int]) -> Any:
    return pa.ipc.open_stream(bytes(data)).read_all().column(0)


def _values(column: Any) -> list[Any]:
    natural = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return list(column.cast(natural.get(column.type, column.type)))
