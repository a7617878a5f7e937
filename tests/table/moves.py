"""Random calls on tables, and a player who makes them and notes what it was told (`history.py`).

Two tables of registers, `a` and `b`; two of accounts, `left` and `right`, between which money moves; a
journal, a plain shard, to which each transfer appends. A val names the call that wrote it, and the run of it.
"""

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import aiopersist as ap
from tests.table.history import THERE, TRANSACTIONS, Began, Failed, Found, Key, Note, Ran, Refused, Run, Told

REGISTERS, ACCOUNTS, JOURNAL = ("a", "b"), ("left", "right"), "journal"
TABLES = (*REGISTERS, *ACCOUNTS)
KEYS = "pqrs"
OPENING = 20  # the balance of each account
ENTRY: ap.Schema[str, str, int] = ap.Schema(str, str)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
RATES = {
    "get": 4,
    "get_many": 2,
    "stale": 2,
    "as_of": 1,
    "at_instant": 0.5,
    "items": 2,
    "put": 5,
    "put_many": 2,
    "insert": 2,
    "update": 5,
    "delete": 2,
    "transact": 6,
    "transfer": 6,
    "look": 2,
}
ONLY_READ = ("get", "get_many", "stale", "as_of", "at_instant", "items", "look")


ACCOUNTS_AT_FIRST = Run(writes={(t, key): f"{OPENING}@{t}{key}" for t in ACCOUNTS for key in KEYS})


