"""Group commit: compare-and-sets of different keys that wait at the same moment go as one statement.

A few statements are under way at a time; entries that come meanwhile go with the next one. The rules, each
from a failure:

- A statement has at most one entry per key; another entry waits for the next statement.
- The statement locks head rows in key order and skips those that other transactions hold. It never waits for
  a lock while it holds one, so it cannot be part of a deadlock.
- An entry is a mismatch (`False`) if the head in the statement's snapshot differs from what it expects. An
  entry that neither won nor differs was skipped or overtaken: it is sent again alone, and waits for the lock.
- An error of severity ERROR may be about one of the entries: each is sent again alone.
- After any other error each entry is `Indeterminate`.

A caller that is cancelled stops waiting; its entry is sent nevertheless.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiopersist.base.errors import Error, Indeterminate
from aiopersist.storage.consensus import Entry, seqnos_of
from aiopersist.storage.postgres.pool import Pool, ServerRefused

if TYPE_CHECKING:
    import asyncpg

GROUPS_MAX = 2  # under way: one is sent while another commits; more would only make groups smaller
LOCKING = 4  # statements that may wait for a lock; the rest of the pool is for other requests
CREATING = 2  # statements that insert first versions
ENTRIES_MAX = 256
STATEMENT_BYTES_MAX = 8 * 1024 * 1024  # of several entries: bounds the bytes that are copied at once


@dataclass(frozen=True, eq=False)
class _Waiting:
    entry: Entry
    outcome: asyncio.Future[bool]

    def settle(self, outcome: bool | Exception) -> None:
        if self.outcome.done():  # cancelled
            return
        if isinstance(outcome, Exception):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


class GroupCommit:
    """Each commit calls `moved(keys, seqnos, alone)`, where `alone` says that no process listened for hints;
    each answer `answered(key, row)` with its clock, its wishes, and a newer head."""

    def __init__(
        self,
        pool: Pool,
        statements: Mapping[str, str],
        moved: Callable[[Collection[str], Mapping[str, int], bool], None],
        answered: Callable[[str, "asyncpg.Record"], None],
    ) -> None:
        self._pool = pool
        self._sql = statements
        self._moved = moved
        self._answered = answered
        self._waiting: deque[_Waiting] = deque()
        self._under_way = 0
        self._scheduled = False
        self._creating = asyncio.Semaphore(CREATING)
        self._locking = asyncio.Semaphore(LOCKING)

    async def compare_and_set(self, entry: Entry) -> bool:
        """The outcome of one entry."""
        waiting = _Waiting(entry, asyncio.get_running_loop().create_future())
        if entry.expected is None:
            self._begin_alone(waiting, self._creating)
        else:
            self._waiting.append(waiting)
            self._schedule()
        return await waiting.outcome

    def _schedule(self) -> None:
        """Dispatch after all tasks that are ready now have run: their entries join the group."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        while self._waiting and self._under_way < GROUPS_MAX:
            group = self._next_group()
            self._under_way += 1
            try:
                self._pool.spawn(self._send_group(group))
            except Error as error:  # closed
                self._under_way -= 1
                _settle_all(group, error)

    def _next_group(self) -> list[_Waiting]:
        """The first entry of each key, in order, within the limits; never empty."""
        group: dict[str, _Waiting] = {}
        later: deque[_Waiting] = deque()
        size = 0
        while self._waiting and len(group) < ENTRIES_MAX:
            waiting = self._waiting.popleft()
            if waiting.entry.key in group or (group and size + len(waiting.entry.data) > STATEMENT_BYTES_MAX):
                later.append(waiting)
            else:
                group[waiting.entry.key] = waiting
                size += len(waiting.entry.data)
        self._waiting.extendleft(reversed(later))
        return list(group.values())

    async def _send_group(self, group: list[_Waiting]) -> None:
        try:
            again = await self._send_together(group)
        except BaseException as error:
            _settle_all(group, error)
            raise
        finally:
            self._under_way -= 1
            if self._waiting:
                self._schedule()
        for waiting in again:
            self._begin_alone(waiting, self._locking)

    async def _send_together(self, group: list[_Waiting]) -> list[_Waiting]:
        """Send a group and settle its entries; return those that must be sent again alone."""
        by_key = {waiting.entry.key: waiting for waiting in group}
        statement, arguments = self._sql["append_one"], tuple[object, ...](group[0].entry)
        if len(group) > 1:  # the statement for one entry takes half the time
            statement = self._sql["append_together"]
            arguments = tuple(zip(*(waiting.entry for waiting in group), strict=True))
        try:
            rows = await self._pool.use(lambda connection: connection.fetch(statement, *arguments))
        except ServerRefused:
            return group
        again = []
        for row in rows:
            if not row["won"] and row["maybe"]:
                again.append(by_key[row["key"]])
            else:
                by_key[row["key"]].settle(row["won"])
        if moved := seqnos_of([by_key[row["key"]].entry for row in rows if row["won"]]):
            self._moved(moved, moved, rows[0]["alone"])
        for row in rows:
            self._answered(row["key"], row)
        return again

    def _begin_alone(self, waiting: _Waiting, turn: asyncio.Semaphore) -> None:
        try:
            self._pool.spawn(self._send_alone(waiting, turn))
        except Error as error:  # closed
            _settle_all([waiting], error)

    async def _send_alone(self, waiting: _Waiting, turn: asyncio.Semaphore) -> None:
        try:
            async with turn:
                waiting.settle(await self._send(waiting.entry))
        except BaseException as error:
            _settle_all([waiting], error)
            raise

    async def _send(self, entry: Entry) -> bool:
        key, expected, data = entry
        arguments: list[object]
        if expected is None:
            statement, arguments = self._sql["create"], [key, data]
        else:
            statement, arguments = self._sql["append"], [key, expected, data]
        row = await self._pool.use(lambda connection: connection.fetchrow(statement, *arguments))
        assert row is not None  # the statement gives one row
        self._answered(key, row)
        won: bool = row["won"]
        if won:
            self._moved([key], {key: entry.seqno}, row["alone"])
        return won


def _settle_all(group: list[_Waiting], error: BaseException) -> None:
    if not isinstance(error, Error):
        error = Indeterminate("postgres: the store was closed before the answer came")
    for waiting in group:  # each gets its own error, since a traceback belongs to one raise
        own = copy(error)
        own.__cause__ = error.__cause__
        waiting.settle(own)
