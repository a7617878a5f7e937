"""Goal: a fork loses nothing and hangs nobody. A child is told, at once and in words, what it cannot use:
each client, handle and store of its parent, and each SQLite file that its parent had open, by whatever name.
It closes none of them, at its end neither.
"""

import asyncio
import gc
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.base import threads
from aiopersist.base.errors import UsageKind
from aiopersist.data import lazy
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.storage.files.blob import FilesBlob
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from tests.support.forked import forked

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
    pytest.mark.blocks_loop,  # a fork of a large process holds the interpreter
]


def refused(found: Any) -> None:
    assert found[:2] == ("InvalidUsage", UsageKind.WRONG_LOOP), found
    assert "`spawn`" in found[2]
    assert "fork" in found[2]


async def puts(location: Any) -> str:
    """As a child would: open, put, close."""
    async with ap.open(location) as client:
        await client.table("t", str, int).put("child", 1)
    return "put"


async def reads(location: Any) -> list[str]:
    async with ap.open(location, readonly=True) as client:
        return [key async for key, _ in client.table("t", str, int).items()]


async def uses_a_stash(location: Any) -> str:
    async with ap.open(location) as client, client.stash("s"):
        return "opened"


def the_same(folder: Path) -> Path:
    return folder


def symlink(folder: Path) -> Path:
    (folder.parent / "link").symlink_to(folder)
    return folder.parent / "link"


def hard_link(folder: Path) -> Path:
    other = folder.parent / "hard"
    other.mkdir()
    (other / "state.db").hardlink_to(folder / "state.db")
    return other


@pytest.mark.parametrize("work", [puts, reads, uses_a_stash])
@pytest.mark.parametrize("name", [the_same, symlink, hard_link])
async def test_a_location_that_the_parent_has_open(
    tmp_path: Path, name: Callable[[Path], Path], work: Callable[[Any], Coroutine[Any, Any, Any]]
) -> None:
    async with ap.open(tmp_path / "l") as client:
        table = client.table("t", str, int)
        await table.put("before", 1)
        refused(await asyncio.to_thread(forked, lambda: work(name(tmp_path / "l"))))
        await table.put("after", 1)
    if name is hard_link:  # a file with two names is not opened by anybody
        (tmp_path / "hard/state.db").unlink()
    assert await reads(tmp_path / "l") == ["after", "before"]


async def test_a_child_of_a_child(tmp_path: Path) -> None:
    async def child() -> Any:
        return forked(lambda: puts(tmp_path))

    async with ap.open(tmp_path) as client:
        await client.table("t", str, int).put("before", 1)
        refused(await asyncio.to_thread(forked, child))


async def test_what_was_closed_before_the_fork_and_other_locations_can_be_opened(tmp_path: Path) -> None:
    await puts(tmp_path / "closed")
    async with ap.open(tmp_path / "l") as client, ap.open(tmp_path / "l", readonly=True):
        await client.table("t", str, int).put("before", 1)
        for folder in ("closed", "new"):
            assert await asyncio.to_thread(forked, lambda: puts(tmp_path / folder)) == "put"  # noqa: B023
            assert await reads(tmp_path / folder) == ["child"]


async def test_a_reader_of_a_file_at_rest_has_nothing_open(tmp_path: Path) -> None:
    await puts(tmp_path)
    async with ap.open(tmp_path, readonly=True) as client:
        assert await client.table("t", str, int).count() == 1
        assert await asyncio.to_thread(forked, lambda: puts(tmp_path)) == "put"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
async def test_processes_that_inherit_nothing(tmp_path: Path, method: Any) -> None:
    async with ap.open(tmp_path) as client:
        table = client.table("t", str, int)
        await table.put("before", 1)
        process = multiprocessing.get_context(method).Process(target=put_and_end, args=(tmp_path,))
        process.start()
        await asyncio.to_thread(process.join)
        assert process.exitcode == 0
        assert await table.get("child") == 1


def put_and_end(location: Path) -> None:
    asyncio.run(puts(location))


