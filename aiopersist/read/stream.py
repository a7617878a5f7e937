"""The contents of a shard at one time, or its updates, as a stream of Arrow batches, in bounded memory."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiopersist.data.lazy import pa
from aiopersist.data.part.layout import writable
from aiopersist.data.updates.merge import rows_below
from aiopersist.data.updates.order import row_key
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.parts.runs import merged
from aiopersist.read.query import Query

Runs = list[list[Named]]
BATCH_ROWS = 65_536  # at most, of a batch that is handed out
FOLD_ROWS_MIN = 4 * BATCH_ROWS  # rows of a projection that are held before they are summed


async def in_batches(
    fetch: Fetch, runs: Runs, selection: Selection, reader: str, *, final: bool
) -> "AsyncGenerator[pa.RecordBatch, None]":
    """Globally consolidated contents (`final`), in key order, or updates, by (key, value, time)."""
    async with aclosing(merged(fetch, runs, selection, reader, final=final)) as tables:
        async for table in tables:
            for batch in _batches(table):
                yield batch


async def projected_in_batches(
    fetch: Fetch, runs: Runs, selection: Selection, reader: str, query: Query
) -> "AsyncGenerator[pa.RecordBatch, None]":
    """The columns of `query`, summed, in their order. If the key, or fields of it from the first one on, come
    first, rows that are alike are near each other, and so they are summed as they come. Distant rows may have
    the same projection otherwise: the result is held in memory, but not the rows that it is made of."""
    held: list[pa.Table] = []
    rows, bound, order = 0, FOLD_ROWS_MIN, query.order
    async with aclosing(merged(fetch, runs, selection, reader, final=False)) as tables:
        async for table in tables:
            held.append(query.projected(table))
            if order:
                settled, waiting = await fetch.stack.compute(_parted, held, order)
                held = [waiting]
                if settled.num_rows:
                    for batch in _batches(await fetch.stack.compute(query.summed, [settled])):
                        yield batch
            rows = sum(some.num_rows for some in held)
            if rows > bound:
                held = [await fetch.stack.compute(query.folded, held)]
                bound = max(FOLD_ROWS_MIN, 2 * held[0].num_rows)
    if held:
        for batch in _batches(await fetch.stack.compute(query.summed, held)):
            yield batch


def _parted(held: "list[pa.Table]", order: tuple[str, ...]) -> "tuple[pa.Table, pa.Table]":
    """The rows before the last ones that are alike in the columns of `order`, by which they are sorted; and
    these, which may go on."""
    table = pa.concat_tables(held)
    rows = rows_below(table, row_key(table, -1, order), order) if table.num_rows else 0
    return table.slice(0, rows), table.slice(rows)


def _batches(table: "pa.Table") -> "list[pa.RecordBatch]":
    """As they are handed out: others may write them as Parquet."""
    return [batch for batch in writable(table).to_batches(max_chunksize=BATCH_ROWS) if batch.num_rows]
