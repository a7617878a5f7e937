"""Conditions on keys, by the order of rows, as `data/updates/order.py` says: nulls first, NaN last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from math import inf, isnan
from operator import and_, or_
from typing import NamedTuple

from aiopersist.data.lazy import pa, pc


def has_conditions(t: pa.DataType) -> bool:
    """Whether keys of that type can be compared: not those with lists."""
    if pa.types.is_struct(t):
        return all(has_conditions(field.type) for field in t)
    return not (pa.types.is_nested(t) or pa.types.is_null(t))


def is_key(key: pa.Scalar) -> pc.Expression:
    """The rows of `key`."""
    return reduce(and_, (leaf.equal() for leaf in _leaves(key)))


def at_or_beyond(key: pa.Scalar) -> pc.Expression:
    """The rows at or beyond `key`: the first leaf that differs is greater, or none differs."""
    leaves = list(_leaves(key))
    differs = [
        reduce(and_, [*(leaf.equal() for leaf in leaves[:number]), last.beyond()])
        for number, last in enumerate(leaves)
    ]
    return reduce(or_, [*differs, reduce(and_, (leaf.equal() for leaf in leaves))])


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
        return self._unless_null(~(self.field <= inf) if self._is_nan else self.field == self.value)

    def beyond(self) -> pc.Expression:
        """Whether the leaf of a row is greater."""
        if not self.value.is_valid:
            return self.field.is_valid()
        if pa.types.is_struct(self.value.type) or self._is_nan:
            return pc.scalar(False)
        if pa.types.is_floating(self.value.type):
            return self._unless_null(~(self.field <= self.value))  # true for NaN
        return self._unless_null(self.field > self.value)

    @property
    def _is_nan(self) -> bool:
        return bool(pa.types.is_floating(self.value.type) and isnan(self.value.as_py()))

    def _unless_null(self, fact: pc.Expression) -> pc.Expression:
        """`fact`, but false for nulls, where `fact` itself is null."""
        return self.field.is_valid() & fact if self.nullable else fact


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
