"""The updates of many parts as one sorted stream, in bounded memory.

Every run of parts is sorted, so runs are merged slab by slab (`data/merge.py`): each holds about one
and a half row groups in memory, whatever its size. All inline parts together are one run, since the
state bounds them.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from aiopersist.data.consolidate import sort_and_consolidate
from aiopersist.data.merge import Merge
from aiopersist.resource import run_bounded
from aiopersist.shard.fetch import Fetch, Named, Selection

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


def plan_runs(parts: Sequence[Named]) -> list[list[Named]]:
    """The parts, all of each batch, by run: `batch.runs` names the first part of every run but the first."""
    runs: list[list[Named]] = []
    for _, group in groupby(parts, key=lambda named: id(named[0])):
        for number, (batch, part) in enumerate(group):
            if number == 0 or number in batch.runs:
                runs.append([])
            runs[-1].append((batch, part))
    return runs


async def merged(
    fetch: Fetch,
    runs: Sequence[Sequence[Named]],
    selection: Selection,
    reader: str,
    *,
    final: bool,
    on_slab: "Callable[[pa.Table], None]" = lambda slab: None,
) -> "AsyncGenerator[pa.Table, None]":
    """What `selection` asks for of the parts of these runs: sorted, consolidated, in tables that follow
    each other. `final`: contents, as `Merge` gives them. `on_slab` is told what was read."""
    parts = [named for run in runs for named in run]
    inline = [named for named in parts if named[1].inline is not None]
    sources = [_at_once(fetch, inline, selection, reader)] if inline else []
    if keeps_order(fetch, parts):
        in_blobs = ([named for named in run if named[1].inline is None] for run in runs)
        sources += [_run(fetch, run, selection, reader) for run in in_blobs if run]
    else:
        whole = [named for named in parts if named[1].inline is None]
        sources.append(_at_once(fetch, whole, selection, reader))
    merge = Merge(len(sources), fetch.schema, final=final)
    at_once = fetch.stack.settings.fetch_max_outstanding_parts
    try:
        while not merge.done:
            needed = merge.needs()
            slabs = await run_bounded(at_once, [partial(anext, sources[n], None) for n in needed])
            for number, slab in zip(needed, slabs, strict=True):
                merge.push(number, slab)
                if slab is not None:
                    on_slab(slab)
            slabs.clear()
            table = await fetch.stack.compute(merge.pop)
            if table.num_rows:
                yield table
    finally:
        for source in sources:
            await source.aclose()


def keeps_order(fetch: Fetch, parts: Sequence[Named]) -> bool:
    """Whether the parts are sorted as `fetch` reads them: fields that an older schema leaves out may
    change the order of rows."""
    return all(part.schema_id <= fetch.schema_id for _, part in parts)


async def _run(
    fetch: Fetch, run: list[Named], selection: Selection, reader: str
) -> "AsyncGenerator[pa.Table, None]":
    for named in run:
        async for slab in fetch.slabs(named, selection, reader):
            yield slab


async def _at_once(
    fetch: Fetch, parts: list[Named], selection: Selection, reader: str
) -> "AsyncGenerator[pa.Table, None]":
    table = await fetch.table(parts, selection, reader)
    yield await fetch.stack.compute(sort_and_consolidate, table)
