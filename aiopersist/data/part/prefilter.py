"""Conditions of other engines (polars, Spark) as conditions on parts. The engine filters again.

Such a condition is a *prefilter*: it is true for each row for which that of the engine is true. It may be
true for others. Both engines have one order of floats: NaN is equal to itself and greater than any number.
In Arrow each comparison with NaN is false, and a filter of Arrow drops rows that the engine keeps. So here
`x > 5` is `not x <= 5`, which is true for NaN, and which bounds in statistics can still exclude.

Where a condition of the engine is true or false, that of Arrow is the same. Where it is null, that of Arrow
may be anything. So `&`, `|` and `~` of prefilters are prefilters. `None`: there is none, all rows are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import isnan
from operator import or_

from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.stats import text_above

COMPARED_MAX = 64  # values that are compared one by one; Arrow nests the comparisons


def compared(path: Sequence[str], t: pa.DataType, operator: str, literal: pa.Scalar) -> pc.Expression | None:
    """`column operator literal`; the operator is one of `== != < <= > >=`, the column at `path` has type
    `t`. `None` unless the type has exactly that value."""
    value = _exactly(literal, t)
    if value is None:
        return None
    field = pc.field(*path)
    may_be_nan = pa.types.is_floating(t)
    match operator:
        case "==":
            return field == value
        case "!=":
            return field != value
        case "<":
            return field < value
        case "<=":
            return field <= value
        case ">":
            return ~(field <= value) if may_be_nan else field > value
        case ">=":
            return ~(field < value) if may_be_nan else field >= value
    return None


def among(path: Sequence[str], t: pa.DataType, literals: Sequence[pa.Scalar]) -> pc.Expression | None:
    """`column in literals`."""
    exact = [_exactly(literal, t) for literal in literals]
    values = [value for value in exact if value is not None]
    if not values or len(values) < len(exact):
        return None
    if len(values) <= COMPARED_MAX:
        return reduce(or_, (pc.field(*path) == value for value in values))
    if pa.types.is_floating(t):
        return None  # Arrow's sets tell 0.0 from -0.0
    field, many = pc.field(*path), pa.array(sorted(value.as_py() for value in values), t)
    within = (field >= many[0]) & (field <= many[-1])  # statistics exclude by a range, and not by a set
    return within & field.isin(many)


def starting(path: Sequence[str], t: pa.DataType, prefix: str) -> pc.Expression | None:
    """The column of texts starts with `prefix`: a range, which statistics can exclude."""
    if not (pa.types.is_string(t) or pa.types.is_large_string(t)):
        return None
    field, above = pc.field(*path), text_above(prefix)
    return field >= prefix if above is None else (field >= prefix) & (field < above)


def _exactly(literal: pa.Scalar, t: pa.DataType) -> pa.Scalar | None:
    """The literal as a value of type `t`; `None` for null, for NaN, and for a value that `t` lacks."""
    if not literal.is_valid or not _are_alike(literal.type, t):
        return None
    if pa.types.is_floating(literal.type) and isnan(literal.as_py()):
        return None
    try:
        value = literal.cast(t)
        return value if value.cast(literal.type).equals(literal) else None
    except (pa.ArrowException, OverflowError):
        return None


def _are_alike(literal: pa.DataType, t: pa.DataType) -> bool:
    """Whether engines compare such a value with such a column without rounding the column."""
    is_ = pa.types
    for kinds in (
        (is_.is_integer, is_.is_decimal),
        (is_.is_string, is_.is_large_string),
        (is_.is_binary, is_.is_large_binary),
    ):
        if all(any(kind(of) for kind in kinds) for of in (literal, t)):
            return True
    if is_.is_floating(t):
        return bool(is_.is_integer(literal) or is_.is_floating(literal))
    if is_.is_timestamp(t) and is_.is_timestamp(literal):
        return (t.tz is None) == (literal.tz is None)
    return bool(literal.id == t.id)
