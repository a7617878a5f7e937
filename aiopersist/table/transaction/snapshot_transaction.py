"""A transaction that only reads, while others write without pause.

The reads of views are compared at the end of a transaction, so they conflict with each commit that changes
them. After several conflicts, a transaction that wrote nothing reads a snapshot: one commit joins all its
tables, without a change, and the body reads their contents as of its time. That commit began after the call,
and history does not change, so the end needs no check.

If the body then writes, or reads another table, it runs again as any other.
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


class SnapshotTransaction(Transaction):
    """See the header."""

    def __init__(
        self, tables: OpenTables, consistent_read: ConsistentRead, names: Iterable[str], at: int
    ) -> None:
        super().__init__(tables, consistent_read)
        self._names = set(names)
        self.at = at

    @property
    def reads_only(self) -> bool:
        """Whether the body has only read, and only tables of the snapshot."""
        return self.touched.keys() <= self._names and not self._writes

    async def get(self, table: Table[K, V], key: K) -> V | None:
        """As of the commit."""
        return (await self.get_many(table, [key])).get(key)

    async def get_many(self, table: Table[K, V], keys: Iterable[K]) -> dict[K, V]:
        """As of the commit."""
        self._check_reads_only(table)
        try:
            return await table.get_many(keys, as_of=self.at)
        except SinceViolation as error:  # the table keeps almost no history
            raise RunAgain from error

    async def items(
        self, table: Table[K, V], start: K | None = None, stop: K | None = None, prefix: Any = None
    ) -> AsyncIterator[tuple[K, V]]:
        """As of the commit."""
        self._check_reads_only(table)
        try:
            async for entry in table.items(start, stop, prefix, as_of=self.at):
                yield entry
        except SinceViolation as error:
            raise RunAgain from error

    async def insert(self, table: Table[K, V], key: K, val: V) -> NoReturn:
        """End the attempt: this kind does not write."""
        self._of(table).written[""] = None  # so that the next attempt is of the other kind
        raise RunAgain

    def _check_reads_only(self, table: Table[Any, Any]) -> None:
        self._of(table)
        if not self.reads_only:
            raise RunAgain


class Attempts:
    """The tables that the attempts of a transaction have read and written so far."""

    def __init__(self) -> None:
        self.touched: dict[str, Touched] = {}
        """By the name of the table."""
        self.began_at = 0.0
        """The beginning of the last body, by a clock that stops while the client stands back."""
        self.reads_ranges = False
        self._writes = self._unsupported = False

    @property
    def may_read_snapshot(self) -> bool:
        """Whether no attempt wrote anything, and its tables can be joined: the body has not closed them."""
        if not self.touched or self._writes or self._unsupported:
            return False
        return not any(is_closed(touched.handle) for touched in self.touched.values())

    def cannot_read_snapshot(self) -> None:
        """The store cannot write several shards at one moment."""
        self._unsupported = True

    def add(self, tx: Transaction) -> None:
        """Add an attempt that has ended."""
        self.touched.update(tx.touched)
        self._writes |= tx._writes
        self.reads_ranges |= bool([touched for touched in tx.touched.values() if touched.ranges])

    async def registers(self) -> list[Register]:
        """The registers of its open tables."""
        handles = [touched.handle for touched in self.touched.values() if not is_closed(touched.handle)]
        return [(await opened(handle)).participant.register for handle in handles]


async def commit_reads(tables: OpenTables, attempts: Attempts) -> int:
    """Join the tables in one commit that changes nothing, and return its time."""
    handles = [touched.handle for touched in attempts.touched.values()]
    participants = tuple([(await opened(handle)).participant for handle in handles])
    keys = ((),) * len(participants)
    operation = PendingOperation(participants, lambda *cells: None, keys, participants[0], binds=True)
    try:
        return (await tables.group.do(operation)).time
    except Unsupported as error:
        attempts.cannot_read_snapshot()
        raise RunAgain from error
