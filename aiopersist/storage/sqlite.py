"""A consensus store in one SQLite file, for the processes of one host.

One thread writes and another reads, each with a connection of its own, so that a read never waits
behind an fsync (in WAL mode neither blocks the other). What waits to be written at the same moment
is one transaction, and so costs one fsync.

*Linearizable*: writes run inside BEGIN IMMEDIATE, which at most one connection of all processes
holds at a time, so each sees the effects of all before it. A read is one statement on a snapshot
begun after the call: WAL shows it every commit that has returned, in any process.

*Durable*: `synchronous = FULL` fsyncs the log before a commit returns.

*Errors*: nothing before COMMIT can last, so its errors are determinate; BUSY at BEGIN is repeated here
for a while. An error at COMMIT is followed by ROLLBACK and is `Indeterminate`: the commit record may
lie in the file and be found after a crash. A full disk is the exception: the write that fails is that
of the commit record or one before it, which a recovery does not take for a commit.
One entry of several that wait together fails alone: each has a savepoint, and if SQLite gave up the
whole transaction, each runs again in one of its own.

*Hints*: see `hints`. The table of listeners is read in the transaction that commits, so a listener
announced before it is told; one announced after it looks at the store once it is announced.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from aiopersist.runtime import SYSTEM, Runtime
from aiopersist.storage import sqlite_sql as sql
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.folders import make_folder
from aiopersist.storage.hints import HintListener, HintSender
from aiopersist.storage.keys import check_consensus_key, check_entries
from aiopersist.storage.lane import Job, Lane
from aiopersist.storage.watchers import Watchers

T = TypeVar("T")

_BUSY_TIMEOUT_S = 5.0  # a writer holds the lock for milliseconds; after this the retry layer waits
_BUSY_DELAY_MIN_S = 0.0002  # about a commit
_BUSY_DELAY_MAX_S = 0.01


class SqliteConsensus(Consensus):
    """Versions in the SQLite file at `path`, which is made on first use, with its folders.

    A compare-and-set costs one fsync, shared by all that wait at the same moment."""

    def __init__(self, path: str | os.PathLike[str], *, runtime: Runtime = SYSTEM) -> None:
        self._path = os.path.abspath(path)
        self._runtime = runtime
        self._watchers = Watchers()
        self._listener = HintListener(self._watchers)
        self._sender = HintSender()
        self._id = str(runtime.uuid())
        self._announced = False
        self._gone: set[str] = set()
        self._never = threading.Event()  # waited on, never set: a thread's sleep
        self._write_connection: sqlite3.Connection | None = None
        self._read_connection: sqlite3.Connection | None = None
        self._writer = Lane("aiopersist-sqlite-write", self._write_round)
        self._reader = Lane("aiopersist-sqlite-read", self._read_round)

    def __repr__(self) -> str:
        return f"<SqliteConsensus {self._path}>"

    async def head(self, key: str) -> Versioned | None:
        check_consensus_key(key)
        return await self._reader.run(lambda connection: sql.head(connection, key))

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self.compare_and_set_many([Entry(key, expected, data)])

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        check_entries(entries)
        return await self._writer.run(lambda transaction: sql.compare_and_set(transaction, entries))

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        check_consensus_key(key)
        bounds = (key, min(from_seqno, sql.SEQNO_MAX), min(max(limit, 0), sql.SEQNO_MAX))
        return await self._reader.run(lambda connection: sql.scan(connection, *bounds))

    async def truncate(self, key: str, seqno: int) -> int:
        check_consensus_key(key)
        return await self._writer.run(lambda transaction: sql.truncate(transaction.connection, key, seqno))

    async def list_keys(self, prefix: str) -> list[str]:
        return await self._reader.run(lambda connection: sql.list_keys(connection, prefix))

    async def watch(self, key: str) -> None:
        check_consensus_key(key)
        with self._watchers.watching(key) as woken:
            if not self._announced:
                await self._announce()
                return  # what moved before others knew of us came without a hint
            await woken

    async def now(self) -> float:
        return self._runtime.wall()

    async def aclose(self) -> None:
        self._listener.close()
        self._watchers.wake_all()
        try:
            await self._reader.close(self._close_reading)
        finally:  # the last connection empties the WAL
            await self._writer.close(self._close_writing)

    async def _announce(self) -> None:
        row = (self._id, self._listener.listen())
        insert = "INSERT OR REPLACE INTO listeners (id, port) VALUES (?, ?)"
        await self._writer.run(lambda transaction: transaction.connection.execute(insert, row).rowcount)
        self._announced = True

    # In the reading thread

    def _read_round(self, jobs: list[Job[Any]]) -> None:
        for job in jobs:
            try:
                if self._read_connection is None:
                    self._read_connection = self._connect(_BUSY_TIMEOUT_S)
                job.succeed(job.work(self._read_connection))
            except Exception as error:  # told to whoever asked
                _fail([job], error, self._path)

    def _close_reading(self) -> None:
        if self._read_connection is not None:
            self._read_connection.close()

    # In the writing thread

    def _write_round(self, jobs: list[Job[Any]]) -> None:
        try:
            if self._write_connection is None:
                self._write_connection = self._connect(0.0)  # see `_patiently`
            connection = self._write_connection
            self._patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
            transaction = sql.Transaction(connection)
            targets = self._write_jobs(transaction, jobs)
        except Exception as error:  # none has happened: told to whoever asked
            self._roll_back()
            _fail(jobs, error, self._path)
            return
        if connection.in_transaction:
            self._commit(transaction, targets, jobs)
        elif len(jobs) > 1:  # an error of one took the others with it, and none has happened
            for job in jobs:
                self._write_round([job])

    def _write_jobs(self, transaction: sql.Transaction, jobs: list[Job[Any]]) -> dict[str, int]:
        for job in jobs:
            self._write_job(transaction, job)
            if not transaction.connection.in_transaction:
                return {}
        if not transaction.moved:
            return {}
        try:
            return self._listeners(transaction.connection)
        except sqlite3.Error:  # hints may be lost
            return {}

    def _write_job(self, transaction: sql.Transaction, job: Job[Any]) -> None:
        connection, moved = transaction.connection, len(transaction.moved)
        connection.execute("SAVEPOINT job")
        try:
            job.succeed(job.work(transaction))
        except Exception as error:  # told to whoever asked
            _fail([job], error, self._path)
            del transaction.moved[moved:]
            if not connection.in_transaction:
                return
            connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")

    def _commit(self, transaction: sql.Transaction, targets: dict[str, int], jobs: list[Job[Any]]) -> None:
        try:
            transaction.connection.execute("COMMIT")
        except Exception as error:  # told to whoever asked
            self._roll_back()
            _fail([job for job in jobs if job.error is None], error, self._path, at_commit=True)
            return
        self._watchers.wake(transaction.moved)
        self._gone = self._sender.send(targets, transaction.moved) if targets else set()

    def _roll_back(self) -> None:
        """End what may have begun. A connection that cannot even do that is given up."""
        connection = self._write_connection
        if connection is None or not connection.in_transaction:
            return
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._write_connection = None
            connection.close()

    def _listeners(self, connection: sqlite3.Connection) -> dict[str, int]:
        for gone in self._gone:
            connection.execute("DELETE FROM listeners WHERE id = ?", (gone,))
        rows = connection.execute("SELECT id, port FROM listeners WHERE id <> ?", (self._id,))
        return dict(rows.fetchall())

    def _close_writing(self) -> None:
        self._sender.close()
        if self._write_connection is None:
            return
        try:
            if self._announced:
                self._write_connection.execute("DELETE FROM listeners WHERE id = ?", (self._id,))
        except sqlite3.Error:  # others find out that nobody listens
            pass
        finally:
            self._write_connection.close()

    # In either thread

    def _connect(self, busy_timeout_s: float) -> sqlite3.Connection:
        make_folder(os.path.dirname(self._path))
        connection = sqlite3.connect(self._path, timeout=busy_timeout_s, isolation_level=None)
        try:
            self._patiently(lambda: sql.prepare(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def _patiently(self, step: Callable[[], T]) -> T:
        """Run `step`, again while another connection is in its way: its own short delays find a free
        moment sooner than SQLite's, which grow to 100 ms."""
        deadline = self._runtime.monotonic() + _BUSY_TIMEOUT_S
        bound = _BUSY_DELAY_MIN_S
        while True:
            try:
                return step()
            except sqlite3.OperationalError as error:
                if sql.primary(error) != sqlite3.SQLITE_BUSY or self._runtime.monotonic() > deadline:
                    raise
            self._never.wait(self._runtime.uniform(0, bound))
            bound = min(bound * 2, _BUSY_DELAY_MAX_S)


def _fail(jobs: Sequence[Job[Any]], error: Exception, path: str, *, at_commit: bool = False) -> None:
    for job in jobs:  # an error of its own for each: a traceback belongs to one raise
        job.fail(sql.mapped(error, path, at_commit=at_commit))
