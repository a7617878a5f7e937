"""Writes rows to standard output or to a file, batch by batch."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, BinaryIO, Protocol

import pydantic_core

from aiopersist.data.lazy import ipc, pa, pq


class Format(StrEnum):
    """A format of written contents."""

    TABLE = "table"
    NDJSON = "ndjson"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"


BINARY = {Format.PARQUET, Format.ARROW}


class RowSink(Protocol):
    """Takes batches, like Arrow's writers. `close` writes the end of the format."""

    def write(self, batch: "pa.RecordBatch") -> None: ...
    def close(self) -> None: ...


def sink_of(form: Format, file: BinaryIO, schema: "pa.Schema") -> RowSink:
    """A sink of that format for batches of that schema."""
    if form not in BINARY:
        return NdjsonSink(file) if form is Format.NDJSON else CsvSink(file, schema)
    flowing = pa.PythonFile(_ForwardOnly(file), mode="w")
    sink: RowSink = (
        ipc.new_stream(flowing, schema)
        if form is Format.ARROW
        else pq.ParquetWriter(flowing, schema, compression="zstd")  # a batch is a row group
    )
    return sink


class NdjsonSink:
    """One line per row."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, batch: "pa.RecordBatch") -> None:
        self._file.write("".join(as_json(row) + "\n" for row in batch.to_pylist()).encode())

    def close(self) -> None:
        """The format has no end."""


class CsvSink:
    """A line of names, then one line per row."""

    def __init__(self, file: BinaryIO, schema: "pa.Schema") -> None:
        self._file = file
        self._write([schema.names])

    def write(self, batch: "pa.RecordBatch") -> None:
        self._write(row.values() for row in batch.to_pylist())

    def _write(self, rows: Iterable[Iterable[Any]]) -> None:
        self._file.write("".join(",".join(map(quoted, row)) + "\n" for row in rows).encode())

    def close(self) -> None:
        """The format has no end."""


class _ForwardOnly:
    """A file that Arrow writes forward only, since a pipe has no position, and does not close."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.flush()


def quoted(value: Any) -> str:
    """A value as a cell of CSV: an empty cell is null, an empty text is in quotes."""
    text = cell(value)
    if value is not None and (not text or any(character in text for character in '",\r\n')):
        return '"' + text.replace('"', '""') + '"'
    return text


def cell(value: Any) -> str:
    """A value as text: texts unchanged, everything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else as_json(value).strip('"')


def as_json(value: Any) -> str:
    return pydantic_core.to_json(value, bytes_mode="base64", inf_nan_mode="strings").decode()
