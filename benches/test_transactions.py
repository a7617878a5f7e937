"""Transactions over two tables beside the same transactions by hand in the same database."""

import asyncio
import itertools
import sqlite3
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import asyncpg
import pytest

import aiopersist as ap

TASKS = 64
ACCOUNTS = 1_000  # in each table
Pair = tuple[str, str]


class SqliteByHand:
    """WAL, synchronous=FULL, on a thread: tasks take turns."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._path = path

    async def open(self) -> None:
        await self._run(self._open)

    async def transfer(self, pair: Pair) -> None:
        await self._run(self._transfer, pair)

    async def aclose(self) -> None:
        await self._run(self._db.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[..., None], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _open(self) -> None:
        self._db = sqlite3.connect(self._path, isolation_level=None)
        self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
        for table in "ab":
            self._db.execute(f"CREATE TABLE {table} (key TEXT PRIMARY KEY, val)")
            self._db.executemany(f"INSERT INTO {table} VALUES (?, 1000)", [(key,) for key in _keys()])

    def _transfer(self, pair: Pair) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        for table, key, amount in zip("ab", pair, (-1, 1), strict=True):
            (val,) = self._db.execute(f"SELECT val FROM {table} WHERE key = ?", (key,)).fetchone()
            self._db.execute(f"UPDATE {table} SET val = ? WHERE key = ?", (val + amount, key))
        self._db.execute("COMMIT")


class PostgresByHand:
    """A pool of connections, serializable, and once more after a conflict."""

    def __init__(self, url: str) -> None:
        self._url, self._id = url.partition("?")[0], uuid.uuid4().hex[:12]

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self._url, min_size=8, max_size=8)
        for table in "ab":
            await self._pool.execute(f"CREATE TABLE {table}_{self._id} (key text PRIMARY KEY, val bigint)")
            rows = [(key, 1000) for key in _keys()]
            await self._pool.executemany(f"INSERT INTO {table}_{self._id} VALUES ($1, $2)", rows)

    async def transfer(self, pair: Pair) -> None:
        async with self._pool.acquire() as connection:
            while True:
                try:
                    async with connection.transaction(isolation="serializable"):
                        for table, key, amount in zip("ab", pair, (-1, 1), strict=True):
                            name = f"{table}_{self._id}"
                            val = await connection.fetchval(f"SELECT val FROM {name} WHERE key = $1", key)
                            statement = f"UPDATE {name} SET val = $2 WHERE key = $1"
                            await connection.execute(statement, key, val + amount)
                    return
                except asyncpg.SerializationError:
                    continue

    async def aclose(self) -> None:
        await self._pool.close()


class Tables:
    """Two tables of one client."""

    def __init__(self, client: ap.Client) -> None:
        self.client = client

    async def open(self) -> None:
        self.tables = [self.client.table(name, str, int) for name in "ab"]
        for table in self.tables:
            await table.put_many(dict.fromkeys(_keys(), 1000))

    async def transfer(self, pair: Pair) -> None:
        async def move(tx: ap.Transaction) -> None:
            for table, key, amount in zip(self.tables, pair, (-1, 1), strict=True):
                val = await tx.get(table, key)
                assert val is not None
                tx.put(table, key, val + amount)

        await self.client.transact(move)


def _keys() -> list[str]:
    return [f"{number:04}" for number in range(ACCOUNTS)]


@pytest.mark.parametrize("place", ["files+sqlite", "files+postgres"], indirect=True)
def test_transfers(place: Any, run: Any, rounds: Any, tmp_path: Path, enabled: bool) -> None:
    """256 transfers by 64 tasks between 1,000 accounts in each of two tables; 64 by 16 tasks between two."""
    is_sqlite = place.consensus.startswith("sqlite:")
    hand: Any = SqliteByHand(tmp_path / "hand.db") if is_sqlite else PostgresByHand(place.consensus)
    client = run(ap.open(blob=place.blob, consensus=place.consensus))
    tables, random, keys = Tables(client), Random(1), _keys()
    each = 4 if enabled else 1
    for contender in (hand, tables):
        run(contender.open())

    async def transfers(transfer: Any, tasks: int, each: int, some: Any) -> None:
        async def task() -> None:
            for _ in range(each):
                await transfer((random.choice(some), random.choice(some)))

        await asyncio.gather(*(task() for _ in range(tasks)))

    contenders = {
        "256 transfers by hand": lambda: transfers(hand.transfer, TASKS, each, keys),
        "256 transfers": lambda: transfers(tables.transfer, TASKS, each, keys),
        "64 by hand, two hot keys": lambda: transfers(hand.transfer, 16, each, keys[:1]),
        "64, two hot keys": lambda: transfers(tables.transfer, 16, each, keys[:1]),
    }
    medians = rounds(contenders, 20)
    assert medians["256 transfers"] > 0
    run(client.aclose())
    run(hand.aclose())


@pytest.mark.parametrize("place", ["files+sqlite"], indirect=True)
def test_open(place: Any, run: Any, rounds: Any, enabled: bool) -> None:
    """Open a resident table of 100,000 keys, beside reading the shard into a dict."""
    entries = {f"key-{number:06}": number for number in range(100_000 if enabled else 1_000)}

    async def filled() -> tuple[ap.Client, ap.Client]:
        client = await ap.open(blob=place.blob, consensus=place.consensus)
        async with client.table("t", str, int) as table:
            await table.put_many(entries)
        return client, await ap.open(blob=place.blob, consensus=place.consensus)

    client, other = run(filled())

    async def by_hand() -> None:
        async with other.reader("t", ap.Schema(str, int)) as reader, reader.snapshot() as snapshot:
            found = await snapshot.to_arrow()
        assert len(dict(zip(found["key"].to_pylist(), found["val"].to_pylist(), strict=True))) == len(entries)

    async def by_table() -> None:
        async with client.table("t", str, int) as table:
            assert await table.get("key-000001") == 1

    medians = rounds({"to_arrow and a dict": by_hand, "open a table": by_table}, 20)
    assert medians["open a table"] > 0
    for resource in (client, other):
        run(resource.aclose())


FOLLOWER = """
import asyncio, sys
import aiopersist as ap

async def main():
    async with ap.open(blob=sys.argv[1], consensus=sys.argv[2]) as client:
        async with client.table("t", str, int).changes() as feed:
            async for step in feed:
                for change in step.changes:
                    sys.stdout.write(f"{change.new}\\n")
                sys.stdout.flush()

asyncio.run(main())
"""


@pytest.mark.parametrize("place", ["files+sqlite", "files+postgres"], indirect=True)
def test_seen_by_a_feed(place: Any, run: Any, rounds: Any) -> None:
    """A put until it is durable; and until a feed of another process has written it to a pipe."""
    numbers = itertools.count()

    async def opened() -> Any:
        client = await ap.open(blob=place.blob, consensus=place.consensus)
        command = [sys.executable, "-c", FOLLOWER, place.blob, place.consensus]
        follower = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        return client, client.table("t", str, int), follower

    client, table, follower = run(opened())

    async def put() -> int:
        number = next(numbers)
        await table.put("k", number)
        return number

    async def seen(number: int) -> None:
        while int(await follower.stdout.readline()) != number:
            pass

    async def put_and_seen() -> None:
        await seen(await put())

    run(put_and_seen())
    medians = rounds({"put": put, "put and seen by a feed": put_and_seen}, 100)
    assert medians["put and seen by a feed"] > 0
    follower.kill()
    run(follower.wait())
    run(client.aclose())
