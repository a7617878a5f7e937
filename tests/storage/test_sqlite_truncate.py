"""Goal: a truncation of many versions keeps no other commit waiting for more than one slice, and yet happens
at one moment, even if it ends early."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import pytest

from aiopersist.base.runtime import Runtime
from aiopersist.storage.sqlite import sql as sqlite_sql
from aiopersist.storage.sqlite.consensus import SqliteConsensus

VERSIONS = 95
SLICES = 10


@pytest.fixture
async def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in which `a` has `VERSIONS` versions, and `b` one."""
    monkeypatch.setattr(sqlite_sql, "SLICE_ROWS", SLICES)
    path = tmp_path / "state.db"
    consensus = SqliteConsensus(path)
    await consensus.compare_and_set("b", None, b"")
    for seqno in range(VERSIONS):
        await consensus.compare_and_set("a", seqno - 1 if seqno else None, b"%d" % seqno)
    await consensus.aclose()
    return path


class Between(Runtime):
    """Calls a function between two slices."""

    def __init__(self, what: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.what = what

    async def sleep(self, seconds: float) -> None:
        await self.what()


def rows(path: Path, key: str) -> list[int]:
    """Read the file without the library."""
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT seqno FROM versions WHERE key = ? ORDER BY seqno", (key,)).fetchall()
    connection.close()
    return [seqno for (seqno,) in found]


async def test_others_commit_between_slices(path: Path) -> None:
    other = SqliteConsensus(path)
    turns, left = count(), []

    async def commit() -> None:
        left.append(sum(0 <= seqno < VERSIONS - 1 for seqno in rows(path, "a")))
        assert [v.seqno for v in await other.scan("a", 0, VERSIONS)] == [VERSIONS - 1]  # at one moment
        assert await other.compare_and_set("b", next(turns), b"")

    consensus = SqliteConsensus(path, runtime=Between(commit))
    assert await consensus.truncate("a", VERSIONS - 1) == VERSIONS - 1
    assert left == list(range(VERSIONS - 1 - SLICES, 0, -SLICES))
    assert rows(path, "a") == [VERSIONS - 1]
    assert rows(path, "b") == list(range(len(left) + 1))
    await consensus.aclose()
    await other.aclose()


async def test_another_process_finds_the_lock_free(path: Path) -> None:
    """A process that tries again and again, as a commit does, gets the lock before the end."""
    consensus, other = SqliteConsensus(path), SqliteConsensus(path)
    await other.compare_and_set("b", 0, b"")
    truncation = asyncio.create_task(consensus.truncate("a", VERSIONS - 1))
    seqno = 1
    while not truncation.done():
        assert await other.compare_and_set("b", seqno, b"")
        seqno += 1
    assert await truncation == VERSIONS - 1
    assert seqno > 3
    await consensus.aclose()
    await other.aclose()


@pytest.mark.parametrize("ended", [1, 4])
async def test_a_truncation_that_ends_early_has_happened(path: Path, ended: int) -> None:
    """A truncation is cancelled, or ends with its process, between two slices: the next one deletes the
    rest."""
    reached, pauses = asyncio.Event(), count(1)

    async def stop() -> None:
        if next(pauses) == ended:
            reached.set()
            await asyncio.Event().wait()

    consensus = SqliteConsensus(path, runtime=Between(stop))
    truncation = asyncio.create_task(consensus.truncate("a", 80))
    await reached.wait()
    truncation.cancel()
    await asyncio.wait([truncation])
    await consensus.aclose()

    consensus = SqliteConsensus(path)
    live = list(range(80, VERSIONS))
    assert len(rows(path, "a")) == VERSIONS - ended * SLICES + 1
    left = [version.seqno for version in await consensus.leftovers("a")]
    assert left == list(range(ended * SLICES, 80)) and await consensus.leftovers("b") == []
    for begin in (0, 50, -7):
        assert [version.seqno for version in await consensus.scan("a", begin, VERSIONS)] == live
    assert [version.seqno for version in await consensus.scan("a", 90, 2)] == [90, 91]
    assert (head := await consensus.head("a")) and head.seqno == VERSIONS - 1
    assert await consensus.list_keys("") == ["a", "b"]
    assert await consensus.compare_and_set("a", VERSIONS - 1, b"next")
    assert await consensus.truncate("a", 10) == 0  # what is gone stays gone
    assert rows(path, "a") == [*live, VERSIONS]
    assert await consensus.truncate("a", 85) == 5
    assert rows(path, "a") == [*range(85, VERSIONS + 1)] and await consensus.leftovers("a") == []
    await consensus.aclose()


async def test_truncations_at_once_count_each_version_once(path: Path) -> None:
    handles = [SqliteConsensus(path) for _ in range(3)]
    dropped = await asyncio.gather(
        *(one.truncate("a", n) for one, n in zip(handles, (30, 60, 90), strict=True))
    )
    assert sum(dropped) == 90
    assert rows(path, "a") == list(range(90, VERSIONS))
    for handle in handles:
        await handle.aclose()


async def test_large_versions_make_small_slices(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_sql, "SLICE_BYTES", 5)  # numbers of one digit, or two
    counted: list[int] = []

    async def look() -> None:
        counted.append(sum(0 <= seqno < 20 for seqno in rows(path, "a")))

    consensus = SqliteConsensus(path, runtime=Between(look))
    assert await consensus.truncate("a", 20) == 20
    assert counted == [15, 10, 8, 6, 4, 2]
    monkeypatch.setattr(sqlite_sql, "SLICE_BYTES", 1)  # less than one version: one at a time
    assert await consensus.truncate("a", 23) == 3
    assert counted[6:] == [0, 0]
    await consensus.aclose()
