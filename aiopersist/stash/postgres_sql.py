"""The statements of `postgres`.

| table       | row                                                                        |
|-------------|----------------------------------------------------------------------------|
| fence       | a single row: the last take-over, the format, and the version              |
| openers     | the last token of an opener; or its wish: since when, and until when       |
| collections | name and codecs                                                            |
| uppers      | upper (null: empty) and revision, and counts of rows for consolidation     |
| sinces      | since (null: empty)                                                        |
| data        | an update                                                                  |

Keys and values are canonical JSON, compared by bytes. The index of `data` holds only the beginning of a key:
Postgres bounds an index entry, and keys are unbounded.
"""

from typing import Any

from aiopersist.stash.model import FORMAT, Select
from aiopersist.stash.store import OPENER_RETENTION_S, WISH
from aiopersist.storage.postgres.tables import Tables, advisory_lock, quoted

SLICE_BYTES = 8 * 1024 * 1024  # of the rows of a collection that come as one row
ROW_BYTES = 32  # of an update besides its texts
KEY_PREFIX = 200  # characters, of up to four bytes; an index entry holds 2,700 bytes


def tables(schema: str) -> Tables:
    """The tables in `schema`."""
    s = quoted(schema)
    ddl = f"""
        CREATE TABLE {s}.fence (
            epoch bigint NOT NULL, nonce text NOT NULL, format int NOT NULL, version bigint NOT NULL
        );
        CREATE UNIQUE INDEX fence_one ON {s}.fence ((true));
        CREATE TABLE {s}.openers (
            opener text COLLATE "C" PRIMARY KEY, token text NOT NULL, seen timestamptz NOT NULL
        );
        CREATE TABLE {s}.collections (
            collection_id bigint PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE,
            key_codec text NOT NULL, val_codec text NOT NULL
        );
        CREATE TABLE {s}.uppers (
            collection_id bigint PRIMARY KEY, upper bigint, revision bigint NOT NULL,
            loose bigint NOT NULL, settled bigint NOT NULL
        ) WITH (fillfactor = 50);
        CREATE TABLE {s}.sinces (collection_id bigint PRIMARY KEY, since bigint) WITH (fillfactor = 50);
        CREATE TABLE {s}.data (
            collection_id bigint NOT NULL, key text COLLATE "C" NOT NULL, val text COLLATE "C" NOT NULL,
            time bigint NOT NULL, diff bigint NOT NULL
        );
        CREATE INDEX data_key ON {s}.data (collection_id, "left"(key, {KEY_PREFIX}));
        INSERT INTO {s}.fence VALUES (0, '', {FORMAT}, 0)
    """
    return Tables(schema, "data", ddl)


def statements(schema: str) -> dict[str, str]:
    """Every statement on the tables in `schema`, by name."""
    names = {**_names(schema), "retention": OPENER_RETENTION_S, "wish": WISH}
    return {name: text.format(**names) for name, text in _TEXTS.items()}


def _names(schema: str) -> dict[str, Any]:
    names = ("fence", "openers", "collections", "uppers", "sinces", "data")
    return {name: f"{quoted(schema)}.{name}" for name in names}


# If a repeated statement arrives late, it finds the row there and changes nothing.
_ENROLL = """
    INSERT INTO {openers} VALUES ($1, $2, clock_timestamp()) ON CONFLICT DO NOTHING"""

