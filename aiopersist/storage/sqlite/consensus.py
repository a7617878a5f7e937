"""A consensus store in one SQLite file, for the processes of one host; see `file` for why it is
linearizable and durable, and for what its errors mean.

*Hints*: see `hints`. The table of listeners is read in the transaction that commits, so a listener
announced before it is told; one announced after it looks at the store once it is announced.
"""

import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeVar

from aiopersist.runtime import SYSTEM, Runtime
from aiopersist.storage.consensus import Entry, Versioned
from aiopersist.storage.hints import HintListener, HintSender
from aiopersist.storage.keys import check_consensus_key, check_entries
from aiopersist.storage.sqlite import sql as sql
from aiopersist.storage.sqlite.file import BUSY_DELAY_MAX_S, SqliteFile, SqliteTransaction
from aiopersist.storage.sqlite.reads import SqliteReads
from aiopersist.storage.watch import Watch
from aiopersist.storage.watchers import Watchers

T = TypeVar("T")

_BETWEEN_SLICES_S = 2 * BUSY_DELAY_MAX_S  # a process that waits for the lock tries more often


class SqliteConsensus(SqliteReads):
    """Versions in the SQLite file at `path`, which is made on first use, with its folders.

    A compare-and-set costs one fsync, shared by all that wait at the same moment."""

    def __init__(self, path: str | os.PathLike[str], *, runtime: Runtime = SYSTEM) -> None:
        self._runtime = runtime
        self._hints = _DatagramHints(str(runtime.uuid()))
        self._announced = False
        self._file = SqliteFile(
            path, runtime, sql.prepare, lambda connection: _Moves(connection, self._hints)
        )

    def __repr__(self) -> str:
        return f"<SqliteConsensus {self._file.path}>"

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._file.read(work)

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self.compare_and_set_many([Entry(key, expected, data)])

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        check_entries(entries)

        def work(transaction: _Moves) -> bool:
            won = sql.compare_and_set(transaction.connection, entries)
            if won:
                transaction.moved += [entry.key for entry in entries]
            return won

        return await self._file.write(work)

    async def truncate(self, key: str, seqno: int) -> int:
        """One commit for each 500 versions, between which others have their turn. Once the first is done, all
        of it has happened; where it ends early, the next truncation of the key deletes the rest."""
        check_consensus_key(key)

        def work(transaction: _Moves) -> sql.Truncation:
            return sql.truncate(transaction.connection, key, seqno)

        dropped, unfinished = await self._file.write(work)
        while unfinished:
            await self._runtime.sleep(_BETWEEN_SLICES_S)
            unfinished = (await self._file.write(work)).unfinished
        return dropped

    async def remove(self, key: str, expected: Versioned) -> bool:
        check_consensus_key(key)

        def work(transaction: _Moves) -> bool:
            gone = sql.remove(transaction.connection, key, expected)
            if gone:
                transaction.moved.append(key)
            return gone

        return await self._file.write(work)

    async def watch(self, key: str) -> None:
        check_consensus_key(key)
        with self._hints.watchers.watching(key) as woken:
            if not self._announced:
                await self._announce()
                return  # what moved before others knew of us came without a hint
            await woken

    def watch_together(self) -> Watch:
        return self._hints.watchers.together(self._announced_now)

    async def _announced_now(self) -> bool:
        """Be announced; whether that was new: what moved before others knew of us came without a hint."""
        if self._announced:
            return False
        await self._announce()
        return True

    async def now(self) -> float:
        return self._runtime.wall()

    async def aclose(self) -> None:
        self._hints.listener.close()
        self._hints.watchers.wake_all()
        try:
            await self._file.aclose(self._say_goodbye)
        finally:
            self._hints.sender.close()

    async def _announce(self) -> None:
        row = (self._hints.id, self._hints.listener.listen())
        insert = "INSERT OR REPLACE INTO listeners (id, port) VALUES (?, ?)"
        await self._file.write(lambda transaction: transaction.connection.execute(insert, row).rowcount)
        self._announced = True

    def _say_goodbye(self, connection: sqlite3.Connection) -> None:
        """Where it fails, others find out that nobody listens."""
        if self._announced:
            connection.execute("DELETE FROM listeners WHERE id = ?", (self._hints.id,))


class _DatagramHints:
    """Who waits here, and how others are told."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.watchers = Watchers()
        self.listener = HintListener(self.watchers)
        self.sender = HintSender()
        self.gone: set[str] = set()
        """Listeners that were not there any more."""


class _Moves(SqliteTransaction):
    """Gathers the keys that moved; tells those who listen once it is durable."""

    def __init__(self, connection: sqlite3.Connection, hints: _DatagramHints) -> None:
        super().__init__(connection)
        self.moved: list[str] = []
        self._hints = hints
        self._targets: dict[str, int] = {}

    def mark(self) -> int:
        return len(self.moved)

    def undo(self, mark: int) -> None:
        del self.moved[mark:]

    def before_commit(self) -> None:
        if not self.moved:
            return
        try:
            self._targets = self._listeners()
        except sqlite3.Error:  # hints may be lost; a commit may not
            if not self.connection.in_transaction:
                raise
            self._targets = {}

    def after_commit(self) -> None:
        hints = self._hints
        hints.watchers.wake(self.moved)
        hints.gone = hints.sender.send(self._targets, self.moved) if self._targets else set()

    def _listeners(self) -> dict[str, int]:
        for gone in self._hints.gone:
            self.connection.execute("DELETE FROM listeners WHERE id = ?", (gone,))
        rows = self.connection.execute("SELECT id, port FROM listeners WHERE id <> ?", (self._hints.id,))
        return dict(rows.fetchall())
