"""One process of `test_road.py`: so many tasks that each do one thing after the other, with the library or by
hand. It prints `ready`, reads a line, works, and prints what it did as JSON.

python -m benches.road ours|hand KIND TASKS SECONDS KEYS SEED BLOB CONSENSUS
"""

import asyncio
import json
import random
import sqlite3
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiopersist as ap

KINDS = ("put", "update", "transact", "transact with once", "get")
TABLES = ("a", "b")
REST_S = 0.3
Do = Callable[[str], Awaitable[object]]


class Contender(ABC):
    """Two tables of numbers by text."""

    @abstractmethod
    async def open(self, blob: str, consensus: str) -> None:
        """Open them; they are made before."""

    @abstractmethod
    async def make(self, keys: list[str]) -> None:
        """Give each key a number in both tables."""

    @abstractmethod
    def do(self, kind: str) -> Do:
        """One thing of that kind, for a key."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close them."""


class Ours(Contender):
    async def open(self, blob: str, consensus: str) -> None:
        self._client = await ap.open(blob=blob, consensus=consensus)
        self._a, self._b = (self._client.table(name, key=str, val=int) for name in TABLES)

    async def make(self, keys: list[str]) -> None:
        for table in (self._a, self._b):
            await table.put_many(dict.fromkeys(keys, 1000))

    def do(self, kind: str) -> Do:
        each: dict[str, Do] = {
            "put": lambda key: self._a.put(key, random.getrandbits(30)),
            "update": lambda key: self._a.update(key, lambda val: (val or 0) + 1),
            "transact": lambda key: self._client.transact(lambda tx: self._move(tx, key)),
            "transact with once": lambda key: self._client.transact(
                lambda tx: self._move(tx, key), once=uuid.uuid4().hex
            ),
            "get": lambda key: self._a.get(key),
        }
        return each[kind]

    async def _move(self, tx: ap.Transaction, key: str) -> None:
        for table, amount in ((self._a, -1), (self._b, 1)):
            tx.put(table, key, (await tx.get(table, key) or 0) + amount)

    async def aclose(self) -> None:
        await self._client.aclose()


