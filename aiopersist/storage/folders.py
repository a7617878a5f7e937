"""Files and folders that survive a power failure.

A new name is durable once the folder that holds it is fsynced. So a folder is made together with the missing
folders above it, and the parent of each is fsynced.

What root makes belongs to the owner of the folder above it: root in a container, say, must not leave files
that the owner of the volume can neither write nor delete.
"""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress

from aiopersist.base.errors import Indeterminate, InvalidLocation, StorageUnavailable

try:
    import fcntl
except ImportError:  # only Unix has it
    fcntl = None  # type: ignore[assignment]

_WAITING_DOES_NOT_HELP = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_NOT_KNOWN_HERE = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS}


def fsync(fd: int) -> None:
    """Make the contents of an open file durable, or the names in an open folder. On macOS `os.fsync` stops at
    the drive, whose cache a power failure empties: there `F_FULLFSYNC` flushes that, too, on the file systems
    that know it."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(fd, full)
        except OSError as error:
            if error.errno not in _NOT_KNOWN_HERE:  # a second fsync would report a success that means nothing
                raise
        else:
            return
    os.fsync(fd)


def fsync_folder(path: str) -> None:
    """Make the names in the folder durable."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: str, *, durable: bool = True) -> None:
    """Make the folder and those above it, durably if asked for. If the fsync of a parent fails, the new
    folder is removed again: a second fsync would report a success that means nothing. Raises
    `FileNotFoundError` if another process removes a folder above at this moment."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent, durable=durable)
    while not _made_here(path) and not _is_folder(path):
        pass  # another process made it, and removed it again
    give_folder(path, parent)
    if not durable:
        return
    try:
        fsync_folder(parent)
    except OSError:
        with suppress(OSError):  # no longer empty: another process uses it, and makes it durable
            os.rmdir(path)
        raise


def give(fd: int, folder: str) -> None:
    """Give an open file or folder that root has made to the owner of the folder above."""
    if _is_root():
        owner = os.stat(folder)
        with suppress(OSError):  # root within a container may not be able to
            os.fchown(fd, owner.st_uid, owner.st_gid)


def give_folder(path: str, parent: str) -> None:
    """The same for a folder that was just made."""
    if _is_root() and os.stat(parent).st_uid != 0:
        with suppress(OSError):  # it went again, or is a link that somebody put here: that is not followed
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                give(fd, parent)
            finally:
                os.close(fd)


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def may_write(path: str) -> bool:
    """Whether this process may write the file, or make and delete files in the folder."""
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def forbidden(path: str) -> StorageUnavailable:
    """The error for a file or a folder that this process may not write."""
    state = os.stat(path)
    whose = f"of user {state.st_uid} and group {state.st_gid}, with mode {state.st_mode & 0o7777:o}"
    text = f"{path}: user {os.geteuid()} may not write it: it is {whose}"
    return StorageUnavailable(text, retry=False)


def _made_here(path: str) -> bool:
    """Make the folder; false if something is there. Another process may have made a folder at this moment,
    and may not have fsynced its name yet."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    return True


def _is_folder(path: str) -> bool:
    """Whether a folder is there; false if nothing is, `FileExistsError` if something else is."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not os.path.islink(path):
            return False
        mode = 0
    if not stat.S_ISDIR(mode):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    return True


def make_root(folder: str, scheme: str, make: Callable[[str], None] = make_folder) -> None:
    """Make a folder that a URL of this scheme names; `InvalidLocation` if it, or one above it, is a file."""
    try:
        make(folder)
    except (FileExistsError, NotADirectoryError) as error:
        if (what := in_the_way(folder)) is None:
            raise
        raise InvalidLocation(f"{scheme}: {what} is not a directory") from error


def in_the_way(folder: str) -> str | None:
    """The path of the folder, or of the first one above it, if something that is no folder is there."""
    while not os.path.isdir(folder):
        if os.path.lexists(folder) or folder == os.path.dirname(folder):
            return folder
        folder = os.path.dirname(folder)
    return None


def mapped(error: OSError, what: str, *, determinate: bool = True) -> StorageUnavailable | Indeterminate:
    """The error of this library for one of the file system."""
    text = f"{what}: {error.strerror or error}"
    if error.errno in _WAITING_DOES_NOT_HELP:
        return StorageUnavailable(text, retry=False)
    return StorageUnavailable(text) if determinate else Indeterminate(text)
