"""Goal: a loss of power takes nothing that was acknowledged from a location in files and SQLite, whatever of
the rest it takes, tears or keeps."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.power.disk import Disk
from tests.power.judge import every_sync, points, tried
from tests.power.trace import Call, available, recorded

POINTS = int(os.environ.get("AIOPERSIST_TEST_POWER", "1000"))
SOME, PLANTED = 24, 60
pytestmark = [pytest.mark.slow, pytest.mark.blocks_loop, pytest.mark.timeout(300)]


class Run:
    """A recorded run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.calls = recorded(self.root / "new" / "loc", folder / "trace")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    if not available():
        pytest.skip("strace is not on this machine, or may not trace: no loss of power is tried")
    return Run(tmp_path_factory.mktemp("power"))


def test_the_recorded_calls_are_all_that_changed_files(run: Run, tmp_path: Path) -> None:
    """Goal: replayed, and with nothing lost, they make the files that are there."""
    disk = Disk(run.root)
    for call in run.calls:
        disk.apply(call)
    disk.keep_all(tmp_path / "kept")
    assert contents(tmp_path / "kept") == contents(run.root)
    assert disk.said[-1] == "told close"


def test_a_descriptor_is_given_anew_before_its_close_has_ended(tmp_path: Path) -> None:
    """Goal: calls are in the order in which they ended; what is written to the new file is not lost."""
    root = tmp_path / "root"
    one, two = (os.fsencode(root / name) for name in ("one", "two"))
    flags = "O_RDWR|O_CREAT"
    disk = Disk(root)
    for call in (
        Call("openat", ("AT_FDCWD", one, flags, "0644"), 7, 0),
        Call("write", ("7", b"old", "3"), 3, 1),
        Call("openat", ("AT_FDCWD", two, flags, "0644"), 7, 2),
        Call("close", ("7",), 0, 2),  # that of `one`: it began before the other was open
        Call("write", ("7", b"new", "3"), 3, 4),
        Call("close", ("7",), 0, 5),
        Call("write", ("7", b"none", "4"), 4, 6),
    ):
        disk.apply(call)
    disk.keep_all(tmp_path / "kept")
    assert contents(tmp_path / "kept") == {"one": b"old", "two": b"new"}


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


async def test_some_losses_of_power(run: Run, tmp_path: Path) -> None:
    found = await tried(run.calls, run.root, points(run.calls, SOME, 1), tmp_path)
    assert found.problems == []
    assert found.told > SOME


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_many_losses_of_power(run: Run, tmp_path: Path) -> None:
    found = await tried(run.calls, run.root, points(run.calls, POINTS, 2), tmp_path)
    assert found.problems == []
    print(f"{found.tried} points of {len(run.calls)} calls, {found.told} acknowledged operations looked for")


def not_of(ending: str) -> Callable[[Disk, Call], bool]:
    return lambda disk, call: not disk.is_of(call).endswith(ending)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "ending", ["-wal", "/", ".parquet", "state.db"], ids=["log", "folders", "blobs", "database"]
)
async def test_a_sync_that_is_left_out_is_found(run: Run, tmp_path: Path, ending: str) -> None:
    """Goal: the bugs of a store that does not sync its log, its folders, its blobs or its database."""
    syncs = not_in_tmp if ending == ".parquet" else not_of(ending)
    found = await tried(run.calls, run.root, points(run.calls, PLANTED, 3), tmp_path, syncs)
    print(f"without syncs of {ending}: {len(found.problems)} problems at {found.tried} points")
    assert found.problems


def not_in_tmp(disk: Disk, call: Call) -> bool:
    return "/tmp/" not in disk.is_of(call) and every_sync(disk, call)
