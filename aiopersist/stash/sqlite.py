"""A stash in a SQLite file, which may hold several stashes, and a consensus store beside them.

Every transaction is BEGIN IMMEDIATE, so it runs alone and sees all earlier ones: the fence needs no lock of
its own. `sqlite_sql` has the tables.
"""

import os
import sqlite3
from collections.abc import Callable
from typing import TypeVar

from aiopersist.base.runtime import Runtime
from aiopersist.stash import sqlite_sql as sql
from aiopersist.stash.model import Fence, Loaded, Opener, Select, Sending, StoreChange, Verdict, judge
from aiopersist.stash.store import OPENER_RETENTION_S, STASH, Store
from aiopersist.storage.sqlite.file import SqliteFile, SqliteTransaction
from aiopersist.storage.sqlite.readonly import NoFile, SqliteReader
from aiopersist.storage.wishes import HeardWishes, Wish

T = TypeVar("T")


class SqliteStore(Store):
    """The stash `name` in the file at `path`. Without `writes` it creates neither, and only reads."""

    def __init__(self, path: str | os.PathLike[str], name: str, runtime: Runtime, *, writes: bool) -> None:
        self._path = path
        self._name = name
        self._runtime = runtime
        self._heard = HeardWishes(runtime)
        self._file: SqliteFile[SqliteTransaction] | SqliteReader = (
            SqliteFile(path, runtime, sql.prepare, SqliteTransaction)
            if writes
            else SqliteReader(path, runtime, lambda connection: None)  # which changes nothing in the file
        )

    def __repr__(self) -> str:
        return f"<SqliteStore {self._file.path} {self._name}>"

    async def take(self, opener_id: str, token: str, nonce: str | None) -> Fence:
        now = self._runtime.wall()

        def work(c: sqlite3.Connection) -> Fence:
            fence = sql.take(c, self._name, nonce)
            sql.sweep_openers(c, self._name, now - OPENER_RETENTION_S)
            sql.enroll(c, self._name, opener_id, token, now)
            return fence

        return await self._write(work)

    async def enroll(self, opener_id: str, token: str) -> None:
        now = self._runtime.wall()
        await self._write(lambda c: sql.enroll(c, self._name, opener_id, token, now))

    async def load(self, select: Select) -> Loaded | None:
        def work(c: sqlite3.Connection) -> Loaded | None:
            if isinstance(self._file, SqliteReader) and not sql.has_tables(c):
                return None
            c.execute("BEGIN")
            loaded = sql.load(c, self._name, select)
            c.execute("COMMIT")
            return loaded

        try:
            return await self._file.read(work)
        except NoFile:
            return None

    async def commit(self, opener: Opener, change: StoreChange, sending: Sending) -> Verdict:
        now = self._runtime.wall()

        def work(c: sqlite3.Connection) -> Verdict:
            now_stored = sql.state_for(c, self._name, opener.id, change)
            self._heard.hear([STASH], sql.wishes(c, self._name, now))
            verdict = judge(opener, now_stored.fence, sending, now_stored.token, now_stored.holds)
            if verdict is Verdict.APPLIED and now_stored.token != sending.token:
                sql.apply(c, self._name, change)
                sql.set_token(c, self._name, opener.id, sending.token, now)
            return verdict

        return await self._write(work)

    async def token(self, opener_id: str) -> str | None:
        return await self._write(lambda c: sql.token_of(c, self._name, opener_id))

    async def consolidate(self, opener: Opener, collection_id: int) -> int | None:
        def work(c: sqlite3.Connection) -> int | None:
            if sql.read_fence(c, self._name) != opener.fence:
                return None
            return sql.consolidate(c, self._name, collection_id)

        return await self._write(work)

    async def forget(self, opener_id: str) -> None:
        await self._write(lambda c: sql.forget(c, self._name, opener_id))

    async def wish(self, opener_id: str, for_s: float, waited_s: float) -> None:
        now = self._runtime.wall()
        await self._write(lambda c: sql.wish(c, self._name, Wish(STASH, opener_id, for_s, waited_s), now))

    async def aclose(self) -> None:
        await self._file.aclose()

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        assert isinstance(self._file, SqliteFile), "opened to be read"
        return await self._file.write(lambda transaction: work(transaction.connection))
