"""The statements of the consensus store in Postgres.

| table | row                                                    |
|-------|--------------------------------------------------------|
| heads | one per key: the seqno of its newest version           |
| log   | one per live version                                   |

One statement changes both, so they agree at every moment. Keys collate by bytes ("C"), so the order of
`list_keys` and of locks is the same in every database. `heads` leaves room in its pages, so an update touches
no index; `log` keeps values of up to some KiB in the row and spends no time on compression.

A row of `log` with a negative seqno is no version but a *wish* (`Consensus.wish`): one row for each client
that has left one, with the moments at which it is over and since which its client waits. Each statement that
writes versions returns those of its keys. A truncation deletes them, also one by an older version of the
library, which knows of none.
"""

from aiopersist.storage.postgres.tables import Tables, advisory_lock, quoted

CLOCK = "extract(epoch FROM clock_timestamp())::float8"


LISTENS = "SELECT pg_advisory_lock_shared({})"


def tables(schema: str) -> Tables:
    """The tables in `schema`."""
    s = quoted(schema)
    ddl = f"""
        CREATE TABLE {s}.heads (
            key text COLLATE "C" PRIMARY KEY,
            seqno bigint NOT NULL
        ) WITH (fillfactor = 50);
        CREATE TABLE {s}.log (
            key text COLLATE "C" NOT NULL,
            seqno bigint NOT NULL,
            data bytea NOT NULL,
            PRIMARY KEY (key, seqno)
        ) WITH (toast_tuple_target = 8160);
        ALTER TABLE {s}.log ALTER COLUMN data SET STORAGE EXTERNAL
    """
    return Tables(schema, "log", ddl)


def statements(schema: str) -> dict[str, str]:
    """Every statement on the tables in `schema`, by name."""
    alone = f"pg_try_advisory_xact_lock({advisory_lock(schema)})"  # listeners hold that lock, shared
    names = {
        "heads": f"{quoted(schema)}.heads",
        "log": f"{quoted(schema)}.log",
        "clock": CLOCK,
        "alone": alone,
    }
    names["newer"] = _NEWER.format(**names)
    names |= {place: _WISHES.format(keys=keys, **names) for place, keys in _KEYS.items()}
    return {name: text.format(**names) for name, text in _TEXTS.items()}


# The head in the statement's snapshot, if it is not the expected one.
_NEWER = """LEFT JOIN LATERAL (
            SELECT l.seqno AS newer, l.data AS newer_data
            FROM {heads} h JOIN {log} l ON l.key = h.key AND l.seqno = h.seqno
            WHERE h.key = e.key AND h.seqno <> e.expected
        ) n ON true"""
# Of each wish: until when, since when, whose, and the key.
_WISHES = """(
            SELECT array_agg(convert_from(w.data, 'UTF8') || ' ' || w.key) FROM {log} w
            WHERE {keys} AND w.seqno < 0
        ) AS wishes"""
_KEYS = {
    "wishes": "w.key = $1",
    "wishes_of_each": "w.key = e.key",
    "wishes_of_all": "w.key = ANY ($1::text[])",
}

