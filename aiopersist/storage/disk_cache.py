"""Blobs kept on local disk: values never change, so bytes that were read once stay right while undamaged.

    DIR/3f/3f2a..../0-16777216      of one blob one range, behind its checksum

The processes of a machine may share a folder. A file appears whole, by a rename; its checksum includes its
name, so neither a crash nor a disk can put another file in its place. Nothing is fsynced: a file that is
missing, damaged or unreadable is fetched again. After a failed write the cache pauses. The files of a blob
belong to one user; another user of the same folder does not keep that blob.

Above the limit, the files that were unused for longest are removed. A process counts what it writes; after
every sixteenth of the limit it looks at the folder, and removes files until nine tenths are used. So the
folder may exceed the limit by a sixteenth for each process. A range that takes more than an eighth is not
kept. Files of other names are neither counted nor removed: the folder may have other uses.

Everything happens in worker threads, which go on when a caller is cancelled. The identity of a location (the
only blob whose key has no folder) is never kept: it must be that of the store.
"""

import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from shutil import rmtree
from threading import Lock
from typing import NamedTuple

from aiopersist.base.runtime import Runtime
from aiopersist.base.threads import Threads
from aiopersist.storage.blob import Blob
from aiopersist.storage.folders import give_folder, make_folder
from aiopersist.storage.wrapper import CachedBlob

log = logging.getLogger("aiopersist").getChild("storage")

DEFAULT_BYTES = 1024**3
_THREADS = 8
_SHARE = 8  # a range may take an eighth
_LOOKS = 16  # at the folder, each after a sixteenth of the limit
_KEPT = 0.9  # of the limit, when files are removed
_USED_EVERY_S = 60.0  # the time of a file's use is as exact as this
_PAUSE_S = 60.0  # after a failed write
_CHECKSUM_BYTES = 16
_TMP = ".tmp-"
_OUR_FOLDERS = re.compile(r"[0-9a-f]{2}(/[0-9a-f]{64})?")
_OUR_FILES = re.compile(rf"[0-9a-f]{{2}}/[0-9a-f]{{64}}/(whole|[0-9]+-[0-9]+|{re.escape(_TMP)}[0-9a-f]+)")


class _CachedFile(NamedTuple):
    used: float
    size: int
    path: str


