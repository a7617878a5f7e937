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
BATCH_ROWS = 65_536  # at most, in a batch
FOLD_ROWS_MIN = 4 * BATCH_ROWS  # rows of a projection in memory before they are summed


async def in_batches(
    fetch: Fetch, runs: Runs, selection: Selection, reader: str, *, final: bool
) -> "AsyncGenerator[pa.RecordBatch, None]":
    """Globally consolidated contents in key order (`final`), or updates by (key, value, time)."""
    async with aclosing(merged(fetch, runs, selection, reader, final=final)) as tables:
        async for table in tables:
            for batch in _batches(table):
                yield batch


async def projected_in_batches(
    fetch: Fetch, runs: Runs, selection: Selection, reader: str, query: Query
) -> "AsyncGenerator[pa.RecordBatch, None]":
    """The columns of `query`, summed, in their order. If the key or its first fields come first, equal rows
    are neighbours, and this sums them as they come. Otherwise distant rows may be equal: then the result is
    in memory, but not its input."""
    pending: list[pa.Table] = []
    rows, bound, order = 0, FOLD_ROWS_MIN, query.order
    async with aclosing(merged(fetch, runs, selection, reader, final=False)) as tables:
        async for table in tables:
            pending.append(query.projected(table))
            if order:
                complete, last = await fetch.stack.compute(_parted, pending, order)
                pending = [last]
                if complete.num_rows:
                    for batch in _batches(await fetch.stack.compute(query.summed, [complete])):
                        yield batch
            rows = sum(table.num_rows for table in pending)
            if rows > bound:
                pending = [await fetch.stack.compute(query.folded, pending)]
                bound = max(FOLD_ROWS_MIN, 2 * pending[0].num_rows)
    if pending:
        for batch in _batches(await fetch.stack.compute(query.summed, pending)):
            yield batch


def _parted(pending: "list[pa.Table]", order: tuple[str, ...]) -> "tuple[pa.Table, pa.Table]":
    """The rows, sorted by `order`, in two tables. The second has the last rows that are equal by `order`:
    more of them may come."""
    table = pa.concat_tables(pending)
    rows = rows_below(table, row_key(table, -1, order), order) if table.num_rows else 0
    return table.slice(0, rows), table.slice(rows)


def _batches(table: "pa.Table") -> "list[pa.RecordBatch]":
    """The batches of a table, in types that users can write as Parquet."""
    return [batch for batch in writable(table).to_batches(max_chunksize=BATCH_ROWS) if batch.num_rows]
