"""Puts of entries that come in chunks: in memory, while they are few, else as a large put (`bulk.py`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from aiopersist.data.arrays import empty_table
from aiopersist.data.updates.inputs import is_repeatable
from aiopersist.data.updates.sizes import goodbytes
from aiopersist.parts.upload import chunks_on_a_thread
from aiopersist.shard.registration import begun_anew
from aiopersist.state.once import Once
from aiopersist.table.bulk.bulk import Bulk, EntriesExpired
from aiopersist.table.commit.group import TableCommits
from aiopersist.table.commit.operation import Put
from aiopersist.table.commit.participant import TableParticipant
from aiopersist.table.commit.plan import Done, PendingOperation, Repeated
from aiopersist.table.view.contents import ENTRY_BYTES

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


async def put_stream(
    member: TableParticipant, group: TableCommits, entries: Any, transactions: Mapping[str, int], once: Once
) -> Done | Repeated:
    """Put entries of any number, at one time: in memory while they take less than
    `settings.table_resident_bytes`, else as a `Bulk`."""
    return await _begun_anew(entries, partial(_put_stream, member, group, entries, transactions, once))


async def replace_contents(member: TableParticipant, group: TableCommits, entries: Any) -> Done | Repeated:
    """Make entries of any number the contents, at one time: keys that are not among them are deleted."""
    return await _begun_anew(entries, partial(_replace_contents, member, group, entries))


async def _begun_anew(entries: Any, put: Callable[[], Awaitable[Done | Repeated]]) -> Done | Repeated:
    return await (begun_anew(put, EntriesExpired) if is_repeatable(entries) else put())


async def _put_stream(
    member: TableParticipant, group: TableCommits, entries: Any, transactions: Mapping[str, int], once: Once
) -> Done | Repeated:
    settings, kind = member.writer.shard.stack.settings, member.view.kind
    bulk = Bulk(member, group.turn, transactions, once)
    here: list[pa.Table] = []
    size = rows = 0
    try:
        async with aclosing(_tables(bulk, entries)) as tables:
            async for table in tables:
                here.append(table)
                rows += table.num_rows
                size += goodbytes(table) + ENTRY_BYTES * table.num_rows
                if size > settings.table_resident_bytes:
                    for some in here:
                        await bulk.add(some)
                    here.clear()
        if not here:
            return await bulk.put() if rows else await _put(member, group, {}, transactions, once)
        texts: dict[str, str] = await bulk.compute(_texts, kind, here)
        return await _put(member, group, texts, transactions, once)
    finally:
        bulk.close()


async def _replace_contents(member: TableParticipant, group: TableCommits, entries: Any) -> Done | Repeated:
    bulk = Bulk(member, group.turn, whole=True)
    try:
        await bulk.add(empty_table(member.view.kind.schema.arrow_schema))  # there may be no entries
        async with aclosing(_tables(bulk, entries)) as tables:
            async for table in tables:
                await bulk.add(table)
        return await bulk.put()
    finally:
        bulk.close()


async def _tables(bulk: Bulk, entries: Any) -> AsyncGenerator[pa.Table, None]:
    """Entries as columns, checked, chunk by chunk."""
    kind, rows = bulk.member.view.kind, 0
    size_max = bulk.member.writer.shard.stack.settings.update_size_max
    async with aclosing(chunks_on_a_thread(kind.pairs(entries))) as chunks:
        async for chunk in chunks:
            table = await bulk.compute(kind.columns_of, chunk, size_max, rows)
            rows += table.num_rows
            yield table


async def _put(
    member: TableParticipant,
    group: TableCommits,
    texts: Mapping[str, str],
    transactions: Mapping[str, int],
    once: Once,
) -> Done | Repeated:
    action = Put(texts)
    return await group.do(PendingOperation((member,), action, (action.keys,), member, transactions, once))


def _texts(kind: Any, tables: Sequence[pa.Table]) -> dict[str, str]:
    return {key: val for table in tables for key, val in zip(*kind.texts(table), strict=True)}
