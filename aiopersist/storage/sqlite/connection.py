"""Connections that know which files they have open.

A connection goes on with its files even if they were deleted or replaced: by a restore from a backup, say, or
if the folder was moved away. No other process finds what it commits then, and a crash loses it.

The log may vanish although nobody deletes it. The last process that closes the file deletes its log, and
locks of the file tell which one is the last. But a process loses *all* its locks of a file when it closes
*any* descriptor of it (a rule of POSIX locks), such as that of a backup by copying.

So each store opens one file only, and a result counts only if the file and its log are still at their paths.
It cannot heal by opening them anew: a connection that closes may write its old log to the file.

The log lies beside the name by which a file was opened; a symbolic link is followed first. A file with
several names would have several logs: commits by one name would not be seen by another.
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


def check_same(opened: FileId | None, current: FileId | None, path: str) -> None:
    """`StorageUnavailable` if another file is at the path than the opened one, or none."""
    if opened != current:
        text = f"{path}: the file was removed or replaced while it was open: open it anew"
        raise StorageUnavailable(text, retry=False)


def path_of(path: str | os.PathLike[str]) -> str:
    """The absolute path of the file to which the path leads: there the log is."""
    absolute = os.path.abspath(path)
    return os.path.realpath(absolute) if os.path.islink(absolute) else absolute


def _check_one_name(path: str) -> None:
    """`StorageUnavailable` if the file has other names, by which others would open it with another log."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if (names := os.stat(path).st_nlink) > 1:
            text = f"the file has {names} names (hard links), each of which would have a log of its own"
            raise StorageUnavailable(f"{path}: {text}: copy it to a file of its own", retry=False)


def file_id(path: str) -> FileId | None:
    """The file at the path, if there is one."""
    try:
        state = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return state.st_dev, state.st_ino


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
