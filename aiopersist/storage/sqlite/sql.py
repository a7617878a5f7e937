"""The statements of `sqlite`, each a function of a connection.

| table     | row                                                                        |
|-----------|----------------------------------------------------------------------------|
| versions  | one version of a key                                                       |
| listeners | the port at which a process listens for hints                              |
| wishes    | until when a client wishes that others commit nothing to a key, and since  |
|           | when it waits                                                              |

*Truncation* happens at one moment, but its rows are deleted in slices, each in a transaction of its own, so
that another writer waits for one slice at most. A row with a negative seqno `-n` is the *floor* of its key:
the versions below `n` are gone, though some of their rows are still there. The last slice deletes the floor,
too. If the slices break off, the next truncation of the key goes on.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from aiopersist.base.errors import InvalidLocation
from aiopersist.storage.consensus import Entry, Versioned
from aiopersist.storage.sqlite.file import prepare_file
from aiopersist.storage.wishes import Wish

SEQNO_MAX = 2**63 - 1
SLICE_ROWS = 500  # deleted in about 10 ms
SLICE_BYTES = 4 * 1024 * 1024  # likewise: a deletion reads each page of a large version
_FORMAT = 1  # the file's user_version
# A plain table with an index took 0.16 ms per commit where one WITHOUT ROWID took 0.19, and 64 keys
# in a commit 1.0 ms instead of 2.5: rows of some KiB append to the table and keep the index small.
_WISHES = """
    CREATE TABLE IF NOT EXISTS wishes (
        key TEXT NOT NULL, who TEXT NOT NULL, until REAL NOT NULL, since REAL NOT NULL, PRIMARY KEY (key, who)
    )"""
_SCHEMA = f"""
    CREATE TABLE versions (
        key TEXT NOT NULL, seqno INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (key, seqno)
    );
    CREATE TABLE listeners (id TEXT PRIMARY KEY, port INTEGER NOT NULL);
    {_WISHES};
    PRAGMA user_version = {_FORMAT}
