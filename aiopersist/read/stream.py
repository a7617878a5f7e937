"""The contents of a shard at one time as a stream of batches, in bounded memory.

Every run of parts is sorted, so runs are merged slab by slab (`data.merge`): each holds about one
row group in memory, whatever its size. All inline parts together are one run, since the state
bounds them.
"""

from collections.abc import AsyncGenerator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from aiopersist.data.consolidate import sort_and_consolidate
from aiopersist.data.merge import Merge
from aiopersist.frontier import Time
from aiopersist.resource import run_bounded
from aiopersist.shard.fetch import Fetch, Named, Selection

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

BATCH_ROWS = 65_536  # of a batch that is handed out


def plan_runs(parts: list[Named]) -> list[list[Named]]:
    """The parts in the blob store by run: `batch.runs` names the first part of every run but the first."""
    runs: list[list[Named]] = []
    for _, group in groupby(parts, key=lambda named: id(named[0])):
        for number, (batch, part) in enumerate(group):
            if number == 0 or number in batch.runs:
                runs.append([])
            runs[-1].append((batch, part))
    return [run for run in runs if run[0][1].inline is None]


def keeps_order(fetch: Fetch, parts: list[Named]) -> bool:
    """Whether the parts are sorted as `fetch` reads them: fields that an older schema leaves out may
    change the order of rows."""
    return all(part.schema_id <= fetch.schema_id for _, part in parts)


async def contents_in_batches(
    fetch: Fetch, parts: list[Named], as_of: Time, reader: str
) -> "AsyncGenerator[pa.RecordBatch, None]":
    """Contents at `as_of`, globally consolidated, in key order."""
    selection = Selection(as_of=as_of)
    inline = [named for named in parts if named[1].inline is not None]
    sources = [_inline(fetch, inline, selection, reader)]
    if keeps_order(fetch, parts):
        sources += [_run(fetch, run, selection, reader) for run in plan_runs(parts)]
    else:
        blobs = [named for named in parts if named[1].inline is None]
        sources.append(_inline(fetch, blobs, selection, reader))
    merge = Merge(len(sources), fetch.schema, final=True)
    at_once = fetch.stack.settings.fetch_max_outstanding_parts
    try:
        while not merge.done:
            runs = merge.needs()
            slabs = await run_bounded(at_once, [partial(anext, sources[run], None) for run in runs])
            for run, slab in zip(runs, slabs, strict=True):
                merge.push(run, slab)
            table = await fetch.stack.compute(merge.pop)
            for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                if batch.num_rows:
                    yield batch
    finally:
        for source in sources:
            await source.aclose()


async def _run(
    fetch: Fetch, run: list[Named], selection: Selection, reader: str
) -> "AsyncGenerator[pa.Table, None]":
    for named in run:
        async for slab in fetch.slabs(named, selection, reader):
            yield slab


async def _inline(
    fetch: Fetch, parts: list[Named], selection: Selection, reader: str
) -> "AsyncGenerator[pa.Table, None]":
    table = await fetch.table(parts, selection, reader)
    yield await fetch.stack.compute(sort_and_consolidate, table)
