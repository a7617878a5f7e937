"""Goal: a read of a SQLite file that no process has open sees one state of it, though others open it
meanwhile."""

import sqlite3
from pathlib import Path

import anyio.to_thread
import pytest

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM
from aiopersist.storage.sqlite import sql as sql
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from aiopersist.storage.sqlite.readonly import ReadonlySqliteConsensus, SqliteReader


async def made(path: Path) -> None:
    store = SqliteConsensus(path)
    assert await store.compare_and_set("k", None, b"0")
    await store.aclose()


def overwritten(path: Path) -> None:
    """Commit as another process that opens the file and closes it."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE versions SET data = CAST(CAST(data AS INTEGER) + 1 AS BLOB)")
    connection.close()


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_a_read_counts_only_if_the_file_stayed_as_it_was(tmp_path: Path, times: int) -> None:
    """Goal: a read during which the file was written is repeated, and returns the newer state."""
    await made(tmp_path / "s")
    reads: list[bytes] = []

    def work(connection: sqlite3.Connection) -> tuple[bytes, bytes]:
        before = connection.execute("SELECT data FROM versions").fetchone()[0]
        if len(reads) < times:
            overwritten(tmp_path / "s")
        reads.append(before)
        return before, connection.execute("SELECT data FROM versions").fetchone()[0]

    reader = SqliteReader(tmp_path / "s", SYSTEM, sql.check_format)
    last = str(times).encode()
    assert await reader.read(work) == (last, last)
    assert len(reads) == times + 1
    await reader.aclose()


async def test_what_fails_while_the_file_changes_is_tried_again(tmp_path: Path) -> None:
    """Goal: an error is raised only if the file did not change during the read."""
    await made(tmp_path / "s")
    errors = [sqlite3.DatabaseError("torn")]

    def work(connection: sqlite3.Connection) -> bytes:
        if errors:
            overwritten(tmp_path / "s")
            raise errors.pop()
        data: bytes = connection.execute("SELECT data FROM versions").fetchone()[0]
        return data

    def broken(connection: sqlite3.Connection) -> bytes:
        raise sqlite3.DatabaseError("broken for good")

    reader = SqliteReader(tmp_path / "s", SYSTEM, sql.check_format)
    assert await reader.read(work) == b"1"
    with pytest.raises(ap.StorageUnavailable, match="broken for good"):
        await reader.read(broken)
    await reader.aclose()


async def test_files_that_are_no_location(tmp_path: Path) -> None:
    """Goal: `InvalidLocation` for a file that is not there, or holds other tables; neither is changed."""
    other = tmp_path / "other"

    def filled() -> bytes:
        connection = sqlite3.connect(other)
        connection.execute("CREATE TABLE mine (x)")
        connection.close()
        return other.read_bytes()

    before = await anyio.to_thread.run_sync(filled)
    for path in (tmp_path / "missing", other):
        store = ReadonlySqliteConsensus(path)
        with pytest.raises(ap.InvalidLocation):
            await store.head("k")
        await store.aclose()
    assert not (tmp_path / "missing").exists()
    assert await anyio.to_thread.run_sync(other.read_bytes) == before


async def test_writes_are_refused(tmp_path: Path) -> None:
    await made(tmp_path / "s")
    store = ReadonlySqliteConsensus(tmp_path / "s")
    for call in (
        store.compare_and_set("k", 0, b"1"),
        store.compare_and_set_many([]),
        store.truncate("k", 0),
    ):
        with pytest.raises(ap.Unsupported):
            await call
    assert await store.scan("k", 0, 10) == [(0, b"0")]
    await store.aclose()
    with pytest.raises(ap.InvalidUsage):
        await store.watch("k")
