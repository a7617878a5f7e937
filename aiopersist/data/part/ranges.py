"""Fetched ranges of a file's bytes, as a file that Parquet can read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from io import SEEK_CUR, SEEK_END, SEEK_SET
from typing import Any

from aiopersist.data.lazy import pa


class Ranges:
    """Ranges `(offset, data)` of a file of `size` bytes."""

    def __init__(self, fetched: Iterable[tuple[int, bytes]], size: int) -> None:
        self._fetched = sorted(fetched, key=lambda span: span[0])
        self._offsets = [offset for offset, _ in self._fetched]
        self.size = size

    def view(self, offset: int, length: int) -> memoryview | None:
        """The bytes `[offset, offset + length)`; `None` unless one range holds them all."""
        for at in range(bisect_right(self._offsets, offset) - 1, -1, -1):
            start, data = self._fetched[at]
            if start + len(data) >= offset + length:
                return memoryview(data)[offset - start : offset - start + length]
        return None

    def sequential_file(self) -> Any:
        """A file to read from in one thread, without a copy."""
        return pa.PythonFile(_File(self), mode="r")

    def file(self) -> Any:
        """A file that Arrow's threads may read from, in Arrow's own memory. The threads release it a moment
        after they return the result. If Python's memory were released then, while the interpreter ends, the
        process would abort. Memory pages that no range covers are never touched."""
        buffer = pa.allocate_buffer(self.size)
        view = memoryview(buffer).cast("B")
        for offset, data in self._fetched:
            view[offset : offset + len(data)] = data
        return pa.BufferReader(buffer)


class _File:
    """The methods that Arrow calls on a file to read."""

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
            raise OSError(f"the bytes from {self._at} on were not fetched")
        self._at += len(view)
        return view

    def close(self) -> None: ...
    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False
