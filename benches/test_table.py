"""A table beside the same work by hand: upserts of SQLite and Postgres with the same durability, and a
shard's `write` of the same row."""

import asyncio
import itertools
import sqlite3
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import aiopersist as ap

TASKS = 64


class SqliteByHand:
    """WAL, synchronous=FULL, on a thread."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._db: Any = None
        self._path = path

    async def put(self, key: str, val: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._put, key, val)

    async def get(self, key: str) -> int:
        found: int = await asyncio.get_running_loop().run_in_executor(self._thread, self._get, key)
        return found

    async def aclose(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    def _put(self, key: str, val: int) -> None:
        if self._db is None:
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._db.executescript(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;"
                "CREATE TABLE t (key TEXT PRIMARY KEY, val)"
            )
        self._db.execute(
            "INSERT INTO t VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET val = excluded.val", (key, val)
        )

    def _get(self, key: str) -> int:
        (val,) = self._db.execute("SELECT val FROM t WHERE key = ?", (key,)).fetchone()
        return int(val)


class PostgresByHand:
    """One connection, a statement per upsert; tasks take turns."""

    def __init__(self, url: str) -> None:
        self._url, self._db, self._turn = url.partition("?")[0], None, asyncio.Lock()
        self._table = f"hand_{uuid.uuid4().hex[:12]}"

    async def put(self, key: str, val: int) -> None:
        async with self._turn:
            if self._db is None:
                self._db = await asyncpg.connect(self._url)
                await self._db.execute(f"CREATE TABLE {self._table} (key text PRIMARY KEY, val bigint)")
            statement = f"INSERT INTO {self._table} VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET val = $2"
            await self._db.execute(statement, key, val)

    async def get(self, key: str) -> int:
        async with self._turn:
            assert self._db is not None
            return int(await self._db.fetchval(f"SELECT val FROM {self._table} WHERE key = $1", key))

    async def aclose(self) -> None:
        if self._db is not None:
            await self._db.close()


@pytest.mark.parametrize("place", ["files+sqlite", "files+postgres"], indirect=True)
def test_table(place: Any, run: Any, rounds: Any, tmp_path: Path) -> None:
    """A put, a get, and 64 tasks that do one each; the times are those of all 64."""
    is_sqlite = place.consensus.startswith("sqlite:")
    hand: Any = SqliteByHand(tmp_path / "hand.db") if is_sqlite else PostgresByHand(place.consensus)
    numbers = itertools.count()

    async def opened() -> Any:
        client = await ap.open(blob=place.blob, consensus=place.consensus)
        writer = await client.writer("shard", ap.Schema(str, int), clock="wall")
        return client, writer, await client.table("t", str, int)

    client, writer, table = run(opened())

    async def tasks(call: Any) -> None:
        await asyncio.gather(*(call(f"k{task}", next(numbers)) for task in range(TASKS)))

    run(tasks(table.put))
    run(tasks(hand.put))
    contenders = {
        "put by hand": lambda: hand.put("k1", next(numbers)),
        "write": lambda: writer.write([("k1", next(numbers))]),
        "put": lambda: table.put("k1", next(numbers)),
        "64 puts by hand": lambda: tasks(hand.put),
        "64 puts": lambda: tasks(table.put),
        "get by hand": lambda: hand.get("k1"),
        "get": lambda: table.get("k1"),
        "64 gets": lambda: tasks(lambda key, _: table.get(key)),
        "get stale": lambda: table.get("k1", stale=True),
    }
    medians = rounds(contenders, 100)
    assert medians["put"] > 0
    for resource in (writer, client, hand):
        run(resource.aclose())
