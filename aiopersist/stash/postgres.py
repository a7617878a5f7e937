"""A stash in a schema of a Postgres database, for any number of processes.

READ COMMITTED with locks. A change locks the fence (shared), its opener's row, and the uppers of its
collections in the order of their ids: so changes never deadlock, and changes of different collections do not
wait for each other. A change of a few thousand rows is one statement: one round trip, and a transaction of
its own. A change of more rows, or one that creates collections or moves the version, is a transaction of
several statements; `idle_in_transaction_session_timeout` ends it if its client is gone.

A read is one statement, so it sees one snapshot. Consolidation has a connection of its own.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from operator import add
from typing import Any

import asyncpg
from asyncpg.prepared_stmt import PreparedStatement

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.settings import Settings
from aiopersist.stash import postgres_sql as sql
from aiopersist.stash.errors import StashError
from aiopersist.stash.model import (
    FORMAT,
    NEWER,
    Codecs,
    Fence,
    Loaded,
    Opener,
    Select,
    Sending,
    StoreChange,
    Stored,
    StoredRows,
    Verdict,
    frontiers_of,
    judge,
)
from aiopersist.stash.store import STASH, WISH, Store
from aiopersist.storage.postgres.address import SCHEMA_BYTES_MAX, PostgresAddress
from aiopersist.storage.postgres.connect import Connection
from aiopersist.storage.postgres.consensus import DEFAULT_SCHEMA
from aiopersist.storage.postgres.pool import Pool
from aiopersist.storage.wishes import HeardWishes, Wish

DEFAULT_STASH_SCHEMA = "stash"
POOL_SIZE = 4  # one writes, the others read
STATEMENT_ROWS = 2048  # of a statement: with more, the driver blocks the loop for longer
STATEMENT_BYTES = 4 * 1024 * 1024

# A client that vanished in the middle of a message is noticed, too, within half a minute.
KEEPALIVE = {"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "4"}

COLUMNS = ("keys", "vals", "times", "diffs")  # of a slice that is read

Chunk = tuple[list[Any], ...]
"""Columns of `data`."""
Prepared = Mapping[str, "PreparedStatement[asyncpg.Record] | _Statement"]


def at(url: str) -> PostgresAddress:
    """The address of the stash at that URL."""
    return PostgresAddress.parse(url, schema=DEFAULT_STASH_SCHEMA)


def beside(url: str, name: str) -> PostgresAddress:
    """The address of the stash `name` beside the consensus store at that URL."""
    address = PostgresAddress.parse(url, schema=DEFAULT_SCHEMA)
    schema = f"{address.schema}_{name}"
    if len(schema.encode()) > SCHEMA_BYTES_MAX:
        what = f"{shown(name)} is too long: the schema {shown(schema, 160)} would have more than 63 bytes"
        raise InvalidUsage(UsageKind.INVALID_NAME, what, name=name)
    return replace(address, schema=schema)


class PostgresStore(Store):
    """The stash in the schema of `address`. One that `writes` uses no standby."""

    def __init__(self, address: PostgresAddress, settings: Settings, *, writes: bool) -> None:
        if writes:
            address.check_newest()
        idle_ms = int(settings.stash_idle_in_transaction_s * 1000)
        session = {"idle_in_transaction_session_timeout": str(idle_ms), **KEEPALIVE}
        self._heard = HeardWishes()
        self._shown = address.shown
        self._schema = address.schema
        self._tables = sql.tables(address.schema)
        self._sql = sql.statements(address.schema)
        size = min(POOL_SIZE, address.numbers.get("connections", POOL_SIZE))
        self._pool = Pool(address, size, session=session)
        self._background = Pool(address, 1, session=session, idle=0)

    def __repr__(self) -> str:
        return f"<PostgresStore {self._shown} {self._schema}>"

    async def take(self, opener_id: str, token: str, nonce: str | None) -> Fence:
        async def work(connection: Connection) -> Fence:
            await self._tables.ensure(connection)
            await connection.execute(self._sql["enroll"], opener_id, token)
            await connection.execute(self._sql["sweep"])
            while True:
                fence = _fence(await connection.fetchrow(self._sql["fence"]))
                if nonce is None or fence.nonce == nonce:
                    return fence
                await connection.execute(self._sql["take"], fence.epoch, nonce)

        return await self._pool.write(work)

    async def enroll(self, opener_id: str, token: str) -> None:
        await self._pool.write(lambda connection: connection.execute(self._sql["enroll"], opener_id, token))

    async def load(self, select: Select) -> Loaded | None:
        statement, arguments = sql.load(self._schema, select)

        async def work(connection: Connection) -> list[asyncpg.Record] | None:
            try:
                return await connection.fetch(statement, *arguments)
            except asyncpg.UndefinedTableError:
                return None

        rows = await self._pool.read(work)
        if not rows:
            return None
        slices: dict[int, list[asyncpg.Record]] = {}
        for row in rows:
            if row["collection_id"] is not None:
                slices.setdefault(row["collection_id"], []).append(row)
        collections = tuple(_stored(slices[cid], select) for cid in sorted(slices))
        return Loaded(_fence(rows[0]), rows[0]["version"], collections)

    async def commit(self, opener: Opener, change: StoreChange, sending: Sending) -> Verdict:
        chunks = list(chunks_of(change))
        several = len(chunks) > 1 or change.created or change.version is not None

        async def work(connection: Connection) -> Verdict:
            if several:
                return await self._commit_several(connection, opener, change, sending, chunks)
            row = await connection.fetchrow(self._sql["commit"], *_arguments(opener, change, sending, chunks))
            return self._verdict(row, opener, sending)

        return await self._pool.write(work)

    async def token(self, opener_id: str) -> str | None:
        token: str | None = await self._pool.write(
            lambda connection: connection.fetchval(self._sql["token"], opener_id)
        )
        return token

    async def consolidate(self, opener: Opener, collection_id: int) -> int | None:
        async def work(connection: Connection) -> int | None:
            lock = sql.consolidation_lock(self._schema, collection_id)
            names = ("fence_shared", "lock_consolidation", "loose", "delete_all", "sums", "settled")
            run = await self._prepared(connection, names)
            async with connection.transaction():
                if _fence(await run["fence_shared"].fetchrow()) != opener.fence:
                    return None
                await run["lock_consolidation"].fetch(lock)
                counted = await run["loose"].fetchval(collection_id)
                await run["delete_all"].fetch(collection_id)
                await run["sums"].fetch(collection_id)
                remaining: int = await run["settled"].fetchval(collection_id, counted)
                return remaining

        return await self._background.write(work)

    async def forget(self, opener_id: str) -> None:
        await self._pool.write(lambda connection: connection.execute(self._sql["forget"], opener_id))

    async def wish(self, opener_id: str, for_s: float, waited_s: float) -> None:
        await self._pool.write(
            lambda connection: connection.execute(self._sql["wish"], opener_id, for_s, waited_s)
        )

    async def aclose(self) -> None:
        try:
            await self._background.aclose()
        finally:
            await self._pool.aclose()

    async def _commit_several(
        self,
        connection: Connection,
        opener: Opener,
        change: StoreChange,
        sending: Sending,
        chunks: list[Chunk],
    ) -> Verdict:
        """A transaction of several statements; the last one decides."""
        lock = "fence_shared" if change.version is None else "lock"
        run = await self._prepared(connection, (lock, "migrate", "create", "insert", "commit"))
        transaction, applied = connection.transaction(), False
        await transaction.start()
        try:
            verdict = await self._begin(run, run[lock], opener, change, chunks)
            if verdict is Verdict.APPLIED:
                row = await run["commit"].fetchrow(*_arguments(opener, change, sending, chunks[-1:]))
                verdict, applied = self._verdict(row, opener, sending), bool(row and row["ok"])
        except asyncpg.UniqueViolationError:  # another opener has created that collection meanwhile
            verdict = Verdict.CONFLICT
        # A sending that finds an earlier one applied leaves nothing.
        await (transaction.commit() if applied else transaction.rollback())
        return verdict

    async def _begin(
        self, run: Prepared, lock: Any, opener: Opener, change: StoreChange, chunks: list[Chunk]
    ) -> Verdict:
        """Lock the fence, then make everything but the last rows."""
        if _fence(await lock.fetchrow()) != opener.fence:
            return Verdict.FENCED
        if change.version is not None:
            arguments = (*change.version, len(change.expected))
            if await run["migrate"].fetchval(*arguments) is None:
                return Verdict.CONFLICT
        for created in change.created:
            since, upper = (frontier.time for frontier in created.frontiers)
            row = (created.id, created.name, *created.codecs, since, upper, len(created.rows))
            await run["create"].fetch(*row)
        for chunk in chunks[:-1]:
            await run["insert"].fetch(*chunk)
        return Verdict.APPLIED

    def _verdict(self, row: asyncpg.Record | None, opener: Opener, sending: Sending) -> Verdict:
        fence = _fence(row)
        assert row is not None  # it has a fence
        texts = [wish.split(" ") for wish in row["wishes"] or ()]
        wishes = [
            Wish(STASH, who.removeprefix(WISH), float(left), float(waited)) for left, waited, who in texts
        ]
        self._heard.hear([STASH], wishes)
        return judge(opener, fence, sending, row["token"], row["ok"])

    async def _prepared(self, connection: Connection, names: Sequence[str]) -> Prepared:
        """Statements for a transaction, prepared before it begins. The driver prepares without a deadline; if
        a client vanished then inside a transaction, the server would not see it as idle, and not end it. At a
        pooler, which notices that, nothing is prepared."""
        if connection.pooled:
            return {name: _Statement(connection, self._sql[name]) for name in names}
        return {name: await connection.prepare(self._sql[name]) for name in names}


class _Statement:
    """A statement that looks like a prepared one."""

    def __init__(self, connection: Connection, text: str) -> None:
        self.fetch = partial(connection.fetch, text)
        self.fetchrow = partial(connection.fetchrow, text)
        self.fetchval = partial(connection.fetchval, text)


def _arguments(opener: Opener, change: StoreChange, sending: Sending, chunks: list[Chunk]) -> tuple[Any, ...]:
    """The arguments of the statement that decides."""
    rows: Chunk = chunks[0] if chunks else ([], [], [], [], [])
    expected = (list(change.expected.keys()), list(change.expected.values()))
    return opener.id, *sending, *opener.fence, *expected, *_moves(change), *rows


def _fence(row: asyncpg.Record | None) -> Fence:
    if row is None:
        raise StashError("the stash is gone")
    if row.get("format", FORMAT) > FORMAT:
        raise StashError(NEWER)
    return Fence(row["epoch"], row["nonce"])


def _stored(slices: Sequence[asyncpg.Record], select: Select) -> Stored:
    """The collection whose rows these slices hold."""
    row, rows = slices[0], StoredRows()
    if select.rows and row["keys"] is not None:
        columns = (list(chain.from_iterable(part[name] for part in slices)) for name in COLUMNS)
        rows = StoredRows(*columns)
    return Stored(
        row["collection_id"],
        row["name"],
        Codecs(row["key_codec"], row["val_codec"]),
        frontiers_of(f"collection {row['name']!r}", row["since"], row["upper"]),
        row["revision"],
        row["loose"],
        row["settled"],
        rows,
    )


def _moves(change: StoreChange) -> tuple[list[int], list[Any], list[Any], list[int]]:
    """Ids, uppers, sinces, and the numbers of rows added."""
    moves = change.moves.values()
    return (
        list(change.moves.keys()),
        [move.frontiers.upper.time for move in moves],
        [move.frontiers.since.time for move in moves],
        [len(move.rows) for move in moves],
    )


def chunks_of(change: StoreChange) -> Iterator[Chunk]:
    """The rows in chunks, each for one statement."""
    columns: Chunk = ([], [], [], [], [])
    for cid, rows in change.rows:
        for column, values in zip(columns, ([cid] * len(rows), *rows.columns), strict=True):
            column.extend(values)
    ends = list(accumulate(map(add, map(len, columns[1]), map(len, columns[2]))))
    begin = 0
    while begin < len(ends):
        so_far = ends[begin - 1] if begin else 0
        end = max(begin + 1, min(bisect_right(ends, so_far + STATEMENT_BYTES), begin + STATEMENT_ROWS))
        yield tuple(column[begin:end] for column in columns)
        begin = end
