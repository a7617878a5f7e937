"""Goal: nothing is acknowledged that lies in a file which no other process finds: it was deleted or replaced
while it was open, or SQLite deleted its log."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aiopersist.base.errors import StorageUnavailable
from aiopersist.base.runtime import SYSTEM
from aiopersist.stash.sqlite import SqliteStore
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from aiopersist.storage.sqlite.readonly import ReadonlySqliteConsensus

ANOTHER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("INSERT INTO versions VALUES ('k', 2, x'32')")
connection.close()
"""


def delete(path: Path) -> None:
    for file in path.parent.glob("state.db*"):
        file.unlink()


def replace(path: Path) -> None:
    delete(path)
    shutil.copy(path.parent / "backup", path)


def move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def delete_log(path: Path) -> None:
    os.unlink(f"{path}-wal")


def copy_here(path: Path) -> None:
    """Read the file in this process: it loses its locks of the file, and the next process that closes it
    takes itself for the last one, and deletes the log."""
    shutil.copy(path, path.parent / "copy")
    subprocess.run([sys.executable, "-c", ANOTHER, path], check=True)


@pytest.mark.parametrize(
    ("happen", "both"),
    [
        *((happen, True) for happen in (delete, replace, move_folder, delete_log, copy_here)),
        *((happen, False) for happen in (delete, replace, move_folder)),
    ],
)
async def test_a_file_that_goes_while_it_is_open(
    tmp_path: Path, happen: Callable[[Path], None], both: bool
) -> None:
    """`both`: also the connection that writes is open, and not only the one that reads."""
    path = tmp_path / "folder" / "state.db"
    first = SqliteConsensus(path)
    assert await first.compare_and_set("k", None, b"0")
    await first.aclose()
    shutil.copy(path, path.parent / "backup")
    consensus = SqliteConsensus(path)
    seqno = 0
    assert await consensus.head("k") == Versioned(0, b"0")
    if both:
        assert await consensus.compare_and_set("k", 0, b"1")
        seqno = 1
    happen(path)
    there = os.path.exists(path)
    for _ in range(2):
        for call in (consensus.compare_and_set("k", seqno, b"lost"), consensus.head("k")):
            with pytest.raises(StorageUnavailable, match="removed or replaced") as caught:
                await call
            assert not caught.value.retry
    assert os.path.exists(path) == there, "another file was made in its place"
    await consensus.aclose()


async def test_a_stash_whose_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path, "stash", SYSTEM, writes=True)
    await store.take("opener", "token", None)
    delete(path)
    with pytest.raises(StorageUnavailable, match="removed or replaced"):
        await store.token("opener")
    await store.aclose()


async def test_a_reader_follows_a_file_that_was_replaced(tmp_path: Path) -> None:
    """Goal: a client that only reads goes on with the file that is there."""
    path = tmp_path / "state.db"
    old, new = SqliteConsensus(path), SqliteConsensus(tmp_path / "new.db")
    assert await old.compare_and_set("k", None, b"old")
    assert await new.compare_and_set("k", None, b"new")
    reader = ReadonlySqliteConsensus(path)
    assert await reader.head("k") == Versioned(0, b"old")
    await new.aclose()
    delete(path)
    (tmp_path / "new.db").rename(path)
    assert await reader.head("k") == Versioned(0, b"new")
    await reader.aclose()
    await old.aclose()


async def test_an_error_that_keeps_a_statement_alive(tmp_path: Path) -> None:
    """Goal: a job that broke off within a statement, and whose error is kept, leaves no snapshot to later
    reads."""
    one, two = SqliteConsensus(tmp_path / "state.db"), SqliteConsensus(tmp_path / "state.db")
    for seqno in range(2):
        assert await one.compare_and_set("k", seqno - 1 if seqno else None, b"x")

    def work(connection: sqlite3.Connection) -> None:
        rows = connection.execute("SELECT * FROM versions")
        rows.fetchone()
        raise MemoryError

    with pytest.raises(StorageUnavailable) as kept:
        await two._file.read(work)
    assert await one.compare_and_set("k", 1, b"x")
    assert await two.head("k") == Versioned(2, b"x")
    assert kept.value.__cause__ is not None
    await one.aclose()
    await two.aclose()