class Sqlite(Contender):
    """WAL, synchronous=FULL, on a thread: tasks take turns."""

    async def open(self, blob: str, consensus: str) -> None:
        self._thread = ThreadPoolExecutor(1)
        await self._run(self._open, f"{consensus.removeprefix('sqlite://')}.hand")

    def _open(self, path: str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=60)
        self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
        for table in TABLES:
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, val)")
        self._db.execute("CREATE TABLE IF NOT EXISTS ids (id TEXT PRIMARY KEY)")

    async def _run(self, work: Callable[..., object], *args: Any) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def make(self, keys: list[str]) -> None:
        await self._run(self._make, keys)

    def _make(self, keys: list[str]) -> None:
        for table in TABLES:
            self._db.executemany(f"INSERT INTO {table} VALUES (?, 1000)", [(key,) for key in keys])

    def do(self, kind: str) -> Do:
        works: dict[str, Callable[[str], object]] = {
            "put": self._put,
            "update": lambda key: self._transaction(key, TABLES[:1]),
            "transact": lambda key: self._transaction(key, TABLES),
            "transact with once": lambda key: self._transaction(key, TABLES, uuid.uuid4().hex),
            "get": lambda key: self._db.execute("SELECT val FROM a WHERE key = ?", (key,)).fetchone(),
        }
        return lambda key: self._run(works[kind], key)

    def _put(self, key: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO a VALUES (?, ?)", (key, random.getrandbits(30)))

    def _transaction(self, key: str, tables: tuple[str, ...], once: str | None = None) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        if once is not None:
            self._db.execute("INSERT INTO ids VALUES (?)", (once,))
        for table in tables:
            (val,) = self._db.execute(f"SELECT val FROM {table} WHERE key = ?", (key,)).fetchone()
            self._db.execute(f"UPDATE {table} SET val = ? WHERE key = ?", (val + 1, key))
        self._db.execute("COMMIT")

    async def aclose(self) -> None:
        await self._run(self._db.close)
        self._thread.shutdown()


class Postgres(Contender):
    """A pool of connections, serializable, and once more after a conflict."""

    async def open(self, blob: str, consensus: str) -> None:
        import asyncpg

        self._errors = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
        url, _, self._schema = consensus.partition("?schema=")
        self._pool = await asyncpg.create_pool(url, min_size=1, max_size=8)

    async def make(self, keys: list[str]) -> None:
        for table in TABLES:
            name = f"{self._schema}_{table}"
            await self._pool.execute(f"CREATE TABLE {name} (key text PRIMARY KEY, val bigint)")
            await self._pool.executemany(f"INSERT INTO {name} VALUES ($1, 1000)", [(key,) for key in keys])
        await self._pool.execute(f"CREATE TABLE {self._schema}_ids (id text PRIMARY KEY)")

    def do(self, kind: str) -> Do:
        get = f"SELECT val FROM {self._schema}_a WHERE key = $1"
        each: dict[str, Do] = {
            "put": self._put,
            "update": lambda key: self._transaction(key, TABLES[:1]),
            "transact": lambda key: self._transaction(key, TABLES),
            "transact with once": lambda key: self._transaction(key, TABLES, uuid.uuid4().hex),
            "get": lambda key: self._pool.fetchval(get, key),
        }
        return each[kind]

    async def _put(self, key: str) -> None:
        text = f"INSERT INTO {self._schema}_a VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET val = $2"
        await self._pool.execute(text, key, random.getrandbits(30))

    async def _transaction(self, key: str, tables: tuple[str, ...], once: str | None = None) -> None:
        async with self._pool.acquire() as connection:
            while True:
                try:
                    async with connection.transaction(isolation="serializable"):
                        if once is not None:
                            await connection.execute(f"INSERT INTO {self._schema}_ids VALUES ($1)", once)
                        for table in tables:
                            name = f"{self._schema}_{table}"
                            val = await connection.fetchval(f"SELECT val FROM {name} WHERE key = $1", key)
                            await connection.execute(
                                f"UPDATE {name} SET val = $2 WHERE key = $1", key, val + 1
                            )
                    return
                except self._errors:
                    continue

    async def aclose(self) -> None:
        await self._pool.close()


def keys_of(count: int) -> list[str]:
    """The keys that all processes use."""
    return [f"sku-{n:05}" for n in range(count)]


def contender(who: str, consensus: str) -> Contender:
    """By that name."""
    if who == "ours":
        return Ours()
    return Sqlite() if consensus.startswith("sqlite") else Postgres()


async def work(do: Do, tasks: int, seconds: float, keys: list[str], dice: random.Random) -> dict[str, Any]:
    """What so many tasks do in so many seconds."""
    took_s: list[float] = []
    ends = time.perf_counter() + seconds

    async def task() -> None:
        while (began := time.perf_counter()) < ends:
            await do(dice.choice(keys))
            took_s.append(time.perf_counter() - began)

    cpu_s = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(task())
    return {"cpu_s": time.process_time() - cpu_s, "took_s": took_s}


async def at_rest() -> None:
    """Return once the process has nothing to do: pyarrow imports pandas beside the first calls, if it is
    there, which takes a second of processor time."""
    before, now = -1.0, time.process_time()
    while now - before > REST_S / 10:
        await asyncio.sleep(REST_S)
        before, now = now, time.process_time()


async def main(who: str, kind: str, tasks: str, seconds: str, keys: str, seed: str, *place: str) -> None:
    one = contender(who, place[1])
    await one.open(*place)
    do = one.do(kind)
    await do(keys_of(int(keys))[0])  # what a first call imports and opens
    await at_rest()
    print("ready", flush=True)
    sys.stdin.readline()
    found = await work(do, int(tasks), float(seconds), keys_of(int(keys)), random.Random(int(seed)))
    print(json.dumps(found), flush=True)
    await one.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
