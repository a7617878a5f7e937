"""Open folders that files are moved into, while other processes may remove empty folders.

A name is durable once its folder is fsynced and the names of the folders above are durable. The store makes a
folder durable once, holds it open from then on, and moves files into it by its descriptor. A moved file lies
in that very folder, so the folder and all above it still exist: a folder that is not empty cannot be removed.
If the folder was removed, the move fails, and the store makes it durable anew: another folder may have its
name by now, perhaps not durably. If the folder was moved away, nobody would find a file in it: so the store
compares it with the one at the path before each move.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from aiopersist.storage.folders import fsync_folder, make_folder

OPEN_MAX = 64  # descriptors; beyond that the least recently used folder is closed


class OpenFolders:
    """Open folders at or below `root`; safe for many threads."""

    def __init__(self, root: str, fsync: bool) -> None:
        self._root = root
        self._fsync = fsync
        self._lock = threading.Lock()
        self._open_fds: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def opened(self, folder: str) -> Iterator[int]:
        """A descriptor of the folder, which is made durably if it does not exist. The folder may be removed
        at any time: then making it, or a move into it, is a `FileNotFoundError`. `forget` it and retry."""
        fd = self._opened_before(folder)
        if fd is None:
            fd = self._open(folder)
        try:
            yield fd
        finally:
            os.close(fd)

    def forget(self, folder: str) -> None:
        """Close the folder's descriptor."""
        with self._lock:
            if (fd := self._open_fds.pop(folder, None)) is not None:
                os.close(fd)

    def close(self) -> None:
        """Close all descriptors."""
        for folder in list(self._open_fds):
            self.forget(folder)

    def __del__(self) -> None:
        for fd in self._open_fds.values():  # without the lock, which after a fork may be held for ever
            os.close(fd)

    def _opened_before(self, folder: str) -> int | None:
        with self._lock:
            fd = self._open_fds.get(folder)
            if fd is None:
                return None
            if not _is_at(fd, folder):
                os.close(self._open_fds.pop(folder))
                return None
            self._open_fds.move_to_end(folder)
            return os.dup(fd)

    def _open(self, folder: str) -> int:
        make_folder(folder, durable=self._fsync)
        fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            if self._fsync:  # another process that made it may not have done so yet
                self._make_durable(folder)
            self._hold(folder, os.dup(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make_durable(self, folder: str) -> None:
        """Fsync the names of the folder and of those above it, up to the root."""
        while True:
            above = os.path.dirname(folder)
            fsync_folder(above)
            if folder == self._root:
                return
            folder = above

    def _hold(self, folder: str, fd: int) -> None:
        with self._lock:
            before = self._open_fds.pop(folder, None)
            self._open_fds[folder] = fd
            last = self._open_fds.popitem(last=False)[1] if len(self._open_fds) > OPEN_MAX else None
        for old in (before, last):
            if old is not None:
                os.close(old)


def _is_at(fd: int, folder: str) -> bool:
    """Whether the open folder is the one at the path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False


def remove_empty(folder: str, root: str, folders: OpenFolders) -> None:
    """Remove the folder, and those above it below the root, as far as they are empty."""
    while folder != root:
        try:
            os.rmdir(folder)
        except OSError:  # not empty, or gone
            return
        folders.forget(folder)
        folder = os.path.dirname(folder)
