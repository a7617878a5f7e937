"""Carries out the plans of `arrangement.py`: reads, writes, and returns a batch.

This changes no state and delays no writes: a later commit applies the batch, if it still fits. Failed work
deletes the blobs that it has written.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiopersist.base.frontier import Antichain
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.buffer import Buffer
from aiopersist.data.updates.sizes import goodbytes
from aiopersist.data.updates.times import Seen, filter_times
from aiopersist.indexed.arrangement import Compaction, Drain, Trim, level_after
from aiopersist.indexed.raw import RawParts
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.parts.named_parts import ZERO, of_trace, of_unsealed
from aiopersist.parts.rewrite import Budget, Rewritten, Target, goodbytes_of, output_for, rewrite, whole_bytes
from aiopersist.parts.sorted_parts import SortedParts
from aiopersist.shard.shard import Shard
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart
from aiopersist.state.streams import TraceBatch, UnsealedBatch

SORT_SHARE = 8  # an eighth of the memory is for the goodbytes of one sort; the sort needs the rest


class StreamContext(NamedTuple):
    """The stream of some work, and its writer."""

    shard: Shard
    schema: Schema[Any, Any, Any]
    schema_id: int
    writer: str
    inline_share: int
    """A batch of a trace below so many goodbytes may stay in the state: new updates need room, too."""

    def is_large(self, parts: Sequence[Named]) -> bool:
        """Whether work on these parts needs the memory of a compaction."""
        return goodbytes_of([parts]) > whole_bytes(self.shard.stack.settings)

    def inline_max(self, parts: Sequence[Named]) -> int:
        """Inline bytes that the result may have: at most those of its inputs."""
        inline = sum(part.size for _, part in parts if part.inline is not None)
        return min(self.shard.stack.settings.inline_writes_single_max_bytes, self.inline_share, inline)


class Output(NamedTuple):
    """A batch, and its parts, which can delete their blobs if no version names them."""

    batch: TraceBatch
    output: SortedParts

    async def discard(self) -> None:
        """Delete the blobs: surely no version names them."""
        await self.output.discard()


async def drain(context: StreamContext, plan: Drain) -> Output | None:
    """One batch of the trace from the unsealed updates of the interval; `None` if there are none. Requests
    for every part that is read or written."""
    parts = of_unsealed(plan.batches)
    selection = Selection(lower=Antichain(plan.lower), upper=Antichain(plan.upper))
    target = Target(context.schema, context.writer, Antichain(plan.lower), ZERO, context.inline_max(parts))
    done, selected = await _sorted_and_rewritten(context, parts, selection, target)
    if not selected:
        return None
    updates = sum(part.rows for part in done.parts)
    batch = TraceBatch(
        lower=plan.lower, upper=plan.upper, since=0, level=0, updates=updates, parts=done.parts
    )
    return Output(batch, done.output)


async def compact(context: StreamContext, plan: Compaction) -> Output:
    """One batch from two neighbours."""
    runs = [of_trace([batch]) for batch in (plan.older, plan.younger) if batch.parts]
    since = Antichain(plan.since)
    inline_max = context.inline_max([named for run in runs for named in run])
    target = Target(context.schema, context.writer, Antichain(plan.older.lower), since, inline_max)
    done = await rewrite(context.shard, runs, Selection(advance_to=since), target)
    updates = sum(part.rows for part in done.parts)
    batch = TraceBatch(
        lower=plan.older.lower,
        upper=plan.younger.upper,
        since=plan.since,
        level=level_after(plan, updates),
        updates=updates,
        parts=done.parts,
    )
    return Output(batch, done.output)


async def trim(context: StreamContext, plan: Trim, raw: RawParts) -> UnsealedBatch:
    """The batch without updates that are in the trace. Needs memory for a row group and a part."""
    stack, seen = context.shard.stack, Seen()
    selection = Selection(lower=Antichain(plan.lower))
    fetch = Fetch(context.shard, context.schema, cached=False)
    parts: list[HollowPart] = []
    held: list[tuple[Any, int]] = []
    for _, part in of_unsealed([plan.batch]):
        async with aclosing(fetch.raw_slabs(part)) as slabs:
            async for slab in slabs:
                kept = await stack.compute_few(slab.nbytes, _between, slab, selection)
                await stack.compute_few(kept.nbytes, seen.add, kept)
                held.append((kept, goodbytes(kept)))
                if sum(size for _, size in held) >= stack.settings.blob_target_size:
                    parts += await raw.write(held, context.schema, context.schema_id)
                    held = []
    parts += await raw.write(held, context.schema, context.schema_id)
    batch = plan.batch
    return batch.replace(time_least=seen.least, time_greatest=seen.greatest, parts=tuple(parts))


def _between(table: "pa.Table", selection: Selection) -> "pa.Table":
    return filter_times(table, lower=selection.lower, upper=selection.upper)


# --- sorting updates that do not fit in memory -----------------------------------------------------


async def _sorted_and_rewritten(
    context: StreamContext, parts: list[Named], selection: Selection, target: Target
) -> tuple[Rewritten, int]:
    """`rewrite` of unsorted parts, and the number of their updates. Sorts large input piece by piece into
    scratch runs, and deletes these in the end; while they are too many for one merge, merges some of them."""
    stack = context.shard.stack
    if not context.is_large(parts):
        done = await rewrite(context.shard, [parts], selection, target)
        return done, done.read.rows
    scratch = _Scratch(context, target._replace(inline_max_bytes=0))
    try:
        runs = [run async for run in scratch.sorted_pieces(parts, selection)]
        budget = Budget.of(stack.settings)
        while len(runs) > (most := budget.runs_max(part for run in runs for _, part in run)):
            runs = [*runs[most:], await scratch.merged(runs[:most])]
        return await rewrite(context.shard, runs, Selection(), target), scratch.selected
    finally:
        stack.supervisor.spawn(scratch.discard(), "delete sorted pieces")


@dataclass(eq=False)
class _Scratch:
    """Sorted runs that no version ever names."""

    context: StreamContext
    target: Target
    outputs: list[SortedParts] = field(default_factory=list)
    selected: int = 0
    """Selected updates, before they are summed."""

    async def sorted_pieces(
        self, parts: list[Named], selection: Selection
    ) -> AsyncGenerator[list[Named], None]:
        """Runs of as many updates as one sort takes in memory."""
        shard, schema = self.context.shard, self.context.schema
        most = max(shard.stack.settings.compaction_memory_bytes // SORT_SHARE, 1)
        fetch, buffer = Fetch(shard, schema, cached=False), Buffer(schema)
        for _, part in parts:
            async with aclosing(fetch.raw_slabs(part)) as slabs:
                async for slab in slabs:
                    kept = await shard.stack.compute_few(slab.nbytes, _between, slab, selection)
                    self.selected += kept.num_rows
                    buffer.add(kept)
                    while buffer.goodbytes >= most:
                        yield await self._sorted(buffer.take_reaching(most))
        if buffer.rows:
            yield await self._sorted(buffer.take())

    async def _sorted(self, table: "pa.Table") -> list[Named]:
        shard = self.context.shard
        output = output_for(shard, shard.stack, self.target)
        self.outputs.append(output)
        await output.add_all(table)
        return self._run(await output.finish())

    async def merged(self, runs: list[list[Named]]) -> list[Named]:
        """One run from several."""
        done = await rewrite(self.context.shard, runs, Selection(), self.target)
        self.outputs.append(done.output)
        return self._run(done.parts)

    async def discard(self) -> None:
        """Delete all runs."""
        for output in self.outputs:
            await output.discard()

    def _run(self, parts: Any) -> list[Named]:
        batch = HollowBatch(lower=self.target.lower, upper=Antichain(), since=ZERO, parts=parts)
        return [(batch, part) for part in parts]
