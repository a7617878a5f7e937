"""A put of more entries than may be in memory, as one commit.

1. *Spill*: the entries go, chunk by chunk, to parts of their own in the blob store, sorted by key, with
   their number as time. No state names these parts; they are deleted at the end, or swept after a crash.
2. *Stage*, without holding up other operations: the spilled entries are merged with the contents before the
   upper of the view, both in key order. What changes, old values and new ones, becomes a staged batch.
3. *Commit*, in a turn with the groups of the client. What other commits did since 2 to the same keys is taken
   back by a *correction*, a second batch: the staged one replaces what was there before them. If they are too
   large to be read, stage again; after `ROUNDS` times within the turn, where no other operation of the client
   goes.

If the entries replace all contents (`whole`), what has other keys is retracted, too, and a correction takes
back all that others did meanwhile.

A process that stood still for longer than its lease stages again; if the sweep has deleted the spilled
entries meanwhile, they are spilled again, unless they came from an iterator (`EntriesExpired`).

Memory: that of two uploads and a merge (`settings.blob_target_size`, `settings.read_memory_bytes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiopersist.base.errors import (
    BatchExpired,
    Error,
    LeaseExpired,
    ShardFinalized,
    SinceViolation,
    UpperMismatch,
)
from aiopersist.base.frontier import Antichain, last_before, minimum, successor
from aiopersist.base.progress import Progressing, progress
from aiopersist.base.resource import run_bounded
from aiopersist.data.lazy import pa, pc
from aiopersist.data.updates.assemble import at_time, concat
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.parts.runs import merged, plan_runs
from aiopersist.parts.upload import Upload
from aiopersist.read.interval import hold_for, parts_since
from aiopersist.read.query import Query
from aiopersist.read.snapshot import groups
from aiopersist.shard import fairness
from aiopersist.shard.hold import HistoryPin
from aiopersist.shard.registration import Registration
from aiopersist.state.command import micros
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.once import Once
from aiopersist.state.writing import RepeatedMark, last_complete, repeat_of
from aiopersist.table.bulk.replacing import Replacing, ReplacingAll, numbered
from aiopersist.table.commit.participant import TableParticipant
from aiopersist.table.commit.plan import Done, Repeated
from aiopersist.table.view.contents import size_of
from aiopersist.table.view.lookup import wanted_keys
from aiopersist.write.append import append_all
from aiopersist.write.batch import Batch
from aiopersist.write.batches import BatchesAppend
from aiopersist.write.staged import StagedBatch, Use

ROUNDS = 2  # of staging beside other operations


class EntriesExpired(BatchExpired):
    """The process stood still, and the sweep has deleted the spilled entries: spill them again."""


class BeginAgain(Exception):  # never leaves the package
    """What was committed since the batch was staged is too large to be read."""


@dataclass(eq=False)
class Staging:
    """What was staged, and what was committed since."""

    need: HistoryPin
    """Holds since at `seen` when it was staged."""
    batches: list[StagedBatch]
    """What replaces the contents, then corrections."""
    seen: Antichain
    """Everything before it is reckoned with: contents, then updates."""
    correction: list[pa.Table] = field(default_factory=list)
    """The updates since then to the same keys, taken back, of which there is no batch yet."""


@dataclass(eq=False)
class Bulk:
    """See the header. One put; `close` deletes what was not appended."""

    member: TableParticipant
    turn: asyncio.Lock
    """The turn of the groups of the client."""
    transactions: Mapping[str, int] = field(default_factory=dict)
    once: Once = field(default_factory=Once)
    whole: bool = False
    """Whether the entries become the contents: keys that are not among them are deleted."""
    _rows: int = 0
    _spill: Upload | None = None
    _spilled: HollowBatch | None = None
    _registration: Registration | None = None
    _staging: Staging | None = None
    _mine: dict[str, bool] = field(default_factory=dict)
    """Of keys that others changed meanwhile, whether they are among the entries."""
    _committing: asyncio.Task[Done | Repeated] | None = None
    _is_abandoned: bool = False

    # --- spill -----------------------------------------------------------------------------------

    async def add(self, entries: pa.Table) -> None:
        """Spill entries, as columns `key` and `val`. Of several values of a key the last counts."""
        if self._spill is None:
            self._registration = await self.member.writer.begin_batch()
            self._spill = self.member.writer.context.upload(minimum(None), self._registration)
        table = await self.compute(numbered, entries, self._rows, self.member.view.kind.schema)
        self._rows += table.num_rows
        await self._spill.add(table)

    async def put(self) -> Done | Repeated:
        """Stage and commit all that was added."""
        assert self._spill is not None
        self._spilled = await self._spill.finish(Antichain(self._rows + 1))
        rounds = 0
        while True:
            rounds += 1
            alone = rounds > ROUNDS
            try:
                if not alone:
                    await self._stage()
                    await self._correct()  # most of it before the turn
                work = self._commit(alone=alone)
                self._committing = self._stack.supervisor.spawn(work, "commit a large put")
                return await asyncio.shield(self._committing)
            except EntriesExpired:
                raise
            except (
                BatchExpired,
                BeginAgain,
                LeaseExpired,
                SinceViolation,
            ):  # the process may have stood still
                continue

    def close(self) -> None:
        """Delete what was not appended; once that is known, if the caller was cancelled. Idempotent."""
        self._is_abandoned = True
        if self._committing is not None and not self._committing.done():
            self._committing.add_done_callback(lambda _: self.close())
            return
        self._drop_staging()
        if self._spill is not None:
            self._spill.discard()
        if self._registration is not None:
            self._registration.release()
            self._registration = None

    # --- stage -----------------------------------------------------------------------------------

    async def _stage(self) -> None:
        self._drop_staging()
        await self.member.catch_up()
        view, writer = self.member.view, self.member.writer
        upper = view.upper
        need = await view.session.need(hold_for(upper, None), None)
        try:
            registration = await writer.begin_batch()
            try:
                batch = await self._staged(upper, registration)
            finally:
                registration.release()
        except BaseException:
            view.session.hold.drop(need)
            raise
        self._staging = Staging(need, [batch], upper)

    async def _staged(self, upper: Antichain, registration: Registration) -> StagedBatch:
        context = self.member.writer.context
        upload = context.upload(upper, registration)
        try:
            time = max(last_before(upper) + 1, 0)
            with progress("merge", self._rows, "rows") as told:
                async with aclosing(self._replacing(upper, time, told)) as found:
                    async for updates in found:
                        await upload.add(updates)
            return StagedBatch(context, registration, await upload.finish(successor(time)))
        except BaseException:
            upload.discard()
            raise

    async def _replacing(
        self, upper: Antichain, time: int, told: Progressing
    ) -> AsyncGenerator[pa.Table, None]:
        """The updates at `time` that make the entries the contents of their keys."""
        view = self.member.view
        replacing = (ReplacingAll if self.whole else Replacing)(view.kind.schema, time)
        async with AsyncExitStack() as stack:
            old: AsyncIterator[pa.RecordBatch] | None = None
            if upper != minimum(None):
                snapshot = await view.session.snapshot(last_before(upper), wait=False)
                old = (await stack.enter_async_context(snapshot)).batches()
                if self.whole:
                    told.tell(0, self._rows + (await snapshot.stats()).updates_max)
            runs = plan_runs(self._named)
            new = await stack.enter_async_context(
                aclosing(merged(self._fetch, runs, Selection(), "", final=False))
            )
            async for table in _with_end(self._while_there(new)):
                await self.compute(replacing.add, table)
                told.advance(table.num_rows if table is not None else 0)
                while old is not None and replacing.needs_old:
                    batch = await anext(old, None)
                    await self.compute(replacing.add_old, batch)
                    told.advance(batch.num_rows if batch is not None and self.whole else 0)
                    old = None if batch is None else old
                    if (gone := replacing.take_gone()).num_rows:
                        yield gone
                for updates in (replacing.take_gone(), await self.compute(replacing.take)):
                    if updates.num_rows:
                        yield updates

    # --- commit ----------------------------------------------------------------------------------

    async def _commit(self, *, alone: bool) -> Done | Repeated:
        member = self.member
        async with self.turn:
            await fairness.yield_to_others([member.register])
            if alone:
                await self._stage()
            while True:
                now = await self._stack.clock.now()
                repeat = repeat_of(member.state, now, self)
                if repeat is not None:
                    return Repeated(repeat.time)
                races = {member.register: member.register.seqno}
                staging = await self._correct()
                if staging.seen != member.state.upper:  # more came meanwhile
                    await fairness.lost(races)
                    continue
                member.check_schema()
                if self._is_abandoned:  # its caller was cancelled before anything was sent
                    raise asyncio.CancelledError
                if not self._has_changes(staging):
                    await member.look()
                    if member.state.upper == staging.seen:
                        return Done(last_complete(staging.seen), None)
                    continue
                time = max(micros(now), self._stack.clock.seen, last_before(staging.seen) + 1)
                try:
                    await self._append(staging, time)
                except (UpperMismatch, RepeatedMark):
                    continue
                with suppress(Error):  # it is in; the view follows later
                    await member.catch_up()
                return Done(time, None)

    def _has_changes(self, staging: Staging) -> bool:
        is_marked = self.once.hashes or self.transactions
        return bool(is_marked or staging.correction or any(batch.hollow.parts for batch in staging.batches))

    async def _append(self, staging: Staging, time: int) -> None:
        writer, lower, upper = self.member.writer, staging.seen, successor(time)
        if staging.correction:
            staging.batches.append(await self._corrected(staging, time))
            staging.correction = []
        batches = [Batch(staged) for staged in staging.batches]
        for batch in batches:
            batch.rewrite_ts(time, upper)
        marks = self.transactions, self.once
        append = BatchesAppend(writer, lower, upper, batches, *marks, is_of_a_table=True)
        await append_all([append])

    async def _corrected(self, staging: Staging, time: int) -> StagedBatch:
        """The correction as a batch."""
        context, registration = self.member.writer.context, await self.member.writer.begin_batch()
        upload = context.upload(staging.seen, registration)
        try:
            table = concat(staging.correction, context.schema)
            await upload.add(at_time(table, time, context.schema))
            return StagedBatch(context, registration, await upload.finish(successor(time)))
        except BaseException:
            upload.discard()
            raise
        finally:
            registration.release()

    async def _correct(self) -> Staging:
        """Reckon with what was committed since, up to the newest state that this process knows when this is
        called."""
        staging, state = self._staging, self.member.state
        assert staging is not None
        if staging.seen != state.upper:
            table = await self._committed_since(staging, state)
            if not self.whole:
                table = await self._only_mine(table)
            diffs = pc.negate(table.column("diff"))
            if table.num_rows:
                staging.correction.append(table.set_column(3, table.schema.field("diff"), diffs))
            staging.seen = state.upper
        return staging

    async def _committed_since(self, staging: Staging, state: State) -> pa.Table:
        session = self.member.view.session
        if state.finalized:
            raise ShardFinalized("it is finalized", shard_id=session.shard.id)
        session.hold.check(staging.need.reader)
        if size_of(parts_since(state, staging.seen)) > self._stack.settings.read_memory_bytes:
            raise BeginAgain
        table: pa.Table = await session.updates_since(staging.seen, state, staging.need.reader)
        return table

    async def _only_mine(self, table: pa.Table) -> pa.Table:
        """The updates to keys that are to be put."""
        texts = await self._keys_of(table)
        unknown = [text for text in dict.fromkeys(texts) if text not in self._mine]
        if unknown:
            mine = await self._among_entries(unknown)
            self._mine.update((text, text in mine) for text in unknown)
        return table.filter(pa.array([self._mine[text] for text in texts], pa.bool_()))

    async def _among_entries(self, keys: list[str]) -> set[str]:
        """Those keys that are to be put."""
        kind = self.member.view.kind
        wanted = await self.compute(wanted_keys, kind, keys)
        parts = await self.compute(Query(kind.schema, keys=wanted).matching, self._named)
        selection = Selection(keys=wanted)
        jobs = [partial(self._fetch.table, group, selection, "") for group in groups(parts)]
        at_once = self._stack.settings.fetch_max_outstanding_parts
        with self._reading_entries():
            tables = await run_bounded(at_once, jobs)
        return set(await self._keys_of(concat(tables, kind.schema)))

    async def _keys_of(self, table: pa.Table) -> list[str]:
        if not table.num_rows:
            return []
        texts, _ = await self._stack.compute_few(table.nbytes, self.member.view.kind.texts, table)
        return texts  # type: ignore[no-any-return]

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _stack(self) -> Any:
        return self.member.writer.shard.stack

    @property
    def compute(self) -> Any:
        """Run work on a thread."""
        return self._stack.compute

    @property
    def _fetch(self) -> Fetch:
        return self.member.view.session.fetch

    @property
    def _named(self) -> list[Named]:
        assert self._spilled is not None
        return [(self._spilled, part) for part in self._spilled.parts]

    @contextmanager
    def _reading_entries(self) -> Iterator[None]:
        """Around reads of the spilled entries."""
        try:
            yield
        except LeaseExpired as error:  # no lease of a reader keeps them: the registration did
            text = "the entries of the put were deleted, as its process stood still: put them again"
            raise EntriesExpired(text, shard_id=self.member.writer.shard.id) from error

    async def _while_there(self, tables: AsyncIterator[pa.Table]) -> AsyncGenerator[pa.Table, None]:
        with self._reading_entries():
            async for table in tables:
                yield table

    def _drop_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            self.member.view.session.hold.drop(staging.need)
            for staged in staging.batches:
                staged.abandon()
            if any(staged.use is Use.BUSY for staged in staging.batches):
                self._stack.supervisor.spawn(self.member.writer.idle(), "settle a large put")


async def _with_end(tables: AsyncIterator[pa.Table]) -> AsyncGenerator[pa.Table | None, None]:
    async for table in tables:
        yield table
    yield None
