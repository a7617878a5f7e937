"""The appends that bring a copy to a state of its source."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from aiopersist.backup.plan import CopyStep, int_of, plan_copy
from aiopersist.backup.reading import PinnedState, pinned
from aiopersist.backup.target import CopyAppend, check_copy, move_since, writing
from aiopersist.base.errors import OpaqueMismatch, Unsupported, UpperMismatch
from aiopersist.base.frontier import Antichain
from aiopersist.base.progress import Progressing
from aiopersist.data.arrays import int64_scalar
from aiopersist.data.lazy import pa, pc
from aiopersist.parts.fetch import Selection
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.copying import CopyMark, mark_of
from aiopersist.write.append import append_all
from aiopersist.write.session import Session

STEP_PARTS = 8  # full parts in one append: a killed copier loses no more, if history allows


@dataclass(eq=False)
class Copier:
    """See the header. `updates` counts the appended updates."""

    source: PinnedState
    copy: Shard
    shards: Shards
    """Of the copy's location."""
    progress: Progressing
    updates: int = 0
    _read: int = 0
    _read_max: int = 0

    async def run(self) -> None:
        """Append all that the copy lacks, then move its since to the source's."""
        source = self.source
        async with writing(self.copy, source.state, source.session.schema, self.shards) as session:
            while steps := self._plan():
                try:
                    for step in steps:
                        await self._append(session, step)
                except (UpperMismatch, OpaqueMismatch):
                    await self.copy.open()  # somebody else has written; `_plan` checks who
        await move_since(self.copy, source.shard.id, source.state.since)

    def _plan(self) -> Sequence[CopyStep]:
        check_copy(self.copy.state, self.copy, self.source.shard)
        step_bytes = STEP_PARTS * self.copy.stack.settings.blob_target_size
        steps = plan_copy(self.source.state, self.copy.state.upper, step_bytes)
        self._read_max = self._read + sum(step.updates_max for step in steps)
        self._tell()
        return steps

    async def _append(self, session: Session, step: CopyStep) -> None:
        read, updates = self._read, self.updates
        mark = CopyMark(mark_of(self.source.shard.id), step.since, step.is_exact)

        async def tables() -> "AsyncGenerator[pa.Table, None]":
            self._read, self.updates = read, updates  # it may run again, if its parts were lost
            async with aclosing(self._updates(step)) as updates_of_step:
                async for table in updates_of_step:
                    self.updates += table.num_rows
                    yield _within(table, step.upper)

        with session.scope.call():
            await append_all([CopyAppend(session, step.lower, step.upper, tables, mark=mark)])
        self._read = read + step.updates_max
        self._tell()

    async def _updates(self, step: CopyStep) -> "AsyncGenerator[pa.Table, None]":
        selection = Selection(advance_to=step.since) if step.replaces else Selection(lower=step.lower)
        async with aclosing(self.source.updates(step.batches, selection, self._count)) as tables:
            async for table in tables:
                yield table
                self._tell()
        if step.replaces:
            async with aclosing(self._retractions(step)) as tables:
                async for table in tables:
                    yield table

    async def _retractions(self, step: CopyStep) -> "AsyncGenerator[pa.Table, None]":
        """All updates of the copy, with negated diffs."""
        if int_of(step.lower) is None:
            text = (
                f"the source has given up the history at {step.lower}, where the copy ends, and product "
                "times do not tell what is new since then: copy to another name"
            )
            raise Unsupported(text, shard_id=self.copy.id)
        async with pinned(self.copy, self.shards, holds=False) as own:
            if own.state.upper != step.lower:
                raise UpperMismatch(step.lower, own.state.upper, shard_id=self.copy.id)
            batches, selection = tuple(own.state.batches.values()), Selection(advance_to=step.since)
            async with aclosing(own.updates(batches, selection)) as tables:
                async for table in tables:
                    yield await own.shard.stack.compute(_opposite, table)

    def _count(self, slab: "pa.Table") -> None:
        self._read += slab.num_rows

    def _tell(self) -> None:
        self.progress.tell(min(self._read, self._read_max), self._read_max)


def _opposite(table: "pa.Table") -> "pa.Table":
    at = table.schema.get_field_index("diff")
    return table.set_column(at, table.schema.field(at), pc.negate_checked(table.column(at)))


def _within(table: "pa.Table", upper: Antichain) -> "pa.Table":
    """The table with times before `upper`. Only a since beyond the upper moves times there, and readers
    beyond that since see an update at either time."""
    end = int_of(upper)
    if end is None:
        return table
    at = table.schema.get_field_index("time")
    if pc.max(table.column(at)).as_py() < end:
        return table
    times = pc.min_element_wise(table.column(at), int64_scalar(end - 1))
    return table.set_column(at, table.schema.field(at), times)
