"""Blobs as files below a folder.

`set` writes a file in `tmp/` (on the same file system, never listed), fsyncs it, renames it to its name and
fsyncs the folder that holds the name. So a name always has a whole value behind it, after a crash too, and
when `set` returns a power failure cannot take it back. A failed fsync is never repaired by a second one,
which could report success for pages that the kernel has dropped: the error says that nothing was set (before
the rename) or that nothing is known (after it), and repeating the `set` writes a new file.

The first file that an instance writes into a folder makes the folder's own name durable, even if another
process made the folder (it may not have reached its fsync). A folder that a deletion leaves empty is removed;
`open_folders` says why a file that is written at that moment is as durable as any other.

A folder in which the instance has met blobs does not vanish by itself: if it is gone or empty, its volume is
not mounted, or the folder was moved away. Then nothing is written, since the volume would not have it
when it comes back, and no blob is reported as missing. Both wait, as for any store that is away.

A file system cannot hold both `a` and `a/b`: the second one is `Unsupported`. A key whose first component is
`tmp` (or `tmp~`, and so on) is stored with one more `~`.

Each operation is one call in a worker thread. A cancelled caller stops waiting, the thread goes on, and
`aclose` waits for it.
"""

import errno
import os
import re
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from itertools import islice
from typing import TypeVar

from aiopersist.base.errors import InvalidUsage, StorageUnavailable, Unsupported
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.base.threads import Threads
from aiopersist.storage.blob import Blob, NotDeleted
from aiopersist.storage.files.open_folders import OpenFolders, remove_empty
from aiopersist.storage.folders import forbidden, fsync, give, make_folder, make_root, mapped, may_write
from aiopersist.storage.keys import check_blob_key, closed

T = TypeVar("T")

_TMP = "tmp"
_TMP_NAME = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TMP_AGE_MAX_S = 24 * 3600.0  # no write takes a day: a crash left an older file
_THREADS = 32  # about a disk's queue: more would only wait in the kernel
_TRIES = 10  # to move a file into a folder that another process removes each time
_LIST_PAGE = 1000  # keys per call in a worker thread


