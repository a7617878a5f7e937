"""The statements of `sqlite`, each a function of a connection that is in a transaction.

| table             | row                                                                  |
|-------------------|----------------------------------------------------------------------|
| stash_fence       | one per stash: the last take-over, the format, and the version        |
| stash_openers     | the last token of an opener; or its wish: since when, and until when   |
| stash_collections | name and codecs                                                       |
| stash_uppers      | upper (null: empty), revision, and counts of rows for consolidation   |
| stash_sinces      | since (null: empty)                                                   |
| stash_data        | an update                                                             |
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from operator import add
from typing import Any, NamedTuple

from aiopersist.stash import model
from aiopersist.stash.errors import StashError
from aiopersist.stash.model import (
    FORMAT,
    NEWER,
    Codecs,
    Fence,
    Loaded,
    Select,
    StoreChange,
    Stored,
    StoredRows,
    frontiers_of,
)
from aiopersist.stash.sqlite_checks import check_columns, check_rows, check_sums, corrupt, readable
from aiopersist.stash.store import STASH, WISH
from aiopersist.storage.sqlite.file import prepare_file
from aiopersist.storage.wishes import Wish

_SCHEMA = """
    CREATE TABLE stash_fence (
        stash TEXT PRIMARY KEY, epoch INTEGER NOT NULL, nonce TEXT NOT NULL,
        format INTEGER NOT NULL, version INTEGER NOT NULL
    );
    CREATE TABLE stash_openers (
        stash TEXT NOT NULL, opener TEXT NOT NULL, token TEXT NOT NULL, seen REAL NOT NULL,
        PRIMARY KEY (stash, opener)
    );
    CREATE TABLE stash_collections (
        stash TEXT NOT NULL, collection_id INTEGER NOT NULL, name TEXT NOT NULL,
        key_codec TEXT NOT NULL, val_codec TEXT NOT NULL,
        PRIMARY KEY (stash, collection_id), UNIQUE (stash, name)
    );
    CREATE TABLE stash_uppers (
        stash TEXT NOT NULL, collection_id INTEGER NOT NULL, upper INTEGER, revision INTEGER NOT NULL,
        loose INTEGER NOT NULL, settled INTEGER NOT NULL, PRIMARY KEY (stash, collection_id)
    );
    CREATE TABLE stash_sinces (
        stash TEXT NOT NULL, collection_id INTEGER NOT NULL, since INTEGER,
        PRIMARY KEY (stash, collection_id)
    );
    CREATE TABLE stash_data (
        stash TEXT NOT NULL, collection_id INTEGER NOT NULL,
        key TEXT NOT NULL, val TEXT NOT NULL, time INTEGER NOT NULL, diff INTEGER NOT NULL
    );
    CREATE INDEX stash_data_key ON stash_data (stash, collection_id, key)
