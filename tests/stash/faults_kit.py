"""Helpers that the tests of faults of a stash share."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.stash import Stash, StashCollection
from tests.stash.attack import ARRIVAL_S, LateProxy, put

BIG = 4100  # rows: more than one statement takes


NEVER = ap.Settings(stash_idle_in_transaction_s=1.0)


REPORT = ap.Settings(stash_idle_in_transaction_s=1.0, retry_timeout_s=0.0)


FAILURES = (Indeterminate, StorageUnavailable)


class Way(NamedTuple):
    """`url` leads through `proxy`, `direct` around it."""

    proxy: LateProxy
    url: str
    direct: str
    admin: Any
    """A connection behind the library's back, in the schema of the stash."""


class Work:
    """Calls of one kind, and how often each of them happened by the tables."""

    def __init__(self, kind: str, stash: Stash, c: StashCollection[str, int], admin: Any) -> None:
        self.kind, self.stash, self.c, self.admin = kind, stash, c, admin

    async def prepare(self) -> Callable[[str], Awaitable[Any]]:
        """The call, given a name of its own, with all reading before a change done already."""
        if self.kind in ("create", "migrate"):
            return self._create if self.kind == "create" else self._migrate
        batch = await self.c.make_batch(self.stash)

        async def append(name: str) -> None:
            for n in range(1 if self.kind == "small" else BIG):
                self.c.append_to_batch(batch, f"{name}-{n}", 0, 1)
            await self.stash.append([batch])

        return append

    async def reset(self) -> None:
        """Let the next migration be the first one again."""
        if self.kind == "migrate":
            await self.admin.execute("UPDATE fence SET version = 0")

    async def _create(self, name: str) -> None:
        await self.stash.collection(name, str, int)

    async def _migrate(self, name: str) -> None:
        async def step(tx: Stash) -> None:
            await put(tx, await tx.collection(name, str, int), [f"{name}-{n}" for n in range(3)])

        assert await self.stash.migrate([step]) == 1

    async def times(self, name: str) -> int:
        """How often it happened; the tables are whole."""
        admin, prefix = self.admin, f'"{name}-%'
        counted = "SELECT count(*) AS n, count(DISTINCT key) AS keys FROM data WHERE key LIKE $1"
        n, distinct = await admin.fetchrow(counted, prefix)
        assert n == distinct, f"{name}: {n} rows of {distinct} keys"
        made = await admin.fetchval("SELECT count(*) FROM collections WHERE name = $1", name)
        for table in ("uppers", "sinces"):
            ids = "SELECT array_agg(collection_id ORDER BY collection_id) FROM "
            assert await admin.fetchval(ids + table) == await admin.fetchval(ids + "collections")
        if self.kind == "migrate":
            assert await admin.fetchval("SELECT version FROM fence") == made, (
                "the step and the version are one"
            )
            assert n == 3 * made
            return int(made)
        if self.kind == "create":
            return int(made)
        whole = 1 if self.kind == "small" else BIG
        assert n in (0, whole), f"{name}: half of it"
        return int(n / whole)


KINDS = ["small", "big", "create", "migrate"]


async def _open(url: str) -> Stash:
    return await ap.stash.open(url, NEVER)


async def _stalled(way: Way) -> None:
    """Wait until requests are held, and one has arrived."""
    async with asyncio.timeout(50):
        while way.proxy._requests.is_set():
            await asyncio.sleep(0.005)
    await asyncio.sleep(ARRIVAL_S)


async def _known(stash: Stash) -> StashCollection[str, int]:
    return await stash.collection("c", str, int)
