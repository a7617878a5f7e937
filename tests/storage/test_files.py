"""Files: the state after a crash, a full disk or a failed fsync."""

import asyncio
import errno
import fcntl
import os
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, InvalidLocation, StorageUnavailable, Unsupported
from aiopersist.storage import folders
from aiopersist.storage.files.blob import FilesBlob


def tmp_files(root: Path) -> list[str]:
    return os.listdir(root / "tmp")


async def test_a_file_has_the_name_of_its_key(tmp_path: Path) -> None:
    blob = FilesBlob(tmp_path / "deep" / "blob")
    await blob.set("s1/w1/a.parquet", b"abc")
    assert (tmp_path / "deep/blob/s1/w1/a.parquet").read_bytes() == b"abc"
    assert tmp_files(tmp_path / "deep/blob") == []


async def test_values_outlive_the_handle(tmp_path: Path) -> None:
    blob = FilesBlob(tmp_path)
    await blob.set("a/k", b"abc")
    await blob.aclose()
    assert await FilesBlob(tmp_path).get("a/k") == b"abc"


async def test_what_lies_in_tmp_is_never_listed_and_what_crashes_left_is_swept_after_a_day(
    tmp_path: Path,
) -> None:
    """Goal: files of other names stay, however old: the folder may have been there for something else."""
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    old, young = (str(uuid.uuid4()) for _ in range(2))
    for name, age_s in ((old, 25 * 3600), (young, 23 * 3600), ("letter", 25 * 3600)):
        (tmp / name).write_bytes(b"x")
        then = (tmp / name).stat().st_mtime - age_s
        os.utime(tmp / name, (then, then))
    blob = FilesBlob(tmp_path)
    assert [item async for item in blob.list("")] == []
    await blob.set("k", b"x")
    assert sorted(tmp_files(tmp_path)) == sorted([young, "letter"])
    assert [item async for item in blob.list("")] == [("k", 1)]
    assert [item async for item in blob.list("t")] == []


async def test_a_key_below_another_is_unsupported(tmp_path: Path) -> None:
    blob = FilesBlob(tmp_path)
    await blob.set("a/b", b"x")
    for key in ("a", "a/b/c"):
        with pytest.raises(Unsupported):
            await blob.set(key, b"x")
        assert await blob.get(key) is None
    assert tmp_files(tmp_path) == []


async def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    blob = FilesBlob(tmp_path / "root")
    await blob.set("a/b/1", b"x")
    os.unlink(tmp_path / "root/a/b/1")
    os.rmdir(tmp_path / "root/a/b")
    await blob.set("a/b/2", b"x")
    await blob.set("a/b/2", b"x")
    os.rmdir(tmp_path / "root/tmp")
    with pytest.raises(StorageUnavailable) as caught:
        await blob.set("a/b/3", b"x")
    assert caught.value.retry
    await blob.set("a/b/3", b"x")
    assert await blob.get("a/b/3") == b"x"


class Fsyncs:
    """Counts fsyncs by path, and fails those for which `fails(path)` is true."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: list[str] = []
        self.fails: Callable[[str], bool] = lambda path: False
        real = os.fsync

        def fsync(fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            self.of.append(path)
            if self.fails(path):
                raise OSError(errno.EIO, "Input/output error")
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)


async def test_each_name_is_made_durable_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, its folder, and for folders that are new to the instance those above."""
    fsyncs = Fsyncs(monkeypatch)
    root = tmp_path / "blob"
    blob = FilesBlob(root)
    await blob.set("a/b/c/1", b"x")
    assert {str(tmp_path), str(root), str(root / "a"), str(root / "a/b"), str(root / "a/b/c")} <= set(
        fsyncs.of
    )
    fsyncs.of.clear()
    await blob.set("a/b/c/2", b"x")
    assert len(fsyncs.of) == 2 and "/blob/tmp/" in fsyncs.of[0] and fsyncs.of[1] == str(root / "a/b/c")
    fsyncs.of.clear()
    other = FilesBlob(root)  # cannot know whether the maker of the folders got to the fsync
    await other.set("a/b/c/3", b"x")
    assert {str(root), str(root / "a"), str(root / "a/b")} <= set(fsyncs.of)


async def test_without_fsync_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsyncs = Fsyncs(monkeypatch)
    await FilesBlob(tmp_path / "blob", fsync=False).set("a/b", b"x")
    assert fsyncs.of == []


async def test_a_failed_fsync_of_the_file_sets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsyncs = Fsyncs(monkeypatch)
    fsyncs.fails = lambda path: "/tmp/" in path.removeprefix(str(tmp_path))
    blob = FilesBlob(tmp_path)
    with pytest.raises(StorageUnavailable) as caught:
        await blob.set("k", b"x")
    assert caught.value.retry
    assert await blob.get("k") is None
    assert tmp_files(tmp_path) == []
    fsyncs.fails = lambda path: False
    await blob.set("k", b"x")
    assert await blob.get("k") == b"x"


