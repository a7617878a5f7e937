"""SQLite: groups in which one fails, faults of the disk, several processes, hints without polling."""

import asyncio
import errno
import os
import socket
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from aiopersist.base.errors import Corruption, Indeterminate, InvalidLocation, StorageUnavailable
from aiopersist.base.runtime import SYSTEM
from aiopersist.stash.sqlite import SqliteStore
from aiopersist.storage.consensus import Entry, Versioned
from aiopersist.storage.sqlite import sql as sqlite_sql
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from aiopersist.storage.sqlite.file import SqliteFile
from aiopersist.storage.sqlite.readonly import ReadonlySqliteConsensus

PYTHON = sys.executable


def log_of(path: Path, key: str) -> list[int]:
    """Open the file without the library."""
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute(
            "SELECT seqno FROM versions WHERE key = ? ORDER BY seqno", (key,)
        ).fetchall()
        return [row[0] for row in rows]
    finally:
        connection.close()


async def test_versions_outlive_the_handle(tmp_path: Path) -> None:
    one = SqliteConsensus(tmp_path / "made" / "here" / "state.db")
    assert await one.compare_and_set("k", None, b"0")
    await one.aclose()
    assert sorted(os.listdir(tmp_path / "made/here")) == ["state.db"]  # the WAL was emptied
    two = SqliteConsensus(tmp_path / "made" / "here" / "state.db")
    assert await two.head("k") == Versioned(0, b"0")
    await two.aclose()


async def test_a_commit_flushes_the_cache_of_the_drive(tmp_path: Path) -> None:
    """Goal: durable means durable on macOS, too, in the tables of shards and of a stash."""
    consensus = SqliteConsensus(tmp_path / "state.db")
    stash = SqliteStore(tmp_path / "state.db", "stash", SYSTEM, writes=True)
    assert isinstance(stash._file, SqliteFile)
    for file in (consensus._file, stash._file):
        assert await file.write(lambda t: t.connection.execute("PRAGMA fullfsync").fetchone()) == (1,)
        assert await file.write(lambda t: t.connection.execute("PRAGMA synchronous").fetchone()) == (2,)
    await stash.aclose()
    await consensus.aclose()


async def test_racing_first_users(tmp_path: Path) -> None:
    handles = [SqliteConsensus(tmp_path / "state.db") for _ in range(8)]
    won = await asyncio.gather(*(handle.compare_and_set("k", None, b"x") for handle in handles))
    assert won.count(True) == 1
    await asyncio.gather(*(handle.aclose() for handle in handles))


async def test_after_closing_nothing_is_open(tmp_path: Path, open_files: Callable[[], list[str]]) -> None:
    consensus = SqliteConsensus(tmp_path / "state.db")
    await consensus.compare_and_set("k", None, b"0")
    await consensus.head("k")
    await consensus.watch("k")
    commits = [asyncio.create_task(consensus.compare_and_set("k", i, b"x")) for i in range(5)]
    await asyncio.sleep(0)
    for commit in commits:
        commit.cancel()
    assert open_files() != []
    await consensus.aclose()
    assert open_files() == []
    await asyncio.gather(*commits, return_exceptions=True)


