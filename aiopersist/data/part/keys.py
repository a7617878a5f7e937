"""Conditions on keys, by the order of rows, as `data/updates/order.py` says: nulls first, NaN last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from math import inf, isnan
from operator import and_, or_
from typing import NamedTuple

from aiopersist.data.lazy import pa, pc

SET_MAX = 50  # values in an `is_in` that Arrow compares with bounds, and no more
PIECES_MAX = 64  # so many comparisons with the bounds of each row group take about a millisecond


def has_conditions(t: pa.DataType) -> bool:
    """Whether keys of that type can be compared: not those with lists."""
    if pa.types.is_struct(t):
        return all(has_conditions(field.type) for field in t)
    return not (pa.types.is_nested(t) or pa.types.is_null(t))


def is_key(key: pa.Scalar) -> pc.Expression:
    """The rows of `key`."""
    return reduce(and_, (leaf.equal() for leaf in _leaves(key)))


def at_or_beyond(key: pa.Scalar) -> pc.Expression:
    """The rows of `key` and of those beyond it: the first leaf that differs is greater, or none differs."""
    leaves = list(_leaves(key))
    differs = [
        reduce(and_, [*(leaf.equal() for leaf in leaves[:number]), last.beyond()])
        for number, last in enumerate(leaves)
    ]
    return reduce(or_, [*differs, reduce(and_, (leaf.equal() for leaf in leaves))])


class Among(NamedTuple):
    """Two conditions that the rows of some keys fulfil; if keys have several fields, other rows may, too."""

    where: pc.Expression
    """Tells by statistics what has none of them."""
    rows: pc.Expression
    """Faster on rows."""


def among(keys: pa.Array) -> Among:
    """The conditions for these keys."""
    leaves = [(path, values) for path, values in _columns(keys) if not _is_opaque(values.type)]
    found = [[_among(path, values, by) for path, values in leaves] for by in (_by_statistics, _is_in)]
    return Among(*(reduce(and_, some) if some else pc.scalar(True) for some in found))


class _KeyLeaf(NamedTuple):
    """One leaf of a key, or a struct in it that may be absent, and its value in a bound."""

    field: pc.Expression
    value: pa.Scalar
    nullable: bool

    def equal(self) -> pc.Expression:
        if not self.value.is_valid:
            return ~self.field.is_valid()
        if pa.types.is_struct(self.value.type):
            return self.field.is_valid()
        return self._there(~(self.field <= inf) if self._is_nan else self.field == self.value)

    def beyond(self) -> pc.Expression:
        """Whether the leaf of a row is greater."""
        if not self.value.is_valid:
            return self.field.is_valid()
        if pa.types.is_struct(self.value.type) or self._is_nan:
            return pc.scalar(False)
        if pa.types.is_floating(self.value.type):
            return self._there(~(self.field <= self.value))  # true for NaN
        return self._there(self.field > self.value)

    @property
    def _is_nan(self) -> bool:
        return bool(pa.types.is_floating(self.value.type) and isnan(self.value.as_py()))

    def _there(self, found: pc.Expression) -> pc.Expression:
        """False for nulls, of which `found` is null."""
        return self.field.is_valid() & found if self.nullable else found


def _leaves(
    scalar: pa.Scalar, path: tuple[str, ...] = ("key",), *, nullable: bool = True
) -> Iterator[_KeyLeaf]:
    """The leaves of a key, the most significant first. A key may be absent as a whole."""
    if not pa.types.is_struct(scalar.type):
        yield _KeyLeaf(pc.field(*path), scalar, nullable)
        return
    if nullable:
        yield _KeyLeaf(pc.field(*path), scalar, nullable)
    for field in scalar.type if scalar.is_valid else ():
        yield from _leaves(scalar[field.name], (*path, field.name), nullable=nullable or field.nullable)


def _columns(
    column: pa.Array, path: tuple[str, ...] = ("key",)
) -> Iterator[tuple[tuple[str, ...], pa.Array]]:
    if not pa.types.is_struct(column.type):
        yield path, column
        return
    for number, field in enumerate(column.type):
        yield from _columns(pc.struct_field(column, [number]), (*path, field.name))


def _is_opaque(t: pa.DataType) -> bool:
    """Whether Arrow has no `is_in` for it."""
    is_ = pa.types
    return bool(is_.is_nested(t) or is_.is_null(t) or is_.is_dictionary(t) or is_.is_float16(t))


def _among(
    path: tuple[str, ...], values: pa.Array, by: Callable[[pc.Expression, pa.Array], pc.Expression]
) -> pc.Expression:
    """Nulls and NaN have expressions of their own: no statistics have bounds for them."""
    field, known = pc.field(*path), values.drop_null()
    found = []
    if len(known) < len(values):
        found.append(~field.is_valid())
    if pa.types.is_floating(known.type):
        is_nan = pc.is_nan(known)
        if pc.any(is_nan).as_py():
            found.append(field.is_valid() & ~(field <= inf))
        known = known.filter(pc.invert(is_nan))
    if len(known):
        found.append(field.is_valid() & by(field, known.unique()))
    return reduce(or_, found)


def _is_in(field: pc.Expression, values: pa.Array) -> pc.Expression:
    return field.isin(values)


def _by_statistics(field: pc.Expression, values: pa.Array) -> pc.Expression:
    """In pieces that Arrow compares with bounds; if there were too many of them, ranges of values."""
    if len(values) <= SET_MAX:
        return field.isin(values)
    values = values.take(pc.sort_indices(values))
    size = max(SET_MAX, -(-len(values) // PIECES_MAX))
    pieces = [values.slice(first, size) for first in range(0, len(values), size)]
    if size == SET_MAX:
        return reduce(or_, (field.isin(piece) for piece in pieces))
    return reduce(or_, ((field >= piece[0]) & (field <= piece[-1]) for piece in pieces))