"""

_DIFF_LIMIT = 2**63
FENCE = (("epoch", int), ("nonce", str), ("version", int), ("format", int))
HEAD = (("collection_id", int), ("name", str), ("key_codec", str), ("val_codec", str))
COUNTS = (("revision", int), ("loose", int), ("settled", int))


def has_tables(connection: sqlite3.Connection) -> bool:
    statement = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'stash_data'"
    return bool(connection.execute(statement).fetchone()[0])


def prepare(connection: sqlite3.Connection) -> None:
    """Bring the file into WAL mode and create the tables, unless another process has done so."""
    prepare_file(connection, has_tables=lambda: has_tables(connection), ddl=_SCHEMA)


def take(connection: sqlite3.Connection, stash: str, nonce: str | None) -> Fence:
    """The fence, created if it is not there; with a nonce the next fence."""
    connection.execute("INSERT OR IGNORE INTO stash_fence VALUES (?, 0, '', ?, 0)", (stash, FORMAT))
    current = read_fence(connection, stash)
    if nonce is None or current.nonce == nonce:
        return current
    connection.execute("UPDATE stash_fence SET epoch = epoch + 1, nonce = ? WHERE stash = ?", (nonce, stash))
    return read_fence(connection, stash)


def read_fence(connection: sqlite3.Connection, stash: str) -> Fence:
    row = _fence(connection, stash)
    if row is None:
        raise StashError("the stash is gone")
    return row[0]


def token_of(connection: sqlite3.Connection, stash: str, opener: str) -> str | None:
    row = connection.execute(
        "SELECT token FROM stash_openers WHERE stash = ? AND opener = ?", (stash, opener)
    ).fetchone()
    return None if row is None else row[0]


def enroll(connection: sqlite3.Connection, stash: str, opener: str, token: str, now: float) -> None:
    """A token that is there stays: the opener has written since."""
    connection.execute("INSERT OR IGNORE INTO stash_openers VALUES (?, ?, ?, ?)", (stash, opener, token, now))


def set_token(connection: sqlite3.Connection, stash: str, opener: str, token: str, now: float) -> None:
    """The opener has a token, which was judged."""
    connection.execute(
        "UPDATE stash_openers SET token = ?, seen = ? WHERE stash = ? AND opener = ?",
        (token, now, stash, opener),
    )


def sweep_openers(connection: sqlite3.Connection, stash: str, before: float) -> None:
    connection.execute("DELETE FROM stash_openers WHERE stash = ? AND seen < ?", (stash, before))


def forget(connection: sqlite3.Connection, stash: str, opener: str) -> None:
    """With its wish."""
    gone = (stash, opener, WISH + opener)
    connection.execute("DELETE FROM stash_openers WHERE stash = ? AND opener IN (?, ?)", gone)


def wish(connection: sqlite3.Connection, stash: str, wish: Wish, now: float) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO stash_openers VALUES (?, ?, ?, ?)",
        (stash, WISH + wish.who, repr(now - wish.waited_s), now + wish.left_s),
    )


def wishes(connection: sqlite3.Connection, stash: str, now: float) -> list[Wish]:
    """Those that last."""
    rows = connection.execute(
        "SELECT opener, seen - ?, ? - token FROM stash_openers WHERE stash = ? AND opener >= ? AND seen > ?",
        (now, now, stash, WISH, now),
    )
    return [Wish(STASH, who.removeprefix(WISH), left, waited) for who, left, waited in rows.fetchall()]


def load(connection: sqlite3.Connection, stash: str, select: Select) -> Loaded | None:
    head = _fence(connection, stash)
    if head is None:
        return None
    collections = []
    for stored in _heads(connection, stash, select):
        if select.rows:
            with readable(stash, stored.name):
                rows = _rows(connection, stash, stored.id, select.key)
            stored = replace(stored, rows=check_rows(stash, stored.name, rows))
        collections.append(stored)
    return Loaded(*head, tuple(collections))


class Now(NamedTuple):
    """What decides about a change."""

    fence: Fence
    token: str | None
    """The token of the opener."""
    holds: bool
    """Whether everything is as the change expects."""


def state_for(connection: sqlite3.Connection, stash: str, opener: str, change: StoreChange) -> Now:
    """The stash as it is. One statement for one collection, as a rule; two for others."""
    ids = tuple(change.expected)
    row = connection.execute(
        "SELECT epoch, nonce, version, format, "
        "(SELECT token FROM stash_openers AS o WHERE o.stash = f.stash AND opener = ?), "
        "(SELECT revision FROM stash_uppers AS u WHERE u.stash = f.stash AND collection_id = ?) "
        "FROM stash_fence AS f WHERE stash = ?",
        (opener, ids[0] if ids else None, stash),
    ).fetchone()
    if row is None:
        raise StashError("the stash is gone")
    fence, version = _read_fence(stash, *row[:4])
    token, revision = row[4:]
    if change.created or change.version is not None:
        collections = {stored.id: stored for stored in _heads(connection, stash, Select())}
        return Now(fence, token, model.holds(change, collections, version))
    if len(ids) == 1:
        return Now(fence, token, revision == change.expected[ids[0]])
    revisions = connection.execute(
        "SELECT collection_id, revision FROM stash_uppers "
        f"WHERE stash = ? AND collection_id IN ({_marks(ids)})",
        (stash, *ids),
    )
    return Now(fence, token, dict(revisions.fetchall()) == change.expected)


def apply(connection: sqlite3.Connection, stash: str, change: StoreChange) -> None:
    for cid, move in change.moves.items():
        connection.execute(
            "UPDATE stash_uppers SET upper = ?, revision = revision + 1, loose = loose + ? "
            "WHERE stash = ? AND collection_id = ?",
            (move.frontiers.upper.time, len(move.rows), stash, cid),
        )
        connection.execute(
            "UPDATE stash_sinces SET since = ? WHERE stash = ? AND collection_id = ?",
            (move.frontiers.since.time, stash, cid),
        )
    for created in change.created:
        frontiers = created.frontiers
        connection.execute(
            "INSERT INTO stash_collections VALUES (?, ?, ?, ?, ?)",
            (stash, created.id, created.name, *created.codecs),
        )
        connection.execute(
            "INSERT INTO stash_uppers VALUES (?, ?, ?, 0, ?, 0)",
            (stash, created.id, frontiers.upper.time, len(created.rows)),
        )
        connection.execute(
            "INSERT INTO stash_sinces VALUES (?, ?, ?)", (stash, created.id, frontiers.since.time)
        )
    for cid, rows in change.rows:
        _insert(connection, stash, cid, rows)
    if change.version is not None:
        connection.execute("UPDATE stash_fence SET version = ? WHERE stash = ?", (change.version[1], stash))


def consolidate(connection: sqlite3.Connection, stash: str, cid: int) -> int:
    """Sum rows, as `Store.consolidate` says; the number of rows that are left."""
    heads = _heads(connection, stash, Select((cid,)))
    if not heads:
        raise corrupt(stash, None, f"collection {cid} is gone")
    since, here = heads[0].frontiers.since.time, (stash, cid)
    if since is None:
        connection.execute("DELETE FROM stash_data WHERE stash = ? AND collection_id = ?", here)
    else:
        _sum(connection, here, heads[0].name, since)
    counted = "SELECT count(*) FROM stash_data WHERE stash = ? AND collection_id = ?"
    rows: int = connection.execute(counted, here).fetchone()[0]
    connection.execute(
        "UPDATE stash_uppers SET loose = 0, settled = ? WHERE stash = ? AND collection_id = ?", (rows, *here)
    )
    return rows


def _sum(connection: sqlite3.Connection, here: tuple[str, int], name: str, since: Any) -> None:
    """SQLite refuses a sum of diffs that needs more than 64 bits: so it sums halves of 32 bits."""
    groups = connection.execute(
        "SELECT key, val, max(time, ?) AS at, sum(diff >> 32), sum(diff & 4294967295), group_concat(rowid), "
        "sum((typeof(key), typeof(val), typeof(time), typeof(diff)) "
        "<> ('text', 'text', 'integer', 'integer')) "
        "FROM stash_data WHERE stash = ? AND collection_id = ? "
        "GROUP BY key, val, at HAVING count(*) > 1 OR min(diff) = 0",
        (since, *here),
    ).fetchall()
    check_sums(here[0], name, groups)
    sums = [(key, val, at, (high << 32) + low, rows) for key, val, at, high, low, rows, _ in groups]
    fitting = [group for group in sums if -_DIFF_LIMIT <= group[3] < _DIFF_LIMIT]
    gone = ((int(row),) for *_, rows in fitting for row in rows.split(","))
    connection.executemany("DELETE FROM stash_data WHERE rowid = ?", gone)
    _insert(connection, *here, (group[:4] for group in fitting if group[3]))


def _fence(connection: sqlite3.Connection, stash: str) -> tuple[Fence, int] | None:
    """The fence and the version."""
    row = connection.execute(
        "SELECT epoch, nonce, version, format FROM stash_fence WHERE stash = ?", (stash,)
    ).fetchone()
    return None if row is None else _read_fence(stash, *row)


def _read_fence(stash: str, epoch: int, nonce: str, version: int, format: int) -> tuple[Fence, int]:
    check_columns(stash, None, FENCE, (epoch, nonce, version, format))
    if format > FORMAT:
        raise StashError(NEWER)
    return Fence(epoch, nonce), version


def _heads(connection: sqlite3.Connection, stash: str, select: Select) -> list[Stored]:
    statement = (
        "SELECT c.collection_id, name, key_codec, val_codec, revision, loose, settled, s.stash, since, upper "
        "FROM stash_collections AS c LEFT JOIN stash_uppers USING (stash, collection_id) "
        "LEFT JOIN stash_sinces AS s USING (stash, collection_id) WHERE c.stash = ?"
    )
    arguments: tuple[Any, ...] = (stash,)
    if select.name is not None:
        statement, arguments = f"{statement} AND name = ?", (stash, select.name)
    elif select.ids is not None:
        marks = _marks(select.ids)
        statement, arguments = f"{statement} AND c.collection_id IN ({marks})", (stash, *select.ids)
    with readable(stash):
        return [_head(stash, *row) for row in connection.execute(statement, arguments).fetchall()]


def _head(stash: str, cid: int, name: str, key: str, val: str, *rest: Any) -> Stored:
    revision, added, summed, sinces_row, since, upper = rest
    check_columns(stash, name, HEAD, (cid, name, key, val))
    for table, value in (("stash_uppers", revision), ("stash_sinces", sinces_row)):
        if value is None:
            raise corrupt(stash, name, f"its row of {table} is gone")
    check_columns(stash, name, COUNTS, (revision, added, summed))
    frontiers = frontiers_of(f"stash {stash!r}, collection {name!r}", since, upper)
    return Stored(cid, name, Codecs(key, val), frontiers, revision, added, summed)


def _marks(ids: Sequence[int]) -> str:
    return ", ".join("?" * len(ids))


def _rows(connection: sqlite3.Connection, stash: str, cid: int, key: str | None) -> StoredRows:
    statement = "SELECT key, val, time, diff FROM stash_data WHERE stash = ? AND collection_id = ?"
    arguments = (stash, cid) if key is None else (stash, cid, key)
    rows = connection.execute(statement + ("" if key is None else " AND key = ?"), arguments).fetchall()
    return StoredRows.of(rows)


def _insert(
    connection: sqlite3.Connection, stash: str, cid: int, rows: Iterable[tuple[str, str, int, int]]
) -> None:
    statement = "INSERT INTO stash_data VALUES (?, ?, ?, ?, ?, ?)"
    connection.executemany(statement, map(add, repeat((stash, cid)), rows))
