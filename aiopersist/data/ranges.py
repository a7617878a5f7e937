"""Fetched ranges of bytes of a file that is not all here, as a file that Parquet can read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from io import RawIOBase
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

    def file(self) -> Any:
        """A file to read from; in memory without copies if one piece is the whole."""
        start, data = self._pieces[0]
        if start == 0 and len(data) == self.size:
            return pa.BufferReader(data)
        return pa.PythonFile(_SparseFile(self), mode="r")


class _SparseFile(RawIOBase):
    """Reads what is there; reading anything else is an error."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._ranges.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        wanted = self._ranges.size - self._at if size < 0 else min(size, self._ranges.size - self._at)
        data = self._ranges.view(self._at, wanted)
        if data is None:
            raise OSError(f"bytes {self._at} to {self._at + wanted} were not fetched")
        self._at += wanted
        return bytes(data)
