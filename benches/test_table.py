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
from pydantic import BaseModel

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


class Item(BaseModel):
    name: str
    count: int


VALS: dict[Any, Any] = {
    int: lambda n: n,
    str: lambda n: f"val {n:08}",
    Item: lambda n: Item(name=f"i{n}", count=n),
}


@pytest.mark.parametrize("val", VALS, ids=lambda t: t.__name__)
def test_open(place: Any, run: Any, rounds: Any, enabled: bool, val: Any) -> None:
    """A resident table of 100,000 keys: `to_arrow()` and a dict by hand, of keys and of vals as Python has
    them."""
    count = 100_000 if enabled else 500

    async def filled() -> Any:
        client = await ap.open(blob=place.blob, consensus=place.consensus, maintenance=False)
        table = client.table("t", str, val)
        await table.put_many({f"key {n:06}": VALS[val](n) for n in range(count)})
        await client.admin.force_compaction("t")
        await table.aclose()
        return client

    client = run(filled())

    async def by_hand() -> dict[str, Any]:
        async with await client.reader("t") as reader, await reader.snapshot() as snapshot:
            found = await snapshot.to_arrow()
        return dict(zip(found.column("key").to_pylist(), found.column("val").to_pylist(), strict=True))

    async def opened() -> int:
        async with client.table("t", str, val) as table:
            return (await table.view()).keys

    assert len(run(by_hand())) == run(opened()) == count
    medians = rounds({"to_arrow and a dict": by_hand, "open": opened}, 30)
    assert medians["open"] > 0
    run(client.aclose())
