"""A model of Postgres under the real group commit: the real `GroupCommit` and `Pool` of several clients, on
connections whose statements run here, step by step, as `storage/postgres/sql.py` has them.

A statement takes a snapshot; it locks head rows one after the other; it commits; its answer arrives. In READ
COMMITTED a row that is locked is looked at again: if its head has moved since the snapshot, it is left alone.
What the model reads in the text of the real statement: whether a lock is waited for, and in which order.

A fault is of a client: `dies` breaks a connection at any step, so that nobody knows; `refused` is an error of
severity ERROR before the commit. An entry whose data is `BAD` is refused always."""

from collections.abc import Iterable, Mapping
from typing import Any

import asyncpg

from aiopersist.storage.consensus import Entry
from aiopersist.storage.postgres.address import PostgresAddress
from aiopersist.storage.postgres.group import GroupCommit
from aiopersist.storage.postgres.pool import Pool
from aiopersist.storage.postgres.sql import statements
from tests.exhaustive.kit import Model

BAD = b"bad"
WAITS = "waits for "
UNSEEN = ("begins", "locks", WAITS, "commits")
POOL_SIZE = 12


class Postgres(Model):
    """See the header."""

    def begin(self) -> None:
        super().begin()
        self.heads: dict[str, int] = {}
        self.log: dict[tuple[str, int], bytes] = {}
        self.locks: dict[str, object] = {}
        """The rows that statements under way have locked."""
        self.unknown: set[bytes] = set()
        """The data of statements whose connection died."""
        self.refused: set[bytes] = set()
        """The data of statements that were refused and had no other."""
        self.groups: dict[str, GroupCommit] = {}

    def group(self, who: str) -> GroupCommit:
        """The group commit of that client."""
        if who not in self.groups:
            pool = _Pool(self, who)
            moved, answered = (lambda keys, seqnos, alone: None), (lambda keys, row: None)
            self.groups[who] = GroupCommit(pool, statements("s"), moved, answered)
        return self.groups[who]

    def tell(self, who: str, what: object) -> None:
        """The steps of a statement are no news to its client until it ends."""
        if not (isinstance(what, str) and what.startswith(UNSEEN) and what.endswith(" ")):
            super().tell(who, what)

    def _ways(self, waiting: Any) -> Iterable[str]:
        if waiting.what.startswith(WAITS) and waiting.what.split()[2] in self.locks:
            return ()
        at_commit = waiting.what.startswith("commits")
        faults = {how for how in self.faults.get(waiting.who, ()) if how == "dies" or at_commit}
        return ("", *sorted(faults)) if " of " in waiting.what else ("",)

    def _mark(self) -> Any:
        told = tuple(sorted((who, tuple(what)) for who, what in self._told.items()))
        waiting = tuple((waiting.who, waiting.what) for waiting in self._waiting)
        return tuple(sorted(self.heads.items())), tuple(sorted(self.log.items())), told, waiting


class _Pool(Pool):
    """The real one, but for the way to a server."""

    def __init__(self, model: Postgres, who: str) -> None:
        super().__init__(PostgresAddress({}, "s", ""), POOL_SIZE)
        self._model = model
        self._who = who

    async def connect(self) -> Any:
        return _Connection(self._model, self._who)


class _Connection:
    """One session. Where it died it raises, as after a timeout: nothing says so before."""

    pooled = False

    def __init__(self, model: Postgres, who: str) -> None:
        self._model = model
        self._who = who
        self._dead = False

    def is_closed(self) -> bool:
        return False

    def is_in_transaction(self) -> bool:
        return False

    def terminate(self) -> None:
        self._dead = True

    async def fetch(self, sql: str, *arguments: Any) -> list[dict[str, Any]]:
        if self._dead:
            raise asyncpg.InterfaceError("the connection is of no more use")
        first = arguments[0]
        if isinstance(first, str):
            key, *expected, data = arguments
            entries = [Entry(key, expected[0] if expected else None, data)]
        else:
            entries = [Entry(*columns) for columns in zip(*arguments, strict=True)]
        statement = _Statement(self._model, self._who, sql, entries)
        try:
            return await statement.run()
        except OSError:
            self._dead = True
            raise

    async def fetchrow(self, sql: str, *arguments: Any) -> dict[str, Any]:
        (row,) = await self.fetch(sql, *arguments)
        return row


class _Statement:
    def __init__(self, model: Postgres, who: str, sql: str, entries: list[Entry]) -> None:
        self._model = model
        self._who = who
        self._entries = entries
        self._skips = "SKIP LOCKED" in sql
        self._in_order = "ORDER BY" in sql
        self._shown = " ".join(f"{entry.key}:{entry.data.decode()}" for entry in entries)
        self._snapshot: dict[str, int] = {}
        self._mine: list[Entry] = []

    async def run(self) -> list[dict[str, Any]]:
        model = self._model
        try:
            await self._step("begins")
            self._snapshot = model.heads.copy()
            for entry in sorted(self._entries) if self._in_order else self._entries:
                if self._expects(entry, self._snapshot):
                    await self._lock(entry)
            await self._step("commits")
            if any(entry.data == BAD for entry in self._entries):
                raise self._refusal()
            self._commit()
        finally:
            for entry in self._mine:
                del model.locks[entry.key]
        await self._step("answers")
        return [self._row(entry) for entry in self._entries]

    async def _step(self, what: str) -> None:
        """Wait for one step. Its text has all that decides how the statement goes on."""
        if self._model.free:  # the run is over
            raise ConnectionResetError
        mine = sorted(entry.key for entry in self._mine)
        seen = sorted(self._snapshot.items())
        how = await self._model._step(self._who, f"{what} of {self._shown} {seen} {mine}")
        if how == "dies":
            self._model.unknown |= {entry.data for entry in self._entries}
            raise ConnectionResetError("the connection died")
        if how == "refused":
            raise self._refusal()

    def _expects(self, entry: Entry, heads: Mapping[str, int]) -> bool:
        return heads.get(entry.key) == entry.expected

    async def _lock(self, entry: Entry) -> None:
        """As `FOR UPDATE`, or `UPDATE`: the newest row is looked at again once it is locked."""
        locks = self._model.locks
        await self._step(("locks " if self._skips else WAITS) + entry.key)
        if entry.key in locks:
            assert self._skips
            return
        if self._expects(entry, self._model.heads):
            locks[entry.key] = self
            self._mine.append(entry)

    def _commit(self) -> None:
        for entry in self._mine:
            seqno = 0 if entry.expected is None else entry.expected + 1
            self._model.heads[entry.key] = seqno
            self._model.log[entry.key, seqno] = entry.data

    def _row(self, entry: Entry) -> dict[str, Any]:
        won = entry.key in {mine.key for mine in self._mine}
        maybe = self._expects(entry, self._snapshot)
        return {"key": entry.key, "won": won, "maybe": maybe, "clock": 0.0, "alone": False}

    def _refusal(self) -> asyncpg.PostgresError:
        if len(self._entries) == 1:
            self._model.refused.add(self._entries[0].data)
        error = asyncpg.PostgresError("refused")
        error.severity_en, error.sqlstate = "ERROR", "40001"
        error.server_source_filename, error.server_source_line = "execMain.c", "1"
        return error
