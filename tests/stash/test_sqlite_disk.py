"""Goal: when a disk fails at any step of a change, a stash in SQLite has all acknowledged changes and no
refused one, after a crash too, and goes on."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.stash import Stash, StashCollection
from aiopersist.stash.sqlite import SqliteStore
from tests.support.failing_disk import CACHE_PAGES, FailingDisk, Fault, after_a_crash
from tests.support.internals import session_of

pytestmark = pytest.mark.blocks_loop  # files are looked at behind the library's back at every step

ROWS = [(f"k{n}", "v" * 500) for n in range(12)]
FULL, IOERR, FSYNC = sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC
ONCE = ap.Settings(retry_timeout_s=0.0)
FAILURES = {
    "read": [(sqlite3.SQLITE_IOERR_READ, False, False)],
    "write": [(FULL, True, True), (IOERR, False, False)],
    "sync": [(FSYNC, False, False), (FSYNC, False, True)],
}


async def opened(path: Path) -> tuple[Stash, list[StashCollection[str, str]]]:
    """With a cache so small that a transaction writes before its COMMIT."""
    stash = await ap.stash.open(f"sqlite://{path}", ONCE)
    store = session_of(stash).store
    assert isinstance(store, SqliteStore)
    await store._file._writer.run(shrink)
    return stash, [await stash.collection(name, str, str) for name in ("a", "b")]


def shrink(transaction: Any) -> None:
    transaction.connection.execute(f"PRAGMA cache_size = {CACHE_PAGES}")


def rows(path: Path) -> list[int]:
    """How many each collection has, behind the library's back."""
    connection = sqlite3.connect(path)
    counted = "SELECT count(*) FROM stash_data WHERE collection_id = ?"
    ids = connection.execute("SELECT collection_id FROM stash_collections ORDER BY name").fetchall()
    found = [connection.execute(counted, cid).fetchone()[0] for cid in ids]
    connection.close()
    return found


async def append(stash: Stash, collections: list[StashCollection[str, str]]) -> None:
    """To both at once."""
    batches = []
    for collection in collections:
        batches.append(batch := await collection.make_batch(stash))
        for key, val in ROWS:
            collection.append_to_batch(batch, key, val, 1)
    await stash.append(batches)


async def times(stash: Stash, collection: StashCollection[str, str]) -> int:
    """How often each row was appended."""
    found = await stash.iter(collection)
    counts = {key: sum(diff for (k, _), _, diff in found if k == key) for key, _ in ROWS}
    assert len(set(counts.values())) == 1, counts
    return counts["k0"]


async def survives(template: Path, folder: Path, disk: FailingDisk, fault: Fault | None) -> str:
    """An append with that fault in a copy of the template; what was told."""
    folder.mkdir()
    path = folder / "stash.db"
    shutil.copy(template, path)
    stash, collections = await opened(path)
    disk.arm(fault)
    told = "done"
    try:
        await append(stash, collections)
    except (StorageUnavailable, Indeterminate) as error:
        told = type(error).__name__
    steps = dict(disk.steps)
    disk.arm(None)
    possible = {"done": [len(ROWS)], "StorageUnavailable": [0], "Indeterminate": [0, len(ROWS)]}[told]
    a, b = rows(after_a_crash(path, folder / "crashed"))
    assert a == b and a in possible, f"{fault}: {told}, and after a crash {a} and {b} rows are there"
    found = [len(await stash.iter(collection)) for collection in collections]
    assert found[0] == found[1] and found[0] in possible, f"{fault}: {told}, and {found} rows are there"
    await append(stash, collections)
    await stash.aclose()
    stash, collections = await opened(path)
    for collection in collections:
        assert await times(stash, collection) == 1 + (found[0] > 0), f"{fault}: at the end"
    await stash.aclose()
    shutil.rmtree(folder)
    disk.steps = steps
    return told


async def test_each_step_of_a_change_fails(tmp_path: Path, disk: FailingDisk) -> None:
    template = tmp_path / "template.db"
    stash, _ = await opened(template)
    await stash.aclose()
    assert await survives(template, tmp_path / "sound", disk, None) == "done"
    steps, outcomes = dict(disk.steps), set()
    assert steps["write"] > 10
    for kind, failures in FAILURES.items():
        for step in range(steps[kind]):
            for failure in failures:
                fault = Fault(kind, step, *failure)
                outcomes.add(await survives(template, tmp_path / str(fault), disk, fault))
    assert outcomes == {"StorageUnavailable", "Indeterminate"}


async def test_a_read_that_fails_once_is_repeated(tmp_path: Path, disk: FailingDisk) -> None:
    """The error that ended its transaction is what is told of it, and the next read is of its own moment."""
    stash, collections = await opened(path := tmp_path / "stash.db")
    step, failed = 0, True
    while failed:
        await append(stash, collections)
        async with ap.stash.open(f"sqlite://{path}", exclusive=False) as other:
            disk.arm(Fault("read", step, sqlite3.SQLITE_IOERR_READ))
            found = [await other.collection(name, str, str) for name in ("a", "b")]
            assert [await times(other, c) for c in found] == [2 * step + 1] * 2
            failed = disk.steps["read"] > step
            disk.arm(None)
            await append(stash, collections)
            assert [await times(other, c) for c in found] == [2 * step + 2] * 2
        step += 1
    assert step > 3
    await stash.aclose()
