"""Goal: `readonly=True` needs no right to write: to the directory, the role, the bucket."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import aiopersist as ap
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from aiopersist.storage.sqlite.readonly import ReadonlySqliteConsensus
from tests.support.schemas import SCHEMA

READER = Path(__file__).with_name("readonly_process.py")
WRITER = """
import asyncio, sys
import aiopersist as ap

async def main():
    async with ap.open(sys.argv[1], maintenance=False) as client:
        async with client.writer("t", ap.Schema(key=str, val=int)) as w:
            await w.write([("killed", 1)])
            print("written", flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


def as_who_may_not_write(command: list[str]) -> list[str]:
    """`command`, held to the permissions of files also where this is run by root."""
    if os.geteuid() != 0:
        return command
    if shutil.which("setpriv") is None:
        pytest.skip("root may write everywhere, and there is no setpriv")
    caps = "-dac_override,-dac_read_search,-fowner"
    return ["setpriv", f"--bounding-set={caps}", f"--inh-caps={caps}", *command]


@contextmanager
def not_writable(folder: Path) -> Iterator[None]:
    """Nothing in `folder` can be written meanwhile, nor made."""
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        yield
    finally:
        for path in paths:
            if path.exists():
                path.chmod(path.stat().st_mode | 0o200)


class Reader:
    """The process of `readonly_process`."""

    def __init__(self, location: Path) -> None:
        self._process = subprocess.Popen(
            as_who_may_not_write([sys.executable, str(READER), str(location)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def rows(self, *, again: bool = True) -> list[Any]:
        def look() -> list[Any]:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            if again:
                self._process.stdin.write("\n")
                self._process.stdin.flush()
            rows: list[Any] = json.loads(self._process.stdout.readline())["rows"]
            return rows

        return await anyio.to_thread.run_sync(look)

    async def end(self) -> None:
        _, _ = await anyio.to_thread.run_sync(self._process.communicate)
        assert self._process.returncode == 0


def files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


async def test_a_directory_at_rest(tmp_path: Path) -> None:
    """Goal: a file that no process has open is read, and no file is made beside the database."""
    async with ap.open(tmp_path / "l") as client, client.writer("t", SCHEMA) as w:
        await w.write([("a", 1)])
    before = files(tmp_path / "l")
    with not_writable(tmp_path / "l"):
        reader = Reader(tmp_path / "l")
        assert await reader.rows(again=False) == [["a", 1, 1]]
        await reader.end()
    assert files(tmp_path / "l") == before


async def test_no_file_is_made_where_it_could_be(tmp_path: Path) -> None:
    """Goal: a reader leaves no file beside the database, which its owner might not be able to write."""
    async with ap.open(tmp_path / "l") as client, client.writer("t", SCHEMA) as w:
        await w.write([("a", 1)])
    before = files(tmp_path / "l")
    async with ap.open(tmp_path / "l", readonly=True) as client:
        async with client.reader("t", SCHEMA) as r, r.snapshot() as s:
            assert await s.rows() == [("a", 1, 1)]
            assert files(tmp_path / "l") == before
    assert files(tmp_path / "l") == before


async def test_a_directory_that_others_write(tmp_path: Path) -> None:
    """Goal: it sees every commit that has returned, while writers come, go and come back."""
    async with ap.open(tmp_path / "l") as client, client.writer("t", SCHEMA) as w:
        await w.write([("a", 1)])
    (tmp_path / "l").chmod(0o555)
    reader = Reader(tmp_path / "l")
    assert await reader.rows(again=False) == [["a", 1, 1]]
    rows = [["a", 1, 1]]
    for turn in range(3):
        (tmp_path / "l").chmod(0o755)
        async with ap.open(tmp_path / "l") as client, client.writer("t", SCHEMA) as w:
            for number in range(3):
                await w.write([(f"b{turn}{number}", number)])
                rows.append([f"b{turn}{number}", number, 1])
                assert await reader.rows() == rows
        assert await reader.rows() == rows
    await reader.end()


async def test_a_directory_that_a_crash_left(tmp_path: Path) -> None:
    """Goal: appends that were acknowledged before the writer was killed are read, from the log that it
    left."""

    def killed() -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "l")], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()

    await anyio.to_thread.run_sync(killed)
    assert (tmp_path / "l" / "state.db-wal").exists()
    with not_writable(tmp_path / "l"):
        reader = Reader(tmp_path / "l")
        assert await reader.rows(again=False) == [["killed", 1, 1]]
        await reader.end()


async def test_reads_of_a_file_that_comes_and_goes(tmp_path: Path) -> None:
    """Goal: a writer opens, commits and closes all the time, so that the log comes and goes: every read sees
    what had returned before it began, and nothing torn."""
    path = tmp_path / "state.db"
    rounds, acknowledged, ended, read = 25, [-1], threading.Event(), threading.Event()

    async def write() -> None:
        for number in range(rounds):
            assert number != 1 or read.wait(50)
            store = SqliteConsensus(path)
            data = str(number).encode() * 2000
            assert await store.compare_and_set("k", None if number == 0 else number - 1, data)
            acknowledged[0] = number
            await store.aclose()

    def written() -> None:
        try:
            anyio.run(write)
        finally:
            ended.set()

    store = SqliteConsensus(path)
    await store.head("k")
    await store.aclose()
    thread = threading.Thread(target=written)
    thread.start()
    reader = ReadonlySqliteConsensus(path)
    seen = set()
    while not ended.is_set():
        least = acknowledged[0]
        head = await reader.head("k")
        assert (-1 if head is None else head.seqno) >= least
        if head is not None:
            assert head.data == str(head.seqno).encode() * 2000
            seen.add(head.seqno)
            read.set()
    assert (await reader.scan("k", 0, rounds))[-1].seqno == rounds - 1
    await reader.aclose()
    await anyio.to_thread.run_sync(thread.join)
    assert seen


async def test_a_role_that_may_only_read(
    postgres_server: Any, postgres_schema: str, admin: Any, tmp_path: Path
) -> None:
    """Goal: `USAGE` of the schema and `SELECT` on its tables suffice, for listens too."""
    role = f"r_{postgres_schema}"
    url, blob = postgres_server.url(postgres_schema), f"file://{tmp_path}/blob"
    async with ap.open(blob=blob, consensus=url) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
        await admin.execute(f"CREATE ROLE {role} LOGIN")
        await admin.execute(f"GRANT USAGE ON SCHEMA {postgres_schema} TO {role}")
        await admin.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {postgres_schema} TO {role}")
        theirs = url.replace("postgres://postgres@", f"postgres://{role}@")
        assert theirs != url
        settings = ap.Settings(watch_timeout_s=3600)
        async with ap.open(blob=blob, consensus=theirs, readonly=True, settings=settings) as other:
            async with other.reader("t", SCHEMA) as r, r.subscribe(0) as listen:
                steps = listen.steps()
                assert (await anext(steps)).updates.rows() == [("a", 1, 0, 1)]
                await w.compare_and_append([("b", 2, 1, 1)], 1, 2)
                assert (await anext(steps)).updates.rows() == [("b", 2, 1, 1)]
    await admin.execute(f"DROP OWNED BY {role}")
    await admin.execute(f"DROP ROLE {role}")


async def test_a_role_that_finds_no_tables(
    postgres_server: Any, postgres_schema: str, tmp_path: Path
) -> None:
    """Goal: `InvalidLocation`, and no schema is made."""
    url = postgres_server.url(postgres_schema)
    with pytest.raises(ap.InvalidLocation, match=postgres_schema):
        await ap.open(blob=f"file://{tmp_path}/blob", consensus=url, readonly=True)
