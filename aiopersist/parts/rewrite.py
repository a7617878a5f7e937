"""Runs of parts become one run: sorted and consolidated, in bounded memory.

A small input is read at once. A larger input is merged slab by slab (`runs.py`), on a thread of its own.
The result is written as sorted parts (`sorted_parts.py`).

Memory: `settings.compaction_memory_bytes`, whatever the size of the input.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from typing import Any, NamedTuple

from aiopersist.base.frontier import Antichain
from aiopersist.base.resource import run_bounded
from aiopersist.base.settings import MIB, Settings
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.consolidate import diff_sum
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.parts.runs import merged
from aiopersist.parts.sorted_parts import SortedParts
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import Total
from aiopersist.state.record import HollowPart, goodbytes_at_most

RANGE_BYTES = 2 * MIB  # fetched at once of a run: large enough that the time of a request does not matter
PAGES_BYTES = 2 * MIB  # decoded besides a slab: a page of each column
WHOLE_SHARE = 64  # inputs of this share of the memory are read at once: in all five copies
WHOLE_BYTES_MAX = 4 * MIB  # more gains nothing


class Budget(NamedTuple):
    """The shares of a compaction's memory: 3/8 for fetched ranges, 3/16 for slabs, 1/4 for two encoded parts
    (one being written, one being uploaded); the rest for the bytes that allocators keep."""

    memory: int
    row_group_bytes: int
    part_bytes_max: int

    @classmethod
    def of(cls, settings: Settings) -> "Budget":
        return cls(settings.compaction_memory_bytes, settings.row_group_bytes, settings.blob_target_size)

    def runs_max(self, parts: Iterable[HollowPart]) -> int:
        """The number of runs, with parts of this size, that may be read at once."""
        shares = (part.size / part.goodbytes for part in parts if part.key is not None and part.goodbytes)
        row_group = min(self.row_group_bytes, int(self.row_group_bytes * max(shares, default=1.0)) + 1)
        return max(self.memory * 3 // 8 // (max(RANGE_BYTES, row_group) + PAGES_BYTES), 2)

    @property
    def slabs_bytes(self) -> int:
        """The bytes for all slabs together."""
        return self.memory * 3 // 16

    @property
    def part_bytes(self) -> int:
        """Encoded bytes at which a part is cut."""
        return max(min(self.part_bytes_max, self.memory // 8), 1)


def whole_bytes(settings: Settings) -> int:
    """Inputs of at most so many goodbytes are read, sorted and written all at once."""
    return min(settings.compaction_memory_bytes // WHOLE_SHARE, WHOLE_BYTES_MAX)


class Target(NamedTuple):
    """Schema, writer and description of the result."""

    schema: Schema[Any, Any, Any]
    writer: str
    lower: Antichain
    since: Antichain
    inline_max_bytes: int
    """Fewer goodbytes become one inline part."""


class Rewritten(NamedTuple):
    """The uploaded parts; `output`, which can discard them; and the total of the input."""

    parts: tuple[HollowPart, ...]
    output: SortedParts
    read: Total


def goodbytes_of(runs: Sequence[Sequence[Named]]) -> float:
    """The goodbytes of all updates in the runs, at most."""
    return sum(goodbytes_at_most(part) for run in runs for _, part in run)


async def rewrite(
    shard: Shard,
    runs: Sequence[Sequence[Named]],
    selection: Selection,
    target: Target,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> Rewritten:
    """Read the selected updates of sorted runs, and write them as one run. `on_rows` gets the number of
    further rows. After an error the written blobs are deleted. Requests for each part read or written."""
    is_little = goodbytes_of(runs) <= whole_bytes(shard.stack.settings)
    with nullcontext(shard.stack) if is_little else shard.stack.on_one_thread() as stack:
        output = output_for(shard, stack, target)
        merge = _whole if is_little else _slab_by_slab
        fetch = Fetch(shard, target.schema, cached=False, range_bytes=RANGE_BYTES, stack=stack)
        try:
            read = await merge(fetch, runs, selection, output, on_rows)
            return Rewritten(await output.finish(), output, read)
        except BaseException:
            stack.supervisor.spawn(output.discard(), "delete parts of a compaction that failed")
            raise


def output_for(shard: Shard, stack: Stack, target: Target) -> SortedParts:
    """A writer of one run."""
    return SortedParts(
        shard,
        target.schema,
        target.writer,
        target.lower,
        target.since,
        part_bytes=Budget.of(stack.settings).part_bytes,
        inline_max_bytes=target.inline_max_bytes,
        stack=stack,
    )


async def _whole(
    fetch: Fetch,
    runs: Sequence[Sequence[Named]],
    selection: Selection,
    output: SortedParts,
    on_rows: Callable[[int], None],
) -> Total:
    """Read all updates at once, and write them as one part. Returns the total of the input."""
    parts = [named for run in runs for named in run]
    groups = [[named] for named in parts if named[1].key is not None]
    groups += [inline] if (inline := [named for named in parts if named[1].key is None]) else []
    jobs = [partial(fetch.table, group, selection, "") for group in groups]
    tables = await run_bounded(fetch.stack.settings.fetch_max_outstanding_parts, jobs)
    read = await output.add_all(concat(tables, fetch.schema))
    on_rows(read.rows)
    return read


async def _slab_by_slab(
    fetch: Fetch,
    runs: Sequence[Sequence[Named]],
    selection: Selection,
    output: SortedParts,
    on_rows: Callable[[int], None],
) -> Total:
    """Merge the runs into parts, in bounded memory. Returns the total of the input."""
    read, reported = Total(0, 0), 0

    def count(slab: "pa.Table") -> None:
        nonlocal read
        read = Total(read.rows + slab.num_rows, (read.diffs + diff_sum(slab)) % 2**64)

    memory = Budget.of(fetch.stack.settings).slabs_bytes
    tables = merged(fetch, runs, selection, "", final=False, memory=memory, on_slab=count)
    async with aclosing(tables):
        async for table in tables:
            await output.add(table)
            on_rows(read.rows - reported)
            reported = read.rows
    return read
