"""The entries that a read of a table selects: conditions on keys and values, and the ranges of keys that
transactions read, with their own writes."""

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
    """The condition of `start <= key < stop`, of keys that begin with `prefix`, and of `where`."""
    if where is not None:
        check_where(where, schema)
    conditions = [] if where is None else [where]
    if start is not None:
        conditions.append(keys.at_or_beyond(_scalar(schema, start)))
    if stop is not None:
        conditions.append(~keys.at_or_beyond(_scalar(schema, stop)))
    if prefix is not None:
        conditions += _prefixed(schema, prefix)
    return reduce(and_, conditions) if conditions else None


def is_key(schema: Schema[Any, Any, Any], key: Any) -> pc.Expression:
    """The condition of one key."""
    return keys.is_key(_scalar(schema, key))


def any_key(schema: Schema[Any, Any, Any], key_list: Sequence[Any]) -> pc.Expression:
    """The condition of these keys."""
    if not key_list:
        return pc.scalar(False)
    column = schema.key.encode(key_list)
    if not pa.types.is_struct(column.type):
        return pc.field("key").isin(column)
    return reduce(or_, (is_key(schema, key) for key in key_list))


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


def condition_of(table_schema: TableSchema[Any, Any], read_range: ReadRange) -> Any:
    """The condition of the range; `None` for all entries."""
    return condition(
        table_schema.schema,
        start=read_range.start,
        stop=read_range.stop,
        prefix=read_range.prefix,
        where=None,
    )


def within(
    table_schema: TableSchema[Any, Any], entries: Mapping[str, object], read_range: ReadRange
) -> pa.Table:
    """The keys of `entries` within the range, as a column, and their numbers."""
    keys = column_from_texts(list(entries), table_schema.schema.key.codec.arrow_type)
    fields = [table_schema.schema.arrow_schema.field("key"), pa.field("number", pa.int64())]
    table = pa.table([keys, int64_array(range(len(entries)))], pa.schema(fields))
    chosen = condition_of(table_schema, read_range)
    return table if chosen is None else table.filter(chosen)


def entries_within(
    table_schema: TableSchema[K, V], vals: Mapping[str, str | None], read_range: ReadRange
) -> list[tuple[K, V]]:
    """The entries within the range, in key order."""
    present = {key: val for key, val in vals.items() if val is not None}
    rows = within(table_schema, present, read_range)
    texts = list(present)
    return _in_order(
        table_schema, {texts[number]: present[texts[number]] for number in rows.column("number").to_pylist()}
    )


def _in_order(table_schema: TableSchema[K, V], entries: Mapping[str, str]) -> list[tuple[K, V]]:
    if not entries:
        return []
    return _decoded(
        table_schema, contents(table_schema.updates(entries, dict.fromkeys(entries), 0), table_schema.schema)
    )


def _decoded(table_schema: TableSchema[K, V], rows: pa.Table | pa.RecordBatch) -> list[tuple[K, V]]:
    keys, vals = (field.decode(rows.column(name)) for name, field in table_schema.columns())
    return list(zip(keys, vals, strict=True))


async def streamed(
    stack: Stack,
    table_schema: TableSchema[K, V],
    snapshot: Snapshot[K, V] | None,
    written: Mapping[str, str | None],
    read_range: ReadRange,
) -> AsyncGenerator[list[tuple[K, V]], None]:
    """The entries of a snapshot (`None`: no entries) within the range, with own writes on top, in key order,
    in bounded memory beside the writes."""
    own = await stack.compute(_OwnWrites, table_schema, written, read_range)
    if snapshot is not None:
        async with aclosing(snapshot.batches(condition_of(table_schema, read_range))) as batches:
            async for batch in batches:
                yield await stack.compute(own.on, batch)
    yield await stack.compute(own.rest)


class _OwnWrites:
    """Writes within a range, in key order."""

    def __init__(
        self, table_schema: TableSchema[Any, Any], written: Mapping[str, str | None], read_range: ReadRange
    ) -> None:
        self._table_schema = table_schema
        rows, texts = within(table_schema, written, read_range), list(written)
        keys = zip(row_keys(rows, ["key"]), rows.column("number").to_pylist(), strict=True)
        self._rest = deque(sorted((key, texts[number]) for key, number in keys))
        self._written = written

    def on(self, batch: pa.RecordBatch) -> list[tuple[Any, Any]]:
        """The next contents, with the writes up to their last key."""
        last = row_key(batch, -1, ("key",))
        own: dict[str, str | None] = {}
        while self._rest and self._rest[0][0] <= last:
            _, text = self._rest.popleft()
            own[text] = self._written[text]
        if not own:
            return _decoded(self._table_schema, batch)
        vals: dict[str, str | None] = {**dict(zip(*self._table_schema.texts(batch), strict=True)), **own}
        return _in_order(self._table_schema, {key: val for key, val in vals.items() if val is not None})

    def rest(self) -> list[tuple[Any, Any]]:
        """The writes beyond all contents."""
        own = {text: self._written[text] for _, text in self._rest}
        return _in_order(self._table_schema, {key: val for key, val in own.items() if val is not None})