_TEXTS = {
    "fence": "SELECT epoch, nonce, format FROM {fence}",
    # Expects the epoch that was read: so a late repetition cannot take over from a later opener.
    "take": "UPDATE {fence} SET epoch = epoch + 1, nonce = $2 WHERE epoch = $1",
    "sweep": "DELETE FROM {openers} WHERE seen < clock_timestamp() - make_interval(secs => {retention})",
    "enroll": _ENROLL,
    "forget": "DELETE FROM {openers} WHERE opener IN ($1, '{wish}' || $1::text)",
    "token": "SELECT token FROM {openers} WHERE opener = $1 FOR UPDATE",
    # All the locks, the decision, and the changes that follow from it, in one statement. A lock waits, and
    # then sees the newest row. The snapshot of the statement may be older than that, but not older than the
    # revisions that the change expects: they were committed before any session could read them.
    "commit": """
        WITH guard AS (SELECT epoch, nonce FROM {fence} FOR SHARE),
        mine AS (SELECT token FROM {openers} WHERE opener = $1 FOR UPDATE),
        expected AS (SELECT * FROM unnest($6::bigint[], $7::bigint[]) AS e (collection_id, revision)),
        locked AS (
            SELECT u.collection_id, u.revision FROM {uppers} u
            WHERE u.collection_id = ANY ($6::bigint[]) ORDER BY u.collection_id FOR UPDATE
        ),
        verdict AS (
            SELECT (SELECT count(*) FROM guard WHERE epoch = $4 AND nonce = $5) = 1
                AND coalesce((SELECT token FROM mine) = $2, false)
                AND (SELECT count(*) FROM locked JOIN expected USING (collection_id, revision))
                    = cardinality($6::bigint[]) AS ok
        ),
        signed AS (
            UPDATE {openers} SET token = $3, seen = clock_timestamp()
            WHERE opener = $1 AND (SELECT ok FROM verdict)
        ),
        sealed AS (
            UPDATE {uppers} u SET upper = m.upper, revision = u.revision + 1, loose = u.loose + m.loose
            FROM unnest($8::bigint[], $9::bigint[], $11::bigint[]) AS m (collection_id, upper, loose)
            WHERE u.collection_id = m.collection_id AND (SELECT ok FROM verdict)
        ),
        compacted AS (
            UPDATE {sinces} s SET since = m.since
            FROM unnest($8::bigint[], $10::bigint[]) AS m (collection_id, since)
            WHERE s.collection_id = m.collection_id AND s.since IS DISTINCT FROM m.since
                AND (SELECT ok FROM verdict)
        ),
        added AS (
            INSERT INTO {data} (collection_id, key, val, time, diff)
            SELECT * FROM unnest($12::bigint[], $13::text[], $14::text[], $15::bigint[], $16::bigint[])
            WHERE (SELECT ok FROM verdict)
        )
        SELECT (SELECT epoch FROM guard) AS epoch, (SELECT nonce FROM guard) AS nonce,
            (SELECT token FROM mine) AS token, (SELECT ok FROM verdict) AS ok,
            (
                SELECT array_agg(
                    extract(epoch FROM seen - clock_timestamp())::text || ' '
                    || (extract(epoch FROM clock_timestamp()) - token::float8)::text || ' ' || opener
                )
                FROM {openers} WHERE opener >= '{wish}' AND seen > clock_timestamp()
            ) AS wishes""",
    "wish": """
        INSERT INTO {openers} VALUES (
            '{wish}' || $1::text, (extract(epoch FROM clock_timestamp()) - $3::float8)::text,
            clock_timestamp() + make_interval(secs => $2)
        ) ON CONFLICT (opener) DO UPDATE SET token = excluded.token, seen = excluded.seen""",
    "insert": """
        INSERT INTO {data} (collection_id, key, val, time, diff)
        SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::bigint[])""",
    "create": """
        WITH made AS (
            INSERT INTO {collections} VALUES ($1, $2, $3, $4) RETURNING collection_id
        ), sealed AS (
            INSERT INTO {uppers} SELECT collection_id, $6, 0, $7, 0 FROM made
        )
        INSERT INTO {sinces} SELECT collection_id, $5 FROM made""",
    # Runs after `lock`, so it sees the changes that `lock` waited for. No row if version or number of
    # collections differ.
    "migrate": """
        UPDATE {fence} SET version = $2
        WHERE version = $1 AND (SELECT count(*) FROM {collections}) = $3 RETURNING version""",
    "fence_shared": "SELECT epoch, nonce FROM {fence} FOR SHARE",
    # Runs under the consolidation lock, so no other session deletes rows, and rows never change: the rows of
    # this snapshot are those to delete. It deletes them by their ctid: Postgres would plan a join by
    # statistics, which know nothing of a young collection.
    "sums": """
        WITH held AS (SELECT since FROM {sinces} WHERE collection_id = $1),
        several AS (
            SELECT key, val, greatest(time, since) AS at, array_agg(d.ctid) AS places, sum(diff) AS total
            FROM {data} d, held WHERE collection_id = $1
            GROUP BY key, val, at HAVING (count(*) > 1 OR min(diff) = 0)
                AND sum(diff) BETWEEN -9223372036854775808 AND 9223372036854775807
        ),
        gone AS (DELETE FROM {data} WHERE ctid = ANY (ARRAY(SELECT unnest(places) FROM several)))
        INSERT INTO {data} (collection_id, key, val, time, diff)
        SELECT $1, key, val, at, total::bigint FROM several WHERE total <> 0""",
    "loose": "SELECT loose FROM {uppers} WHERE collection_id = $1",
    "delete_all": """
        DELETE FROM {data} WHERE collection_id = $1
            AND EXISTS (SELECT FROM {sinces} WHERE collection_id = $1 AND since IS NULL)""",
    "settled": """
        UPDATE {uppers} SET loose = greatest(loose - $2, 0),
            settled = (SELECT count(*) FROM {data} WHERE collection_id = $1)
        WHERE collection_id = $1 RETURNING settled""",
    "lock_consolidation": "SELECT pg_advisory_xact_lock($1)",
    "lock": "SELECT epoch, nonce FROM {fence} FOR UPDATE",
}