class DiskCache:
    """The files of one location in `folder`, which may have files of other locations; `limit` holds for all
    of them. Its methods block, and may be called in any thread."""

    def __init__(self, folder: str, limit: int, place: str, runtime: Runtime) -> None:
        self.folder = os.path.abspath(folder)
        self.limit = limit
        self._place = place
        self._runtime = runtime
        self._unseen = limit  # bytes written since the last look: the first write looks
        self._paused_until = float("-inf")
        self._is_shared = False
        self._lock = Lock()

    def load(self, key: str, name: str) -> bytes | None:
        """What was stored under that name for the key; `None` unless it is there, and undamaged."""
        path = self._folder_of(key) / name
        try:
            with path.open("rb") as file:
                stored = file.read()
                used = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        data = memoryview(stored)[_CHECKSUM_BYTES:]
        if stored[:_CHECKSUM_BYTES] != self._checksum(key, name, data):
            _remove(path)
            return None
        now = self._runtime.wall()
        if abs(now - used) > _USED_EVERY_S:
            with suppress(OSError):
                os.utime(path, (now, now))
        return bytes(data)

    def store(self, key: str, name: str, data: bytes) -> None:
        """Keep the data, if there is room and the disk works."""
        if len(data) > self.limit // _SHARE or self._runtime.monotonic() < self._paused_until:
            return
        folder = self._folder_of(key)
        temporary = folder / f"{_TMP}{self._runtime.token()}"
        try:
            make_folder(str(folder.parent), durable=False)
            if not folder.is_dir():
                folder.mkdir(exist_ok=True, mode=0o700)
                give_folder(str(folder), str(folder.parent))
            try:
                temporary.write_bytes(self._checksum(key, name, data) + data)
                temporary.rename(folder / name)
            except BaseException:
                _remove(temporary)
                raise
        except FileNotFoundError:  # another process has just removed the folder
            return
        except PermissionError as error:
            if not self._is_shared:
                self._is_shared = True
                log.warning("a part of the cache is of another user: %s", error, extra={"op": "cache"})
            return
        except OSError as error:
            self._paused_until = self._runtime.monotonic() + _PAUSE_S
            extra = {"op": "cache", "error": type(error).__name__}
            log.warning("the cache in %s cannot be written: %s", self.folder, error.strerror, extra=extra)
            self._shrink()
            return
        with self._lock:
            self._unseen += len(data) + _CHECKSUM_BYTES
            looks = self._unseen >= self.limit // _LOOKS
            if looks:
                self._unseen = 0
        if looks:
            self._shrink()

    def drop(self, keys: Sequence[str]) -> None:
        """Forget what is kept of these keys."""
        for key in keys:
            rmtree(self._folder_of(key), ignore_errors=True)

    def _shrink(self) -> None:
        """Remove the files that were not used for longest, where there are too many bytes."""
        files = sorted(_files(self.folder))
        size = sum(file.size for file in files)
        if size <= self.limit:
            return
        for file in files:
            if size <= self.limit * _KEPT:
                return
            _remove(Path(file.path))
            size -= file.size

    def _folder_of(self, key: str) -> Path:
        digest = sha256(f"{self._place}\0{key}".encode()).hexdigest()
        return Path(self.folder, digest[:2], digest)

    def _checksum(self, key: str, name: str, data: bytes | memoryview) -> bytes:
        digest = blake2b(f"{self._place}\0{key}\0{name}\0".encode(), digest_size=_CHECKSUM_BYTES)
        digest.update(data)
        return digest.digest()


class DiskCacheBlob(CachedBlob):
    """`inner` behind a cache on disk."""

    def __init__(self, inner: Blob, disk: DiskCache) -> None:
        super().__init__(inner)
        self.disk = disk
        self._threads = Threads(_THREADS, "aiopersist cache")

    def __repr__(self) -> str:
        return repr(self.inner)

    def before(self, store: Blob) -> Blob:
        return DiskCacheBlob(store, self.disk)

    async def get(self, key: str) -> bytes | None:
        return await self._read(key, "whole", lambda: self.inner.get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return await self._read(key, f"{offset}-{length}", lambda: self.inner.get_range(key, offset, length))

    async def aclose(self) -> None:
        try:
            await self.inner.aclose()
        finally:
            self._threads.end()

    async def delete(self, keys: Sequence[str]) -> None:
        deleted = list(keys)
        await self.inner.delete(deleted)
        await self._threads.run(partial(self.disk.drop, deleted))

    async def facts(self) -> dict[str, str]:
        kept = f"{self.disk.folder}, at most {self.disk.limit / 1024**2:,.0f} MiB"
        return {**await self.inner.facts(), "cache": kept}

    async def probe(self) -> dict[str, str]:
        return await self.inner.probe()

    async def _read(self, key: str, name: str, fetch: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        if "/" not in key:
            return await fetch()
        stored = await self._threads.run(partial(self.disk.load, key, name))
        if stored is None and (stored := await fetch()) is not None:
            await self._threads.run(partial(self.disk.store, key, name, stored))
        return stored


def _files(folder: str) -> list[_CachedFile]:
    """The files of caches in the folder."""
    files = list[_CachedFile]()
    for at, folders, names in os.walk(folder):
        place = "" if at == folder else Path(at).relative_to(folder).as_posix() + "/"
        folders[:] = [name for name in folders if _OUR_FOLDERS.fullmatch(place + name)]
        for name in names:
            if not _OUR_FILES.fullmatch(place + name):
                continue
            path = os.path.join(at, name)
            with suppress(OSError):  # removed meanwhile
                state = os.stat(path)
                files.append(_CachedFile(state.st_mtime, state.st_size, path))
    return files


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()  # if it is empty
