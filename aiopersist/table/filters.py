"""Which entries a read of a table asks for, as one condition on rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_, or_
from typing import Any

from aiopersist.base.errors import InvalidUpdate, InvalidUsage, UsageKind, shown
from aiopersist.data.lazy import pa, pc
from aiopersist.data.part import keys
from aiopersist.data.part.select import check_where
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.encodings import natural
from aiopersist.data.types.schema import Schema


def condition(
    schema: Schema[Any, Any, Any], *, start: Any, stop: Any, prefix: Any, where: Any
) -> pc.Expression | None:
    """The entries with `start <= key < stop`, with keys that begin with `prefix`, and of `where`."""
    if where is not None:
        check_where(where, schema)
    found = [] if where is None else [where]
    if start is not None:
        found.append(keys.at_or_beyond(_scalar(schema, start)))
    if stop is not None:
        found.append(~keys.at_or_beyond(_scalar(schema, stop)))
    if prefix is not None:
        found += _prefixed(schema, prefix)
    return reduce(and_, found) if found else None


def is_key(schema: Schema[Any, Any, Any], key: Any) -> pc.Expression:
    """The entry of one key."""
    return keys.is_key(_scalar(schema, key))


def any_key(schema: Schema[Any, Any, Any], some: Sequence[Any]) -> pc.Expression:
    """The entries of these keys."""
    if not some:
        return pc.scalar(False)
    column = schema.key.encode(some)
    if not pa.types.is_struct(column.type):
        return pc.field("key").isin(column)
    return reduce(or_, (is_key(schema, key) for key in some))


def _prefixed(schema: Schema[Any, Any, Any], prefix: Any) -> list[pc.Expression]:
    t = natural(schema.key.codec.arrow_type)
    is_text = pa.types.is_string(t) or pa.types.is_binary(t)
    if not is_text or type(prefix) is not (str if pa.types.is_string(t) else bytes):
        text = f"prefix={shown(prefix)}: only keys that are str or bytes have prefixes, of their own type"
        raise InvalidUsage(UsageKind.INVALID_TYPE, text)
    return [keys.at_or_beyond(_scalar(schema, prefix)), pc.starts_with(pc.field("key"), pattern=prefix)]


def _scalar(schema: Schema[Any, Any, Any], key: Any) -> pa.Scalar:
    try:
        return schema.key.encode([key])[0]
    except Refusal as refusal:
        raise InvalidUpdate(f"key: {refusal.reason}") from refusal
