"""Four processes that commit ten times each to one shard, beside the same by hand: read the newest number,
write the next record if nobody has, else read again. What a first commit imports was imported before."""

import sqlite3
import statistics
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benches import byhand
from benches.conftest import report
from benches.processes import together

PROCESSES, COMMITS = 4, 10

OURS = """
import asyncio, sys
import aiopersist as ap

async def main():
    schema = ap.Schema(key=bytes, val=bytes)
    async with ap.open(blob=sys.argv[1], consensus=sys.argv[2]) as client, client.writer("t", schema) as w:
        await w.write([(b"first", b"")])
        print("ready", flush=True); sys.stdin.readline()
        for number in range(int(sys.argv[3])):
            await w.write([(b"%016d" % number, b"x" * 64)])
        print("done", flush=True)

asyncio.run(main())
"""

SQLITE_BY_HAND = """
import sqlite3, sys
from benches import byhand

db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
db.execute("PRAGMA synchronous = FULL")
byhand.record([(b"first", b"", 0, 1)])
PUT = "INSERT INTO log SELECT ?, ? WHERE ? = (SELECT coalesce(max(seqno) + 1, 0) FROM log)"
print("ready", flush=True); sys.stdin.readline()
for number in range(int(sys.argv[2])):
    record = byhand.record([(b"%016d" % number, b"x" * 64, number, 1)])
    while True:
        (seqno,) = db.execute("SELECT coalesce(max(seqno) + 1, 0) FROM log").fetchone()
        db.execute("BEGIN IMMEDIATE")
        won = db.execute(PUT, (seqno, record, seqno)).rowcount == 1
        db.execute("COMMIT")
        if won:
            break
print("done", flush=True)
"""

POSTGRES_BY_HAND = """
import asyncio, asyncpg, sys
from benches import byhand

async def main():
    db = await asyncpg.connect(sys.argv[1])
    put = byhand.PostgresRecords.PUT.format(sys.argv[2])
    byhand.record([(b"first", b"", 0, 1)])
    print("ready", flush=True); sys.stdin.readline()
    for number in range(int(sys.argv[3])):
        record = byhand.record([(b"%016d" % number, b"x" * 64, number, 1)])
        while True:
            seqno = 1 + await db.fetchval(f"SELECT seqno FROM {sys.argv[2]}.head")
            if await db.execute(put, seqno, record) == "INSERT 0 1":
                break
    print("done", flush=True)
    await db.close()

asyncio.run(main())
"""


def sqlite_by_hand(path: Path, commits: int) -> float:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE log (seqno INTEGER PRIMARY KEY, data BLOB NOT NULL)")
    took_s = together(SQLITE_BY_HAND, [str(path), str(commits)], PROCESSES)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM log").fetchone() == (PROCESSES * commits,)
    return took_s


async def prepare(url: str, schema: str) -> None:
    records = byhand.PostgresRecords(url, schema)
    await records.connect()
    await records.aclose()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_four_processes(
    kind: str, request: Any, run: Any, enabled: bool, benchmark: Any, capsys: Any, tmp_path: Path
) -> None:
    rounds, commits = (9, COMMITS) if enabled else (1, 2)
    ours, hand = list[float](), list[float]()

    def turn() -> None:
        place = tmp_path / uuid.uuid4().hex
        place.mkdir()
        if kind == "sqlite":
            consensus = f"sqlite://{place / 'state.db'}"
            hand.append(sqlite_by_hand(place / "hand.db", commits))
        else:
            server = request.getfixturevalue("postgres_server")
            consensus, schema = server.url(f"b_{uuid.uuid4().hex[:12]}"), f"hand_{uuid.uuid4().hex[:12]}"
            run(prepare(consensus, schema))
            hand.append(together(POSTGRES_BY_HAND, [server.dsn(), schema, str(commits)], PROCESSES))
        ours.append(together(OURS, [f"file://{place / 'blob'}", consensus, str(commits)], PROCESSES))

    benchmark.pedantic(turn, rounds=rounds)
    by_hand_ms, ours_ms = (round(1000 * statistics.median(seconds)) for seconds in (hand, ours))
    title = f"four processes, {commits} commits each, {kind}"
    report(capsys, title, by_hand_ms=by_hand_ms, ours_ms=ours_ms, ratio=round(ours_ms / by_hand_ms, 2))
