"""Group commit of `write`: calls on one handle that wait at the same moment share one commit.

Each call checks its own rows, so only the bad call fails. Then it queues. One task per handle takes all
waiting calls and commits them as one batch at one time. A cancelled call does not disturb the others: if it
still waits, it is withdrawn; else it has the outcome of its group, which `settle` returns.

Thousands may wait at one moment. So the task works in slices (`_slices`), and other tasks run in between.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence, Sized
from contextlib import aclosing
from copy import copy
from functools import partial
from typing import Any

from aiopersist.base.errors import Indeterminate, InvalidUsage, UpperMismatch, UsageKind
from aiopersist.base.frontier import Antichain, successor
from aiopersist.base.resource import for_each
from aiopersist.data.lazy import pa
from aiopersist.data.updates.assemble import at_time, concat, joined
from aiopersist.data.updates.convert import ROW, chunks_of, is_arrow, to_table
from aiopersist.data.updates.inputs import own_copy
from aiopersist.data.updates.sizes import check_update_size
from aiopersist.data.updates.tiny import TINY_ROWS, PlainRows
from aiopersist.parts.columns import columns_of
from aiopersist.parts.flush import must_flush
from aiopersist.parts.upload import Upload, chunks_as_they_come, chunks_on_a_thread, is_small
from aiopersist.shard.queue import GroupQueue
from aiopersist.shard.registration import LOST_MAX
from aiopersist.state.command import Context
from aiopersist.state.model import HollowBatch
from aiopersist.state.once import Once
from aiopersist.state.writing import (
    Appended,
    PartsExpired,
    Write,
    last_complete,
    new_apps,
    repeat_of,
    time_of_write,
)
from aiopersist.write.append import commit_staged
from aiopersist.write.pending import PendingAppend
from aiopersist.write.session import Session

CALLS_AT_ONCE = 256  # in one turn of the event loop: under a millisecond
MARKS_MAX = 512  # calls with `txn` or `once` in a commit: each is a record of its version, made in one turn


class _WaitingWrite:
    """One waiting `write`: an `UnsettledCall` after its caller was cancelled."""

    def __init__(self, session: Session, transactions: Mapping[str, int], once: Once) -> None:
        self.transactions = transactions
        self.once = once
        self.append = PendingAppend(session)
        """The append of the last group that took it."""
        self.decided: asyncio.Future[None] | None = None
        self.time: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Only its caller awaits it, so the caller's cancellation cancels it."""
        self.rows: Sequence[tuple[Any, Any, int]] = ()
        """A few plain rows, each with its diff. The rows of all calls of a group become columns together."""
        self.table: pa.Table | None = None
        """All other rows, as columns."""
        self.queued = False
        self.is_decided = False
        self.origin: Any = None
        """The position of its caller in a trace."""
        self.abandoned = False
        """Whether its caller was cancelled: no further group takes it."""

    @property
    def has_rows(self) -> bool:
        """Whether there is anything to append."""
        return bool(self.rows) or (self.table is not None and self.table.num_rows > 0)

    def abandon(self, *, withdrawn: bool) -> None:
        """Its caller is cancelled. Unless it was `withdrawn` in time, its group may still decide it."""
        self.abandoned = True
        if not withdrawn and not self.is_decided:
            self.decided = asyncio.get_running_loop().create_future()

    def decide(self) -> None:
        """Its outcome is decided, except for settling."""
        self.is_decided = True
        if self.decided is not None and not self.decided.done():
            self.decided.set_result(None)

    def answer(self, outcome: "int | BaseException") -> None:
        """Decide it, and return or raise `outcome` in its call."""
        self.decide()
        if self.time.done():
            return
        if isinstance(outcome, int):
            self.time.set_result(outcome)
        else:
            self.time.set_exception(outcome)