async def test_a_connection_that_the_library_does_not_know(tmp_path: Path) -> None:
    """Of the application; and one that was closed in vain, since a statement of it is under way."""
    await puts(tmp_path)
    application = sqlite3.connect(tmp_path / "state.db")
    assert application.execute("SELECT count(*) FROM versions").fetchone()[0] > 0
    refused(await asyncio.to_thread(forked, lambda: puts(tmp_path)))
    application.close()
    assert await asyncio.to_thread(forked, lambda: puts(tmp_path)) == "put"
    consensus = SqliteConsensus(tmp_path / "state.db")
    rows = await consensus._file.read(lambda connection: connection.execute("SELECT * FROM versions"))
    assert rows.fetchone()
    await consensus.aclose()
    refused(await asyncio.to_thread(forked, lambda: puts(tmp_path)))
    del rows
    gc.collect()
    assert await asyncio.to_thread(forked, lambda: puts(tmp_path)) == "put"


async def test_forks_in_the_middle_of_commits(tmp_path: Path) -> None:
    """Goal: a child finds no mutex of SQLite held, and nothing is lost, whenever the fork comes."""
    async with ap.open(tmp_path / "l") as client:
        table, stopping = client.table("t", str, int), asyncio.Event()
        told = list[str]()

        async def at_work(name: str) -> None:
            while not stopping.is_set():
                told.append(f"{name}{len(told)}")
                await table.put(told[-1], 1)

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(at_work(name))
            for number in range(30):
                other = number % 3 != 0

                async def child(folder: str = f"{number}" if other else "l") -> Any:
                    consensus = SqliteConsensus(tmp_path / folder / "state.db")
                    return await consensus.compare_and_set("k", None, b"")

                found = await asyncio.to_thread(forked, child)
                if other:
                    assert found is True
                else:
                    refused(found)
            stopping.set()
        assert {key async for key, _ in table.items()} == {*told}
    assert {*await reads(tmp_path / "l")} == {*told}


async def test_a_thread_that_stays_within_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the fork does not wait for ever; the child may find a mutex held, so it opens no SQLite file."""
    monkeypatch.setattr(threads, "FORK_WAIT_S", 0.05)
    consensus, entered, leave = SqliteConsensus(tmp_path / "a.db"), threading.Event(), threading.Event()

    def stay(connection: sqlite3.Connection) -> None:
        entered.set()
        leave.wait()

    staying = asyncio.ensure_future(consensus._file.read(stay))
    await asyncio.to_thread(entered.wait)
    found = await asyncio.to_thread(forked, lambda: puts(tmp_path / "another"))
    leave.set()
    await staying
    refused(found)
    assert "a thread had locks" in found[2]
    assert await consensus.compare_and_set("k", None, b"")
    await consensus.aclose()


async def test_a_client_and_stores_of_the_parent(tmp_path: Path) -> None:
    """Goal: none does anything, waits for anything or is closed in the child."""
    blob, consensus = FilesBlob(tmp_path / "blob"), SqliteConsensus(tmp_path / "state.db")
    await blob.set("a/b", b"")
    await consensus.head("k")
    async with ap.open(tmp_path / "l") as client:
        table = client.table("t", str, int)
        await table.put("before", 1)
        writer = await client.writer("w", ap.Schema(str, int))
        await writer.write([("a", 1)])
        stash = await client.stash("s")
        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: table.get("before"),
            lambda: table.put("child", 1),
            lambda: client.transact(lambda tx: tx.get(table, "before")),
            lambda: anext(aiter(table.changes())),
            lambda: writer.write([("b", 1)]),
            writer.aclose,
            stash.aclose,
            client.ping,
            client.aclose,
            lambda: blob.get("a/b"),
            lambda: blob.set("a/c", b""),
            blob.aclose,
            lambda: consensus.head("k"),
            lambda: consensus.compare_and_set("k", None, b""),
            consensus.aclose,
        ]

        async def child() -> list[Any]:
            found = list[Any]()
            for use in uses:
                try:
                    async with asyncio.timeout(5):
                        await use()
                    found.append("done")
                except Exception as error:
                    found.append((type(error).__name__, getattr(error, "kind", None), str(error)))
            return found

        for found in await asyncio.to_thread(forked, child):
            refused(found)
        await table.put("after", 1)
        assert await table.count() == 2
        await stash.aclose()
    await consensus.aclose()
    await blob.aclose()


async def test_a_fork_during_the_first_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: it waits for an import on a thread, whose lock Python would keep for ever in the child; and what
    the parent has under way is refused in the child as all else."""
    entered, leave, imported = threading.Event(), threading.Event(), list[str]()

    def import_slowly(name: str) -> None:
        entered.set()
        leave.wait(5)
        imported.append(name)

    async def child() -> list[str]:
        return imported

    monkeypatch.setattr(lazy, "import_module", import_slowly)
    importing = asyncio.ensure_future(asyncio.to_thread(lazy.import_all, ["slow"]))
    await asyncio.to_thread(entered.wait)
    threading.Timer(0.2, leave.set).start()
    assert await asyncio.to_thread(forked, child) == ["slow"]
    await importing
    monkeypatch.undo()
    async with ap.open(tmp_path) as client:
        table = client.table("t", str, int)
        monkeypatch.setattr(client._services.tables, "_warming", asyncio.get_running_loop().create_future())
        refused(await asyncio.to_thread(forked, lambda: table.put("child", 1)))


