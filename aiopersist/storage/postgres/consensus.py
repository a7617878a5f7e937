"""A consensus store in Postgres, for any number of processes on any number of hosts.

Per key there is one row in `heads`, with the seqno of the newest version, and one row in `log` per live
version. READ COMMITTED is enough, and SERIALIZABLE is not used: its predicate locks collapse under load.

*Linearizable.* A compare-and-set is one statement: it updates the head row where `seqno = expected`, and
inserts the version that the row moved to. The predicate is evaluated on the statement's snapshot. If another
transaction holds the row, the lock waits for its end, and then the predicate is evaluated again on the newest
row. So of several statements with the same `expected` one finds it and moves the head. The others find
another seqno, and will for ever, since seqnos only grow. A success takes effect when its transaction commits,
and a mismatch when it reads the head. The version is inserted in the same transaction, so whichever snapshot
has a head has its version, and the primary key of `log` would refuse a second version of the same seqno. A
read is one statement, and thus one snapshot, taken after the call began. It contains all commits that were
reported before it, since a commit is visible before it is reported. `head` joins the head row with its
version in that snapshot.

*A concurrent truncate* deletes only versions below a seqno that is at most the head of its snapshot. Heads
only grow, so the head that it spares may be old, but never too new: no head row is ever without its version.
The truncate takes effect at its snapshot. Two of them count each deleted row once, because the second skips
rows whose deletion it waited for.

*A removal* deletes the head row where `seqno = expected`, under the same rule as a compare-and-set. In a race
with one, either the head has moved and nothing is deleted, or the compare-and-set finds no row and is a
mismatch. The removal's snapshot says whether the version of that seqno is the expected one. It deletes the
versions of its snapshot, which are all: had another version come since, the predicate would have met its
seqno. A row of the same key that was made since the snapshot, perhaps up to the same seqno, is not seen, and
stays with its versions. Rows of the log are locked in order, as by a truncate. If nothing was deleted, a
second read tells whether the key still exists.

*First versions*: INSERT ... ON CONFLICT DO NOTHING waits for the end of another insert of the same key and
then does nothing, so exactly one insert wins.

*Several entries at once*: see `group`. `compare_and_set_many` locks all its head rows in key order, waiting
(so two of them cannot block each other), and moves the heads only if it got all locks. If some keys are new,
it runs in a transaction that inserts those first, also in key order.

*Durable*: `synchronous_commit = on` on every connection. *Errors* and cancellation: see `pool`.

The answers of the store carry its clock; between answers a local clock advances it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.consensus import Consensus, Entry, Versioned, seqnos_of, sliced
from aiopersist.storage.keys import check_consensus_key, check_entries, closed
from aiopersist.storage.postgres.address import PostgresAddress
from aiopersist.storage.postgres.connect import Connection
from aiopersist.storage.postgres.group import GroupCommit
from aiopersist.storage.postgres.hints import POLL_MAX_S, POLL_S, NotifyHints
from aiopersist.storage.postgres.pool import Pool
from aiopersist.storage.postgres.sql import CLOCK, statements, tables
from aiopersist.storage.waiters import Waiters
from aiopersist.storage.watch import Watch
from aiopersist.storage.wishes import HeardWishes, Wish

if TYPE_CHECKING:
    import asyncpg

# Two for groups of commits, six that may wait for locks or first versions, four for reads and hints.
POOL_SIZE = 12
POOLED = {
    "sessions": "of a pooler: a commit is five requests, a read is two",
    "hints": f"polled, every {POLL_S:g} to {POLL_MAX_S:g} s",
}
_SEQNO_MAX = 2**63 - 1
_KEYS_AT_ONCE = 256  # heads of some KiB each: bounds the size of an answer
DEFAULT_SCHEMA = "aiopersist"


class PostgresConsensus(Consensus):
    """Versions in the Postgres database at `url`, in the tables of `?schema=` (default `aiopersist`). The
    tables are created on first use, unless `readonly`: then the role needs only `USAGE` of the schema and
    `SELECT` on the tables. Other options are those of libpq. Only the primary is used, unless the URL of a
    `readonly` store asks for a standby.

    A compare-and-set is one round trip, shared with those of other keys that wait at the same moment."""

    def __init__(self, url: str, *, runtime: Runtime = SYSTEM, readonly: bool = False) -> None:
        address = PostgresAddress.parse(url, schema=DEFAULT_SCHEMA)
        if not readonly:
            address.check_newest()
        schema = address.schema
        self._shown = address.shown
        self._runtime = runtime
        self._sql = statements(schema)
        self._waiters = Waiters()
        self._heard = HeardWishes(runtime)
        prepare = tables(schema).require if readonly else tables(schema).ensure
        self._pool = Pool(address, address.numbers.get("connections", POOL_SIZE), prepare)
        self._hints = NotifyHints(self._pool, schema, self._waiters, runtime)
        self._newer: dict[str, Versioned] = {}
        self._group = GroupCommit(self._pool, self._sql, self._hints.moved, self._answered_one)
        self._clock: tuple[float, float] | None = None  # the store's time, and the local time at its arrival

    def __repr__(self) -> str:
        return f"<PostgresConsensus {self._shown}>"

    async def facts(self) -> dict[str, str]:
        async def asked(connection: Connection) -> dict[str, str]:
            names = ("server_version", "fsync", "full_page_writes", "synchronous_commit", "max_connections")
            shown = ", ".join(f"current_setting('{name}') AS {name}" for name in names)
            row = await connection.fetchrow(f"SELECT {shown}, pg_is_in_recovery()::text AS in_recovery")
            return {**dict(row or {}), **(POOLED if connection.pooled else {})}

        settings = await self._pool.write(asked)  # at a pooler a write has the settings
        return {"store": f"Postgres {settings.pop('server_version')}", **settings}

    async def head(self, key: str) -> Versioned | None:
        check_consensus_key(key)
        row = await self._pool.read(lambda connection: connection.fetchrow(self._sql["head"], key))
        if row is None:
            return None
        self._set_clock(row["clock"])
        return Versioned(row["seqno"], row["data"])

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        moved: dict[str, Versioned | None] = {}
        for key in known:
            check_consensus_key(key)
        for chunk in sliced(known, _KEYS_AT_ONCE):
            moved |= await self._pool.read(partial(self._heads, chunk))
        return moved

    async def _heads(
        self, seqnos: Mapping[str, int | None], connection: Connection
    ) -> dict[str, Versioned | None]:
        rows = await connection.fetch(self._sql["heads"], list(seqnos), list(seqnos.values()))
        if rows:
            self._set_clock(rows[0]["clock"])
        return {r["key"]: None if r["seqno"] is None else Versioned(r["seqno"], r["data"]) for r in rows}

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        check_consensus_key(key)
        if self._pool.closed:
            raise closed("consensus store")
        self._newer.pop(key, None)
        return await self._group.compare_and_set(Entry(key, expected, data))

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        check_entries(entries)
        if not entries:
            return True
        for entry in entries:
            self._newer.pop(entry.key, None)
        won = await self._pool.write(partial(self._write_all, entries))
        if won:
            self._hints.moved(seqnos := seqnos_of(entries), seqnos)
        return won

    async def wish(self, keys: Sequence[str], who: str, for_s: float, waited_s: float) -> None:
        slot = -1 - int.from_bytes(hashlib.sha256(who.encode()).digest()[:7], "big")
        if for_s <= 0:
            await self._pool.write(lambda c: c.execute(self._sql["withdraw"], list(keys), slot))
            return
        arguments = list(keys), slot, who, for_s, waited_s
        row = await self._pool.write(lambda connection: connection.fetchrow(self._sql["wish"], *arguments))
        assert row is not None  # the statement gives one row
        self._answered(keys, row)

    def stand_back_s(self, key: str, who: str, waited_s: float) -> float:
        return self._heard.stand_back_s(key, who, waited_s)

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        check_consensus_key(key)
        bounds = (key, min(max(from_seqno, 0), _SEQNO_MAX), min(max(limit, 0), _SEQNO_MAX))
        rows = await self._pool.read(lambda connection: connection.fetch(self._sql["scan"], *bounds))
        return [Versioned(row["seqno"], row["data"]) for row in rows]

    async def truncate(self, key: str, seqno: int) -> int:
        check_consensus_key(key)
        row = await self._pool.write(
            lambda connection: connection.fetchrow(self._sql["truncate"], key, min(seqno, _SEQNO_MAX))
        )
        assert row is not None  # the statement gives one row
        if row["head"] is None or seqno > row["head"]:
            raise ValueError(f"cannot truncate {key!r} at {seqno}: its head is {row['head']}")
        return int(row["dropped"])

    async def remove(self, key: str, expected: Versioned) -> bool:
        check_consensus_key(key)
        head = key, min(expected.seqno, _SEQNO_MAX), expected.data
        removed = await self._pool.write(lambda connection: connection.fetchval(self._sql["remove"], *head))
        if removed:
            self._hints.moved([key])
            return True
        return await self.head(key) is None

    async def list_keys(self, prefix: str) -> list[str]:
        rows = await self._pool.read(lambda connection: connection.fetch(self._sql["list_keys"], prefix))
        return [row["key"] for row in rows]

    async def watch(self, key: str) -> None:
        check_consensus_key(key)
        if self._pool.closed:
            raise closed("consensus store")
        self._hints.listen()
        await self._waiters.wait(key)

    def watch_together(self) -> Watch:
        if self._pool.closed:
            raise closed("consensus store")
        self._hints.listen()
        return self._waiters.watch()

    async def now(self) -> float:
        if self._clock is None:
            return await self.clock()
        theirs, ours = self._clock
        return theirs + self._runtime.monotonic() - ours

    async def clock(self) -> float:
        now: float = await self._pool.read(lambda c: c.fetchval(f"SELECT {CLOCK}"))
        self._set_clock(now)
        return now

    async def aclose(self) -> None:
        self._hints.stop_listening()
        self._waiters.wake_all()
        await self._pool.aclose()

    async def _write_all(self, entries: Sequence[Entry], connection: Connection) -> bool:
        created = [entry for entry in entries if entry.expected is None]
        appended = [entry for entry in entries if entry.expected is not None]
        if not created:
            return await self._append_all(connection, appended)
        transaction = connection.transaction()
        await transaction.start()
        won = await self._create_all(connection, created)
        won = won and (not appended or await self._append_all(connection, appended))
        await (transaction.commit() if won else transaction.rollback())
        return won

    async def _append_all(self, connection: Connection, entries: Sequence[Entry]) -> bool:
        columns = [list(column) for column in zip(*entries, strict=True)]
        row = await connection.fetchrow(self._sql["append_all"], *columns)
        assert row is not None  # the statement gives one row
        self._answered(columns[0], row)
        heads = zip(row["lost"] or (), row["newer"] or (), row["newer_data"] or (), strict=True)
        self._newer |= {key: Versioned(seqno, data) for key, seqno, data in heads}
        return bool(row["won"])

    async def _create_all(self, connection: Connection, entries: Sequence[Entry]) -> bool:
        keys, data = [entry.key for entry in entries], [entry.data for entry in entries]
        row = await connection.fetchrow(self._sql["create_all"], keys, data)
        assert row is not None  # the statement gives one row
        self._answered(keys, row)
        return bool(row["won"])

    def _answered_one(self, key: str, row: "asyncpg.Record") -> None:
        self._answered([key], row)
        if (seqno := row.get("newer")) is not None:
            self._newer[key] = Versioned(seqno, row["newer_data"])

    def newer(self, key: str) -> Versioned | None:
        return self._newer.pop(key, None)

    def _answered(self, keys: Sequence[str], row: "asyncpg.Record") -> None:
        """An answer to a compare-and-set of these keys came, or to a wish for them."""
        now: float = row["clock"]
        self._set_clock(now)
        texts = [wish.split(" ", 3) for wish in row["wishes"] or ()]
        wishes = [Wish(key, who, float(until) - now, now - float(since)) for until, since, who, key in texts]
        self._heard.hear(keys, wishes)

    def _set_clock(self, seconds: float) -> None:
        self._clock = (seconds, self._runtime.monotonic())