async def test_a_failed_fsync_of_the_folder_is_of_unknown_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = FilesBlob(tmp_path)
    await blob.set("a/0", b"x")
    fsyncs = Fsyncs(monkeypatch)
    fsyncs.fails = lambda path: path.endswith("/a")
    with pytest.raises(Indeterminate):
        await blob.set("a/0", b"x")
    fsyncs.fails = lambda path: False
    fsyncs.of.clear()
    await blob.set("a/0", b"x")
    assert ["/tmp/" in path.removeprefix(str(tmp_path)) for path in fsyncs.of] == [
        True,
        False,
    ]  # written anew


async def test_a_folder_whose_name_is_not_durable_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsyncs = Fsyncs(monkeypatch)
    fsyncs.fails = lambda path: path.endswith("/a")
    blob = FilesBlob(tmp_path)
    with pytest.raises(StorageUnavailable):
        await blob.set("a/b/k", b"x")
    assert not (tmp_path / "a/b").exists()
    fsyncs.fails = lambda path: False
    await blob.set("a/b/k", b"x")


class FullFsyncs:
    """macOS: `fcntl` knows `F_FULLFSYNC`, and counts its calls, or fails them with `number`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int | None = None) -> None:
        self.count = 0

        def full_fsync(fd: int, command: int) -> int:
            assert command == 51
            self.count += 1
            if number is not None:
                raise OSError(number, os.strerror(number))
            return 0

        monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", full_fsync)


async def test_the_cache_of_the_drive_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: where `os.fsync` stops at the drive, each file and each name goes on to the disk."""
    full, plain = FullFsyncs(monkeypatch), Fsyncs(monkeypatch)
    blob = FilesBlob(tmp_path)
    await blob.set("a/1", b"x")
    assert full.count >= 4 and plain.of == []
    full.count = 0
    await blob.set("a/2", b"x")
    assert full.count == 2 and plain.of == []
    await blob.aclose()


async def test_a_file_system_without_full_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: such a file system can be used, as far as it keeps its promises."""
    full, plain = FullFsyncs(monkeypatch, errno.ENOTSUP), Fsyncs(monkeypatch)
    blob = FilesBlob(tmp_path)
    await blob.set("a/1", b"x")
    assert len(plain.of) == full.count >= 4
    await blob.aclose()


async def test_a_failed_full_fsync_sets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no second fsync, which would succeed without a meaning, hides a failure of the drive."""
    blob = FilesBlob(tmp_path)
    await blob.set("k", b"x")
    FullFsyncs(monkeypatch, errno.EIO)
    plain = Fsyncs(monkeypatch)
    with pytest.raises(StorageUnavailable):
        await blob.set("k", b"y")
    assert await blob.get("k") == b"x" and plain.of == []
    await blob.aclose()


async def test_a_full_disk(small_disk: Path) -> None:
    blob = FilesBlob(small_disk)
    await blob.set("k", b"x" * 1000)
    with pytest.raises(StorageUnavailable, match="No space") as caught:
        await blob.set("big", b"x" * 1_000_000)
    assert not caught.value.retry
    assert tmp_files(small_disk) == []
    assert await blob.get("k") == b"x" * 1000
    assert await blob.get("big") is None
    await blob.set("small", b"x")
    await blob.aclose()


async def test_a_read_only_disk(small_disk: Path, make_read_only: Callable[[Path], Awaitable[None]]) -> None:
    blob = FilesBlob(small_disk)
    await blob.set("k", b"x")
    await make_read_only(small_disk)
    for refused in (blob.set("l", b"x"), blob.delete(["k"])):
        with pytest.raises(StorageUnavailable, match="Read-only") as caught:
            await refused
        assert not caught.value.retry
    assert await blob.get("k") == b"x"


@pytest.mark.parametrize(
    ("number", "retry"),
    [(errno.EACCES, False), (errno.EPERM, False), (errno.EDQUOT, False), (errno.EIO, True)],
)
def test_what_waiting_does_not_help(number: int, retry: bool) -> None:
    error = folders.mapped(OSError(number, os.strerror(number)), "here", determinate=True)
    assert isinstance(error, StorageUnavailable) and error.retry == retry


