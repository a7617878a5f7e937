"""A SQLite file, for a process that may write neither the file nor its folder.

In WAL mode even a reader needs the files `-wal` and `-shm` beside the database, and SQLite makes those that
are missing, under the reader's own user: the owner of the location might then not be able to open it. So
no connection is opened that would make them:

- *`-wal` is there*: some process has the file open, or crashed while it had. A connection in `mode=ro` sees
  every commit that has returned, as any other connection does, and is kept. Of a file that this process may
  not write it makes no `-shm`, either: where that is missing, the owner has to open the file.
- *`-wal` is not there*: no process has the file open, and all data is in the database. A connection for this
  one read takes the file as immutable, and the read counts only if the file is the same after it: no `-wal`,
  and the same time of change. That time must not be too recent for the clock of the file system to tell two
  changes apart.

*Hints*: a process that may not write cannot announce that it listens. One of its tasks polls the file for
changes instead, for all tasks that wait.
"""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

from aiopersist.base.errors import InvalidLocation, StorageUnavailable
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.consensus import Entry
from aiopersist.storage.folders import in_the_way, may_write
from aiopersist.storage.keys import check_consensus_key, closed
from aiopersist.storage.readonly import refuse
from aiopersist.storage.sqlite import sql as sql
from aiopersist.storage.sqlite.connection import KnownFiles, connected, path_of
from aiopersist.storage.sqlite.file import mapped
from aiopersist.storage.sqlite.reads import SqliteReads
from aiopersist.storage.sqlite.worker import ThreadJob, WorkerThread
from aiopersist.storage.waiters import Waiters

T = TypeVar("T")

BUSY_TIMEOUT_S = 5.0  # a reader waits for nothing but a recovery
LOOK_S = 0.05  # between two looks at the version of the file
SETTLED_S = 0.05  # longer than the clock of any local file system takes for a tick
READS_MAX = 200  # of one file that changes all the time: ten seconds

Stat = tuple[int, int, int] | None


class NoFile(StorageUnavailable):
    """There is no file at the path."""


class SqliteReader:
    """Reads the SQLite file at `path`; `NoFile` if it is not there. `prepare` gets each new connection."""

    def __init__(
        self, path: str | os.PathLike[str], runtime: Runtime, prepare: Callable[[sqlite3.Connection], None]
    ) -> None:
        self.path = path_of(path)
        self._runtime = runtime
        self._prepare = prepare
        self._never = threading.Event()  # waited on, never set: a thread's sleep
        self._live: KnownFiles | None = None
        self._thread = WorkerThread("aiopersist-sqlite-read", self._run_group)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in the reading thread. Its statements see one state only within a transaction."""
        return await self._thread.run(lambda _: self._read(work))

    async def version(self) -> object:
        """A value that every commit changes: SQLite's data version while the file is open, else the
        facts that the file system keeps about the files."""
        return await self._thread.run(lambda _: self._version())

    async def aclose(self) -> None:
        """Let the waiting reads finish."""
        await self._thread.close(self._close)

    # In the reading thread

    def _run_group(self, jobs: list[ThreadJob[Any]]) -> None:
        for job in jobs:
            try:
                job.succeed(job.work(None))
            except Exception as error:  # delivered to the caller
                job.fail(mapped(error, self.path))
                self._close()  # later reads might see the snapshot of a statement that the error keeps alive

    def _version(self) -> object:
        self._close_old()
        if self._live is None:
            return _stat(self.path), _stat(f"{self.path}-wal")
        return self._live.execute("PRAGMA data_version").fetchone()

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        for _ in range(READS_MAX):
            self._close_old()
            if self._live is None and _stat(f"{self.path}-wal") is not None:
                options = "mode=ro" if may_write(self.path) else "mode=ro&readonly_shm=1"
                self._live = connected(self.path, options, BUSY_TIMEOUT_S, self._prepare)
            if self._live is not None:
                return work(self._live)
            if result := self._read_at_rest(work):
                return result[0]
            self._never.wait(SETTLED_S)
        raise sqlite3.OperationalError(f"the file changed during each of {READS_MAX} reads: try again")

    def _read_at_rest(self, work: Callable[[sqlite3.Connection], T]) -> tuple[T] | None:
        """The result of `work` in a tuple, or `None` if a process may have had the file open meanwhile."""
        before = _stat(self.path)
        if before is None:
            what = in_the_way(os.path.dirname(self.path))
            text = f"{self.path}: there is no such file" if what is None else f"{what} is not a directory"
            raise NoFile(text, retry=False)
        if abs(self._runtime.wall() - before[2] / 1e9) < SETTLED_S:
            return None
        try:
            immutable = "mode=ro&immutable=1"
            with closing(connected(self.path, immutable, BUSY_TIMEOUT_S, self._prepare)) as connection:
                result = work(connection)
        except sqlite3.Error:
            if self._is_as(before):
                raise
            return None
        return (result,) if self._is_as(before) else None

    def _is_as(self, before: Stat) -> bool:
        return _stat(f"{self.path}-wal") is None and _stat(self.path) == before

    def _close_old(self) -> None:
        """Close the connection if other files are at the path now: it would read the old ones for ever."""
        if self._live is not None and not self._live.are_at(self.path):
            self._close()

    def _close(self) -> None:
        connection, self._live = self._live, None
        if connection is not None:
            connection.close()


class ReadonlySqliteConsensus(SqliteReads):
    """The versions in the SQLite file at `path`. Neither the file nor anything beside it is made or written;
    `InvalidLocation` if it is not there. Hints come within a few times `LOOK_S`."""

    def __init__(self, path: str | os.PathLike[str], *, runtime: Runtime = SYSTEM) -> None:
        self._runtime = runtime
        self._reader = SqliteReader(path, runtime, sql.check_format)
        self._waiters = Waiters()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<ReadonlySqliteConsensus {self._reader.path}>"

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await self._reader.read(work)
        except NoFile as error:
            raise InvalidLocation(f"sqlite: {error}") from error

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        refuse("compare_and_set")

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        refuse("compare_and_set_many")

    async def truncate(self, key: str, seqno: int) -> int:
        refuse("truncate")

    async def watch(self, key: str) -> None:
        check_consensus_key(key)
        if self._closed:
            raise closed("consensus store")
        with self._waiters.waiting(key) as woken:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look(), name="look at a SQLite file")
            await woken

    async def now(self) -> float:
        return self._runtime.wall()

    async def aclose(self) -> None:
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        self._waiters.wake_all()
        await self._reader.aclose()

    async def _look(self) -> None:
        """Wake all waiters at the beginning and after each change of the file; end when none is left."""
        last = None
        while self._waiters.any_waits:
            version = await self._reader.version()
            if version != last:
                last = version
                self._waiters.wake_all()
            await self._runtime.sleep(LOOK_S)


def _stat(path: str) -> Stat:
    try:
        state = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (state.st_ino, state.st_size, state.st_mtime_ns)
