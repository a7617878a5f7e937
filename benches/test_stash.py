"""A stash beside the same work in bare SQL: a row per entry, one compare-and-set of a head, one commit."""

import asyncio
import itertools
import sqlite3
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from aiopersist import stash
from aiopersist.stash import TypedCollection


class User(BaseModel):
    name: str
    email: str
    age: int


USERS = TypedCollection("users", str, User)
Entries = list[tuple[str, User]]


def users(n: int, start: int) -> Entries:
    return [
        (f"user-{i:08}", User(name=f"Name {i}", email=f"{i}@example.org", age=i % 90))
        for i in range(start, start + n)
    ]


class SqliteByHand:
    """WAL, synchronous=FULL, on a thread."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._db: Any = None
        self._path = path

    async def append(self, entries: Entries, time: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._append, entries, time)

    async def peek(self) -> dict[str, User]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._peek)

    async def aclose(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    def _append(self, entries: Entries, time: int) -> None:
        if self._db is None:
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._db.executescript(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE head (upper);"
                "CREATE TABLE data (key TEXT, val TEXT, time INTEGER, diff INTEGER);"
                "CREATE INDEX data_key ON data (key); INSERT INTO head VALUES (0)"
            )
        self._db.execute("BEGIN IMMEDIATE")
        moved = self._db.execute("UPDATE head SET upper = ? WHERE upper = ?", (time + 1, time))
        assert moved.rowcount == 1
        rows = ((key, val.model_dump_json(), time, 1) for key, val in entries)
        self._db.executemany("INSERT INTO data VALUES (?, ?, ?, ?)", rows)
        self._db.execute("COMMIT")

    def _peek(self) -> dict[str, User]:
        found = self._db.execute(
            "SELECT key, val FROM data GROUP BY key, val HAVING sum(diff) = 1 ORDER BY key"
        )
        return {key: User.model_validate_json(val) for key, val in found.fetchall()}


class PostgresByHand:
    """Prepared statements in a transaction, on one connection."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._schema = f"hand_{uuid.uuid4().hex[:12]}"
        self._db: Any = None

    async def append(self, entries: Entries, time: int) -> None:
        if self._db is None:
            await self._connect()
        keys, vals = [key for key, _ in entries], [val.model_dump_json() for _, val in entries]
        async with self._db.transaction():
            moved = await self._db.execute("UPDATE head SET upper = $2 WHERE upper = $1", time, time + 1)
            assert moved == "UPDATE 1"
            await self._db.execute(
                "INSERT INTO data SELECT key, val, $3, 1 FROM unnest($1::text[], $2::text[]) AS d (key, val)",
                keys,
                vals,
                time,
            )

    async def peek(self) -> dict[str, User]:
        found = await self._db.fetch(
            "SELECT key, val FROM data GROUP BY key, val HAVING sum(diff) = 1 ORDER BY key"
        )
        return {row["key"]: User.model_validate_json(row["val"]) for row in found}

    async def aclose(self) -> None:
        await self._db.execute(f"DROP SCHEMA {self._schema} CASCADE")
        await self._db.close()

    async def _connect(self) -> None:
        self._db = await asyncpg.connect(self._dsn, server_settings={"search_path": self._schema})
        await self._db.execute(
            f"CREATE SCHEMA {self._schema}; CREATE TABLE head (upper bigint); INSERT INTO head VALUES (0);"
            'CREATE TABLE data (key text COLLATE "C", val text, time bigint, diff bigint);'
            "CREATE INDEX data_key ON data (key)"
        )


@pytest.fixture(params=["sqlite", "postgres"])
def beside(request: Any, tmp_path: Path) -> tuple[str, Any]:
    """The URL of an empty stash, and the same database by hand."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path / 'stash.db'}", SqliteByHand(tmp_path / "hand.db")
    server = request.getfixturevalue("postgres_server")
    return server.url(f"b_{uuid.uuid4().hex[:12]}"), PostgresByHand(server.dsn())


@pytest.mark.parametrize("n", [1, 100, 10_000])
def test_append(beside: tuple[str, Any], n: int, run: Any, rounds: Any) -> None:
    """New entries at the upper; the sealed time follows."""
    url, hand = beside
    opened = run(stash.open(url))
    c = run(USERS.get(opened))
    ours_at, hand_at = itertools.count(), itertools.count()

    async def ours() -> None:
        time = next(ours_at)
        entries = [((key, val), time, 1) for key, val in users(n, time * n)]
        await opened.append([stash.AppendBatch(c.id, time, time + 1, time, time, entries)])

    async def by_hand() -> None:
        time = next(hand_at)
        await hand.append(users(n, time * n), time)

    medians = rounds({"by hand": by_hand, "ours": ours}, 300 if n < 10_000 else 10)
    assert medians["ours"] > 0
    run(opened.aclose())
    run(hand.aclose())


def test_peek(beside: tuple[str, Any], run: Any, rounds: Any) -> None:
    """10,000 entries as a dict of models."""
    url, hand = beside
    opened = run(stash.open(url))
    entries = users(10_000, 0)
    run(USERS.upsert(opened, entries))
    run(hand.append(entries, 0))

    async def ours() -> None:
        assert len(await USERS.peek_one(opened)) == 10_000

    async def by_hand() -> None:
        assert len(await hand.peek()) == 10_000

    assert run(USERS.peek_one(opened)) == run(hand.peek())
    assert rounds({"by hand": by_hand, "ours": ours}, 20)["ours"] > 0
    run(opened.aclose())
    run(hand.aclose())