_LOAD = """
    SELECT epoch, nonce, format, version, c.*{columns} FROM {fence} LEFT JOIN (
        SELECT collection_id, name, key_codec, val_codec, since, upper, revision, loose, settled
        FROM {collections} JOIN {uppers} USING (collection_id) JOIN {sinces} USING (collection_id)
    ) c ON {which}{rows}"""
# An array, and a row of a result, have less than 1 GiB: so the rows of a collection come in slices.
_ROWS = """
    LEFT JOIN LATERAL (
        SELECT array_agg(key) AS keys, array_agg(val) AS vals, array_agg(time) AS times,
            array_agg(diff) AS diffs
        FROM (
            SELECT key, val, time, diff, sum(octet_length(key) + octet_length(val) + {row_bytes})
                OVER (ROWS UNBOUNDED PRECEDING) / {slice_bytes} AS slice
            FROM {data} WHERE collection_id = c.collection_id{of_key}
        ) r GROUP BY slice
    ) d ON true"""
_OF_KEY = """ AND "left"(key, {prefix}) = "left"(${position}::text, {prefix}) AND key = ${position}"""


def load(schema: str, select: Select) -> tuple[str, list[Any]]:
    """The statement of a selection, and its arguments. It gives a row per collection, or one for each slice
    of its rows, in no order; without any collection, one row with nulls."""
    arguments: list[Any] = []
    which = "true"
    if select.name is not None:
        arguments.append(select.name)
        which = "c.name = $1"
    elif select.ids is not None:
        arguments.append(list(select.ids))
        which = "c.collection_id = ANY ($1::bigint[])"
    rows = ""
    if select.rows:
        of_key = ""
        if select.key is not None:
            arguments.append(select.key)
            of_key = _OF_KEY.format(prefix=KEY_PREFIX, position=len(arguments))
        slices = {"row_bytes": ROW_BYTES, "slice_bytes": SLICE_BYTES}
        rows = _ROWS.format(**_names(schema), **slices, of_key=of_key)
    columns = ", keys, vals, times, diffs" if select.rows else ""
    return _LOAD.format(**_names(schema), columns=columns, which=which, rows=rows), arguments


def consolidation_lock(schema: str, collection_id: int) -> int:
    """The number of the advisory lock under which the collection is consolidated."""
    return advisory_lock(f"{schema} {collection_id}")
