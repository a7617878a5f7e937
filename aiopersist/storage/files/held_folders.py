"""Folders that files are moved into, while anybody may remove those that are empty.

A name is durable once its folder was fsynced, and the names of the folders above it were too. That is done
once for a folder, which is held open from then on. What is moved into it by its descriptor lies in that very
folder, which then has been there all the time, with all above it: a folder that holds something cannot be
removed. Or the move fails, since the folder was removed (another may have its name by now, and perhaps not
durably), and it is made anew.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from aiopersist.storage.folders import fsync_folder, make_folder

HELD_MAX = 64  # descriptors; of more folders the one that was used least lately is let go


class HeldFolders:
    """Those below `root`, and itself. For many threads."""

    def __init__(self, root: str, fsync: bool) -> None:
        self._root = root
        self._fsync = fsync
        self._lock = threading.Lock()
        self._held: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def opened(self, folder: str) -> Iterator[int]:
        """A descriptor of the folder, which is made durably where it is not there. It may be removed at any
        time: then a move into it is a `FileNotFoundError`, as may be the making: `forget` it, try again."""
        fd = self._known(folder)
        if fd is None:
            fd = self._made(folder)
        try:
            yield fd
        finally:
            os.close(fd)

    def forget(self, folder: str) -> None:
        """Let go of it."""
        with self._lock:
            if (fd := self._held.pop(folder, None)) is not None:
                os.close(fd)

    def close(self) -> None:
        """Let go of all."""
        for folder in list(self._held):
            self.forget(folder)

    __del__ = close

    def _known(self, folder: str) -> int | None:
        with self._lock:
            if folder not in self._held:
                return None
            self._held.move_to_end(folder)
            return os.dup(self._held[folder])

    def _made(self, folder: str) -> int:
        if self._fsync:
            make_folder(folder)
        else:
            os.makedirs(folder, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            if self._fsync:  # who made it may not have got to that
                self._make_durable(folder)
            self._hold(folder, os.dup(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make_durable(self, folder: str) -> None:
        """The names of the folder and of those above it, up to the root's."""
        while True:
            above = os.path.dirname(folder)
            fsync_folder(above)
            if folder == self._root:
                return
            folder = above

    def _hold(self, folder: str, fd: int) -> None:
        with self._lock:
            before = self._held.pop(folder, None)
            self._held[folder] = fd
            last = self._held.popitem(last=False)[1] if len(self._held) > HELD_MAX else None
        for gone in (before, last):
            if gone is not None:
                os.close(gone)


def remove_empty(folder: str, root: str, folders: HeldFolders) -> None:
    """Remove the folder and those above it below the root, as far as they are empty."""
    while folder != root:
        try:
            os.rmdir(folder)
        except OSError:  # not empty, or gone
            return
        folders.forget(folder)
        folder = os.path.dirname(folder)
