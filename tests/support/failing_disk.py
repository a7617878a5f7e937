"""A disk that fails when it is told to: a VFS of SQLite that passes everything on to the system's, except for
the step that is to fail.

It needs SQLite as a shared library, as most Pythons have it; where it is not, `FailingDisk.get()` skips.
"""

import _sqlite3
import ctypes
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

WRITE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
READ = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
SYNC = CFUNCTYPE(c_int, c_void_p, c_int)
SHM_MAP = CFUNCTYPE(c_int, c_void_p, c_int, c_int, c_int, c_void_p)
OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)


class _Methods(Structure):
    """`sqlite3_io_methods`."""

    _fields_ = [
        ("version", c_int),
        ("close", c_void_p),
        ("read", READ),
        ("write", WRITE),
        ("truncate", TRUNCATE),
        ("sync", SYNC),
        ("others", c_void_p * 7),
        ("shm_map", SHM_MAP),
        ("more", c_void_p * 5),
    ]


class _File(Structure):
    """`sqlite3_file`; the system's own fields follow."""

    _fields_ = [("methods", POINTER(_Methods))]


class _Vfs(Structure):
    """`sqlite3_vfs`, of which only `open` is replaced."""

    _fields_ = [
        ("version", c_int),
        ("file_size", c_int),
        ("path_max", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", OPEN),
        ("others", c_void_p * 14),
    ]


class Fault(NamedTuple):
    """The `step`-th one of `kind` (counted from 0) ends with `code`, and all after it if it `lasts`. A write
    that is `torn` has written its first half."""

    kind: str
    step: int
    code: int
    torn: bool = False
    lasts: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.step} is {_NAMES[self.code]}{' torn' * self.torn}{' lasting' * self.lasts}"


_NAMES = {
    value: name for name, value in vars(sqlite3).items() if name.startswith(("SQLITE_IOERR_", "SQLITE_FULL"))
}


class FailingDisk:
    """Hands on what SQLite does with its files. `fault` is what goes wrong from now on; `steps` counts by
    kind what was done since: `read`, `write`, `sync`, `truncate`, `shm_map`."""

    def __init__(self, library: Any) -> None:
        self.fault: Fault | None = None
        self.steps = dict.fromkeys(("read", "write", "sync", "truncate", "shm_map"), 0)
        self._library = library
        self._tables: dict[int, _Methods] = {}
        library.sqlite3_memory_used.restype = c_int64
        library.sqlite3_hard_heap_limit64.argtypes = [c_int64]
        library.sqlite3_vfs_find.restype = POINTER(_Vfs)
        library.sqlite3_vfs_find.argtypes = [c_char_p]
        self._system = library.sqlite3_vfs_find(None)
        self._vfs = _Vfs.from_buffer_copy(self._system.contents)
        self._vfs.name = b"failing"
        self._vfs.open = OPEN(self._open)

    @classmethod
    @cache
    def get(cls) -> Self:
        """The disk of this process: files that were opened through it stay on it."""
        try:
            library = ctypes.CDLL(_sqlite3.__file__)
            found = library.sqlite3_vfs_find
        except (AttributeError, OSError):
            found = None
        if found is None:
            pytest.skip("SQLite is no shared library here")
        return cls(library)

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """What is opened meanwhile lies on this disk."""
        self.fault = None
        assert self._library.sqlite3_vfs_register(byref(self._vfs), 1) == sqlite3.SQLITE_OK
        try:
            yield self
        finally:
            self.arm(None)
            self.leave_memory(None)
            self._library.sqlite3_vfs_unregister(byref(self._vfs))

    def arm(self, fault: Fault | None) -> None:
        """From now on."""
        self.steps = dict.fromkeys(self.steps, 0)
        self.fault = fault

    def leave_memory(self, spare: int | None) -> None:
        """From now on SQLite gets only so many bytes more; `None`: as many as it wants."""
        limit = 0 if spare is None else self._library.sqlite3_memory_used() + spare
        self._library.sqlite3_hard_heap_limit64(limit)

    def _failing(self, kind: str) -> Fault | None:
        step, fault = self.steps[kind], self.fault
        self.steps[kind] += 1
        if fault is None or fault.kind != kind or step < fault.step:
            return None
        return fault if step == fault.step or fault.lasts else None

    def _open(self, vfs: int, name: int, file: int, flags: int, out: int) -> int:
        rc: int = self._system.contents.open(ctypes.addressof(self._system.contents), name, file, flags, out)
        methods = _File.from_address(file).methods
        if rc == sqlite3.SQLITE_OK and methods:
            address = ctypes.addressof(methods.contents)
            table = self._tables.get(address) or self._tables.setdefault(
                address, self._table(methods.contents)
            )
            _File.from_address(file).methods = ctypes.pointer(table)
        return rc

    def _table(self, system: _Methods) -> _Methods:
        table = _Methods.from_buffer_copy(system)

        def write(file: int, data: int, size: int, offset: int) -> int:
            if (fault := self._failing("write")) is None:
                return int(system.write(file, data, size, offset))
            if fault.torn:
                system.write(file, data, size // 2, offset)
            return fault.code

        def replaced(kind: str, call: Callable[..., int]) -> Callable[..., int]:
            def step(*arguments: Any) -> int:
                fault = self._failing(kind)
                return int(call(*arguments)) if fault is None else fault.code

            return step

        table.write = WRITE(write)
        table.read = READ(replaced("read", system.read))
        table.truncate = TRUNCATE(replaced("truncate", system.truncate))
        table.sync = SYNC(replaced("sync", system.sync))
        table.shm_map = SHM_MAP(replaced("shm_map", system.shm_map))
        return table


def after_a_crash(path: Path, folder: Path) -> Path:
    """The file as a crash of all processes would leave it. Copied by another process: to close a file gives
    up the locks that this one has on it."""
    folder.mkdir()
    files = [str(file) for file in (path, path.with_name(path.name + "-wal")) if file.exists()]
    subprocess.run(["cp", *files, str(folder)], check=True)
    return folder / path.name


CACHE_PAGES = 5
