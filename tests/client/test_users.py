"""Goal: no user costs another one a location: who may write the folder and not the files is told at once, and
leaves nothing; what root makes is the owner's; what cannot be deleted stops nothing else, and is named.
"""

import asyncio
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM
from aiopersist.storage.disk_cache import DiskCache
from tests.support.forked import forked

pytestmark = [
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be other users"
    ),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]
OWNER, SECOND, GROUP = 5001, 5002, 5000
SETTINGS = ap.Settings(inline_writes_single_max_bytes=0, rollup_every=4, open_timeout_s=5, retry_timeout_s=5)
Work = Callable[[], Coroutine[Any, Any, Any]]


def become(user: int, mask: int, group: int) -> None:
    os.setgroups([GROUP] if user else [])
    os.setgid(group)
    os.setuid(user)
    os.umask(mask)
    os.chdir("/")


def by(user: int, work: Work, *, mask: int = 0o022, group: int = GROUP) -> Any:
    """The outcome of `work` by a process of that user."""
    return forked(work, partial(become, user, mask, group))


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """A process of another user may not be able to read what it would import."""

    async def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            await writes(Path(folder), "x")
            await reads(Path(folder))
            await stashes(Path(folder))
            async with ap.open(folder) as client:
                await client.admin.sweep_leaked_blobs(dry_run=False)

    forked(work)
    asyncio.run(work())


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of the owner, in which the group may make files, which are the group's."""
    above = Path(tempfile.mkdtemp())
    above.chmod(0o755)
    folder = above / "l"
    folder.mkdir()
    os.chown(folder, OWNER, GROUP)
    folder.chmod(0o2775)
    yield folder
    shutil.rmtree(above)


async def writes(location: Path, name: str) -> str:
    async with ap.open(location, settings=SETTINGS, maintenance=False) as client:
        table = client.table("t", str, str)
        for number in range(10):
            await table.put(f"{name}{number % 3}", "x" * 200)
        await client.admin.retain("t", timedelta(0))
        await client.admin.force_compaction("t")
        await client.admin.force_gc("t")
    return "wrote"


async def reads(location: Path) -> int:
    async with ap.open(location, readonly=True, settings=SETTINGS) as client:
        return len([row async for row in client.table("t", str, str).items()])


async def stashes(location: Path) -> str:
    async with ap.open(location, settings=SETTINGS) as client, client.stash("s"):
        return "opened"


def names(folder: Path) -> dict[str, int]:
    """All files with their users."""
    return {str(path.relative_to(folder)): path.stat().st_uid for path in folder.rglob("*")}


def refused(found: Any, *parts: object) -> None:
    assert found[0] == "StorageUnavailable", found
    for part in parts:
        assert str(part) in found[2], found[2]


@pytest.mark.parametrize("work", [partial(writes, name="b"), stashes])
@pytest.mark.parametrize("mode", [0o2775, 0o777])
def test_who_may_write_the_folder_and_not_the_file(
    shared: Path, mode: int, work: Callable[[Path], Coroutine[Any, Any, Any]]
) -> None:
    shared.chmod(mode)
    assert by(OWNER, lambda: writes(shared, "a")) == "wrote"
    before = names(shared)
    refused(by(SECOND, lambda: work(shared)), shared / "state.db", f"user {SECOND}", f"of user {OWNER}")
    assert by(SECOND, lambda: reads(shared)) == 3
    assert names(shared) == before
    assert by(OWNER, lambda: writes(shared, "a")) == "wrote"


def test_users_of_one_group_share_a_location(shared: Path) -> None:
    for user in (OWNER, SECOND, OWNER, SECOND):
        assert by(user, lambda: writes(shared, f"{user}"), mask=0o002) == "wrote"  # noqa: B023
    assert by(OWNER, lambda: reads(shared)) == 6


def test_what_others_could_not_use_is_not_made(shared: Path) -> None:
    """Goal: without the group bit of the folder, the log of a second user would be of a group of his own."""
    assert by(OWNER, lambda: writes(shared, "a"), mask=0o002) == "wrote"
    shared.chmod(0o775)
    refused(by(SECOND, lambda: writes(shared, "b"), mask=0o002, group=SECOND), "chmod g+s", shared)
    assert not (shared / "state.db-wal").exists()
    assert by(OWNER, lambda: writes(shared, "a"), mask=0o002) == "wrote"


@pytest.mark.parametrize("which", ["state.db-wal", "state.db-shm"])
def test_what_another_user_left_is_named(shared: Path, which: str) -> None:
    assert by(OWNER, lambda: writes(shared, "a")) == "wrote"
    (shared / which).touch()
    os.chown(shared / which, SECOND, GROUP)
    refused(by(OWNER, lambda: writes(shared, "a")), shared / which, f"user {SECOND}")


def test_a_reader_of_what_a_crash_left_leaves_nothing(shared: Path) -> None:
    """Goal: who may not write the file makes no index of its log, either."""
    assert by(OWNER, lambda: writes(shared, "a")) == "wrote"
    connection = sqlite3.connect(shared / "state.db")
    connection.execute("INSERT INTO listeners VALUES ('x', 1)")
    connection.commit()
    shutil.copy(shared / "state.db-wal", shared / "kept")
    connection.close()
    (shared / "kept").rename(shared / "state.db-wal")
    os.chown(shared / "state.db-wal", OWNER, GROUP)
    before = names(shared)
    assert by(SECOND, lambda: reads(shared))[0] == "StorageUnavailable"
    assert names(shared) == before
    assert by(OWNER, lambda: writes(shared, "a")) == "wrote"
    assert by(SECOND, lambda: reads(shared)) == 3


