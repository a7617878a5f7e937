"""The contents of a shard at one time as a stream of batches, in bounded memory."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from aiopersist.frontier import Time
from aiopersist.shard.fetch import Fetch, Named, Selection
from aiopersist.shard.runs import merged, plan_runs

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

BATCH_ROWS = 65_536  # of a batch that is handed out


async def contents_in_batches(
    fetch: Fetch, parts: list[Named], as_of: Time, reader: str
) -> "AsyncGenerator[pa.RecordBatch, None]":
    """Contents at `as_of`, globally consolidated, in key order."""
    stream = merged(fetch, plan_runs(parts), Selection(as_of=as_of), reader, final=True)
    async with aclosing(stream) as tables:
        async for table in tables:
            for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                if batch.num_rows:
                    yield batch
