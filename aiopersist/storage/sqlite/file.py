"""One SQLite file, for the processes of one host.

One thread writes and another reads, each with a connection of its own, so a read never waits behind an
fsync (in WAL mode neither blocks the other). Jobs that wait to write at the same moment are one transaction,
and so cost one fsync.

*Linearizable*: writes run inside BEGIN IMMEDIATE, which at most one connection of all processes holds at a
time, so each write sees the effects of all writes before it. A read is one snapshot that begins after the
call: WAL shows it every commit that has returned, in any process.

*Durable*: `synchronous = FULL` fsyncs the log before a commit returns; on macOS `fullfsync` flushes the
cache of the drive, too, which an fsync does not do there.

*Acknowledged*: a job that writes succeeds after the COMMIT of the transaction that it ran in, and nowhere
else. SQLite ends a transaction by itself when a statement, even one that only reads, meets a failing or full
disk or too little memory; the next statement would run outside of it. So each step checks that the
transaction is still open; if it is not, nothing has happened.

*Errors*: nothing before COMMIT can last, so an error before it is determinate; BUSY at BEGIN is tried again
here for a while. An error at COMMIT is followed by ROLLBACK and is `Indeterminate`: the commit record may lie
in the log and be found after a crash. A full disk is the exception: only writes to the log report it, the
last of them is the second half of the commit record, and a recovery takes no torn record for a commit.
(Without `psow`, a SQLite that is built to expect damage beside a write pads the log then.) One job
of several fails alone: each has a savepoint, or changes the file by one statement, which fails as a whole. If
SQLite gave up the whole transaction, each job runs again in a transaction of its own.

*The same file*: see `connection`. A result counts only if the files are still at their paths.

*Checkpoints*, which copy the log into the file, run only while this process holds the lock of writers. A
checkpoint of SQLite before 3.51.3 that another process's commit overtakes may take frames of a log that began
anew for copied ones, and they are lost (its "WAL-reset bug"): SQLite's own checkpoints hold that lock neither
at a commit nor where another writer has it. So they are off. Here one connection holds the lock, and another
makes the checkpoint; no log can begin anew meanwhile. The one that SQLite makes as the last connection closes
has the whole file for itself.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from aiopersist.base.errors import Corruption, Error, Indeterminate, InvalidLocation, StorageUnavailable
from aiopersist.base.runtime import Runtime
from aiopersist.storage import folders
from aiopersist.storage.folders import make_root
from aiopersist.storage.sqlite.connection import KnownFiles, check_same, connected, file_id, path_of
from aiopersist.storage.sqlite.forks import FileId
from aiopersist.storage.sqlite.rights import check_rights, make_file
from aiopersist.storage.sqlite.worker import After, ThreadJob, WorkerThread

T = TypeVar("T")

_BUSY_TIMEOUT_S = 5.0  # a writer holds the lock for milliseconds; after this the retry layer waits
_BUSY_DELAY_MIN_S = 0.0002  # about a commit
BUSY_DELAY_MAX_S = 0.01
LOG_BYTES_MAX = 1024 * 1024  # beyond it there is a checkpoint, and a log that begins anew is cut to it


class SqliteTransaction:
    """One group of jobs that write. A subclass may gather their effects. A job must not catch an error of
    SQLite: its next statements would run outside of the transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def mark(self) -> int:
        """The point at which a job begins; see `undo`."""
        return 0

    def undo(self, mark: int) -> None:
        """Forget the effects gathered since `mark`: they did not happen."""

    def before_commit(self) -> None:
        """Called after all jobs have run, within the transaction."""

    def after_commit(self) -> None:
        """Called after the transaction is durable."""


X = TypeVar("X", bound=SqliteTransaction)


