"""Goal: when a disk fails at any step of a commit, acknowledged writes are there after a crash, writes
that failed determinately are not, and the store goes on."""

import asyncio
import os
import resource
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from aiopersist.base.errors import Indeterminate, InvalidLocation, StorageUnavailable
from aiopersist.storage.consensus import Entry
from aiopersist.storage.sqlite import file as sqlite_file
from aiopersist.storage.sqlite import sql as sqlite_sql
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from tests.support.failing_disk import CACHE_PAGES, FailingDisk, Fault, after_a_crash

pytestmark = pytest.mark.blocks_loop  # files are looked at behind the library's back at every step

KEYS = ("a", "b", "c", "d")
SIZE = 5_000  # bytes of a version: more pages than the cache has

FULL, IOERR = sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE
FAILURES = {  # of one step
    "write": [(FULL, False, True), (FULL, True, False), (IOERR, False, False), (IOERR, True, True)],
    "read": [(sqlite3.SQLITE_IOERR_READ, False, False)],
    "sync": [(sqlite3.SQLITE_IOERR_FSYNC, False, False), (sqlite3.SQLITE_IOERR_FSYNC, False, True)],
    "shm_map": [(sqlite3.SQLITE_IOERR_SHMSIZE, False, False)],
    "truncate": [(sqlite3.SQLITE_IOERR_TRUNCATE, False, False)],
}


@pytest.fixture
async def template(tmp_path: Path) -> Path:
    """A file in which each key has version 0."""
    consensus = SqliteConsensus(tmp_path / "template.db")
    await asyncio.gather(*(consensus.compare_and_set(key, None, b"0") for key in KEYS))
    await consensus.aclose()
    return tmp_path / "template.db"


def heads(path: Path) -> dict[str, int]:
    """Read the file without the library."""
    connection = sqlite3.connect(path)
    try:
        return dict(connection.execute("SELECT key, max(seqno) FROM versions GROUP BY key").fetchall())
    finally:
        connection.close()


async def together(consensus: SqliteConsensus, break_it: Callable[[], object]) -> dict[str, Any]:
    """Compare-and-sets of one group, which `break_it` precedes: the outcome of each key, and of one that is
    refused."""
    entered, gate = threading.Event(), threading.Event()
    gated = consensus._file.write(lambda transaction: (entered.set(), gate.wait()))
    data = b"x" * SIZE
    calls = [
        asyncio.ensure_future(gated),
        consensus.compare_and_set("a", 0, data),
        consensus.compare_and_set("b", 0, data),
        consensus.compare_and_set("a", 7, data),
        consensus.compare_and_set_many([Entry("c", 0, data), Entry("d", 0, data)]),
    ]
    while not entered.is_set():
        await asyncio.sleep(0.001)
    told = asyncio.gather(*calls, return_exceptions=True)
    await asyncio.sleep(0)  # each has begun, and waits
    break_it()
    gate.set()
    _, a, b, refused, both = await told
    return {"a": a, "b": b, "c": both, "d": both, "refused": refused}


def check(told: dict[str, Any], found: dict[str, int], where: str) -> None:
    for key in KEYS:
        if told[key] is True:
            assert found[key] == 1, f"{where}: {key} was acknowledged and is lost"
        elif isinstance(told[key], StorageUnavailable):
            assert found[key] == 0, f"{where}: {key} was told to have failed and is there: {told[key]}"
        else:
            assert isinstance(told[key], Indeterminate), f"{where}: {told[key]!r}"
    assert found["c"] == found["d"], where
    assert told["refused"] is False or isinstance(told["refused"], Indeterminate | StorageUnavailable), where


def opened(path: Path) -> SqliteConsensus:
    """Give SQLite a cache so small that a transaction writes before its COMMIT."""

    def prepare(connection: sqlite3.Connection) -> None:
        sqlite_sql.prepare(connection)
        connection.execute(f"PRAGMA cache_size = {CACHE_PAGES}")

    consensus = SqliteConsensus(path)
    consensus._file._prepare = prepare
    return consensus