_TEXTS = {
    "head": """
        SELECT l.seqno, l.data, {clock} AS clock
        FROM {heads} h JOIN {log} l ON l.key = h.key AND l.seqno = h.seqno WHERE h.key = $1""",
    "heads": """
        SELECT k.key, l.seqno, l.data, {clock} AS clock
        FROM unnest($1::text[], $2::bigint[]) AS k (key, known)
        LEFT JOIN {heads} h ON h.key = k.key LEFT JOIN {log} l ON l.key = h.key AND l.seqno = h.seqno
        WHERE h.seqno IS DISTINCT FROM k.known""",
    "scan": """
        SELECT seqno, data FROM {log} WHERE key = $1 AND seqno >= $2 ORDER BY seqno LIMIT $3""",
    "list_keys": """
        SELECT key FROM {heads} WHERE key >= $1 AND starts_with(key, $1) ORDER BY key""",
    # Rows are locked in order, so that two truncates do not block each other for ever.
    "truncate": """
        WITH head AS (SELECT seqno FROM {heads} WHERE key = $1),
        doomed AS (
            SELECT key, seqno FROM {log}
            WHERE key = $1 AND seqno < $2 AND $2 <= (SELECT seqno FROM head) ORDER BY seqno FOR UPDATE
        ),
        dropped AS (
            DELETE FROM {log} l USING doomed d WHERE l.key = d.key AND l.seqno = d.seqno RETURNING l.seqno
        )
        SELECT (SELECT seqno FROM head) AS head,
            (SELECT count(*) FROM dropped WHERE seqno >= 0) AS dropped""",
    "wish": """
        WITH wished AS (
            INSERT INTO {log} (key, seqno, data)
            SELECT key, $2, convert_to(
                ({clock} + $4::float8)::text || ' ' || ({clock} - $5::float8)::text || ' ' || $3::text, 'UTF8'
            )
            FROM {heads} WHERE key = ANY ($1::text[]) ORDER BY key
            ON CONFLICT (key, seqno) DO UPDATE SET data = excluded.data
        )
        SELECT {wishes_of_all}, {clock} AS clock""",
    "withdraw": """
        DELETE FROM {log} WHERE key = ANY ($1::text[]) AND seqno = $2""",
    "remove": """
        WITH gone AS (
            DELETE FROM {heads} WHERE key = $1 AND seqno = $2
            AND EXISTS (SELECT FROM {log} WHERE key = $1 AND seqno = $2 AND data = $3) RETURNING key
        ),
        doomed AS (
            SELECT l.key, l.seqno FROM {log} l JOIN gone g ON l.key = g.key ORDER BY l.seqno FOR UPDATE OF l
        ),
        dropped AS (
            DELETE FROM {log} l USING doomed d WHERE l.key = d.key AND l.seqno = d.seqno RETURNING 1
        )
        SELECT EXISTS (SELECT FROM gone) AND (SELECT count(*) FROM dropped) > 0""",
    "create": """
        WITH made AS (INSERT INTO {heads} (key, seqno) VALUES ($1, 0) ON CONFLICT DO NOTHING RETURNING key),
        logged AS (INSERT INTO {log} (key, seqno, data) SELECT key, 0, $2 FROM made RETURNING key)
        SELECT EXISTS (SELECT FROM logged) AS won, {wishes}, {clock} AS clock, {alone} AS alone""",
    "append": """
        WITH moved AS (
            UPDATE {heads} SET seqno = seqno + 1 WHERE key = $1 AND seqno = $2 RETURNING key, seqno
        ),
        logged AS (INSERT INTO {log} (key, seqno, data) SELECT key, seqno, $3 FROM moved RETURNING key)
        SELECT EXISTS (SELECT FROM logged) AS won, {wishes}, {clock} AS clock, {alone} AS alone, n.*
        FROM (SELECT $1::text AS key, $2::bigint AS expected) e {newer}""",
    # A group of one entry. `maybe`: as in `append_together`.
    "append_one": """
        WITH locked AS (SELECT key FROM {heads} WHERE key = $1 AND seqno = $2 FOR UPDATE SKIP LOCKED),
        moved AS (
            UPDATE {heads} SET seqno = seqno + 1 WHERE key = (SELECT key FROM locked) RETURNING key, seqno
        ),
        logged AS (INSERT INTO {log} (key, seqno, data) SELECT key, seqno, $3 FROM moved RETURNING key)
        SELECT e.key, EXISTS (SELECT FROM logged) AS won,
            EXISTS (SELECT FROM {heads} WHERE key = $1 AND seqno = $2) AS maybe,
            {wishes}, {clock} AS clock, {alone} AS alone, n.*
        FROM (SELECT $1::text AS key, $2::bigint AS expected) e {newer}""",
    # `maybe`: this statement's snapshot has the expected head, so without a win it is no mismatch (yet)
    "append_together": """
        WITH entry AS (
            SELECT * FROM unnest($1::text[], $2::bigint[], $3::bytea[]) AS e (key, expected, data)
        ),
        locked AS (
            SELECT h.key FROM {heads} h JOIN entry e ON h.key = e.key AND h.seqno = e.expected
            ORDER BY h.key FOR UPDATE OF h SKIP LOCKED
        ),
        moved AS (
            UPDATE {heads} h SET seqno = h.seqno + 1 FROM locked l WHERE h.key = l.key
            RETURNING h.key, h.seqno
        ),
        logged AS (
            INSERT INTO {log} (key, seqno, data)
            SELECT m.key, m.seqno, e.data FROM moved m JOIN entry e
            ON e.key = m.key AND e.expected + 1 = m.seqno RETURNING key
        )
        SELECT e.key, EXISTS (SELECT FROM logged g WHERE g.key = e.key) AS won,
            EXISTS (SELECT FROM {heads} h WHERE h.key = e.key AND h.seqno = e.expected) AS maybe,
            {wishes_of_each}, {clock} AS clock, {alone} AS alone, n.*
        FROM entry e {newer}""",
    "append_all": """
        WITH entry AS (
            SELECT * FROM unnest($1::text[], $2::bigint[], $3::bytea[]) AS e (key, expected, data)
        ),
        locked AS (
            SELECT h.key FROM {heads} h JOIN entry e ON h.key = e.key AND h.seqno = e.expected
            ORDER BY h.key FOR UPDATE OF h
        ),
        moved AS (
            UPDATE {heads} h SET seqno = h.seqno + 1 FROM locked l
            WHERE h.key = l.key AND (SELECT count(*) FROM locked) = cardinality($1::text[])
            RETURNING h.key, h.seqno
        ),
        logged AS (
            INSERT INTO {log} (key, seqno, data)
            SELECT m.key, m.seqno, e.data FROM moved m JOIN entry e
            ON e.key = m.key AND e.expected + 1 = m.seqno RETURNING key
        )
        SELECT (SELECT count(*) FROM logged) = cardinality($1::text[]) AS won,
            {wishes_of_all}, {clock} AS clock,
            (SELECT array_agg(e.key) FROM entry e {newer} WHERE n.newer IS NOT NULL) AS lost,
            (SELECT array_agg(n.newer) FROM entry e {newer} WHERE n.newer IS NOT NULL) AS newer,
            (SELECT array_agg(n.newer_data) FROM entry e {newer} WHERE n.newer IS NOT NULL) AS newer_data""",
    "create_all": """
        WITH entry AS (SELECT * FROM unnest($1::text[], $2::bytea[]) AS e (key, data)),
        made AS (
            INSERT INTO {heads} (key, seqno) SELECT key, 0 FROM entry ORDER BY key
            ON CONFLICT DO NOTHING RETURNING key
        ),
        logged AS (
            INSERT INTO {log} (key, seqno, data)
            SELECT m.key, 0, e.data FROM made m JOIN entry e ON e.key = m.key RETURNING key
        )
        SELECT (SELECT count(*) FROM logged) = cardinality($1::text[]) AS won,
            {wishes_of_all}, {clock} AS clock""",
}