class Combiner:
    """The queue of one handle's writes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shard = session.shard
        self._schema = session.schema
        self._plain = PlainRows(session.schema)
        supervisor = session.shard.stack.supervisor
        self._queue = GroupQueue[_WaitingWrite](supervisor, "commit the writes of a handle", self._carry_out)

    @property
    def queueing(self) -> int:
        """How many calls wait for the next group."""
        return len(self._queue.waiting)

    async def write(self, rows: Any, diff: int, transactions: Mapping[str, int], once: Once) -> int:
        """See `WriteHandle.write`."""
        if self._schema.time_length is not None:
            raise InvalidUsage(UsageKind.INVALID_TIME, "write picks int times; this shard has product times")
        call = _WaitingWrite(self._session, transactions, once)
        try:
            few = self._plain.few(rows, diff, self._shard.stack.settings.update_size_max)
            if few is None:
                call.table = await self._converted(rows, diff)
            else:
                call.rows = few
            if not call.has_rows and not transactions and not once.hashes:
                await self._session.idle()
                return last_complete((await self._shard.open()).upper)
            return await self._queued(call)
        except (asyncio.CancelledError, Indeterminate):
            call.abandon(withdrawn=self._queue.withdraw(call) or not call.queued)
            self._session.unsettled = call
            raise

    async def _queued(self, call: _WaitingWrite) -> int:
        call.queued, call.origin = True, self._shard.stack.tracing.origin()
        self._queue.add(call)
        return await call.time

    async def _converted(self, rows: Any, diff: int) -> "pa.Table":
        """The checked rows, in any form that `write` takes, as columns."""
        if is_small(rows):
            return self._table([rows], diff)
        stack, rows = self._shard.stack, own_copy(rows)
        if isinstance(rows, Sequence):
            return await columns_of(stack, rows, partial(self._columns, diff), self._schema)
        if is_arrow(rows) and isinstance(rows, Sized):
            return await stack.compute(self._table, chunks_of(rows), diff)
        in_chunks = chunks_as_they_come if isinstance(rows, AsyncIterable) else chunks_on_a_thread
        return await self._in_chunks(in_chunks(rows), diff)

    async def _in_chunks(self, source: AsyncGenerator[Any, None], diff: int) -> "pa.Table":
        """The columns of the rows. Converts chunk by chunk: an iterator may fill the same memory again."""
        tables, count = [], 0
        async with aclosing(source) as chunks:
            async for chunk in chunks:
                small, work = is_small(chunk), partial(self._columns, diff, chunk, count)
                tables.append(work() if small else await self._shard.stack.compute(work))
                count += tables[-1].num_rows
        return concat(tables or [self._columns(diff, [], 0)], self._schema)

    def _table(self, chunks: Iterable[Any], diff: int) -> "pa.Table":
        tables, rows = [], 0
        for chunk in chunks:
            tables.append(self._columns(diff, chunk, rows))
            rows += tables[-1].num_rows
        return concat(tables or [self._columns(diff, [], 0)], self._schema)

    def _columns(self, diff: int, rows: Any, start: int) -> "pa.Table":
        table = to_table(rows, self._schema, columns=ROW, diff=diff, row_base=start)
        check_update_size(table, self._shard.stack.settings.update_size_max, row_base=start)
        return table

    async def _carry_out(self) -> None:
        group: list[_WaitingWrite] = []
        try:
            await self._session.begin_turn()
            try:
                group = self._take()
                await self._commit(group)
            finally:
                self._session.end_turn()
        except BaseException as error:
            # Without a group the turn did not begin: all waiting calls get the error.
            await self._answer(group or self._queue.take(), error)
            if not isinstance(error, Exception):
                raise

    def _take(self) -> list[_WaitingWrite]:
        """All waiting calls, or as many as one commit may have."""
        calls = marked = 0
        for call in self._queue.waiting:
            if call.transactions or call.once.hashes:
                marked += 1
                if marked > MARKS_MAX:
                    break
            calls += 1
        return self._queue.take(calls)

    async def _slices(self, calls: Sequence[_WaitingWrite]) -> AsyncIterator[Sequence[_WaitingWrite]]:
        """`calls` in slices. Other tasks run between two of them."""
        for start in range(0, len(calls), CALLS_AT_ONCE):
            if start:
                await self._shard.stack.runtime.sleep(0)
            yield calls[start : start + CALLS_AT_ONCE]

    async def _answer(self, calls: Sequence[_WaitingWrite], outcome: "int | BaseException") -> None:
        """Answer `calls`, except those that wait again."""

        def answer(call: _WaitingWrite) -> None:
            if call not in self._queue.waiting:
                call.answer(outcome)

        await for_each(calls, answer, CALLS_AT_ONCE, self._shard.stack.runtime)

    async def _commit(self, group: list[_WaitingWrite]) -> None:
        """Commit all calls of `group` at one time; a call whose transaction is a repeat writes nothing."""
        lost = 0
        while group := await self._without_repeats(group):
            upper = self._shard.state.upper
            if not upper.elements:
                current = (await self._shard.open()).upper
                raise UpperMismatch(Antichain(0), current, shard_id=self._shard.id)  # 0 stands for any int
            try:
                done = await self._append(group, upper)
            except PartsExpired:  # the sweep deleted the parts before `repair` could copy them
                lost += 1
                if lost == LOST_MAX:
                    raise
                continue  # uploads the rows again
            except InvalidUsage as error:
                if error.kind is not UsageKind.INVALID_TXN:
                    raise
                group = await self._without_new_apps(group, error)
                continue
            if done.wrote:
                await self._answer(group, last_complete(done.upper))
                return

    async def _append(self, group: list[_WaitingWrite], upper: Antichain) -> Appended:
        tracing = self._shard.stack.tracing
        with tracing.group(call.origin for call in group), tracing.span("append", self._shard.known_as):
            return await self._append_group(group, upper)

    async def _append_group(self, group: list[_WaitingWrite], upper: Antichain) -> Appended:
        time = await self.time(upper)
        transactions = {
            app: number for call in group if call.transactions for app, number in call.transactions.items()
        }
        hashes = tuple(hashed for call in group for hashed in call.once.hashes)
        inline, context = self._inline(group, upper, time), self._session.context
        registration = await self._session.ensure_registered()
        upload = context.upload(upper, registration)
        pending = PendingAppend(self._session, uploads=[upload])
        pending.hold(registration)  # an upload may take longer than the handle keeps it
        for call in group:
            call.append = pending
        try:
            if inline is None:
                await self._upload(upload, group, time)
            if must_flush(self._shard):
                await self._session.flush_inline()
            batch = await upload.finish(successor(time)) if inline is None else inline
            stack = self._shard.stack
            room, apps_max = stack.settings.inline_writes_total_max_bytes, stack.settings.txn_ids_max
            once = Once(hashes, stack.settings.once_keep_s)
            marks = transactions, room, apps_max, once
            pending.command = Write(upload.writer, stack.runtime.token(), batch, *marks)
            (done,) = await commit_staged([pending], own_task=False)
            return done
        finally:
            await pending.tidy()

    def _inline(self, group: list[_WaitingWrite], upper: Antichain, time: int) -> HollowBatch | None:
        """The rows of all calls at that time as an inline batch, if they are few and plain."""
        if len(group) > TINY_ROWS or any(call.table is not None for call in group):
            return None
        return self._session.context.inline(_rows_of(group, time), upper, successor(time))

    async def _upload(self, upload: Upload, group: list[_WaitingWrite], time: int) -> None:
        """Upload the rows of all calls at that time."""
        async for calls in self._slices(group):
            if rows := _rows_of(calls, time):
                await upload.take(rows)
            if tables := [call.table for call in calls if call.table is not None and call.table.num_rows]:
                await upload.add(at_time(joined(tables, self._schema), time, self._schema))

    async def time(self, upper: Antichain) -> int:
        """The time of a group that commits at `upper`, unless the upper or the clock moves on."""
        state = self._shard.state
        now = await self._shard.register.now() if state.is_wall else 0.0
        return time_of_write(upper, state, Context(now=now, seen=self._shard.stack.clock.seen))

    async def _without_new_apps(self, group: list[_WaitingWrite], error: InvalidUsage) -> list[_WaitingWrite]:
        """The calls of `group` for whose application ids the shard has room; the others fail with `error`."""
        state, accepted = self._shard.state, list[_WaitingWrite]()
        room = self._shard.stack.settings.txn_ids_max - len(state.transactions)
        async for calls in self._slices(group):
            for call in calls:
                new = len(new_apps(state, call.transactions))
                if new and new > room:
                    call.answer(copy(error))
                else:
                    room -= new
                    accepted.append(call)
        return accepted

    async def _without_repeats(self, group: list[_WaitingWrite]) -> list[_WaitingWrite]:
        """The calls that must still commit. A group has one call of each application and of each id of
        `once=`. Later ones wait for the next group, which sees whether they are repeats."""
        remaining: list[_WaitingWrite] = []
        apps: set[str] = set()
        now = await self._shard.register.now() if any(call.once.hashes for call in group) else 0.0
        async for calls in self._slices(group):
            state = self._shard.state
            for call in calls:
                if call.abandoned:
                    call.decide()
                elif repeat := repeat_of(state, now, call):
                    call.answer(repeat.time)
                elif apps.isdisjoint(call.transactions) and apps.isdisjoint(call.once.hashes):
                    apps.update(call.transactions, call.once.hashes)
                    remaining.append(call)
                else:
                    self._queue.waiting[call] = None
        return remaining


def _rows_of(calls: Sequence[_WaitingWrite], time: int) -> list[tuple[Any, Any, int, int]]:
    return [(key, val, time, diff) for call in calls for key, val, diff in call.rows]
