"""Writes all files of commands.

A regular file appears complete or not at all: a temporary file beside it is written, then renamed. A replaced
file keeps its mode and, if allowed, its owner; a link is followed. Other files, like a device, a FIFO or
`/dev/stdout`, are written directly.
"""

import errno
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import BinaryIO

from aiopersist.base.runtime import SYSTEM
from aiopersist.cli.command import CannotBegin

LOOK_S = 0.05  # between two looks whether a FIFO has a reader


@asynccontextmanager
async def written(path: str) -> AsyncIterator[BinaryIO]:
    """The file, to be written. Waits for the reader of a FIFO."""
    status = _status_of(path)
    is_regular = status is None or stat.S_ISREG(status.st_mode)
    with _replaced(path, status) if is_regular else os.fdopen(await _opened(path), "wb") as file:
        yield file


def _status_of(path: str) -> os.stat_result | None:
    """The status of an existing file, behind links; `CannotBegin` for a folder."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise CannotBegin(f"{path}: it is a folder")
    return status


async def _opened(path: str) -> int:
    """A descriptor of an existing file. It creates nothing, and no call blocks for the reader of a FIFO."""
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno != errno.ENXIO or not stat.S_ISFIFO(os.stat(path).st_mode):
                raise
            await SYSTEM.sleep(LOOK_S)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


@contextmanager
def _replaced(path: str, status: os.stat_result | None) -> Iterator[BinaryIO]:
    path = os.path.realpath(path)
    if status is not None and not os.access(path, os.W_OK):
        raise CannotBegin(f"{path}: no permission to write it")
    beside = f"{path}.{SYSTEM.token()}.tmp"  # no pid: another container may have the same
    descriptor = _created(beside, status)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if status is not None:
                _copy_mode(file.fileno(), status)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _created(path: str, status: os.stat_result | None) -> int:
    """A new file. If it replaces another one, only its owner may open it at first."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o666 if status is None else 0o600)
    except PermissionError as error:
        folder = os.path.dirname(path)
        text = f"no permission to write in {folder}: the file is written beside its place, then renamed"
        raise CannotBegin(text) from error


def _copy_mode(descriptor: int, status: os.stat_result) -> None:
    """Give the file the owner and the mode of the file that it replaces. If the owner cannot be set, the
    set-uid and set-gid bits are dropped."""
    mode = stat.S_IMODE(status.st_mode)
    own = os.fstat(descriptor)
    if (own.st_uid, own.st_gid) != (status.st_uid, status.st_gid):
        try:
            os.fchown(descriptor, status.st_uid, status.st_gid)
        except PermissionError:
            mode &= ~(stat.S_ISUID | stat.S_ISGID)
    os.fchmod(descriptor, mode)
