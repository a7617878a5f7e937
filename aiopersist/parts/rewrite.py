"""Runs of parts become one: sorted and consolidated, in bounded memory.

What is little is read all at once. What is much is merged, each run slab by slab (`runs.py`), on a thread of
its own; all inline parts are one run. Then it is written as sorted parts (`sorted_parts.py`).

Memory: `settings.compaction_memory_bytes`, whatever the size of the input.
"""

from collections.abc import Iterable, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.consolidate import diff_sum
from aiopersist.frontier import Antichain
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.parts.runs import merged
from aiopersist.parts.sorted_parts import SortedParts
from aiopersist.resource import run_bounded
from aiopersist.settings import MIB, Settings
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import Total, goodbytes_at_most
from aiopersist.state.record import HollowPart

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

RANGE_BYTES = 2 * MIB  # fetched at once of a run: enough that a request does not matter
PAGES_BYTES = 2 * MIB  # decoded beside a slab: a page of each column
WHOLE_SHARE = 64  # of the memory, goodbytes that are read whole: sorted and encoded they are there five times
WHOLE_BYTES_MAX = 4 * MIB  # more gains nothing


class Budget(NamedTuple):
    """How the memory of a compaction is divided: 3/8 for what was fetched, encoded; 3/16 for slabs; 1/4 for
    the part that is written and the one that is uploaded; the rest is for what allocators keep."""

    memory: int
    row_group_bytes: int
    part_bytes_max: int

    @classmethod
    def of(cls, settings: Settings) -> "Budget":
        return cls(settings.compaction_memory_bytes, settings.row_group_bytes, settings.blob_target_size)

    def runs_max(self, parts: Iterable[HollowPart]) -> int:
        """How many runs of such parts may be read at once."""
        shares = (part.size / part.goodbytes for part in parts if part.key is not None and part.goodbytes)
        row_group = min(self.row_group_bytes, int(self.row_group_bytes * max(shares, default=1.0)) + 1)
        return max(self.memory * 3 // 8 // (max(RANGE_BYTES, row_group) + PAGES_BYTES), 2)

    @property
    def slabs_bytes(self) -> int:
        """All slabs together."""
        return self.memory * 3 // 16

    @property
    def part_bytes(self) -> int:
        """Encoded bytes at which a part is cut."""
        return max(min(self.part_bytes_max, self.memory // 8), 1)


def whole_bytes(settings: Settings) -> int:
    """Goodbytes that are read, sorted and written all at once."""
    return min(settings.compaction_memory_bytes // WHOLE_SHARE, WHOLE_BYTES_MAX)


class Target(NamedTuple):
    """What is made of the runs: for whom it is written, and what it says."""

    schema: Schema[Any, Any, Any]
    writer: str
    lower: Antichain
    since: Antichain
    inline_max_bytes: int
    """Less than so many goodbytes are one inline part."""


class Rewritten(NamedTuple):
    """The parts, all uploaded, and who can discard them; what was read."""

    parts: tuple[HollowPart, ...]
    output: SortedParts
    read: Total


def goodbytes_of(runs: Sequence[Sequence[Named]]) -> float:
    """Of all their updates, at most."""
    return sum(goodbytes_at_most(part) for run in runs for _, part in run)


async def rewrite(
    shard: Shard, runs: Sequence[Sequence[Named]], selection: Selection, target: Target
) -> Rewritten:
    """Read what `selection` asks for of sorted runs, and write it as one. Whatever it raises, what was
    written is deleted. Requests for every part that is read or written."""
    is_little = goodbytes_of(runs) <= whole_bytes(shard.stack.settings)
    with nullcontext(shard.stack) if is_little else shard.stack.on_one_thread() as stack:
        output = _output(shard, stack, target)
        merge = _whole if is_little else _slab_by_slab
        fetch = Fetch(shard, target.schema, cached=False, range_bytes=RANGE_BYTES, stack=stack)
        try:
            read = await merge(fetch, runs, selection, output)
            return Rewritten(await output.finish(), output, read)
        except BaseException:
            stack.supervisor.spawn(output.discard(), "delete parts of a compaction that failed")
            raise


def _output(shard: Shard, stack: Stack, target: Target) -> SortedParts:
    """Where the updates go."""
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
    fetch: Fetch, runs: Sequence[Sequence[Named]], selection: Selection, output: SortedParts
) -> Total:
    """Read all at once, and write it as one part; what was read."""
    parts = [named for run in runs for named in run]
    groups = [[named] for named in parts if named[1].key is not None]
    groups += [inline] if (inline := [named for named in parts if named[1].key is None]) else []
    jobs = [partial(fetch.table, group, selection, "") for group in groups]
    tables = await run_bounded(fetch.stack.settings.fetch_max_outstanding_parts, jobs)
    return await output.add_all(concat(tables, fetch.schema))


async def _slab_by_slab(
    fetch: Fetch, runs: Sequence[Sequence[Named]], selection: Selection, output: SortedParts
) -> Total:
    """Merge the runs into parts, in bounded memory; what was read."""
    read = Total(0, 0)

    def count(slab: "pa.Table") -> None:
        nonlocal read
        read = Total(read.rows + slab.num_rows, (read.diffs + diff_sum(slab)) % 2**64)

    memory = Budget.of(fetch.stack.settings).slabs_bytes
    tables = merged(fetch, runs, selection, "", final=False, memory=memory, on_slab=count)
    async with aclosing(tables):
        async for table in tables:
            await output.add(table)
    return read
