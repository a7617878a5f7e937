"""Goal: the log stays short while the file is open; and no process makes a checkpoint while another one may
write, which before SQLite 3.51.3 may lose pages for good (its "WAL-reset bug")."""

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from aiopersist.storage.sqlite import file as sqlite_file
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from tests.power.trace import available

A_COMMIT = 32 * 1024


async def write(consensus: SqliteConsensus, key: str, first: int, last: int) -> None:
    for seqno in range(first, last):
        assert await consensus.compare_and_set(key, seqno - 1 if seqno else None, b"x" * 2000)


@pytest.mark.parametrize("is_read", [False, True], ids=["alone", "read"])
async def test_the_log_stays_short(tmp_path: Path, is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a reader whose snapshot needs the log keeps nobody waiting and sees no difference; once it has
    ended, the log is short again."""
    monkeypatch.setattr(sqlite_file, "LOG_BYTES_MAX", 4 * A_COMMIT)
    path, log = tmp_path / "state.db", tmp_path / "state.db-wal"
    one, two = SqliteConsensus(path), SqliteConsensus(path)
    await write(one, "a", 0, 1)
    reader = sqlite3.connect(path, isolation_level=None)
    if is_read:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM versions").fetchone() == (1,)
    for seqno in range(1, 200):
        await write(two if seqno % 2 else one, "a", seqno, seqno + 1)
        assert is_read or log.stat().st_size <= 5 * A_COMMIT
    assert (log.stat().st_size > 5 * A_COMMIT) is is_read
    if is_read:
        assert reader.execute("SELECT count(*) FROM versions").fetchone() == (1,)
    reader.close()
    await write(one, "a", 200, 300)
    assert log.stat().st_size <= 5 * A_COMMIT
    for handle in (one, two):
        assert [version.seqno for version in await handle.scan("a", 0, 1000)] == list(range(300))
        await handle.aclose()


WRITES = """
import asyncio, sys
from aiopersist.storage.sqlite import file
from aiopersist.storage.sqlite.consensus import SqliteConsensus
file.LOG_BYTES_MAX = 64 * 1024

async def main(path, key):
    consensus = SqliteConsensus(path)
    for seqno in range(200):
        assert await consensus.compare_and_set(key, seqno - 1 if seqno else None, b"x" * 2000)
    assert await consensus.truncate(key, 150) == 150
    await consensus.aclose()

asyncio.run(main(*sys.argv[1:]))
"""
_LOCK = re.compile(r"fcntl\(\d+<(.*?)>, F_SETLK, \{l_type=(\w+), .*l_start=(\d+), l_len=(\d+)\}\) += 0")
_WRITE, _CHECKPOINT, _SHARED = 120, 121, 1073741826  # bytes of `-shm` and of the file, which SQLite locks


def checkpoints(trace: Path) -> int:
    """How many a thread made, by the locks that it took; each while it held the lock of writers, or had the
    file for itself."""
    held, found = set[tuple[str, int]](), 0
    for name, kind, start, length in _LOCK.findall(trace.read_text()):
        which = "shm" if name.endswith("-shm") else "file"
        for byte in range(int(start), int(start) + min(int(length), 8)):
            if kind == "F_WRLCK":
                held.add((which, byte))
            else:
                held.discard((which, byte))
        if (which, kind, int(start)) == ("shm", "F_WRLCK", _CHECKPOINT):
            found += 1
            assert {("shm", _WRITE), ("file", _SHARED)} & held, f"{trace.name}: another process may write"
    return found


def test_a_checkpoint_excludes_writers(tmp_path: Path) -> None:
    """Goal: no log can begin anew under a checkpoint, whatever version of SQLite this is."""
    if not available():
        pytest.skip("strace is not on this machine, or may not trace: locks cannot be seen")
    traces = ["strace", "-ff", "-y", "-e", "trace=fcntl", "-o"]
    running = [
        subprocess.Popen(
            [*traces, tmp_path / name, sys.executable, "-c", WRITES, tmp_path / "state.db", name],
            stderr=subprocess.PIPE,
        )
        for name in "ab"
    ]
    for process in running:
        assert process.wait(200) == 0, process.stderr and process.stderr.read()
        assert process.stderr
        process.stderr.close()
    for name in "ab":
        assert sum(map(checkpoints, tmp_path.glob(f"{name}.*"))) > 10