ENDS = """
import asyncio, gc, os, sys, time
from aiopersist.storage.sqlite.consensus import SqliteConsensus

async def main():
    consensus = SqliteConsensus(sys.argv[1])
    assert await consensus.compare_and_set("k", None, b"0")
    assert await consensus.head("k")
    return consensus

consensus, parent = asyncio.run(main()), os.getpid()
for thread in (consensus._file._writer, consensus._file._reader):
    thread._executor.shutdown()  # so that no thread refers to a connection at the fork
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)  # then nobody else has the file open
if sys.argv[2] == "collect":
    del consensus
    gc.collect()
os.write(1, b"ended")
sys.exit()
"""


@pytest.mark.parametrize("how", ["collect", "exit"])
def test_the_end_of_a_child_closes_nothing(tmp_path: Path, how: str) -> None:
    """Goal: neither its collector nor the end of its interpreter empties or deletes the log of a file that it
    inherited."""
    path = tmp_path / "state.db"
    ends = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDS, str(path), how]
    assert (
        subprocess.run(ends, capture_output=True, timeout=60).stdout == b"ended"
    )  # once all hands have let go
    assert (tmp_path / "state.db-wal").stat().st_size > 0
    assert heads(path) == 1


def heads(path: Path) -> int:
    connection = sqlite3.connect(path)
    (count,) = connection.execute("SELECT count(*) FROM versions").fetchone()
    connection.close()
    return int(count)


def test_polars_of_the_parent_hangs_no_child() -> None:
    """Goal: its threads are not in a child, so what it would sort is sorted without it, or refused."""
    schema = ap.Schema(str, int)
    updates = pa.table(
        [[f"k{n % 5000}" for n in range(20_000)], list(range(20_000)), [0] * 20_000, [1] * 20_000],
        schema=schema.arrow_schema,
    )
    expected = sort_and_consolidate(updates)  # by polars, whose threads begin

    async def sorts() -> bool:
        return sort_and_consolidate(updates).equals(expected)

    names = ["key", "val", "time", "diff"]
    values = pa.array([[n] for n in range(20_000)])
    lists = pa.table([updates["key"], values, updates["time"], updates["diff"]], names=names)

    async def sorts_lists() -> None:
        sort_and_consolidate(lists)

    assert sort_and_consolidate(lists).num_rows == 20_000
    assert forked(sorts) is True
    refused(forked(sorts_lists))
    assert sort_and_consolidate(updates).equals(expected), "the parent goes on"
