"""Goal: `dump --to FILE` replaces regular files alone, as a whole, follows links, keeps modes, and writes
into what is no regular file."""

import asyncio
import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.cli import written as module
from tests.cli.test_commands import aiopersist

CSV = b"key,val\na,b\n"
IS_ROOT = os.geteuid() == 0


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        await client.table("t", key=str, val=str).put("a", "b")


@pytest.fixture
def location(tmp_path: Path) -> Path:
    asyncio.run(_fill(tmp_path / "location"))
    return tmp_path / "location"


def dumped(location: Path, to: Path, status: int = 0) -> str:
    done = aiopersist("dump", "t", "--to", str(to), "--format", "csv", "--location", location)
    assert done.status == status, done.err
    return done.err


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604])
def test_a_file_keeps_its_mode(location: Path, tmp_path: Path, mode: int) -> None:
    private = tmp_path / "private.csv"
    private.write_bytes(b"secret")
    private.chmod(mode)
    before = private.stat().st_ino
    dumped(location, private)
    assert (private.read_bytes(), mode_of(private)) == (CSV, mode)
    assert private.stat().st_ino != before  # another file took its place: whoever reads the old one reads on


def test_a_new_file_has_the_mode_that_the_umask_says(location: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        dumped(location, tmp_path / "new.csv")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new.csv") == 0o640


@pytest.mark.skipif(not IS_ROOT, reason="only root gives files away")
def test_a_file_keeps_its_owner(location: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.csv"
    theirs.write_bytes(b"old")
    os.chown(theirs, 12, 34)
    dumped(location, theirs)
    assert (theirs.stat().st_uid, theirs.stat().st_gid, theirs.read_bytes()) == (12, 34, CSV)


def test_links_are_followed(location: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    target, link, dangling = tmp_path / "inner/target", tmp_path / "link", tmp_path / "dangling"
    target.write_bytes(b"old")
    link.symlink_to("inner/target")
    dangling.symlink_to("inner/new")
    for path in (link, dangling):
        dumped(location, path)
        assert path.is_symlink() and path.read_bytes() == CSV
    assert target.read_bytes() == (tmp_path / "inner/new").read_bytes() == CSV
    assert sorted(os.listdir(tmp_path / "inner")) == ["new", "target"]


def test_a_fifo_is_written_to(location: Path, tmp_path: Path) -> None:
    fifo, got = tmp_path / "fifo", bytearray()
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.extend(fifo.read_bytes()))
    reader.start()
    dumped(location, fifo)
    reader.join(60)
    assert got == CSV and stat.S_ISFIFO(fifo.stat().st_mode)


async def test_a_fifo_without_a_reader_is_waited_for(tmp_path: Path) -> None:
    """Goal: by a wait that can be cancelled, and leaves nothing behind."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def write() -> None:
        async with module.written(str(fifo)) as file:
            file.write(b"never")

    work = asyncio.create_task(write())
    await asyncio.wait([work], timeout=0.2)
    assert not work.done()
    work.cancel()
    await asyncio.wait([work])
    assert work.cancelled() and os.listdir(tmp_path) == ["fifo"]


def test_a_device_stays_one(location: Path, tmp_path: Path) -> None:
    null = tmp_path / "null"
    made = subprocess.run(["mknod", null, "c", "1", "3"], check=False, capture_output=True)
    if made.returncode:
        null = Path("/dev/null")
    dumped(location, null)
    assert stat.S_ISCHR(null.stat().st_mode)


def test_what_cannot_be_a_file_is_refused(location: Path, tmp_path: Path) -> None:
    assert "it is a folder" in dumped(location, tmp_path, status=2)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_what_may_not_be_written_stays(location: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked.csv"
    locked.write_bytes(b"old")
    locked.chmod(0o444)
    assert "may not be written" in dumped(location, locked, status=2)
    assert locked.read_bytes() == b"old"


async def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="disk"):
        async with module.written(str(path)) as file:
            file.write(b"half")
            raise RuntimeError("disk")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_pipe_can_be_loaded(location: Path, tmp_path: Path) -> None:
    """Goal: what a shell gives for `<(...)` is read, of each format, into a shard that is there."""
    for form in ("csv", "parquet"):
        whole = tmp_path / f"whole.{form}"
        aiopersist("dump", "t", "--to", str(whole), "--location", location)
        fifo, data = tmp_path / f"fifo.{form}", whole.read_bytes()
        os.mkfifo(fifo)
        writer = threading.Thread(target=fifo.write_bytes, args=(data,))
        writer.start()
        loaded = aiopersist("load", "t", str(fifo), "--key", "key", "--location", location)
        writer.join(60)
        assert (loaded.status, loaded.out) == (0, "t: 1 row loaded\n"), loaded.err
    refused = aiopersist(
        "load", "new", "/dev/null", "--key", "key", "--format", "csv", "--location", location
    )
    assert refused.status == 1 and "is no regular file: it has no types" in refused.err


async def test_two_that_write_one_file_at_once(tmp_path: Path) -> None:
    """Goal: each is whole, and neither takes what the other writes; as in containers whose pids are alike."""
    path = tmp_path / "out.csv"
    async with module.written(str(path)) as one:
        one.write(b"one")
        async with module.written(str(path)) as two:
            two.write(b"two")
        assert path.read_bytes() == b"two"
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["out.csv"]
