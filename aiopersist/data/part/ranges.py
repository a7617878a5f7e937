"""Fetched ranges of bytes of a file that is not all here, as a file that Parquet can read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from io import SEEK_CUR, SEEK_END, SEEK_SET
from typing import Any

from aiopersist.data.lazy import pa


class Ranges:
    """Pieces of a file of `size` bytes, each `(offset, data)`."""

    def __init__(self, pieces: Iterable[tuple[int, bytes]], size: int) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece[0])
        self._offsets = [offset for offset, _ in self._pieces]
        self.size = size

    def view(self, offset: int, length: int) -> memoryview | None:
        """The bytes `[offset, offset + length)`; `None` unless one piece holds them all."""
        for at in range(bisect_right(self._offsets, offset) - 1, -1, -1):
            start, data = self._pieces[at]
            if start + len(data) >= offset + length:
                return memoryview(data)[offset - start : offset - start + length]
        return None

    def sequential_file(self) -> Any:
        """A file to read from in one thread, without a copy."""
        return pa.PythonFile(_File(self), mode="r")

    def file(self) -> Any:
        """A file that Arrow's threads may read from, in memory of Arrow's own. They let go of what they read
        a moment after they told the result; were it memory of Python, that could be while the interpreter
        ends, and the process would abort. Pages that no piece covers are never touched."""
        buffer = pa.allocate_buffer(self.size)
        bytes_of = memoryview(buffer).cast("B")
        for offset, data in self._pieces:
            bytes_of[offset : offset + len(data)] = data
        return pa.BufferReader(buffer)


class _File:
    """What Arrow asks of a file that is read."""

    closed = False

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._at = 0

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._at = offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._ranges.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, length: int) -> memoryview:
        view = self._ranges.view(self._at, min(length, self._ranges.size - self._at))
        if view is None:
            raise OSError(f"bytes {self._at} and following were not fetched")
        self._at += len(view)
        return view

    def close(self) -> None: ...
    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False