async def test_closing_waits_for_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_files: Callable[[], list[str]]
) -> None:
    """A cancelled write goes on; after closing nothing of the location is open."""
    begun, going = asyncio.Event(), __import__("threading").Event()
    loop, real = asyncio.get_running_loop(), os.fsync

    def fsync(fd: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        going.wait(50)
        real(fd)

    blob = FilesBlob(tmp_path)
    await blob.set("warm", b"x")
    monkeypatch.setattr(os, "fsync", fsync)
    task = asyncio.create_task(blob.set("k", b"x"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    closing = asyncio.create_task(blob.aclose())
    await asyncio.sleep(0.05)
    assert not closing.done() and open_files() != []
    going.set()
    await closing
    assert open_files() == []
    assert await FilesBlob(tmp_path).get("k") == b"x"


@pytest.mark.parametrize("fsync", [True, False])
async def test_a_file_in_the_place_of_the_root(tmp_path: Path, fsync: bool) -> None:
    """Goal: the error comes at once, without retries, even if the file stands for a folder further up."""
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "blob"):
        blob = FilesBlob(root, fsync=fsync)
        with pytest.raises(InvalidLocation, match="file is not a directory"):
            await blob.set("a", b"")
        assert await blob.get("a") is None
        await blob.aclose()
    with pytest.raises(InvalidLocation, match="file is not a directory"):
        await ap.open(tmp_path / "file", settings=ap.Settings(open_timeout_s=1000))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- folders that a deletion leaves empty ----------------------------------------------------------------


def folders_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir() and path.name != "tmp"}


async def test_a_folder_that_a_deletion_leaves_empty_goes(tmp_path: Path) -> None:
    """Goal: the folder goes with those above it, as far as they are empty, but never the root."""
    blob = FilesBlob(tmp_path / "root")
    for key in ("a/b/1", "a/b/2", "a/c/1", "1"):
        await blob.set(key, b"x")
    await blob.delete(["a/b/1", "a/b/none", "none/none"])
    assert folders_of(tmp_path / "root") == {"a", "a/b", "a/c"}
    await blob.delete(["a/b/2"])
    assert folders_of(tmp_path / "root") == {"a", "a/c"}
    await blob.delete(["a/c/1", "1"])
    assert folders_of(tmp_path / "root") == set()
    await blob.set("a/b/1", b"y")
    assert await FilesBlob(tmp_path / "root").get("a/b/1") == b"y"


async def test_a_folder_that_was_removed_and_made_by_another_is_made_durable_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the same name, and perhaps the same inode, is not taken for the same folder."""
    blob = FilesBlob(tmp_path)
    await blob.set("a/b/1", b"x")
    os.unlink(tmp_path / "a/b/1")
    for folder in ("a/b", "a"):
        os.rmdir(tmp_path / folder)
    os.makedirs(tmp_path / "a/b")  # without any fsync
    fsyncs = Fsyncs(monkeypatch)
    await blob.set("a/b/2", b"x")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")} <= set(fsyncs.of)


@pytest.mark.parametrize("fsync", [True, False])
async def test_a_writer_loses_nothing_while_others_remove_folders(tmp_path: Path, fsync: bool) -> None:
    """Goal: each value is there until it is deleted; at the end no folder is left."""
    blobs = [FilesBlob(tmp_path / "root", fsync) for _ in range(3)]

    async def work(name: int) -> None:
        blob, other = blobs[name % 3], blobs[(name + 1) % 3]
        for n in range(40):
            key = f"s/w/{name}-{n}"
            for _ in range(5):  # as the layer above does
                with suppress(StorageUnavailable):
                    await blob.set(key, b"x")
                    break
            assert await other.get(key) == b"x"
            await other.delete([key])

    await asyncio.gather(*map(work, range(6)))
    assert folders_of(tmp_path / "root") == set()
    for blob in blobs:
        await blob.aclose()


@pytest.mark.parametrize("fsync", [True, False])
async def test_a_folder_that_another_makes_and_removes_at_once(
    tmp_path: Path, fsync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a folder that was there a moment ago is in nobody's way."""
    mkdir, met = os.mkdir, []

    def too_late(path: str, *args: int) -> None:
        if path.endswith("/b") and not met:
            met.append(path)
            raise FileExistsError(errno.EEXIST, "it was there", path)
        mkdir(path, *args)

    monkeypatch.setattr(os, "mkdir", too_late)
    blob = FilesBlob(tmp_path / "root", fsync)
    await blob.set("a/b/c", b"x")
    assert await blob.get("a/b/c") == b"x"
    assert met
    await blob.aclose()


async def test_few_folders_are_held_open(tmp_path: Path) -> None:
    """Goal: a store of many folders does not use up the descriptors of the process."""
    blob = FilesBlob(tmp_path, False)
    before = len(os.listdir("/proc/self/fd"))
    for n in range(150):
        await blob.set(f"{n}/k", b"x")
    assert len(os.listdir("/proc/self/fd")) - before < 80
    await blob.set("0/k", b"y")
    assert await blob.get("0/k") == b"y"
    await blob.aclose()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