async def test_closing_needs_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a store that listened for hints is closed even when the process has no descriptor left."""
    consensus = SqliteConsensus(tmp_path / "state.db")
    async with asyncio.timeout(30):
        waiting = asyncio.ensure_future(consensus.watch("k"))
        while not consensus._announced:
            await asyncio.sleep(0.001)

    def no_socket(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", no_socket)
        await consensus.aclose()
    await waiting
    assert consensus._file._write_connection is not None
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        consensus._file._write_connection.execute("SELECT 1")


async def test_one_of_a_group_fails_alone(tmp_path: Path) -> None:
    """A trigger refuses one key; the others of its group are committed, each with its own outcome."""
    path = tmp_path / "state.db"
    consensus = SqliteConsensus(path)
    await asyncio.gather(*(consensus.compare_and_set(f"k{i}", None, b"0") for i in range(40)))
    for action in ("ABORT", "ROLLBACK"):  # of the statement, and of the whole transaction
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TRIGGER IF EXISTS refuse")
            connection.execute(
                "CREATE TRIGGER refuse BEFORE INSERT ON versions WHEN new.key IN ('k7', 'k20')"
                f" BEGIN SELECT RAISE({action}, 'refused'); END"
            )
        connection.close()
        heads = [await consensus.head(f"k{i}") for i in range(40)]
        seqnos = [head.seqno for head in heads if head]
        stale = [i for i in range(40) if i % 5 == 0]
        results = await asyncio.gather(
            *(consensus.compare_and_set(f"k{i}", seqnos[i] + (i in stale), b"x") for i in range(40)),
            return_exceptions=True,
        )
        for i, result in enumerate(results):
            if i == 7:
                assert isinstance(result, StorageUnavailable)
            else:
                assert result is (i not in stale)
            assert log_of(path, f"k{i}")[-1] == seqnos[i] + (result is True)
    await consensus.aclose()


async def test_several_at_once_are_all_or_none_when_a_statement_fails(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    consensus = SqliteConsensus(path)
    await consensus.compare_and_set("a", None, b"0")
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON versions WHEN new.key = 'c'"
            " BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
    connection.close()
    both = [
        consensus.compare_and_set_many([Entry("b", None, b""), Entry("c", None, b"")]),
        consensus.compare_and_set("a", 0, b"1"),
    ]
    failed, won = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(failed, StorageUnavailable) and won is True
    assert await consensus.list_keys("") == ["a"]
    await consensus.aclose()


async def test_a_group_is_one_transaction(tmp_path: Path) -> None:
    consensus = SqliteConsensus(tmp_path / "state.db")
    await asyncio.gather(*(consensus.compare_and_set(f"k{i}", None, b"0") for i in range(64)))
    statements: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def hold_up(transaction: Any) -> None:
        transaction.connection.set_trace_callback(statements.append)
        begun.set()
        go.wait(50)

    writer = consensus._file._writer
    first = asyncio.create_task(writer.run(hold_up))
    await asyncio.to_thread(begun.wait, 50)
    group = [asyncio.create_task(consensus.compare_and_set(f"k{i}", 0, b"1")) for i in range(64)]
    async with asyncio.timeout(50):
        while len(writer._waiting) < 64:
            await asyncio.sleep(0.001)
    go.set()
    await asyncio.gather(first, *group)
    assert statements.count("COMMIT") == 2
    assert sum(statement.startswith("INSERT") for statement in statements) == 64
    await consensus.aclose()


async def test_another_writer_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    consensus = SqliteConsensus(path)
    await consensus.compare_and_set("k", None, b"0")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(consensus.compare_and_set("k", 0, b"1"))
    assert await consensus.head("k") == Versioned(0, b"0")  # a read does not wait
    await asyncio.sleep(0.1)
    assert not waiting.done()
    other.execute("ROLLBACK")
    assert await waiting is True
    other.close()
    await consensus.aclose()


async def test_busy_for_long_is_determinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiopersist.storage.sqlite.file._BUSY_TIMEOUT_S", 0.1)
    path = tmp_path / "state.db"
    consensus = SqliteConsensus(path)
    await consensus.compare_and_set("k", None, b"0")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageUnavailable) as caught:
        await consensus.compare_and_set("k", 0, b"1")
    assert caught.value.retry
    other.close()
    assert log_of(path, "k") == [0]
    await consensus.aclose()


async def test_an_error_at_commit_is_of_unknown_outcome(tmp_path: Path) -> None:
    """So it is for each entry of the transaction; here a connection's COMMIT fails."""
    consensus = SqliteConsensus(tmp_path / "state.db")
    await consensus.compare_and_set("k", None, b"0")
    real = consensus._file._write_connection
    assert real is not None

    class Failing:
        broken = True

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def execute(self, statement: str, *arguments: object) -> object:
            if statement == "COMMIT" and self.broken:
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
                raise error
            return real.execute(statement, *arguments)

    consensus._file._write_connection = Failing()  # type: ignore[assignment]
    results = await asyncio.gather(
        *(consensus.compare_and_set(key, expected, b"1") for key, expected in (("k", 0), ("l", None))),
        return_exceptions=True,
    )
    assert all(isinstance(result, Indeterminate) for result in results)
    Failing.broken = False
    assert await consensus.head("k") == Versioned(0, b"0")
    assert await consensus.compare_and_set("k", 0, b"1") is True
    await consensus.aclose()


async def test_a_full_disk(small_disk: Path) -> None:
    consensus = SqliteConsensus(small_disk / "state.db")
    assert await consensus.compare_and_set("k", None, b"0")
    with pytest.raises(StorageUnavailable, match="full") as caught:
        await consensus.compare_and_set("k", 0, b"x" * 800_000)
    assert not caught.value.retry
    assert await consensus.head("k") == Versioned(0, b"0")
    assert await consensus.compare_and_set("k", 0, b"1") is True
    await consensus.aclose()


async def test_a_read_only_disk(small_disk: Path, make_read_only: Callable[[Path], Awaitable[None]]) -> None:
    first = SqliteConsensus(small_disk / "state.db")
    assert await first.compare_and_set("k", None, b"0")
    await first.aclose()
    await make_read_only(small_disk)
    consensus = SqliteConsensus(small_disk / "state.db")
    with pytest.raises(StorageUnavailable) as caught:
        await consensus.compare_and_set("k", 0, b"1")
    assert not caught.value.retry
    await consensus.aclose()