def test_what_root_makes_is_the_owners(shared: Path) -> None:
    """Goal: root in a container, say, leaves nothing that the owner of the volume cannot use."""
    for location in (shared, shared / "below"):
        assert by(0, lambda: writes(location, "root"), mask=0o077, group=0) == "wrote"  # noqa: B023
        assert {*names(shared).values()} == {OWNER}
        assert by(OWNER, lambda: writes(location, "a")) == "wrote"  # noqa: B023
    assert by(OWNER, lambda: reads(shared)) == 6


def folder_of_garbage(shared: Path) -> Path:
    """That of the writer that put; those of compactions have one file each."""
    files = [path for path in (shared / "blob").rglob("*.parquet") if path.is_file()]
    return max({path.parent for path in files}, key=lambda folder: len(list(folder.iterdir())))


def test_a_collection_goes_on_beside_what_it_may_not_delete(shared: Path) -> None:
    """Goal: it deletes the other blobs and the versions, and says which folder it is; so does a sweep."""

    async def prepares() -> None:
        async with ap.open(shared, settings=SETTINGS, maintenance=False) as client:
            for name in ("t", "u"):
                for number in range(10):
                    await client.table(name, str, str).put(f"{number % 3}", "x" * 200)
                await client.admin.retain(name, timedelta(0))
                await client.admin.force_compaction(name)

    async def collects() -> Any:
        records = list[str]()

        class Told(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                records.append(record.getMessage())

        logging.getLogger("aiopersist").addHandler(Told())
        async with ap.open(shared, settings=SETTINGS, maintenance=False) as client:
            counts = [await client.admin.force_gc(name) for name in ("t", "u")]
            try:
                await client.admin.sweep_leaked_blobs(dry_run=False)
                swept = "swept"
            except ap.StorageUnavailable as error:
                swept = str(error)
        return [tuple(count) for count in counts], records, swept

    assert by(OWNER, prepares) is None
    first = folder_of_garbage(shared)
    os.chown(first, 0, 0)
    first.chmod(0o755)
    counts, records, swept = by(OWNER, collects)
    assert sorted(bool(parts) for parts, _, _ in counts) == [False, True], counts
    assert all(versions for _, versions, _ in counts), counts
    assert [record for record in records if str(first) in record], records
    assert str(first) in swept, swept
    os.chown(first, OWNER, GROUP)
    assert by(OWNER, collects)[2] == "swept"


def test_a_folder_of_another_user_is_named_by_who_cannot_write_there(shared: Path) -> None:
    assert by(OWNER, lambda: writes(shared, "a"), mask=0o002) == "wrote"
    folder = shared / "blob" / "tmp"
    os.chown(folder, 0, 0)
    folder.chmod(0o755)
    refused(by(SECOND, lambda: writes(shared, "b"), mask=0o002), folder, "of user 0")


def test_a_cache_with_a_folder_of_another_user(shared: Path) -> None:
    """Goal: what this user may not write there is read from the store; the rest is kept."""

    async def stores(key: str) -> Any:
        cache = DiskCache(str(shared / "cache"), 1 << 20, "place", SYSTEM)
        cache.store(key, "whole", b"data")
        return cache.load(key, "whole")

    async def both() -> Any:
        cache = DiskCache(str(shared / "cache"), 1 << 20, "place", SYSTEM)
        for key in ("s/a", "s/b"):
            cache.store(key, "whole", b"data")
        return cache.load("s/a", "whole"), cache.load("s/b", "whole")

    assert by(SECOND, partial(stores, "s/a"), mask=0o077) == b"data"
    (shared / "cache").chmod(0o777)
    assert by(OWNER, both) == (None, b"data")
    assert by(0, partial(stores, "s/c"), mask=0o077) == b"data"
    assert by(SECOND, partial(stores, "s/c")) == b"data"  # of root in a container, say


async def test_another_container(shared: Path) -> None:
    """Goal: with networks and process ids of its own, a process shares a directory,
    without hints."""
    apart = ["unshare", "--net", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("this process may not make namespaces, as a container has them")
    async with ap.open(shared, settings=ap.Settings(watch_timeout_s=0.2)) as client:
        table = client.table("t", str, str)
        changes = aiter(table.changes())
        await table.put("here", "a")
        assert (await anext(changes)).changes[0].key == "here"
        command = [*apart, sys.executable, "-c", PUTS, str(shared)]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=60)
        async with asyncio.timeout(20):
            assert (await anext(changes)).changes[0].key == "apart"
        assert await table.count() == 2


PUTS = """
import asyncio, sys
import aiopersist as ap

async def main():
    async with ap.open(sys.argv[1]) as client:
        table = client.table("t", str, str)
        assert await table.get("here") == "a"
        await table.put("apart", "a")

asyncio.run(main())
"""