class Disk(NamedTuple):
    """The folder in which groups are tried, each in a copy of the template, and how to mend the disk."""

    template: Path
    folder: Path
    mend: Callable[[], object]

    async def survives(self, name: str, break_it: Callable[[], object]) -> set[str]:
        """Write one group with a broken disk; return the outcomes."""
        folder = self.folder / name
        folder.mkdir()
        path = folder / "state.db"
        shutil.copy(self.template, path)
        consensus = opened(path)
        told = await together(consensus, break_it)
        self.mend()
        check(told, heads(after_a_crash(path, folder / "crashed")), f"{name}: after a crash")
        live = {key: head.seqno for key in KEYS if (head := await consensus.head(key))}
        check(told, live, f"{name}: in the open store")
        for key in KEYS:
            assert await consensus.compare_and_set(key, live[key], b"after"), f"{name}: {key} cannot go on"
        await consensus.aclose()
        assert heads(path) == {key: seqno + 1 for key, seqno in live.items()}, f"{name}: at the end"
        shutil.rmtree(folder)
        return {type(answer).__name__ for answer in told.values()}


@pytest.mark.parametrize(
    "log_bytes",
    [sqlite_file.LOG_BYTES_MAX, pytest.param(0, marks=pytest.mark.long)],
    ids=["commit", "commit and checkpoint"],
)
async def test_each_step_of_a_commit_fails(
    template: Path, tmp_path: Path, disk: FailingDisk, log_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "LOG_BYTES_MAX", log_bytes)
    counted: dict[str, int] = {}

    def mend() -> None:
        counted.update(disk.steps)
        disk.arm(None)

    tried = Disk(template, tmp_path, mend)
    assert await tried.survives("sound", lambda: disk.arm(None)) == {"bool"}
    steps, outcomes = dict(counted), set[str]()
    assert steps["write"] > 10
    for kind, count in steps.items():
        for step in range(count):
            for code, torn, lasts in FAILURES[kind]:
                fault = Fault(kind, step, code, torn, lasts)
                outcomes |= await tried.survives(str(fault), lambda: disk.arm(fault))  # noqa: B023
    assert outcomes == {"bool", "StorageUnavailable", "Indeterminate"}


async def test_too_little_memory(template: Path, tmp_path: Path, disk: FailingDisk) -> None:
    tried = Disk(template, tmp_path, lambda: disk.leave_memory(None))
    outcomes = [{"begun"}]
    while outcomes[-1] != {"bool"}:
        spare = 4000 * len(outcomes)
        outcomes.append(await tried.survives(f"{spare} bytes", lambda: disk.leave_memory(spare)))  # noqa: B023
    assert {"StorageUnavailable"} in outcomes


async def test_a_full_disk_at_every_page(template: Path, tmp_path: Path, small_disk: Path) -> None:
    """Goal: the same on a real disk, for each number of free pages."""
    ballast = small_disk / "ballast"

    def fill(pages: int) -> None:
        ballast.write_bytes(b"")
        free = os.statvfs(small_disk)
        ballast.write_bytes(b"x" * ((free.f_bavail - pages) * free.f_frsize))

    tried = Disk(template, small_disk, lambda: ballast.write_bytes(b""))
    outcomes = [{"begun"}]
    while outcomes[-1] != {"bool"}:
        pages = len(outcomes) - 1
        outcomes.append(await tried.survives(f"{pages} pages", lambda: fill(pages)))  # noqa: B023
    assert {"StorageUnavailable"} in outcomes


async def limited_groups(template: Path, folder: Path) -> None:
    """Try each limit for the size of a file; in a process of its own."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    tried = Disk(template, folder, lambda: limit(resource.RLIM_INFINITY))
    outcomes = [{"begun"}]
    while outcomes[-1] != {"bool"}:
        size = 1030 * (len(outcomes) - 1)  # quarters of a frame
        outcomes.append(await tried.survives(f"{size} bytes", lambda: limit(size)))  # noqa: B023
    print(*sorted(set[str]().union(*outcomes[1:])))


async def test_a_file_that_may_not_grow(template: Path, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from tests.storage import test_sqlite_disk as t; "
    )
    program += "asyncio.run(t.limited_groups(Path(sys.argv[1]), Path(sys.argv[2])))"
    command = [sys.executable, "-c", program, str(template), str(tmp_path)]
    done = await anyio.run_process(command, cwd=Path(__file__).parents[2], stderr=None)
    assert done.stdout.split() == [b"Indeterminate", b"StorageUnavailable", b"bool"]


def test_a_file_system_without_a_log_is_refused() -> None:
    """A commit in another journal mode may be lost with the power: SQLite does not sync the folder."""
    connection = sqlite3.connect(":memory:", isolation_level=None)  # it has no log, either
    with pytest.raises(InvalidLocation, match="log"):
        sqlite_sql.prepare(connection)
    connection.close()
