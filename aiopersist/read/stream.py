"""The contents of a shard at one time, or its updates, as a stream of Arrow batches, in bounded memory."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiopersist.data.lazy import pa
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.parts.runs import merged
from aiopersist.read.query import Query

Runs = list[list[Named]]
BATCH_ROWS = 65_536  # at most, of a batch that is handed out
FOLD_ROWS_MIN = 4 * BATCH_ROWS  # rows of a projection that are held before they are summed


async def in_batches(
    fetch: Fetch, runs: Runs, selection: Selection, reader: str, *, final: bool
) -> "AsyncGenerator[pa.RecordBatch, None]":
    """Globally consolidated contents (`final`), in key order, or updates, by (key, val, time)."""
    async with aclosing(merged(fetch, runs, selection, reader, final=final)) as tables:
        async for table in tables:
            for batch in _batches(table):
                yield batch


async def projected_in_batches(
    fetch: Fetch, runs: Runs, selection: Selection, reader: str, query: Query
) -> "AsyncGenerator[pa.RecordBatch, None]":
    """The columns of `query`, summed, in their order. Distant rows may have the same projection, so the
    result is held in memory, but not the rows that it is made of."""
    held: list[pa.Table] = []
    rows, bound = 0, FOLD_ROWS_MIN
    async with aclosing(merged(fetch, runs, selection, reader, final=False)) as tables:
        async for table in tables:
            held.append(query.projected(table))
            rows += table.num_rows
            if rows > bound:
                held = [await fetch.stack.compute(query.folded, held)]
                rows = held[0].num_rows
                bound = max(FOLD_ROWS_MIN, 2 * rows)
    if held:
        for batch in _batches(await fetch.stack.compute(query.summed, held)):
            yield batch


def _batches(table: "pa.Table") -> "list[pa.RecordBatch]":
    return [batch for batch in table.to_batches(max_chunksize=BATCH_ROWS) if batch.num_rows]