async def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "file" / "state.db", tmp_path / "file" / "folder" / "state.db"):
        consensus = SqliteConsensus(path)
        with pytest.raises(InvalidLocation, match="directory"):
            await consensus.head("k")
        await consensus.aclose()


@pytest.mark.parametrize("name", ["a b", "a?b#c%20d", "\u00fc", "\udcff"])
@pytest.mark.parametrize("root", ["", "/"])  # paths may begin with two slashes, as of four in a URL
async def test_a_path_that_a_uri_would_read_otherwise(tmp_path: Path, root: str, name: str) -> None:
    path = f"{root}{tmp_path}/{name}"
    consensus = SqliteConsensus(path)
    assert await consensus.compare_and_set("k", None, b"0")
    await consensus.aclose()
    assert os.path.exists(path)
    reader = ReadonlySqliteConsensus(path)
    assert (found := await reader.head("k")) is not None and found.data == b"0"
    await reader.aclose()


async def test_damage_is_corruption(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"this is no database at all " * 100)
    consensus = SqliteConsensus(path)
    for call in (consensus.head("k"), consensus.compare_and_set("k", None, b"")):
        with pytest.raises(Corruption):
            await call
    await consensus.aclose()


async def test_damaged_pages_are_corruption(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    consensus = SqliteConsensus(path)
    for i in range(20):
        await consensus.compare_and_set(f"k{i}", None, b"x" * 3000)
    await consensus.aclose()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\x5a" * (len(data) - 4096)
    path.write_bytes(data)
    consensus = SqliteConsensus(path)
    with pytest.raises(Corruption):
        await consensus.head("k3")
    await consensus.aclose()


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {sqlite_sql._FORMAT + 1}")
    connection.close()
    consensus = SqliteConsensus(path)
    with pytest.raises(InvalidLocation, match="newer"):
        await consensus.head("k")
    await consensus.aclose()


CONTENDER = """
import asyncio, sys
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from aiopersist.storage.sqlite.readonly import ReadonlySqliteConsensus
async def main(path, name):
    consensus, won = SqliteConsensus(path), 0
    while won < 25:
        head = await consensus.head("k")
        if await consensus.compare_and_set("k", head and head.seqno, name.encode()):
            won += 1
        assert await consensus.compare_and_set(name, None, b"") in (True, False)
    await consensus.aclose()
asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


async def test_several_processes(tmp_path: Path) -> None:
    """Each wins 25 times: nothing is lost, nothing is written twice, not even the creation of the file."""
    path = tmp_path / "state.db"
    processes = [
        await asyncio.create_subprocess_exec(PYTHON, "-c", CONTENDER, str(path), name)
        for name in ("p0", "p1", "p2")
    ]
    assert [await process.wait() for process in processes] == [0, 0, 0]
    consensus = SqliteConsensus(path)
    log = await consensus.scan("k", 0, 1000)
    assert [version.seqno for version in log] == list(range(75))
    counts = [sum(version.data == name for version in log) for name in (b"p0", b"p1", b"p2")]
    assert counts == [25, 25, 25]
    await consensus.aclose()


WATCHER = """
import asyncio, sys, time
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from aiopersist.storage.sqlite.readonly import ReadonlySqliteConsensus
async def main(path):
    consensus = SqliteConsensus(path)
    await consensus.watch("k")
    hint = asyncio.create_task(consensus.watch("k"))
    await asyncio.sleep(0)  # it has begun
    print("watching", flush=True)
    await hint
    head = await consensus.head("k")
    print(head.seqno, flush=True)
    if len(sys.argv) > 2: import os; os._exit(9)
    await consensus.aclose()
asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("crash", [False, True])
async def test_hints_between_processes(tmp_path: Path, crash: bool) -> None:
    """Another process learns of a commit at once; when it has crashed, its announcement is swept."""
    path = tmp_path / "state.db"
    consensus = SqliteConsensus(path)
    await consensus.compare_and_set("k", None, b"0")
    arguments = [PYTHON, "-c", WATCHER, str(path), *(["crash"] if crash else [])]
    watcher = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert watcher.stdout is not None
    assert await watcher.stdout.readline() == b"watching\n"
    assert await consensus.compare_and_set("k", 0, b"1")
    assert await asyncio.wait_for(watcher.stdout.readline(), 30) == b"1\n"
    assert await watcher.wait() == (9 if crash else 0)
    for seqno in range(1, 5):
        assert await consensus.compare_and_set("k", seqno, b"x")
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM listeners").fetchone() == (0,)
    connection.close()
    await consensus.aclose()
