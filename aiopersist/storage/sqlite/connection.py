"""Connections that know which files they have open.

A connection goes on with its files, though they were deleted, or others are at their paths by now: after a
restore from a backup, say, or where the folder was moved away. What it commits then no other process finds,
and a crash loses it.

The log may go without anybody deleting it. The last process that closes the file deletes its log, and takes
itself for the last one by locks of the file. A process loses *all* its locks of a file whenever it closes
*any* descriptor of it (so it is with POSIX locks), such as that of a backup that it made by copying.

So each store opens one file only, and a result counts only if the file and its log are still at their paths.
It cannot heal by opening them anew: a connection that closes may write its old log to the file.

The log lies beside the name by which a file was opened; a symbolic link is followed first. A file with
several names would have several logs, and who opens it by one name would not see what was committed by
another.
"""

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.sqlite import forks as forks
from aiopersist.storage.sqlite.forks import FileId


class KnownFiles(sqlite3.Connection):
    """A connection, the database that it has open, and its log."""

    database: FileId | None = None
    log: FileId | None = None

    def know(self, path: str) -> None:
        """Take the files at the path for those that are open."""
        self.database, self.log = file_id(path), file_id(_log(path))

    def are_at(self, path: str) -> bool:
        """Whether the files at the path are those that are open."""
        return self.database == file_id(path) and self.log == file_id(_log(path))

    def close(self) -> None:
        super().close()
        forks.closed(self)

    def check_at(self, path: str) -> None:
        """`StorageUnavailable` unless they are."""
        check_same(self.database, file_id(path), path)
        check_same(self.log, file_id(_log(path)), _log(path))


def check_same(opened: FileId | None, there: FileId | None, path: str) -> None:
    """`StorageUnavailable` if another file is at the path than the opened one, or none."""
    if opened != there:
        text = f"{path}: the file was removed or replaced while it was open: open it anew"
        raise StorageUnavailable(text, retry=False)


def path_of(path: str | os.PathLike[str]) -> str:
    """The absolute path of the file to which the path leads: there the log is."""
    found = os.path.abspath(path)
    return os.path.realpath(found) if os.path.islink(found) else found


def _check_one_name(path: str) -> None:
    """`StorageUnavailable` if the file has other names, by which others would open it with another log."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if (names := os.stat(path).st_nlink) > 1:
            text = f"the file has {names} names (hard links), each of which would have a log of its own"
            raise StorageUnavailable(f"{path}: {text}: copy it to a file of its own", retry=False)


def file_id(path: str) -> FileId | None:
    """The file at the path, if there is one."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


_opening = threading.Lock()


def connected(
    path: str,
    options: str,
    busy_timeout_s: float,
    prepare: Callable[[sqlite3.Connection], None],
    make: Callable[[str], None] = lambda path: None,
) -> KnownFiles:
    """A prepared connection to the file. `make` is called while no other thread opens one."""
    url = f"{Path(path).as_uri()}?{options}"
    with _opening:
        make(path)
        forks.check_openable(path, file_id(path))
        _check_one_name(path)
        connection = sqlite3.connect(  # the worker is one thread at a time, and not always the same
            url,
            uri=True,
            timeout=busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=KnownFiles,
        )
    try:
        if (file := file_id(path)) is not None:
            forks.opened(connection, file)
        prepare(connection)
        connection.know(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _log(path: str) -> str:
    return f"{path}-wal"
