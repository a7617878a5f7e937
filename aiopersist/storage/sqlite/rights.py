"""Who may write a SQLite file, asked before it is opened.

SQLite makes a log, `-wal`, and its index, `-shm`, beside a file that it opens. They belong to the user of the
process, even if that user may write the folder but not the file. Then others that may write the file cannot
write its log, and all are locked out until somebody deletes these files. So a file is not opened if this
process may not write it, or would make files beside it that others cannot use.
"""

import os
import stat
import sys

from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.folders import forbidden, give, may_write


def make_file(path: str) -> None:
    """Make the file, if it is not there, with the rights that this process gives new files: SQLite itself
    gives none to the group, whatever the umask. To be called while no other thread opens the file: closing a
    descriptor of a file gives up the locks that other threads have of it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return
    try:
        give(fd, os.path.dirname(path))
    finally:
        os.close(fd)


def check_rights(path: str) -> None:
    """`StorageUnavailable` unless this process may write the file and what is beside it, and others may write
    what it would make there."""
    files = [path, f"{path}-wal", f"{path}-shm"]
    existing = [file for file in files if os.path.exists(file)]
    folder = os.path.dirname(path)
    for place in [*existing, *([folder] if len(existing) < len(files) else [])]:
        if not may_write(place):
            raise forbidden(place)
    if existing[:1] == [path]:
        _check_group(os.stat(path), os.stat(folder), path)


def _check_group(file: os.stat_result, folder: os.stat_result, path: str) -> None:
    """What root makes SQLite gives to the owner of the file; all else belongs to its maker."""
    if not hasattr(os, "geteuid") or os.geteuid() in (0, file.st_uid) or file.st_mode & stat.S_IWOTH:
        return
    of_folder = sys.platform != "linux" or folder.st_mode & stat.S_ISGID
    group = folder.st_gid if of_folder else os.getegid()
    if group != file.st_gid:
        text = f"what user {os.geteuid()} makes beside it is of group {group}, and not of {file.st_gid}"
        advice = f"others could not use it: chmod g+s {os.path.dirname(path)}"
        raise StorageUnavailable(f"{path}: {text}: {advice}", retry=False)