class OneStatement(Generic[X, T]):
    """A job that changes the file by one statement at most; if that changed it, it is the last step. A
    statement that fails changes nothing, so the job needs no savepoint, which is two statements more."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[X], T]) -> None:
        self._work = work

    def __call__(self, transaction: X) -> T:
        return self._work(transaction)


class SqliteFile(Generic[X]):
    """The SQLite file at `path`, which is made on first use, with its folders.

    `prepare` is called with each new connection; `begin` makes the transaction that jobs are called with."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        runtime: Runtime,
        prepare: Callable[[sqlite3.Connection], None],
        begin: Callable[[sqlite3.Connection], X],
    ) -> None:
        self.path = path_of(path)
        self._runtime = runtime
        self._prepare = prepare
        self._begin = begin
        self._never = threading.Event()  # waited on, never set: a thread's sleep
        self._database: FileId | None = None  # the first that a connection opened
        self._checkpoint_at = LOG_BYTES_MAX
        self._write_connection: KnownFiles | None = None
        self._read_connection: KnownFiles | None = None
        self._writer = WorkerThread("aiopersist-sqlite-write", self._write_group)
        self._reader = WorkerThread("aiopersist-sqlite-read", self._read_group)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in the reading thread."""
        return await self._reader.run(work)

    async def write(self, work: Callable[[X], T]) -> T:
        """Run `work` in the writing thread, in one transaction with the other jobs that wait. Its effects are
        durable when this returns."""
        return await self._writer.run(work)

    async def aclose(self, last: Callable[[sqlite3.Connection], None] = lambda connection: None) -> None:
        """Let the waiting jobs finish. `last` is called with the connection that writes, if there is one; its
        errors of SQLite are ignored."""
        try:
            await self._reader.close(self._close_reading)
        finally:  # the last connection empties the WAL
            await self._writer.close(lambda: self._close_writing(last))

    # In the reading thread

    def _read_group(self, jobs: list[ThreadJob[Any]]) -> None:
        for job in jobs:
            try:
                if self._read_connection is None:
                    self._read_connection = self._connect(_BUSY_TIMEOUT_S)
                result = job.work(self._read_connection)
                self._read_connection.check_at(self.path)
                job.succeed(result)
            except Exception as error:  # delivered to the caller
                _fail([job], error, self.path)
                self._end_reading(error)

    def _end_reading(self, error: Exception) -> None:
        """Close the connection if a failed job left a transaction open, or perhaps a statement, which the
        error keeps alive: all later reads would be of its snapshot."""
        connection = self._read_connection
        if connection is not None and (connection.in_transaction or not isinstance(error, Error)):
            self._close_reading()

    def _close_reading(self) -> None:
        connection, self._read_connection = self._read_connection, None
        if connection is not None:
            connection.close()

    # In the writing thread

    def _write_group(self, jobs: list[ThreadJob[Any]]) -> After | None:
        """Run one transaction. Nothing of it has happened before its COMMIT, whatever ends it."""
        connection = None
        try:
            connection = self._begun()
            transaction = self._begin(connection)
            done = self._write_jobs(transaction, jobs)
        except Exception as error:
            given_up = connection is not None and not connection.in_transaction  # by SQLite
            self._roll_back()
            if not given_up or len(jobs) == 1:
                _fail(jobs, error, self.path)
                return None
        else:
            return self._commit(transaction, done)
        for job in jobs:
            if (after := self._write_group([job])) is not None:
                after()
        return None

    def _begun(self) -> sqlite3.Connection:
        """The writing connection, in a new transaction that excludes all other writers."""
        if self._write_connection is None:
            self._write_connection = self._connect(0.0)  # `_retried` waits instead
        connection = self._write_connection
        try:
            self._retried(lambda: connection.execute("BEGIN IMMEDIATE"))
        except sqlite3.Error:  # a statement of a failed job, which its error keeps alive, may hold a snapshot
            self._write_connection = None
            connection.close()
            raise
        return connection

    def _write_jobs(self, transaction: X, jobs: list[ThreadJob[Any]]) -> list[tuple[ThreadJob[Any], Any]]:
        """Each job that has not failed alone, with its result. Raises if the transaction has ended."""
        results = [(job, self._write_job(transaction, job, alone=len(jobs) == 1)) for job in jobs]
        transaction.before_commit()
        _check_open(transaction.connection)
        self._check_files()
        return [(job, *result) for job, result in results if result is not None]

    def _write_job(self, transaction: X, job: ThreadJob[Any], *, alone: bool) -> tuple[Any] | None:
        """The result in a tuple, or `None` if the job has failed by itself. One that is `alone` fails with
        the transaction."""
        if alone:
            return (job.work(transaction),)
        connection, mark = transaction.connection, transaction.mark()
        has_savepoint = not isinstance(job.work, OneStatement)
        if has_savepoint:
            connection.execute("SAVEPOINT job")
        try:
            result = (job.work(transaction),)
        except Exception as error:  # delivered to the caller
            if not connection.in_transaction:
                raise
            _fail([job], error, self.path)
            transaction.undo(mark)
            if has_savepoint:
                connection.execute("ROLLBACK TO job")
            result = None
        _check_open(connection)
        if has_savepoint:
            connection.execute("RELEASE job")
        return result

    def _commit(self, transaction: X, done: list[tuple[ThreadJob[Any], Any]]) -> After | None:
        """The only place where a job that writes succeeds."""
        try:
            transaction.connection.execute("COMMIT")
            self._check_files()
        except Exception as error:  # delivered to the callers
            self._roll_back()
            _fail([job for job, _ in done], error, self.path, at_commit=True)
            return None
        for job, result in done:
            job.succeed(result)
        return partial(self._after_commit, transaction)

    def _after_commit(self, transaction: X) -> None:
        transaction.after_commit()
        # if it fails nothing has changed, and a later commit tries again
        with suppress(OSError, sqlite3.Error, Error, MemoryError):
            self._empty_log()

    def _empty_log(self) -> None:
        """Copy a long log into the file, so that it begins anew with the next commit; if a reader needs it,
        it grows by as much again before the next try."""
        size = os.path.getsize(f"{self.path}-wal")
        if size <= LOG_BYTES_MAX:
            self._checkpoint_at = LOG_BYTES_MAX
        if size <= self._checkpoint_at:
            return
        self._begun()
        try:
            with closing(self._connect(0.0)) as beside:
                beside.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            self._checkpoint_at = size + LOG_BYTES_MAX
        finally:
            self._roll_back()

    def _check_files(self) -> None:
        if self._write_connection is not None:
            self._write_connection.check_at(self.path)

    def _roll_back(self) -> None:
        """End the transaction, if one has begun. A connection that fails to do so is closed."""
        connection = self._write_connection
        if connection is None or not connection.in_transaction:
            return
        try:
            connection.execute("ROLLBACK")
        except Exception:
            self._write_connection = None
            connection.close()

    def _close_writing(self, last: Callable[[sqlite3.Connection], None]) -> None:
        if self._write_connection is None:
            return
        with closing(self._write_connection), suppress(sqlite3.Error):
            last(self._write_connection)

    # In either thread

    def _connect(self, busy_timeout_s: float) -> KnownFiles:
        """A connection to the file that was opened first."""
        if self._database is not None:
            check_same(self._database, file_id(self.path), self.path)
        connection = self._connected(busy_timeout_s)
        first = self._database = self._database or connection.database
        if connection.database != first:
            connection.close()
        check_same(first, connection.database, self.path)
        return connection

    def _connected(self, busy_timeout_s: float) -> KnownFiles:
        make_root(os.path.dirname(self.path), "sqlite")
        if os.path.isdir(self.path):
            raise InvalidLocation(f"sqlite: {self.path} is a directory")
        check_rights(self.path)
        options = "psow=1"  # no padding after a commit record, see the header
        return connected(
            self.path, options, busy_timeout_s, lambda c: self._retried(lambda: self._prepare(c)), make_file
        )

    def _retried(self, step: Callable[[], T]) -> T:
        """Run `step`, again while another connection holds the lock. These short delays find a free moment
        sooner than those of SQLite, which grow to 100 ms."""
        deadline = self._runtime.monotonic() + _BUSY_TIMEOUT_S
        bound = _BUSY_DELAY_MIN_S
        while True:
            try:
                return step()
            except sqlite3.OperationalError as error:
                if primary(error) != sqlite3.SQLITE_BUSY or self._runtime.monotonic() > deadline:
                    raise
            self._never.wait(self._runtime.uniform(0, bound))
            bound = min(bound * 2, BUSY_DELAY_MAX_S)


def _check_open(connection: sqlite3.Connection) -> None:
    if not connection.in_transaction:
        raise sqlite3.OperationalError("SQLite has given up the transaction")


def _fail(jobs: Sequence[ThreadJob[Any]], error: Exception, path: str, *, at_commit: bool = False) -> None:
    for job in jobs:  # each gets its own error, since a traceback belongs to one raise
        job.fail(mapped(error, path, at_commit=at_commit))


def mapped(error: Exception, path: str, *, at_commit: bool = False) -> Exception:
    """The error of this library for one of SQLite or the file system."""
    text, code = f"{path}: {str(error) or type(error).__name__}", primary(error)
    if at_commit and code != sqlite3.SQLITE_FULL:
        return _because(Indeterminate(text), error)
    if isinstance(error, Error | ValueError):
        return error
    if isinstance(error, OSError):
        return _because(folders.mapped(error, path), error)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _because(Corruption(text), error)
    if code in _WAITING_DOES_NOT_HELP:
        return _because(StorageUnavailable(text, retry=False), error)
    return _because(StorageUnavailable(text), error)


_WAITING_DOES_NOT_HELP = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_ERROR,  # a statement that this file, or this version of SQLite, refuses
)


def _because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def primary(error: Exception) -> int:
    """The error code of SQLite without its extension."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def prepare_file(connection: sqlite3.Connection, *, has_tables: Callable[[], bool], ddl: str) -> None:
    """Bring the file into WAL mode and create the tables, once; safe for first users at the same time."""
    connection.execute("PRAGMA wal_autocheckpoint = 0")  # see *Checkpoints*
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES_MAX}")
    connection.execute("PRAGMA fullfsync = ON")
    mode = connection.execute("PRAGMA journal_mode").fetchone()
    if mode != ("wal",) and connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
        raise InvalidLocation("sqlite: this file system cannot hold a write-ahead log: use a local one")
    connection.execute("PRAGMA synchronous = FULL")
    # Some systems overwrite each page that is freed, which takes a sixth of the time of a collection.
    connection.execute("PRAGMA secure_delete = FAST")
    if has_tables():
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not has_tables():
            for statement in ddl.split(";"):
                connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
