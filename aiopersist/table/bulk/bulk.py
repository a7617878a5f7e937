"""A put of more entries than may be in memory, as one commit.

1. *Spill*: the entries go, chunk by chunk, to parts of their own in the blob store, sorted by key, with
   their number as time. No state names these parts; they are deleted at the end, or swept after a crash.
2. *Stage*, while other operations go on: the spilled entries are merged with the contents before the upper of
   the view, both in key order. The differences, old values and new ones, become a staged batch.
3. *Commit*, in a turn with the groups of the client. The staged batch replaces the contents of step 2, so a
   second batch, the *correction*, takes back the changes of other commits to the same keys since then. If
   these are too large to read, stage again; after `ROUNDS` times in the turn, where no other operation of
   the client goes on.

If the entries replace all contents (`replaces_all`), other keys are retracted, too, and a
correction takes back all other changes.

A process that stood still for longer than its lease stages again. If the sweep has deleted the spilled
entries, it spills them again, unless they came from an iterator (`EntriesExpired`).

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
    """The sweep deleted the spilled entries while the process stood still: spill them again."""


class BeginAgain(Exception):  # never leaves the package
    """The commits since the batch was staged are too large to read."""


@dataclass(eq=False)
class Staging:
    """The staged batches, and the commits since then."""

    pin: HistoryPin
    """Holds since at the `upper` at which it was staged."""
    batches: list[StagedBatch]
    """The batch that replaces the contents, then corrections."""
    upper: Antichain
    """The batches and `correction` cover the contents before it."""
    correction: list[pa.Table] = field(default_factory=list)
    """Updates that take back later commits to the same keys, and are in no batch yet."""


@dataclass(eq=False)
class Bulk:
    """See the header. One put; `close` deletes everything that was not appended."""

    participant: TableParticipant
    turn: asyncio.Lock
    """The turn of the groups of the client."""
    transactions: Mapping[str, int] = field(default_factory=dict)
    once: Once = field(default_factory=Once)
    replaces_all: bool = False
    """Whether other keys are deleted."""
    _rows: int = 0
    _spill: Upload | None = None
    _spilled: HollowBatch | None = None
    _registration: Registration | None = None
    _staging: Staging | None = None
    _is_own_key: dict[str, bool] = field(default_factory=dict)
    """Whether the keys that others changed meanwhile are among the entries."""
    _committing: asyncio.Task[Done | Repeated] | None = None
    _is_abandoned: bool = False

    # --- spill -----------------------------------------------------------------------------------

    async def add(self, entries: pa.Table) -> None:
        """Spill entries, as columns `key` and `val`. Of several values of a key the last counts."""
        if self._spill is None:
            self._registration = await self.participant.writer.begin_batch()
            self._spill = self.participant.writer.context.upload(minimum(None), self._registration)
        table = await self.compute(numbered, entries, self._rows, self.participant.view.table_schema.schema)
        self._rows += table.num_rows
        await self._spill.add(table)

    async def put(self) -> Done | Repeated:
        """Stage and commit all that was added."""
        assert self._spill is not None
        self._spilled = await self._spill.finish(Antichain(self._rows + 1))
        rounds = 0
        while True:
            rounds += 1
            exclusive = rounds > ROUNDS
            try:
                if not exclusive:
                    await self._stage()
                    await self._correct()  # most of it before the turn
                work = self._commit(exclusive=exclusive)
                self._committing = self._stack.supervisor.spawn(work, "commit a large put")
                return await asyncio.shield(self._committing)
            except EntriesExpired:
                raise
            except (BatchExpired, BeginAgain, LeaseExpired, SinceViolation):  # it may have stood still
                continue

    def close(self) -> None:
        """Delete everything that was not appended, once the outcome is known. Idempotent."""
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
        await self.participant.view.catch_up()
        view = self.participant.view
        upper = view.upper
        time = max(last_before(upper) + 1, 0)
        pin = await view.session.need(hold_for(upper, None), None)
        try:
            with progress("merge", self._rows, "rows") as progressing:
                batch = await self._batch_of(self._replacing(upper, time, progressing), upper, time)
        except BaseException:
            view.session.hold.drop(pin)
            raise
        self._staging = Staging(pin, [batch], upper)

    async def _batch_of(
        self, updates: AsyncGenerator[pa.Table, None], lower: Antichain, time: int
    ) -> StagedBatch:
        """The updates at `time` as a batch."""
        context, registration = self.participant.writer.context, await self.participant.writer.begin_batch()
        upload = context.upload(lower, registration)
        try:
            async with aclosing(updates) as tables:
                async for table in tables:
                    await upload.add(table)
            return StagedBatch(context, registration, await upload.finish(successor(time)))
        except BaseException:
            upload.discard()
            raise
        finally:
            registration.release()

    async def _replacing(
        self, upper: Antichain, time: int, progressing: Progressing
    ) -> AsyncGenerator[pa.Table, None]:
        """The updates at `time` that replace the contents by the entries."""
        view = self.participant.view
        replacing = (ReplacingAll if self.replaces_all else Replacing)(view.table_schema.schema, time)
        async with AsyncExitStack() as stack:
            old: AsyncIterator[pa.RecordBatch] | None = None
            if upper != minimum(None):
                snapshot = await view.session.snapshot(last_before(upper), wait=False)
                old = (await stack.enter_async_context(snapshot)).batches()
                if self.replaces_all:
                    progressing.tell(0, self._rows + (await snapshot.stats()).updates_max)
            runs = plan_runs(self._named)
            new = await stack.enter_async_context(
                aclosing(merged(self._fetch, runs, Selection(), "", final=False))
            )
            async for table in _with_end(self._spilled_tables(new)):
                await self.compute(replacing.add, table)
                progressing.advance(table.num_rows if table is not None else 0)
                while old is not None and replacing.needs_old:
                    batch = await anext(old, None)
                    await self.compute(replacing.add_old, batch)
                    progressing.advance(batch.num_rows if batch is not None and self.replaces_all else 0)
                    old = None if batch is None else old
                    if (deletions := replacing.take_deletions()).num_rows:
                        yield deletions
                for updates in (replacing.take_deletions(), await self.compute(replacing.take)):
                    if updates.num_rows:
                        yield updates

    # --- commit ----------------------------------------------------------------------------------

    async def _commit(self, *, exclusive: bool) -> Done | Repeated:
        participant = self.participant
        async with self.turn:
            await fairness.yield_to_others([participant.register])
            if exclusive:
                await self._stage()
            while True:
                now = await self._stack.clock.now()
                repeat = repeat_of(participant.state, now, self)
                if repeat is not None:
                    return Repeated(repeat.time)
                races = {participant.register: participant.register.seqno}
                staging = await self._correct()
                if staging.upper != participant.state.upper:  # there were more commits meanwhile
                    await fairness.lost(races)
                    continue
                participant.check_schema()
                if self._is_abandoned:  # the caller was cancelled before anything was sent
                    raise asyncio.CancelledError
                if not self._has_changes(staging):
                    await participant.look()
                    if participant.state.upper == staging.upper:
                        return Done(last_complete(staging.upper), None)
                    continue
                time = max(micros(now), self._stack.clock.seen, last_before(staging.upper) + 1)
                try:
                    await self._append(staging, time)
                except (UpperMismatch, RepeatedMark):
                    continue
                with suppress(Error):  # it is durable; the view follows later
                    await participant.view.catch_up()
                return Done(time, None)

    def _has_changes(self, staging: Staging) -> bool:
        is_marked = self.once.hashes or self.transactions
        return bool(is_marked or staging.correction or any(batch.hollow.parts for batch in staging.batches))

    async def _append(self, staging: Staging, time: int) -> None:
        writer, lower, upper = self.participant.writer, staging.upper, successor(time)
        if staging.correction:
            staging.batches.append(await self._batch_of(self._correction_at(staging, time), lower, time))
            staging.correction = []
        batches = [Batch(staged) for staged in staging.batches]
        for batch in batches:
            batch.rewrite_ts(time, upper)
        marks = self.transactions, self.once
        append = BatchesAppend(writer, lower, upper, batches, *marks, is_of_a_table=True)
        await append_all([append])

    async def _correction_at(self, staging: Staging, time: int) -> AsyncGenerator[pa.Table, None]:
        schema = self.participant.writer.context.schema
        yield at_time(concat(staging.correction, schema), time, schema)

    async def _correct(self) -> Staging:
        """Add the corrections of commits up to the newest state that this process knows at the call."""
        staging, state = self._staging, self.participant.state
        assert staging is not None
        if staging.upper != state.upper:
            table = await self._committed_since(staging, state)
            if not self.replaces_all:
                table = await self._own_rows(table)
            diffs = pc.negate(table.column("diff"))
            if table.num_rows:
                staging.correction.append(table.set_column(3, table.schema.field("diff"), diffs))
            staging.upper = state.upper
        return staging

    async def _committed_since(self, staging: Staging, state: State) -> pa.Table:
        session = self.participant.view.session
        if state.finalized:
            raise ShardFinalized("it is finalized", shard_id=session.shard.id)
        session.hold.check(staging.pin.reader)
        if size_of(parts_since(state, staging.upper)) > self._stack.settings.read_memory_bytes:
            raise BeginAgain
        table: pa.Table = await session.updates_since(staging.upper, state, staging.pin.reader)
        return table

    async def _own_rows(self, table: pa.Table) -> pa.Table:
        """The updates to keys of the entries."""
        texts = await self._keys_of(table)
        unknown = [text for text in dict.fromkeys(texts) if text not in self._is_own_key]
        if unknown:
            own_keys = await self._keys_of_entries(unknown)
            self._is_own_key.update((text, text in own_keys) for text in unknown)
        return table.filter(pa.array([self._is_own_key[text] for text in texts], pa.bool_()))

    async def _keys_of_entries(self, keys: list[str]) -> set[str]:
        """The keys that entries have."""
        table_schema = self.participant.view.table_schema
        selected = await self.compute(wanted_keys, table_schema, keys)
        parts = await self.compute(Query(table_schema.schema, keys=selected).matching, self._named)
        selection = Selection(keys=selected)
        jobs = [partial(self._fetch.table, group, selection, "") for group in groups(parts)]
        at_once = self._stack.settings.fetch_max_outstanding_parts
        with self._reading_entries():
            tables = await run_bounded(at_once, jobs)
        return set(await self._keys_of(concat(tables, table_schema.schema)))

    async def _keys_of(self, table: pa.Table) -> list[str]:
        if not table.num_rows:
            return []
        texts, _ = await self._stack.compute_few(
            table.nbytes, self.participant.view.table_schema.texts, table
        )
        return texts  # type: ignore[no-any-return]

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _stack(self) -> Any:
        return self.participant.writer.shard.stack

    @property
    def compute(self) -> Any:
        """Run work on a thread."""
        return self._stack.compute

    @property
    def _fetch(self) -> Fetch:
        return self.participant.view.session.fetch

    @property
    def _named(self) -> list[Named]:
        assert self._spilled is not None
        return [(self._spilled, part) for part in self._spilled.parts]

    @contextmanager
    def _reading_entries(self) -> Iterator[None]:
        """Around reads of the spilled entries."""
        try:
            yield
        except LeaseExpired as error:  # only the registration kept them, no lease of a reader
            text = "the entries of the put were deleted while the process stood still: put them again"
            raise EntriesExpired(text, shard_id=self.participant.writer.shard.id) from error

    async def _spilled_tables(self, tables: AsyncIterator[pa.Table]) -> AsyncGenerator[pa.Table, None]:
        with self._reading_entries():
            async for table in tables:
                yield table

    def _drop_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            self.participant.view.session.hold.drop(staging.pin)
            for staged in staging.batches:
                staged.abandon()
            if any(staged.use is Use.BUSY for staged in staging.batches):
                self._stack.supervisor.spawn(self.participant.writer.idle(), "settle a large put")


async def _with_end(tables: AsyncIterator[pa.Table]) -> AsyncGenerator[pa.Table | None, None]:
    async for table in tables:
        yield table
    yield None
