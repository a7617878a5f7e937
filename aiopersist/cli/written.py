"""Files that commands write: all of them go through here.

A regular file is whole or not there: it is written beside, and renamed. One that is there keeps its mode and,
where that is allowed, its owner; a link leads to the file that it names. What is no regular file, such as a
device, a FIFO or `/dev/stdout`, is written to as it is.
"""

import errno
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import BinaryIO

from aiopersist.base.runtime import SYSTEM
from aiopersist.cli.command import CannotBegin

LOOK_S = 0.05  # whether somebody reads a FIFO


@asynccontextmanager
async def written(path: str) -> AsyncIterator[BinaryIO]:
    """The file of that path, to be written. A FIFO waits for its reader."""
    there = _there(path)
    is_regular = there is None or stat.S_ISREG(there.st_mode)
    with _replaced(path, there) if is_regular else os.fdopen(await _opened(path), "wb") as file:
        yield file


def _there(path: str) -> os.stat_result | None:
    """What is there, behind links; `CannotBegin` for a folder."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(there.st_mode):
        raise CannotBegin(f"{path}: it is a folder")
    return there


async def _opened(path: str) -> int:
    """A descriptor of what is there. Nothing is made, and a FIFO is not waited for by a call that blocks."""
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
def _replaced(path: str, there: os.stat_result | None) -> Iterator[BinaryIO]:
    path = os.path.realpath(path)
    if there is not None and not os.access(path, os.W_OK):
        raise CannotBegin(f"{path}: it may not be written")
    beside = f"{path}.{SYSTEM.token()}.tmp"  # a pid is that of others, too, in another container
    descriptor = _made(beside, there)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if there is not None:
                _like(file.fileno(), there)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _made(path: str, there: os.stat_result | None) -> int:
    """A new file, which others may not open while one that they may not read is replaced."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o666 if there is None else 0o600)
    except PermissionError as error:
        folder = os.path.dirname(path)
        text = f"{folder} may not be written: a file in it is written beside, and renamed when it is whole"
        raise CannotBegin(text) from error


def _like(descriptor: int, there: os.stat_result) -> None:
    """Give the file the owner and the mode of the one that it replaces. Of another owner whom it cannot be
    given to, it has no bits that would let others run it as ours."""
    mode = stat.S_IMODE(there.st_mode)
    ours = os.fstat(descriptor)
    if (ours.st_uid, ours.st_gid) != (there.st_uid, there.st_gid):
        try:
            os.fchown(descriptor, there.st_uid, there.st_gid)
        except PermissionError:
            mode &= ~(stat.S_ISUID | stat.S_ISGID)
    os.fchmod(descriptor, mode)