"""


def prepare(connection: sqlite3.Connection) -> None:
    """Bring the file into WAL mode and create the tables, once; safe for first users at the same time."""
    prepare_file(connection, has_tables=lambda: _format(connection) != 0, ddl=_SCHEMA)
    check_format(connection)
    connection.execute(_WISHES)  # an earlier version of the library has made the others


def check_format(connection: sqlite3.Connection) -> None:
    """Raise `InvalidLocation` unless the tables are there, in a format that this version knows."""
    version = _format(connection)
    if version == 0:
        raise InvalidLocation("sqlite: the file holds no location: a client that may write makes it")
    if version > _FORMAT:
        raise InvalidLocation(f"sqlite: a newer aiopersist wrote the file (format {version}): update")


def _format(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def head(connection: sqlite3.Connection, key: str) -> Versioned | None:
    row = connection.execute(
        "SELECT seqno, data FROM versions WHERE key = ? ORDER BY seqno DESC LIMIT 1", (key,)
    ).fetchone()
    return None if row is None else Versioned(*row)


def heads(connection: sqlite3.Connection, seqnos: Mapping[str, int | None]) -> dict[str, Versioned | None]:
    moved = [key for key, seqno in seqnos.items() if _head_seqno(connection, key) != seqno]
    return {key: head(connection, key) for key in moved}


def _head_seqno(connection: sqlite3.Connection, key: str) -> int | None:
    newest = "SELECT max(seqno) FROM versions WHERE key = ?"
    seqno: int | None = connection.execute(newest, (key,)).fetchone()[0]
    return seqno


def compare_and_set_one(connection: sqlite3.Connection, entry: Entry) -> bool:
    """`compare_and_set` of one entry, as one statement."""
    key, expected, data = entry
    inserted = connection.execute(
        "INSERT INTO versions (key, seqno, data) SELECT ?, ?, ? "
        "WHERE (SELECT max(seqno) FROM versions WHERE key = ?) IS ?",
        (key, 0 if expected is None else expected + 1, data, key, expected),
    )
    return inserted.rowcount == 1


def compare_and_set(connection: sqlite3.Connection, entries: Sequence[Entry]) -> bool:
    if any(_head_seqno(connection, entry.key) != entry.expected for entry in entries):
        return False
    connection.executemany(
        "INSERT INTO versions (key, seqno, data) VALUES (?, ?, ?)",
        [(key, 0 if expected is None else expected + 1, data) for key, expected, data in entries],
    )
    return True


def scan(connection: sqlite3.Connection, key: str, from_seqno: int, limit: int) -> list[Versioned]:
    rows = connection.execute(
        "SELECT seqno, data FROM versions WHERE key = ? "
        "AND seqno >= max(?, coalesce((SELECT -min(seqno) FROM versions WHERE key = ?), 0)) "
        "ORDER BY seqno LIMIT ?",
        (key, from_seqno, key, limit),
    )
    return [Versioned(*row) for row in rows.fetchall()]


def leftovers(connection: sqlite3.Connection, key: str) -> list[Versioned]:
    """The versions below the floor that are not deleted yet."""
    rows = connection.execute(
        "SELECT seqno, data FROM versions WHERE key = ? AND seqno >= 0 "
        "AND seqno < coalesce((SELECT -min(seqno) FROM versions WHERE key = ?), 0)",
        (key, key),
    )
    return [Versioned(*row) for row in rows.fetchall()]


class Truncation(NamedTuple):
    """The result of one slice: how many versions it dropped, and whether rows are still to be deleted."""

    dropped: int
    unfinished: bool


def truncate(connection: sqlite3.Connection, key: str, seqno: int) -> Truncation:
    """Raise the floor to `seqno`, if it is lower, and delete one slice of the rows below."""
    newest = _head_seqno(connection, key)
    if newest is None or seqno > newest:
        raise ValueError(f"cannot truncate {key!r} at {seqno}: its head is {newest}")
    before = max(0, *connection.execute("SELECT -min(seqno) FROM versions WHERE key = ?", (key,)).fetchone())
    floor = max(before, seqno)
    earliest, end = _slice(connection, key, floor)
    connection.execute("DELETE FROM versions WHERE key = ? AND seqno < ?", (key, end))
    if end < floor:
        connection.execute("INSERT INTO versions (key, seqno, data) VALUES (?, ?, x'')", (key, -floor))
    return Truncation(floor - max(before, earliest), end < floor)


def _slice(connection: sqlite3.Connection, key: str, floor: int) -> tuple[int, int]:
    """The seqno of the earliest row, and the end of the first slice of rows below `floor`."""
    rows = connection.execute(
        "SELECT seqno, length(data) FROM versions WHERE key = ? AND seqno BETWEEN 0 AND ? - 1 "
        "ORDER BY seqno LIMIT ?",
        (key, floor, SLICE_ROWS),
    ).fetchall()
    if not rows:
        return floor, floor
    fitting = sum(size <= SLICE_BYTES for size in accumulate(size for _, size in rows))
    return rows[0][0], rows[max(fitting, 1) - 1][0] + 1


def remove(connection: sqlite3.Connection, key: str, expected: Versioned) -> bool:
    if head(connection, key) not in (None, expected):
        return False
    connection.execute("DELETE FROM versions WHERE key = ?", (key,))
    return True


def wish(connection: sqlite3.Connection, wishes: Sequence[Wish], now: float) -> None:
    """Leave these wishes, or withdraw those that last for no time; drop those that are over."""
    connection.executemany(
        "INSERT OR REPLACE INTO wishes (key, who, until, since) VALUES (?, ?, ?, ?)",
        [(key, who, now + left_s, now - waited_s) for key, who, left_s, waited_s in wishes],
    )
    connection.execute("DELETE FROM wishes WHERE until <= ?", (now,))


def wishes(connection: sqlite3.Connection, now: float) -> list[Wish]:
    """All of them; as a rule there is none."""
    rows = connection.execute("SELECT key, who, until - ?, ? - since FROM wishes", (now, now))
    return [Wish(*row) for row in rows.fetchall()]


def list_keys(connection: sqlite3.Connection, prefix: str) -> list[str]:
    """One index lookup per key, however many versions each has."""
    keys: list[str] = []
    row = connection.execute("SELECT min(key) FROM versions WHERE key >= ?", (prefix,)).fetchone()
    while row[0] is not None and row[0].startswith(prefix):
        keys.append(row[0])
        row = connection.execute("SELECT min(key) FROM versions WHERE key > ?", (row[0],)).fetchone()
    return keys
