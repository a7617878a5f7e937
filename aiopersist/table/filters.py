"""Which entries a read of a table asks for, as one condition on rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from math import inf, isnan
from operator import and_, or_
from typing import Any, NamedTuple

from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.select import check_where
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.schema import Schema
from aiopersist.errors import InvalidUpdate, InvalidUsage, UsageKind, shown


class _KeyLeaf(NamedTuple):
    """One leaf of a key, or a struct in it that may be absent, and its value in a bound. Rows are ordered as
    `data/updates/order.py` says: nulls first, NaN last."""

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


def condition(
    schema: Schema[Any, Any, Any], *, start: Any, stop: Any, prefix: Any, where: Any
) -> pc.Expression | None:
    """The entries with `start <= key < stop`, with keys that begin with `prefix`, and of `where`."""
    if where is not None:
        check_where(where, schema)
    found = [] if where is None else [where]
    if start is not None:
        found.append(_from(schema, start))
    if stop is not None:
        found.append(~_from(schema, stop))
    if prefix is not None:
        found += _prefixed(schema, prefix)
    return reduce(and_, found) if found else None


def is_key(schema: Schema[Any, Any, Any], key: Any) -> pc.Expression:
    """The entry of one key."""
    return reduce(and_, (leaf.equal() for leaf in _leaves(_scalar(schema, key))))


def after(schema: Schema[Any, Any, Any], key: Any) -> pc.Expression:
    """The keys beyond `key`."""
    return _from(schema, key) & ~is_key(schema, key)


def any_key(schema: Schema[Any, Any, Any], keys: Sequence[Any]) -> pc.Expression:
    """The entries of these keys."""
    if not keys:
        return pc.scalar(False)
    column = schema.key.encode(keys)
    if not pa.types.is_struct(column.type):
        return pc.field("key").isin(column)
    return reduce(or_, (is_key(schema, key) for key in keys))


def _from(schema: Schema[Any, Any, Any], key: Any) -> pc.Expression:
    """The keys at or beyond `key`: the first leaf that differs is greater, or none differs."""
    leaves = list(_leaves(_scalar(schema, key)))
    differs = [
        reduce(and_, [*(leaf.equal() for leaf in leaves[:number]), last.beyond()])
        for number, last in enumerate(leaves)
    ]
    return reduce(or_, [*differs, reduce(and_, (leaf.equal() for leaf in leaves))])


def _prefixed(schema: Schema[Any, Any, Any], prefix: Any) -> list[pc.Expression]:
    t = schema.key.codec.arrow_type
    is_text = pa.types.is_string(t) or pa.types.is_binary(t)
    if not is_text or type(prefix) is not (str if pa.types.is_string(t) else bytes):
        text = f"prefix={shown(prefix)}: only keys that are str or bytes have prefixes, of their own type"
        raise InvalidUsage(UsageKind.INVALID_TYPE, text)
    return [_from(schema, prefix), pc.starts_with(pc.field("key"), pattern=prefix)]


def _scalar(schema: Schema[Any, Any, Any], key: Any) -> pa.Scalar:
    try:
        return schema.key.encode([key])[0]
    except Refusal as refusal:
        raise InvalidUpdate(f"key: {refusal.reason}") from refusal


def _leaves(
    scalar: pa.Scalar, path: tuple[str, ...] = ("key",), *, nullable: bool = False
) -> Iterator[_KeyLeaf]:
    if not pa.types.is_struct(scalar.type):
        yield _KeyLeaf(pc.field(*path), scalar, nullable)
        return
    if nullable:
        yield _KeyLeaf(pc.field(*path), scalar, nullable)
    for field in scalar.type if scalar.is_valid else ():
        yield from _leaves(scalar[field.name], (*path, field.name), nullable=nullable or field.nullable)
