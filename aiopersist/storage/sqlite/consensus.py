"""A consensus store in one SQLite file, for the processes of one host; `file` says why it is linearizable
and durable, and what its errors mean.

*Hints*: see `hints`. The transaction that commits reads the table of listeners. So it tells a listener that
was announced before; a listener that is announced after it reads the store once it is announced. It
reads the wishes, too, whose moments are those of the clock that all processes of the host share.
"""

import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeVar

from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.consensus import Entry, Versioned, seqnos_of
from aiopersist.storage.keys import check_consensus_key, check_entries
from aiopersist.storage.sqlite import sql as sql
from aiopersist.storage.sqlite.file import BUSY_DELAY_MAX_S, OneStatement, SqliteFile, SqliteTransaction
from aiopersist.storage.sqlite.hints import LoopbackHints
from aiopersist.storage.sqlite.reads import SqliteReads
from aiopersist.storage.watch import Watch
from aiopersist.storage.wishes import HeardWishes, Wish

T = TypeVar("T")
_Newer = dict[str, Versioned]

_BETWEEN_SLICES_S = 2 * BUSY_DELAY_MAX_S  # a process that waits for the lock tries more often


class SqliteConsensus(SqliteReads):
    """Versions in the SQLite file at `path`, which is made on first use, with its folders.

    A compare-and-set costs one fsync, shared by all that wait at the same moment."""

    def __init__(self, path: str | os.PathLike[str], *, runtime: Runtime = SYSTEM) -> None:
        self._runtime = runtime
        self._hints = LoopbackHints(str(runtime.uuid()))
        self._heard = HeardWishes(runtime)
        self._newer: dict[str, Versioned] = {}
        self._announced = False
        self._file = SqliteFile(path, runtime, sql.prepare, self._begun)

    def __repr__(self) -> str:
        return f"<SqliteConsensus {self._file.path}>"

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._file.read(work)

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        entry = Entry(key, expected, data)
        check_entries([entry])

        def work(transaction: _Moves) -> _Newer | None:
            won = sql.compare_and_set_one(transaction.connection, entry)
            return transaction.tried([entry], won=won)

        return await self._won([key], OneStatement(work))

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        check_entries(entries)

        def work(transaction: _Moves) -> _Newer | None:
            return transaction.tried(entries, won=sql.compare_and_set(transaction.connection, entries))

        return await self._won([entry.key for entry in entries], work)

    async def _won(self, keys: Sequence[str], work: "Callable[[_Moves], _Newer | None]") -> bool:
        """Whether a compare-and-set of these keys won. `newer` tells the heads of this answer alone."""
        for key in keys if self._newer else ():
            self._newer.pop(key, None)
        newer = await self._file.write(work)
        self._newer |= newer or {}
        return newer is None

    def newer(self, key: str) -> Versioned | None:
        return self._newer.pop(key, None)

    async def wish(self, keys: Sequence[str], who: str, for_s: float, waited_s: float) -> None:
        now, wishes = self._runtime.wall(), [Wish(key, who, for_s, waited_s) for key in keys]

        def leave(transaction: _Moves) -> None:
            sql.wish(transaction.connection, wishes, now)
            self._heard.hear(keys, sql.wishes(transaction.connection, now))

        await self._file.write(leave)

    def stand_back_s(self, key: str, who: str, waited_s: float) -> float:
        return self._heard.stand_back_s(key, who, waited_s)

    async def truncate(self, key: str, seqno: int) -> int:
        """One commit per 500 versions, and other writers have their turn between two of them. With the first
        commit the whole truncation has happened; if the call ends early, the next truncation of the key
        deletes the rest."""
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
            removed = sql.remove(transaction.connection, key, expected)
            if removed:
                transaction.moved.append((key, sql.SEQNO_MAX))  # to none that anybody expects
            return removed

        return await self._file.write(work)

    async def watch(self, key: str) -> None:
        check_consensus_key(key)
        with self._hints.waiters.waiting(key) as woken:
            if not await self._announce():
                await woken

    def watch_together(self) -> Watch:
        return self._hints.waiters.watch(self._announce)

    async def facts(self) -> dict[str, str]:
        def asked(connection: sqlite3.Connection) -> str:
            return str(connection.execute("PRAGMA journal_mode").fetchone()[0])

        mode = await self._file.read(asked)
        return {"store": f"SQLite {sqlite3.sqlite_version}", "journal_mode": mode, "synchronous": "FULL"}

    async def now(self) -> float:
        return self._runtime.wall()

    async def aclose(self) -> None:
        self._hints.listener.close()
        self._hints.waiters.wake_all()
        try:
            await self._file.aclose(self._withdraw)
        finally:
            self._hints.sender.close()

    def _begun(self, connection: sqlite3.Connection) -> "_Moves":
        return _Moves(connection, self._hints, self._heard, self._runtime.wall())

    async def _announce(self) -> bool:
        """Announce the listener, once. True if this call did it: keys that moved before gave no hint."""
        if self._announced:
            return False
        row = (self._hints.id, self._hints.listener.listen())
        insert = "INSERT OR REPLACE INTO listeners (id, port) VALUES (?, ?)"
        await self._file.write(lambda transaction: transaction.connection.execute(insert, row).rowcount)
        self._announced = True
        return True

    def _withdraw(self, connection: sqlite3.Connection) -> None:
        """Delete the announcement. If this fails, other processes find out that the port refuses."""
        if self._announced:
            connection.execute("DELETE FROM listeners WHERE id = ?", (self._hints.id,))


class _Moves(SqliteTransaction):
    """Gathers the keys that moved, and sends hints once the transaction is durable. `heard` hears the wishes
    that are there, by a clock that says `now`."""

    def __init__(
        self, connection: sqlite3.Connection, hints: LoopbackHints, heard: HeardWishes, now: float
    ) -> None:
        super().__init__(connection)
        self.moved: list[tuple[str, int]] = []
        """Keys, and the versions to which they did."""
        self.lost: list[tuple[str, int]] = []
        self._hints = hints
        self._heard = heard
        self._now = now
        self._targets: dict[str, int] = {}

    def tried(self, entries: Sequence[Entry], *, won: bool) -> _Newer | None:
        """Note a compare-and-set, and give the heads to which it was lost, of this same transaction; `None`:
        it was won."""
        (self.moved if won else self.lost).extend(seqnos_of(entries).items())
        if won:
            return None
        heads = sql.heads(self.connection, {entry.key: entry.expected for entry in entries})
        return {key: head for key, head in heads.items() if head is not None}

    def mark(self) -> int:
        return len(self.moved)

    def undo(self, mark: int) -> None:
        del self.moved[mark:]

    def before_commit(self) -> None:
        try:
            if tried := [*self.moved, *self.lost]:
                self._heard.hear(list(dict(tried)), sql.wishes(self.connection, self._now))
            if self.moved:
                self._targets = self._listeners()
        except sqlite3.Error:  # hints may be lost; a commit may not
            if not self.connection.in_transaction:
                raise

    def after_commit(self) -> None:
        hints = self._hints
        moved = dict(self.moved)
        hints.waiters.wake(moved, moved)
        hints.unreachable = hints.sender.send(self._targets, list(moved)) if self._targets else set()

    def _listeners(self) -> dict[str, int]:
        for listener in self._hints.unreachable:
            self.connection.execute("DELETE FROM listeners WHERE id = ?", (listener,))
        rows = self.connection.execute("SELECT id, port FROM listeners WHERE id <> ?", (self._hints.id,))
        return dict(rows.fetchall())
