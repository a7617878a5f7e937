"""The updates of many parts as one sorted stream, in bounded memory.

Every run of parts is sorted, so runs of any size are merged slab by slab (`data/updates/merge.py`). A *slab*
is a table of a run's next rows, decoded. Memory has one fetched range of row groups of each run, encoded, and
some slabs of it; the more runs, the smaller the slabs. All inline parts together are one run, since their
size is limited.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import groupby

from aiopersist.base.resource import run_bounded
from aiopersist.data.lazy import pa
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.data.updates.merge import Merge
from aiopersist.parts.fetch import Fetch, Named, Selection, Slabs
from aiopersist.state.model import HollowBatch

SLABS_PER_RUN = 5  # in memory: one and a half that wait, and the copies that a step sorts
SLAB_MIN_BYTES = 64 * 1024  # smaller slabs cost more in calls than they save in memory
READ_SHARE = 2  # slabs get this share of a read's memory; allocators keep as much again


def plan_runs(parts: Sequence[Named]) -> list[list[Named]]:
    """The parts grouped by run. They must include all parts of each batch. `batch.runs` has the number of the
    first part of each run but the first."""
    runs: list[list[Named]] = []
    for _, group in groupby(parts, key=lambda named: id(named[0])):
        named = list(group)
        starts = {0, *named[0][0].runs}
        for number, part in enumerate(named):
            if number in starts:
                runs.append([])
            runs[-1].append(part)
    return runs


def are_contents(parts: Sequence[Named], schema_id: int) -> bool:
    """Whether the rows of these parts are contents without further work: one sorted run of updates at one
    time, so that no key and value appear twice."""
    if not parts:
        return False
    batch, first = parts[0]
    is_one_run = not batch.runs and (len(parts) == 1 or first.inline is None)
    return (
        is_one_run
        and _has_one_time(batch)
        and all(
            other is batch and part.schema_id == schema_id and part.rewrite is None and part.truncated is None
            for other, part in parts
        )
    )


def _has_one_time(batch: HollowBatch) -> bool:
    """Int times: all updates are of one append, or a compaction advanced them to since."""
    lower, upper = batch.lower.elements, batch.upper.elements
    times = [time for time in (*lower, *upper) if isinstance(time, int)]
    return len(times) == 2 and (times[0] + 1 == times[1] or batch.uncompacted == 0)


def slab_bytes(memory: int, runs: int, row_group_bytes: int) -> int:
    """Goodbytes of each run to decode at once, if `memory` bytes are for the slabs of all runs."""
    share = memory // (SLABS_PER_RUN * max(runs, 1))
    return max(min(row_group_bytes, share), min(row_group_bytes, SLAB_MIN_BYTES))


async def merged(
    fetch: Fetch,
    runs: Sequence[Sequence[Named]],
    selection: Selection,
    reader: str,
    *,
    final: bool,
    memory: int | None = None,
    on_slab: "Callable[[pa.Table], None]" = lambda slab: None,
) -> "AsyncGenerator[pa.Table, None]":
    """The selected updates of these runs, sorted and consolidated, in consecutive tables. `final`: contents,
    see `Merge`. `memory` is for slabs; by default that of a read. `on_slab` gets each slab that was read."""
    settings = fetch.stack.settings
    if memory is None:
        memory = settings.read_memory_bytes // READ_SHARE
    slab = slab_bytes(memory, len(runs), settings.row_group_bytes)
    sources = [_RunSource(ranges) for ranges in _by_run(fetch, runs, selection, reader, slab)]
    merge = Merge(len(sources), fetch.schema, final=final)
    at_once = settings.fetch_max_outstanding_parts
    step = partial(_step, merge, sources, on_slab)
    try:
        while True:
            dry, table = await fetch.stack.compute(step)
            if table is not None:
                yield table
                del table
            elif dry:
                await run_bounded(at_once, [source.fetch for source in dry])
            else:
                return
    finally:
        for source in sources:
            await source.ranges.aclose()


class _RunSource:
    """A run in a merge: its ranges are fetched, and slabs of a range are decoded."""

    def __init__(self, ranges: AsyncGenerator[Slabs, None]) -> None:
        self.ranges = ranges
        self.slabs: Slabs = iter(())
        self.at_end = False

    async def fetch(self) -> None:
        """Fetch the next range."""
        slabs = await anext(self.ranges, None)
        self.at_end = slabs is None
        self.slabs = slabs if slabs is not None else iter(())


def _step(
    merge: Merge, sources: Sequence[_RunSource], on_slab: "Callable[[pa.Table], None]"
) -> "tuple[list[_RunSource], pa.Table | None]":
    """Decode and merge until a table is final, and return it; or the sources that must fetch first; or
    neither at the end. One call does this on one thread: allocators reuse the memory of one step for the next
    only within a thread."""
    while not merge.done:
        if dry := _push_slabs(merge, sources, on_slab):
            return dry, None
        if (table := merge.pop()).num_rows:
            pa.default_memory_pool().release_unused()
            return [], table
    return [], None


def _push_slabs(
    merge: Merge, sources: Sequence[_RunSource], on_slab: "Callable[[pa.Table], None]"
) -> list[_RunSource]:
    """Push the next slab of each run that the merge needs. Returns the sources that must fetch first."""
    dry = []
    for number in merge.needs():
        source = sources[number]
        slab = next(source.slabs, None)
        if slab is None and not source.at_end:
            dry.append(source)
            continue
        merge.push(number, slab)
        if slab is not None:
            on_slab(slab)
    return dry


def _by_run(
    fetch: Fetch, runs: Sequence[Sequence[Named]], selection: Selection, reader: str, slab: int
) -> Iterator[AsyncGenerator[Slabs, None]]:
    """The ranges of each run. All inline parts are one run; so are blobs whose order the schema changes."""
    parts = [named for run in runs for named in run]
    if inline := [named for named in parts if named[1].inline is not None]:
        yield _at_once(fetch, inline, selection, reader)
    if keeps_order(fetch, parts):
        in_blobs = ([named for named in run if named[1].inline is None] for run in runs)
        yield from (_run(fetch, run, selection, reader, slab) for run in in_blobs if run)
    else:
        whole = [named for named in parts if named[1].inline is None]
        yield _at_once(fetch, whole, selection, reader)


def keeps_order(fetch: Fetch, parts: Sequence[Named]) -> bool:
    """Whether the parts stay sorted in the schema of `fetch`. An older schema leaves out fields, which may
    change the order of rows."""
    return all(part.schema_id <= fetch.schema_id for _, part in parts)


async def _run(
    fetch: Fetch, run: list[Named], selection: Selection, reader: str, slab: int
) -> AsyncGenerator[Slabs, None]:
    for named in run:
        async with aclosing(fetch.slabs(named, selection, reader, slab)) as ranges:
            async for slabs in ranges:
                yield slabs


async def _at_once(
    fetch: Fetch, parts: list[Named], selection: Selection, reader: str
) -> AsyncGenerator[Slabs, None]:
    table = await fetch.table(parts, selection, reader)
    yield map(sort_and_consolidate, [table])