class FilesBlob(Blob):
    """Blobs in the folder `root`, which is made on first write. With `fsync=False` a power failure, unlike a
    crash of the process, may lose or empty the values that were set last."""

    def __init__(
        self, root: str | os.PathLike[str], fsync: bool = True, *, runtime: Runtime = SYSTEM
    ) -> None:
        self._root = os.path.abspath(root)
        self._fsync = fsync
        self._runtime = runtime
        self._threads = Threads(_THREADS, "aiopersist files")
        self._folders = OpenFolders(self._root, fsync)
        self._has_tmp = False
        self._has_blobs = False  # some blob was read or written
        self._swept = False
        self._idle = threading.Condition()
        self._busy = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<FilesBlob {self._root}>"

    async def facts(self) -> dict[str, str]:
        return {"store": f"files in {self._root}", "fsync": "on" if self._fsync else "off"}

    async def get(self, key: str) -> bytes | None:
        path = self._path(key)
        return await self._run(lambda: self._read(path, 0, None))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        path = self._path(key)
        return await self._run(lambda: self._read(path, offset, length))

    async def set(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        await self._run(lambda: self._write(path, data, os.replace))

    async def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        return await self._run(lambda: self._create(path, data))

    @property
    def uri(self) -> str:
        return f"file://{self._root}"

    async def delete(self, keys: Sequence[str]) -> None:
        paths = {self._path(key): key for key in keys}
        await self._run(lambda: self._remove(paths))

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        names = self._names(prefix)
        while page := await self._run(lambda: list(islice(names, _LIST_PAGE))):
            for key, size in page:
                yield key, size

    async def aclose(self) -> None:
        self._threads.process.check()
        self._closed = True
        if self._busy:
            await Threads(1, "aiopersist files, closing").run(self._wait_until_idle)
        self._threads.end()
        self._folders.close()

    async def _run(self, work: Callable[[], T]) -> T:
        self._threads.process.check()
        if self._closed:
            raise closed("blob store")
        with self._idle:
            self._busy += 1
        started = dropped = False

        def counted() -> T:
            nonlocal started
            with self._idle:
                if dropped:  # the last moment: its caller has gone, and waits no more
                    raise closed("blob store")
                started = True
            try:
                return work()
            except OSError as error:
                raise mapped(error, str(error.filename or self._root)) from error
            finally:
                self._leave()

        try:
            return await self._threads.run(counted)
        finally:
            with self._idle:
                dropped = not started  # cancelled before a thread was free
            if dropped:
                self._leave()

    def _leave(self) -> None:
        with self._idle:
            self._busy -= 1
            self._idle.notify_all()

    def _wait_until_idle(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._busy == 0)

    # In a worker thread

    def _read(self, path: str, offset: int, length: int | None) -> bytes | None:
        data = _read(path, offset, length)
        if data is None:
            self._check_root()
        else:
            self._has_blobs = True
        return data

    def _check_root(self) -> None:
        """`StorageUnavailable` if the root, in which there were blobs, is gone or empty."""
        if self._has_blobs and next(_scan(self._root), None) is None:
            raise StorageUnavailable(f"file: {self._root} is gone, or empty: is its volume mounted?")

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._write(path, data, _linked)
        except FileExistsError:
            return False
        return True

    def _write(self, path: str, data: bytes | memoryview, move: Callable[..., None]) -> None:
        tmp = os.path.join(self._root, _TMP, str(self._runtime.uuid()))
        make_root(os.path.dirname(tmp), "file", self._make_tmp)
        self._sweep(os.path.dirname(tmp))
        try:
            self._write_tmp(tmp, data)
            self._move(tmp, path, move)
            self._has_blobs = True
        except BaseException as error:
            if isinstance(error, FileNotFoundError):  # another process removed folders that exist for us
                self._has_tmp = False
            with suppress(OSError):
                os.unlink(tmp)
            if isinstance(error, PermissionError):
                self._check_writable(tmp, path)
            raise

    def _check_writable(self, *paths: str) -> None:
        """`StorageUnavailable` that names the first folder of another user that this one may not write."""
        for path in paths:
            for folder in reversed([path, *_above(path, self._root)]):
                if os.path.isdir(folder) and not may_write(folder):
                    raise forbidden(folder)

    def _write_tmp(self, tmp: str, data: bytes | memoryview) -> None:
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            give(fd, self._root)
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[os.write(fd, rest) :]
            if self._fsync:
                fsync(fd)
        finally:
            os.close(fd)

    def _move(self, tmp: str, path: str, move: Callable[..., None]) -> None:
        """Move the file to its path, durably."""
        folder, name = os.path.split(path)
        try:
            for more in range(_TRIES - 1, -1, -1):
                try:
                    with self._folders.opened(folder) as fd:
                        move(tmp, name, dst_dir_fd=fd)
                        self._fsync_name(fd, path)
                    return
                except FileNotFoundError:  # another process removed the folder, which was empty
                    self._folders.forget(folder)
                    if not more:
                        raise
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            if move is _linked and os.path.isfile(path):
                raise
            raise Unsupported(f"file: a key cannot be a folder of another key: {path}") from error

    def _fsync_name(self, folder: int, path: str) -> None:
        if self._fsync:
            try:
                fsync(folder)
            except OSError as error:
                raise mapped(error, path, determinate=False) from error

    def _make_tmp(self, folder: str) -> None:
        if not self._has_tmp:
            self._check_root()
            make_folder(folder, durable=self._fsync)
            self._has_tmp = True

    def _remove(self, paths: Mapping[str, str]) -> None:
        """Delete files without an fsync: a blob that a power failure brings back is a leak, and leaks are
        swept."""
        self._check_root()
        undeleted = list[str]()
        for path in paths:
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                pass
            except PermissionError:  # in a folder that another user made
                undeleted.append(path)
        folders = {os.path.dirname(path) for path in paths}
        for folder in folders - {os.path.dirname(path) for path in undeleted}:
            remove_empty(folder, self._root, self._folders)
        if undeleted:
            text = f"{len(undeleted)} blobs could not be deleted: {forbidden(os.path.dirname(undeleted[0]))}"
            raise NotDeleted(text, [paths[path] for path in undeleted])

    def _sweep(self, tmp: str) -> None:
        """Remove the files that crashes left in `tmp`, once per instance. Files of other names stay: the
        folder may have been there for something else."""
        if self._swept:
            return
        self._swept = True
        oldest = self._runtime.wall() - _TMP_AGE_MAX_S
        with suppress(PermissionError), os.scandir(tmp) as entries:
            for entry in entries:
                if not _TMP_NAME.fullmatch(entry.name):
                    continue
                with suppress(OSError):  # another process sweeps too; the next instance tries again
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)

    # Keys and paths

    def _path(self, key: str) -> str:
        check_blob_key(key)
        first, slash, rest = key.partition("/")
        if first.rstrip("~") == _TMP:
            first += "~"
        return os.path.join(self._root, first + slash + rest)

    def _names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """The keys that start with `prefix`, by a walk from the deepest folder that it names."""
        self._check_root()
        folder = prefix.rpartition("/")[0]
        if folder:
            with suppress(InvalidUsage):  # no legal key starts so
                yield from _walk(self._path(folder), folder + "/", prefix)
            return
        for name, entry in _scan(self._root):
            if name == _TMP:
                continue
            key = name[:-1] if name.rstrip("~") == _TMP else name
            yield from _entries(entry, key, prefix)


def _linked(tmp: str, name: str, dst_dir_fd: int) -> None:
    """Move a file to a name that no other file has; `FileExistsError` if one has it, `Unsupported` where a
    file cannot have two names."""
    try:
        os.link(tmp, name, dst_dir_fd=dst_dir_fd)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise Unsupported(f"file: the file system of {tmp} has no hard links") from error
        raise
    os.unlink(tmp)


def _scan(folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name, entry


def _walk(folder: str, key: str, prefix: str) -> Iterator[tuple[str, int]]:
    for name, entry in _scan(folder):
        yield from _entries(entry, key + name, prefix)


def _entries(entry: os.DirEntry[str], key: str, prefix: str) -> Iterator[tuple[str, int]]:
    if entry.is_dir(follow_symlinks=False):
        if (key + "/").startswith(prefix) or prefix.startswith(key + "/"):
            yield from _walk(entry.path, key + "/", prefix)
    elif key.startswith(prefix):
        with suppress(FileNotFoundError):  # deleted meanwhile
            yield key, entry.stat().st_size


def _read(path: str, offset: int, length: int | None) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        length = status.st_size - offset if length is None else min(length, status.st_size - offset)
        with open(fd, "rb", buffering=0, closefd=False) as file:
            file.seek(offset)
            return _read_exactly(file, max(length, 0))
    finally:
        os.close(fd)


def _read_exactly(file: FileIO, length: int) -> bytes:
    """Read a value of any length: one `read` returns at most 2 GiB."""
    data = file.read(length) or b""
    if len(data) == length:
        return data
    pieces = [data]
    while (missing := length - sum(map(len, pieces))) and (piece := file.read(missing)):
        pieces.append(piece)
    return b"".join(pieces)


def _above(path: str, root: str) -> Iterator[str]:
    """The folders above the path, up to the root."""
    while path != root:
        path = os.path.dirname(path)
        yield path
