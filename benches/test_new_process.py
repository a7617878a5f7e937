"""The whole of a small program: from `python -c` to 500 rows, everything that it imports included; beside
a program by hand that reads the same rows from one record, and sums them."""

import os
import sqlite3
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

import aiopersist as ap
from benches import byhand
from benches.conftest import report

ROWS = 500

OURS = """
import asyncio, sys
import aiopersist as ap

async def main():
    async with ap.open(blob=sys.argv[1], consensus=sys.argv[2]) as client:
        async with client.reader("shard", ap.Schema(key=bytes, val=bytes)) as r, r.snapshot() as s:
            assert len(await s.rows()) == 500

asyncio.run(main())
"""

SUMMED = """
import base64, json
import pyarrow as pa
import pyarrow.ipc

schema = pa.schema([("key", pa.binary()), ("val", pa.binary()), ("time", pa.int64()), ("diff", pa.int64())])

def rows(record):
    data = base64.b64decode(json.loads(record)["data"])
    batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
    sums = {}
    for key, val, diff in zip(*(batch.column(name).to_pylist() for name in ("key", "val", "diff"))):
        sums[key, val] = sums.get((key, val), 0) + diff
    return [(*row, diff) for row, diff in sorted(sums.items()) if diff]
"""

SQLITE_BY_HAND = f"""
import sqlite3, sys
{SUMMED}
db = sqlite3.connect(sys.argv[1])
(record,) = db.execute("SELECT data FROM log ORDER BY seqno DESC LIMIT 1").fetchone()
assert len(rows(record)) == 500
"""

POSTGRES_BY_HAND = f"""
import asyncio, asyncpg, sys
{SUMMED}
async def main():
    db = await asyncpg.connect(sys.argv[1])
    record = await db.fetchval("SELECT data FROM by_hand_log ORDER BY seqno DESC LIMIT 1")
    await db.close()
    assert len(rows(record)) == 500

asyncio.run(main())
"""

IMPORTS = "import pyarrow, pyarrow.ipc, {driver}"


class Taken(NamedTuple):
    """What a process took, in seconds: by the clock, and of the processor."""

    wall: float
    cpu: float


def taken(program: str, *arguments: str) -> Taken:
    """What `python -c program` took. It may keep compiled modules, as installed programs do."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program, *arguments], kept)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, program
    return Taken(time.perf_counter() - began, usage.ru_utime + usage.ru_stime)


def beside_by_hand(programs: dict[str, tuple[str, ...]], n: int, capsys: Any, title: str) -> None:
    """Medians over `n` rounds in which the programs take turns; each ran once before."""
    found: dict[str, list[Taken]] = {name: [] for name in programs}
    for number in range(n + 1):
        for name, program in programs.items():
            one = taken(*program)
            if number or n == 0:
                found[name].append(one)
    wall = {name: statistics.median(one.wall for one in every) for name, every in found.items()}
    cpu = {name: statistics.median(one.cpu for one in every) for name, every in found.items()}
    figures = {
        name: f"{wall[name] * 1e3:5.0f} ms {wall[name] / wall['by hand']:5.2f} x, "
        f"of processor time {cpu[name] * 1e3:5.0f} ms {cpu[name] / cpu['by hand']:5.2f} x"
        for name in programs
    }
    report(capsys, title, **figures)


def record() -> bytes:
    return byhand.record(byhand.rows(ROWS, 0))


async def written(place: Any) -> None:
    schema = ap.Schema(key=bytes, val=bytes)
    settings = ap.Settings(inline_writes_single_max_bytes=2**20)  # one record, as by hand
    async with (
        ap.open(blob=place.blob, consensus=place.consensus, settings=settings, maintenance=False) as client,
        client.writer("shard", schema) as writer,
    ):
        await writer.compare_and_append(byhand.rows(ROWS, 0), 0, 1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["files+sqlite"], indirect=True)
def test_a_new_process_on_sqlite(place: Any, run: Any, enabled: bool, tmp_path: Path, capsys: Any) -> None:
    path = str(tmp_path / "by-hand.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE log (seqno INTEGER PRIMARY KEY, data BLOB)")
        db.execute("INSERT INTO log VALUES (1, ?)", (record(),))
    run(written(place))
    programs = {
        "by hand": (SQLITE_BY_HAND, path),
        "its imports alone": (IMPORTS.format(driver="sqlite3"),),
        "import aiopersist; aiopersist.open": ("import aiopersist; aiopersist.open",),
        "ours": (OURS, *place),
    }
    beside_by_hand(programs, 15 if enabled else 0, capsys, "from python -c to 500 rows, SQLite")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["files+postgres"], indirect=True)
def test_a_new_process_on_postgres(place: Any, run: Any, enabled: bool, capsys: Any) -> None:
    url = place.consensus.partition("?")[0]

    async def by_hand() -> None:
        db = await asyncpg.connect(url)
        await db.execute("CREATE TABLE IF NOT EXISTS by_hand_log (seqno int PRIMARY KEY, data bytea)")
        await db.execute("INSERT INTO by_hand_log VALUES (1, $1) ON CONFLICT DO NOTHING", record())
        await db.close()

    run(by_hand())
    run(written(place))
    programs = {
        "by hand": (POSTGRES_BY_HAND, url),
        "its imports alone": (IMPORTS.format(driver="asyncpg"),),
        "ours": (OURS, *place),
    }
    beside_by_hand(programs, 15 if enabled else 0, capsys, "from python -c to 500 rows, Postgres")
