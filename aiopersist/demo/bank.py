"""The bank of `aiopersist demo --tables`: two tables of accounts, a journal, and the turnover.

A transfer takes an amount from an account of one table, gives it to an account of the other, and appends an
entry to the journal, in one transaction. The auditor consumes the journal with a subscription. It adds each
entry to the turnover of its accounts in the transaction that acknowledges the entry.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import BaseModel

from aiopersist.base.runtime import SYSTEM
from aiopersist.client.client import Client
from aiopersist.data.types.schema import Schema
from aiopersist.table.table import Table
from aiopersist.table.transaction.transaction import Transaction
from aiopersist.write.handle import WriteHandle

ACCOUNTS = 100  # in each table
BALANCE = 1_000  # of each at the beginning
AMOUNT_MAX = 50
TABLES = ("checking", "savings")


class BankAccount(BaseModel):
    """One account."""

    balance: int


class JournalEntry(BaseModel):
    """One transfer, in the journal."""

    source: str
    target: str
    amount: int


class Turnover(BaseModel):
    """The amounts that an account received minus those that it gave, and its number of transfers."""

    amount: int = 0
    transfers: int = 0


class Insufficient(Exception):
    """The account has less than the amount."""


class Place(NamedTuple):
    """An account: the number of its table, and its key."""

    table: int
    key: str

    @property
    def name(self) -> str:
        """The name in the journal and in the turnover."""
        return f"{TABLES[self.table]}/{self.key}"


class Bank:
    """The bank as one client sees it. `run` is part of the names, so a location can have many banks."""

    def __init__(self, client: Client, run: str) -> None:
        self.client = client
        self.tables: list[Table[str, BankAccount]] = [
            client.table(f"demo-{run}/{name}", key=str, val=BankAccount) for name in TABLES
        ]
        self.turnover = client.table(f"demo-{run}/turnover", key=str, val=Turnover)
        self.journal_name = f"demo-{run}/journal"
        self.journal_schema: Schema[str, JournalEntry, int] = Schema(str, JournalEntry)

    async def journal(self) -> WriteHandle[str, JournalEntry]:
        """A writer of the journal."""
        return await self.client.writer(self.journal_name, self.journal_schema, clock="wall")

    async def open_accounts(self) -> int:
        """Create all accounts in one transaction, and return its time."""
        accounts = {f"{number:03}": BankAccount(balance=BALANCE) for number in range(ACCOUNTS)}

        async def fill(tx: Transaction) -> Transaction:
            for table in self.tables:
                tx.put_many(table, accounts)
            return tx

        tx = await self.client.transact(fill)
        assert isinstance(tx, Transaction)
        return tx.time

    async def transfer(self, journal: WriteHandle[str, JournalEntry], name: str) -> None:
        """Move a random amount between two random accounts, once per `name`."""
        while True:
            number = _below(2)
            source, target = _random_account(number), _random_account(1 - number)
            entry = JournalEntry(source=source.name, target=target.name, amount=1 + _below(AMOUNT_MAX))

            async def move(
                tx: Transaction, source: Place = source, target: Place = target, entry: JournalEntry = entry
            ) -> None:
                await self._add(tx, source, -entry.amount)
                await self._add(tx, target, entry.amount)
                tx.append(journal, [(name, entry)])

            try:
                await self.client.transact(move, once=name)
            except Insufficient:
                continue
            return

    async def _add(self, tx: Transaction, place: Place, amount: int) -> None:
        table = self.tables[place.table]
        account = await tx.get(table, place.key)
        if account is None or account.balance + amount < 0:
            raise Insufficient(place.name)
        tx.put(table, place.key, BankAccount(balance=account.balance + amount))

    async def audit(self) -> None:
        """Add every entry of the journal to the turnover exactly once, even if this process is killed."""
        journal = self.client.subscription(self.journal_name, self.journal_schema, name="auditor")
        async with journal as entries:
            async for step in entries:
                rows = [(entry, diff) for _, entry, _, diff in step.updates]

                async def add(tx: Transaction, rows: list[tuple[JournalEntry, int]] = rows) -> None:
                    await self.book(tx, rows)

                await self.client.transact(add, acks=[(entries, step)])

    async def book(self, tx: Transaction, rows: Iterable[tuple[JournalEntry, int]]) -> None:
        amounts: Counter[str] = Counter()
        transfers: Counter[str] = Counter()
        for entry, diff in rows:
            amounts.update({entry.target: entry.amount * diff, entry.source: -entry.amount * diff})
            transfers.update({entry.target: diff, entry.source: diff})
        turnovers = await tx.get_many(self.turnover, list(transfers))
        for name, count in transfers.items():
            before = turnovers.get(name, Turnover())
            after = Turnover(amount=before.amount + amounts[name], transfers=before.transfers + count)
            tx.put(self.turnover, name, after)


def _random_account(table: int) -> Place:
    return Place(table, f"{_below(ACCOUNTS):03}")


def _below(number: int) -> int:
    """A random int below `number`."""
    return int(SYSTEM.uniform(0, number)) % number
