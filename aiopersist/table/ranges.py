"""Which entries a read of a table asks for: conditions on keys and values, and the ranges of keys that
transactions read, with their own writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple, TypeVar

from aiopersist.base.errors import InvalidUpdate, InvalidUsage, UsageKind, shown
from aiopersist.data.arrays import int64_array
from aiopersist.data.jsonable import column_from_texts
from aiopersist.data.lazy import pa, pc
from aiopersist.data.part import keys
from aiopersist.data.part.select import check_where
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.encodings import natural
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import contents
from aiopersist.data.updates.order import row_key, row_keys
from aiopersist.read.snapshot import Snapshot
from aiopersist.shard.stack import Stack
from aiopersist.table.schema import TableSchema


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


K = TypeVar("K")
V = TypeVar("V")


class ReadRange(NamedTuple):
    """A range of keys that a transaction read."""

    start: Any
    stop: Any
    prefix: Any


def condition_of(kind: TableSchema[Any, Any], wanted: ReadRange) -> Any:
    """The condition that holds for the entries of the range; `None` for all."""
    return condition(kind.schema, start=wanted.start, stop=wanted.stop, prefix=wanted.prefix, where=None)


def within(kind: TableSchema[Any, Any], entries: Mapping[str, object], wanted: ReadRange) -> pa.Table:
    """The keys of `entries` within the range, as a column, and their numbers."""
    keys = column_from_texts(list(entries), kind.schema.key.codec.arrow_type)
    fields = [kind.schema.arrow_schema.field("key"), pa.field("number", pa.int64())]
    table = pa.table([keys, int64_array(range(len(entries)))], pa.schema(fields))
    chosen = condition_of(kind, wanted)
    return table if chosen is None else table.filter(chosen)


def entries_within(
    kind: TableSchema[K, V], vals: Mapping[str, str | None], wanted: ReadRange
) -> list[tuple[K, V]]:
    """The entries within the range, in key order."""
    there = {key: val for key, val in vals.items() if val is not None}
    found = within(kind, there, wanted)
    texts = list(there)
    return _in_order(
        kind, {texts[number]: there[texts[number]] for number in found.column("number").to_pylist()}
    )


def _in_order(kind: TableSchema[K, V], entries: Mapping[str, str]) -> list[tuple[K, V]]:
    if not entries:
        return []
    return _decoded(kind, contents(kind.updates(entries, dict.fromkeys(entries), 0), kind.schema))


def _decoded(kind: TableSchema[K, V], found: pa.Table | pa.RecordBatch) -> list[tuple[K, V]]:
    keys, vals = (field.decode(found.column(name)) for name, field in kind.columns())
    return list(zip(keys, vals, strict=True))


async def streamed(
    stack: Stack,
    kind: TableSchema[K, V],
    snapshot: Snapshot[K, V] | None,
    written: Mapping[str, str | None],
    wanted: ReadRange,
) -> AsyncGenerator[list[tuple[K, V]], None]:
    """The entries of a snapshot (`None`: there are none) within the range, with own writes on top, in key
    order, in bounded memory beside the writes."""
    own = await stack.compute(_OwnWrites, kind, written, wanted)
    if snapshot is not None:
        async with aclosing(snapshot.batches(condition_of(kind, wanted))) as batches:
            async for batch in batches:
                yield await stack.compute(own.on, batch)
    yield await stack.compute(own.rest)


class _OwnWrites:
    """Writes within a range, which are taken in key order."""

    def __init__(
        self, kind: TableSchema[Any, Any], written: Mapping[str, str | None], wanted: ReadRange
    ) -> None:
        self._kind = kind
        found, texts = within(kind, written, wanted), list(written)
        keys = zip(row_keys(found, ["key"]), found.column("number").to_pylist(), strict=True)
        self._left = deque(sorted((key, texts[number]) for key, number in keys))
        self._written = written

    def on(self, batch: pa.RecordBatch) -> list[tuple[Any, Any]]:
        """The next entries of the contents, with the writes up to the last of them."""
        last = row_key(batch, -1, ("key",))
        own: dict[str, str | None] = {}
        while self._left and self._left[0][0] <= last:
            _, text = self._left.popleft()
            own[text] = self._written[text]
        if not own:
            return _decoded(self._kind, batch)
        vals: dict[str, str | None] = {**dict(zip(*self._kind.texts(batch), strict=True)), **own}
        return _in_order(self._kind, {key: val for key, val in vals.items() if val is not None})

    def rest(self) -> list[tuple[Any, Any]]:
        """The writes beyond all entries."""
        own = {text: self._written[text] for _, text in self._left}
        return _in_order(self._kind, {key: val for key, val in own.items() if val is not None})
