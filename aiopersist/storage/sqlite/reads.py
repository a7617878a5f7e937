"""The reads of a consensus store in a SQLite file, whether the file may be written or not."""

import sqlite3
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from aiopersist.storage.consensus import Consensus, Versioned, sliced
from aiopersist.storage.keys import check_consensus_key
from aiopersist.storage.sqlite import sql as sql

T = TypeVar("T")

_KEYS_AT_ONCE = 256  # read within some milliseconds; then other reads have their turn


class SqliteReads(Consensus):
    """A subclass says how the file is read."""

    @abstractmethod
    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in the thread that reads."""

    async def head(self, key: str) -> Versioned | None:
        check_consensus_key(key)
        return await self._read(lambda connection: sql.head(connection, key))

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        moved: dict[str, Versioned | None] = {}
        for key in known:
            check_consensus_key(key)
        for chunk in sliced(known, _KEYS_AT_ONCE):
            moved |= await self._read(partial(sql.heads, seqnos=chunk))
        return moved

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        check_consensus_key(key)
        bounds = (key, min(from_seqno, sql.SEQNO_MAX), min(max(limit, 0), sql.SEQNO_MAX))
        return await self._read(lambda connection: sql.scan(connection, *bounds))

    async def leftovers(self, key: str) -> list[Versioned]:
        check_consensus_key(key)
        return await self._read(lambda connection: sql.leftovers(connection, key))

    async def list_keys(self, prefix: str) -> list[str]:
        return await self._read(lambda connection: sql.list_keys(connection, prefix))
