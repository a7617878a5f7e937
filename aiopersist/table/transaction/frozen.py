"""A transaction that only reads, beside writers that never pause.

What it read of views is compared at its end, and so conflicts with each commit that changes it. After several
conflicts a transaction that wrote nothing reads *frozen* tables: one commit joins all of its tables, without
a change, and the body reads their contents as of its time. That commit is the moment at which it reads: it
began after the call, and nobody can change what was there. So its end needs no check.

A body that turns out to write, or to read another table, runs as others do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, NoReturn, TypeVar

from aiopersist.base.errors import SinceViolation, Unsupported
from aiopersist.shard.register import Register
from aiopersist.table.commit.plan import PendingOperation
from aiopersist.table.handle import is_closed, opened
from aiopersist.table.open import OpenTables
from aiopersist.table.table import Table
from aiopersist.table.transaction.consistent_read import ConsistentRead
from aiopersist.table.transaction.transaction import RunAgain, Touched, Transaction

K = TypeVar("K")
V = TypeVar("V")


class FrozenTransaction(Transaction):
    """See the header."""

    def __init__(self, tables: OpenTables, cut: ConsistentRead, names: Iterable[str], at: int) -> None:
        super().__init__(tables, cut)
        self._names = set(names)
        self.at = at

    @property
    def is_frozen(self) -> bool:
        """Whether the body has read frozen tables alone, and written nothing."""
        return self.touched.keys() <= self._names and not self._writes

    async def get(self, table: Table[K, V], key: K) -> V | None:
        """As of the commit."""
        return (await self.get_many(table, [key])).get(key)

    async def get_many(self, table: Table[K, V], keys: Iterable[K]) -> dict[K, V]:
        """As of the commit."""
        self._check_frozen(table)
        try:
            return await table.get_many(keys, as_of=self.at)
        except SinceViolation as error:  # almost no history is kept
            raise RunAgain from error

    async def items(
        self, table: Table[K, V], start: K | None = None, stop: K | None = None, prefix: Any = None
    ) -> AsyncIterator[tuple[K, V]]:
        """As of the commit."""
        self._check_frozen(table)
        try:
            async for entry in table.items(start, stop, prefix, as_of=self.at):
                yield entry
        except SinceViolation as error:
            raise RunAgain from error

    async def insert(self, table: Table[K, V], key: K, val: V) -> NoReturn:
        """It writes."""
        self._of(table).written[""] = None  # so that the next attempt is none of this kind
        raise RunAgain

    def _check_frozen(self, table: Table[Any, Any]) -> None:
        self._of(table)
        if not self.is_frozen:
            raise RunAgain


class Attempted:
    """What the attempts of a transaction have touched so far."""

    def __init__(self) -> None:
        self.touched: dict[str, Touched] = {}
        """By the name of the table."""
        self.began_at = 0.0
        """When the body of the last attempt began, by a clock without the time that its client stood back."""
        self.reads_ranges = False
        self._writes = self._unsupported = False

    @property
    def may_be_frozen(self) -> bool:
        """Whether no attempt wrote anything, and its tables can be frozen: the body has not closed them."""
        if not self.touched or self._writes or self._unsupported:
            return False
        return not any(is_closed(some.handle) for some in self.touched.values())

    def cannot_freeze(self) -> None:
        """The store writes one shard at a time."""
        self._unsupported = True

    def add(self, tx: Transaction) -> None:
        """The attempt has ended."""
        self.touched.update(tx.touched)
        self._writes |= tx._writes
        self.reads_ranges |= bool([touched for touched in tx.touched.values() if touched.ranges])

    async def registers(self) -> list[Register]:
        """Of its tables that are open."""
        handles = [some.handle for some in self.touched.values() if not is_closed(some.handle)]
        return [(await opened(handle)).member.register for handle in handles]


async def freeze(tables: OpenTables, seen: Attempted) -> int:
    """Join the tables in one commit that changes nothing, and return its time."""
    members = tuple([(await opened(some.handle)).member for some in seen.touched.values()])
    keys = ((),) * len(members)
    waiting = PendingOperation(members, lambda *cells: None, keys, members[0], binds=True)
    try:
        return (await tables.group.do(waiting)).time
    except Unsupported as error:
        seen.cannot_freeze()
        raise RunAgain from error