class Refusal(Exception):
    """Of a body; what it saw."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run = run


@dataclass(frozen=True)
class Move:
    """One call. It may be made again, if it has an id."""

    name: str
    kind: str
    keys: tuple[Key, ...] = ()
    """Those that it reads, or all that it touches."""
    writes: tuple[Key, ...] = ()
    deletes: tuple[Key, ...] = ()
    within: tuple[str, Any, Any] | None = None
    once: str | None = None

    @property
    def shard(self) -> str | None:
        """Where its id is kept."""
        return None if self.kind in TRANSACTIONS else self.keys[0][0]


def drawn(dice: random.Random, name: str, rates: dict[str, float]) -> Move:
    """A random one of that name."""
    kind = dice.choices(list(rates), list(rates.values()))[0]
    once = name if kind not in ONLY_READ and dice.random() < 0.5 else None
    if kind == "transfer":
        keys = dice.sample([(table, key) for table in ACCOUNTS for key in KEYS], 2)
        return Move(name, kind, tuple(keys), tuple(keys), once=once)
    if kind == "look":
        return Move(name, kind, within=("left", None, None))
    if kind == "transact":
        return _transaction(dice, name, once)
    table = dice.choice(TABLES if kind in ONLY_READ else REGISTERS)
    number = len(KEYS) if kind in ("get_many", "stale", "as_of", "at_instant") else 1
    if kind in ("put_many", "delete"):
        number = dice.choice([1, 2])
    keys = [(table, key) for key in dice.sample(KEYS, number)]
    within = (table, *dice.choice([(None, None), ("q", None), ("q", "s"), (None, "r")]))
    deletes = keys if kind == "update" and once and dice.random() < 0.3 else []
    return Move(name, kind, tuple(keys), (), tuple(deletes), within, once)


def _transaction(dice: random.Random, name: str, once: str | None) -> Move:
    def some(most: int) -> tuple[Key, ...]:
        return tuple({(dice.choice(REGISTERS), dice.choice(KEYS)): None for _ in range(dice.randrange(most))})

    writes = some(3)
    deletes = tuple(key for key in some(2) if key not in writes) if writes else ()
    within = (dice.choice(REGISTERS), "q", "s") if dice.random() < 0.4 else None
    return Move(name, "transact", some(4), writes, deletes, within, once)


def balance(val: str) -> int:
    return int(val.partition("@")[0])


Answer = tuple[int | None, Run | None]
"""The time that was told, and what was seen and done, if it is known."""


class Player:
    """Makes calls by one client. `clock`: the moments of its events."""

    def __init__(
        self, name: str, client: ap.Client, note: Note, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.clock = clock
        self.client = client
        self.note = note
        self.tables = {table: client.table(table, key=str, val=str) for table in TABLES}
        self.journal: Any = None
        self._runs = count()

    async def open(self) -> "Player":
        """With all that it needs."""
        self.journal = await self.client.writer(JOURNAL, ENTRY, clock="wall")
        for table in self.tables.values():
            await table
        return self

    async def prepare(self) -> None:
        """What is there before all moves, as one of them; all history is kept, so that it can be checked."""
        await self.open()
        for table in (*TABLES, JOURNAL):
            await self.client.admin.retain(table, None)
        assert await self.do(Move("setup", "setup"))

    async def do(self, move: Move) -> bool:
        """Make it; whether it was answered. A refusal is an answer only if `move` has no id."""
        self.note(Began(move.name, self.name, self.clock(), move, self._intended(move)))
        call: Callable[[Move], Awaitable[Answer]] = getattr(self, move.kind)
        try:
            at, run = await call(move)
        except ap.KeyExists:
            self._failed(move, Run({move.keys[0]: THERE}))
        except Refusal as refusal:
            self._failed(move, refusal.run)
        except ap.StorageUnavailable:
            self.note(Refused(move.name))
            return False
        except ap.Indeterminate:
            return False
        else:
            self.note(Told(move.name, self.name, self.clock(), at, run))
        return True

    def _failed(self, move: Move, run: Run) -> None:
        self.note(Failed(move.name, self.name, self.clock(), run))

    def _intended(self, move: Move) -> Run | None:
        if move.kind in ("put", "put_many", "insert"):
            reads = dict.fromkeys(move.keys) if move.kind == "insert" else {}
            return Run(reads, writes={(t, key): f"{move.name}:{key}" for t, key in move.keys})
        return Run(writes=dict.fromkeys(move.keys)) if move.kind == "delete" else None

    # --- reads -----------------------------------------------------------------------------------

    async def get(self, move: Move) -> Answer:
        (key,) = move.keys
        return None, Run({key: await self.tables[key[0]].get(key[1])})

    async def get_many(self, move: Move) -> Answer:
        return None, await self._many(move)

    async def stale(self, move: Move) -> Answer:
        return None, await self._many(move, stale=True)

    async def as_of(self, move: Move) -> Answer:
        upper: Any = (await self.tables[move.keys[0][0]].view()).upper.time
        at = max(upper - random.Random(move.name).choice([1, 1, 2, 1000]), 0)
        return at, await self._many(move, as_of=at) if upper else Run()

    async def at_instant(self, move: Move) -> Answer:
        now, error = self.client.clock()
        at = int((now - error) * 1e6)
        return at, await self._many(move, as_of=EPOCH + timedelta(microseconds=at))

    async def _many(self, move: Move, **how: Any) -> Run:
        table, keys = move.keys[0][0], [key for _, key in move.keys]
        found = await self.tables[table].get_many(keys, **how)
        return Run({(table, key): found.get(key) for key in keys})

    async def items(self, move: Move) -> Answer:
        assert move.within is not None
        table, start, stop = move.within
        found = dict([entry async for entry in self.tables[table].items(start, stop)])
        return None, Run(ranges=(Found(table, start, stop, found),))

    # --- writes ----------------------------------------------------------------------------------

    async def setup(self, move: Move) -> Answer:
        async def body(tx: ap.Transaction) -> Run:
            for (table, key), val in ACCOUNTS_AT_FIRST.writes.items():
                tx.put(self.tables[table], key, val)
            return ACCOUNTS_AT_FIRST

        return await self._transacted(move, body)

    async def put(self, move: Move) -> Answer:
        ((table, key),) = move.keys
        return await self.tables[table].put(key, f"{move.name}:{key}", once=move.once), None

    async def put_many(self, move: Move) -> Answer:
        table, entries = move.keys[0][0], {key: f"{move.name}:{key}" for _, key in move.keys}
        return await self.tables[table].put_many(iter(entries.items()), once=move.once), None

    async def insert(self, move: Move) -> Answer:
        ((table, key),) = move.keys
        return await self.tables[table].insert(key, f"{move.name}:{key}", once=move.once), None

    async def delete(self, move: Move) -> Answer:
        keys = [key for _, key in move.keys]
        return await self.tables[move.keys[0][0]].delete(*keys, once=move.once), None

    async def update(self, move: Move) -> Answer:
        ((table, key),) = move.keys
        runs: dict[Any, Run] = {}

        def change(old: str | None) -> str | None:
            new = None if move.deletes else self._val(move)
            runs[new] = Run({(table, key): old}, writes={(table, key): new})
            self.note(Ran(move.name, runs[new]))
            return new

        found = await self.tables[table].update(key, change, once=move.once)
        if isinstance(found, ap.Repeated):
            return found.time, None
        return None, None if found is None else runs[found]

    def _val(self, move: Move) -> str:
        return f"{move.name}#{self.name}.{next(self._runs)}"

    # --- transactions ----------------------------------------------------------------------------

    async def transact(self, move: Move) -> Answer:
        async def body(tx: ap.Transaction) -> Run:
            reads = {key: await tx.get(self.tables[key[0]], key[1]) for key in move.keys}
            ranges = [await self._within(tx, move.within)] if move.within else []
            val = self._val(move)
            for table, key in move.writes:
                tx.put(self.tables[table], key, f"{val}:{key}")
            for table, key in move.deletes:
                tx.delete(self.tables[table], key)
            writes = {(t, key): f"{val}:{key}" for t, key in move.writes}
            return Run(reads, tuple(ranges), {**writes, **dict.fromkeys(move.deletes)})

        return await self._transacted(move, body)

    async def _within(self, tx: ap.Transaction, within: tuple[str, Any, Any]) -> Found:
        table, start, stop = within
        found = dict([entry async for entry in tx.items(self.tables[table], start, stop)])
        return Found(table, start, stop, found)

    async def transfer(self, move: Move) -> Answer:
        """Of what the call's own dice say; refused if there is not so much."""
        amount, (source, target) = random.Random(move.name).randrange(1, 9), move.keys

        async def body(tx: ap.Transaction) -> Run:
            found = {key: await tx.get(self.tables[key[0]], key[1]) for key in move.keys}
            val = self._val(move)
            run = Run(found)
            if balance(found[source] or "0") < amount:
                raise Refusal(run)
            writes: dict[Key, Any] = {
                key: f"{balance(found[key] or '0') + more}@{val}:{key[1]}"
                for key, more in ((source, -amount), (target, amount))
            }
            for key, new in writes.items():
                tx.put(self.tables[key[0]], key[1], new)
            entry = f"{'/'.join(source)}>{'/'.join(target)}:{amount}@{val}"
            tx.append(self.journal, [(move.name, entry)])
            return Run(found, writes={**writes, (JOURNAL, move.name): entry})

        return await self._transacted(move, body)

    async def look(self, move: Move) -> Answer:
        """At all accounts, at one moment."""

        async def body(tx: ap.Transaction) -> Run:
            ranges = [await self._within(tx, (table, None, None)) for table in ACCOUNTS]
            total = sum(balance(val) for found in ranges for val in found.entries.values())
            assert total == OPENING * len(ACCOUNTS) * len(KEYS), ("half of a transfer", ranges)
            return Run(ranges=tuple(ranges))

        return await self._transacted(move, body)

    async def _transacted(self, move: Move, body: Callable[[ap.Transaction], Awaitable[Run]]) -> Answer:
        last: list[ap.Transaction] = []

        async def noted(tx: ap.Transaction) -> Run:
            last[:] = [tx]
            run = await body(tx)
            self.note(Ran(move.name, run))
            return run

        found = await self.client.transact(noted, once=move.once)
        if isinstance(found, ap.Repeated):
            return found.time, None
        return (last[0].time if found.writes or move.once else None), found
