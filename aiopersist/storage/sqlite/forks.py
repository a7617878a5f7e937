"""What a child of `fork` must not do with SQLite, and how it is kept from it.

A child begins with a copy of its parent's memory: SQLite's too, with which files are open and which locks of
them are held. The kernel gives it none of these locks. So:

- *A file that the parent had open* is not opened in the child. SQLite keeps one record of the locks of a file
  for all connections of a process, whatever name they opened it by; the child would find the parent's locks
  there, and take none of its own. The parent would then delete the log, as the last one that closes the file.
- *A connection of the parent* is never closed in the child, neither by the collector nor at the end of the
  interpreter: it might empty the log, or delete it. The child keeps a reference that nobody gives back.
- *A thread that is within SQLite* while another one forks leaves mutexes of SQLite held in the child. So its
  work is `kept_from_forks` (in `worker`), and no fork falls into a commit. If one did nevertheless, since it
  does not wait without end, the child opens no file of SQLite at all.
"""

import ctypes
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import suppress
from weakref import WeakKeyDictionary

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.runtime import FORK_ADVICE
from aiopersist.base.threads import was_forked_within

FileId = tuple[int, int]
"""The device and the number of a file."""

_open = WeakKeyDictionary[sqlite3.Connection, FileId]()
_inherited = set[FileId]()  # SQLite never forgets them


def check_openable(path: str, file: FileId | None) -> None:
    """`InvalidUsage` where `file`, which is at the path, must not be opened in this process."""
    if was_forked_within():
        what = "this process was forked while a thread had locks that it would need"
    elif file in _inherited:
        what = "this process is a fork of one that had the file open, so SQLite's locks do not hold here"
    else:
        return
    raise InvalidUsage(UsageKind.WRONG_LOOP, f"{path}: {what}: {FORK_ADVICE}")


def opened(connection: sqlite3.Connection, file: FileId) -> None:
    """The connection has the file open; to be told before its first statement."""
    _open[connection] = file


def closed(connection: sqlite3.Connection) -> None:
    """The connection was closed."""
    _open.pop(connection, None)


def _begin_as_child() -> None:
    for connection, file in _open.items():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        _inherited.add(file)
    _open.clear()
    _inherited.update(_open_files())


def _open_files() -> Iterator[FileId]:
    """All files that this process has open: also those of connections of the application, and of connections
    that were closed in vain, since a statement of theirs was under way."""
    descriptors = list[str]()
    with suppress(OSError):  # not every system has this folder, and not every container
        descriptors = os.listdir("/dev/fd")
    for descriptor in descriptors:
        with suppress(OSError):  # that of the listing is closed by now
            state = os.fstat(int(descriptor))
            if stat.S_ISREG(state.st_mode):
                yield state.st_dev, state.st_ino


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_as_child)
