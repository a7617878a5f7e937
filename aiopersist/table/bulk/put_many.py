"""Puts of entries in chunks: few are put from memory, many by a large put (`bulk.py`)."""

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
    participant: TableParticipant,
    group: TableCommits,
    entries: Any,
    transactions: Mapping[str, int],
    once: Once,
) -> Done | Repeated:
    """Put any number of entries at one time: from memory if they take less than
    `settings.table_resident_bytes`, else by a `Bulk`."""
    return await _begun_anew(entries, partial(_put_stream, participant, group, entries, transactions, once))


async def replace_contents(
    participant: TableParticipant, group: TableCommits, entries: Any
) -> Done | Repeated:
    """Replace the contents by any number of entries, at one time: other keys are deleted."""
    return await _begun_anew(entries, partial(_replace_contents, participant, group, entries))


async def _begun_anew(entries: Any, put: Callable[[], Awaitable[Done | Repeated]]) -> Done | Repeated:
    return await (begun_anew(put, EntriesExpired) if is_repeatable(entries) else put())


async def _put_stream(
    participant: TableParticipant,
    group: TableCommits,
    entries: Any,
    transactions: Mapping[str, int],
    once: Once,
) -> Done | Repeated:
    settings, table_schema = participant.writer.shard.stack.settings, participant.view.table_schema
    bulk = Bulk(participant, group.turn, transactions, once)
    tables: list[pa.Table] = []
    size = rows = 0
    try:
        async with aclosing(_tables(bulk, entries)) as chunks:
            async for table in chunks:
                tables.append(table)
                rows += table.num_rows
                size += goodbytes(table) + ENTRY_BYTES * table.num_rows
                if size > settings.table_resident_bytes:
                    for chunk in tables:
                        await bulk.add(chunk)
                    tables.clear()
        if not tables:
            return await bulk.put() if rows else await _put(participant, group, {}, transactions, once)
        texts: dict[str, str] = await bulk.compute(_texts, table_schema, tables)
        return await _put(participant, group, texts, transactions, once)
    finally:
        bulk.close()


async def _replace_contents(
    participant: TableParticipant, group: TableCommits, entries: Any
) -> Done | Repeated:
    bulk = Bulk(participant, group.turn, replaces_all=True)
    try:
        await bulk.add(
            empty_table(participant.view.table_schema.schema.arrow_schema)
        )  # there may be no entries
        async with aclosing(_tables(bulk, entries)) as chunks:
            async for table in chunks:
                await bulk.add(table)
        return await bulk.put()
    finally:
        bulk.close()


async def _tables(bulk: Bulk, entries: Any) -> AsyncGenerator[pa.Table, None]:
    """Entries as columns, checked, chunk by chunk."""
    table_schema, rows = bulk.participant.view.table_schema, 0
    size_max = bulk.participant.writer.shard.stack.settings.update_size_max
    async with aclosing(chunks_on_a_thread(table_schema.pairs(entries))) as chunks:
        async for chunk in chunks:
            table = await bulk.compute(table_schema.columns_of, chunk, size_max, rows)
            rows += table.num_rows
            yield table


async def _put(
    participant: TableParticipant,
    group: TableCommits,
    texts: Mapping[str, str],
    transactions: Mapping[str, int],
    once: Once,
) -> Done | Repeated:
    action = Put(texts)
    return await group.do(
        PendingOperation((participant,), action, (action.keys,), participant, transactions, once)
    )


def _texts(table_schema: Any, chunks: Sequence[pa.Table]) -> dict[str, str]:
    return {key: val for table in chunks for key, val in zip(*table_schema.texts(table), strict=True)}
