"""Files of columns, read block by block: Parquet, CSV, NDJSON and Arrow, and standard input."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import pyarrow.csv as pa_csv  # type: ignore[import-untyped]  # pyarrow ships no stubs

from aiopersist.cli.command import CannotBegin, Problems
from aiopersist.cli.formats import Format
from aiopersist.cli.ndjson import BLOCK_BYTES, Types, read_ndjson
from aiopersist.data.lazy import ipc, pa, pq

STDIN = "-"
BATCH_ROWS = 65_536  # of Parquet
ENDINGS = {
    ".parquet": Format.PARQUET,
    ".csv": Format.CSV,
    ".ndjson": Format.NDJSON,
    ".jsonl": Format.NDJSON,
    ".arrow": Format.ARROW,
    ".arrows": Format.ARROW,
    ".ipc": Format.ARROW,
    ".feather": Format.ARROW,
}

Batches = Iterator["pa.RecordBatch | pa.Table"]


def format_of_file(path: str, form: Format | None) -> Format:
    """The format that the user chose, or that the name ends with."""
    if form is Format.TABLE:
        raise CannotBegin("--format table is for terminals: choose parquet, csv, ndjson or arrow")
    chosen = form or ENDINGS.get(Path(path).suffix.lower())
    if chosen is None:
        raise CannotBegin(f"{path}: add --format parquet, csv, ndjson or arrow")
    return chosen


@contextmanager
def opened(path: str, form: Format) -> Iterator[BinaryIO]:
    """The file, or standard input. A pipe is spooled to disk if the format needs its end first."""
    with nullcontext(standard_input()) if path == STDIN else open(path, "rb") as file:
        if form in (Format.CSV, Format.NDJSON) or file.seekable():
            yield file
            return
        with tempfile.TemporaryFile() as spool:
            shutil.copyfileobj(file, spool)
            spool.seek(0)
            yield spool


def standard_input() -> BinaryIO:
    """The bytes of standard input; `CannotBegin` if it is closed."""
    if sys.stdin is None:
        raise CannotBegin("standard input is closed")
    return sys.stdin.buffer


def size_of(paths: Sequence[str]) -> int | None:
    """Bytes of all files; `None` if one is a pipe, of unknown length."""
    return None if any(map(is_pipe, paths)) else sum(map(os.path.getsize, paths))


def is_pipe(path: str) -> bool:
    """Whether it is standard input or no regular file, like a FIFO, so that it can be read only once."""
    return path == STDIN or not os.path.isfile(path)


def batches_of(file: BinaryIO, form: Format, types: Types) -> tuple["pa.Schema", Batches]:
    """The columns and the rows of a file."""
    columns, batches = READERS[form](file, types)
    _check_names(columns)
    return columns, _valid(batches)


def check_exist(paths: Sequence[str]) -> None:
    """`CannotBegin` for a missing file."""
    for path in paths:
        if path != STDIN and not Path(path).exists():
            raise CannotBegin(f"{path}: no such file")
        if path != STDIN and Path(path).is_dir():
            raise CannotBegin(f"{path}: it is a folder")


@contextmanager
def bad_rows(path: str) -> Iterator[None]:
    """Turns Arrow's errors about a file into `Problems` that name it."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise Problems(f"{path}: {' '.join(str(error).split())}; nothing was written") from None


def _check_names(fields: Iterable["pa.Field"]) -> None:
    """`UnicodeDecodeError` for names that are no UTF-8; Arrow decodes names only on access."""
    for field in fields:
        if field.name and pa.types.is_nested(field.type):
            _check_names(map(field.type.field, range(field.type.num_fields)))


def _valid(batches: Batches) -> Batches:
    """The batches, validated: damaged files can make columns that crash the process."""
    for batch in batches:
        batch.validate(full=True)
        yield batch


def _parquet(file: BinaryIO, types: Types) -> tuple["pa.Schema", Batches]:
    parquet = pq.ParquetFile(file)
    return parquet.schema_arrow, parquet.iter_batches(BATCH_ROWS)


def _arrow(file: BinaryIO, types: Types) -> tuple["pa.Schema", Batches]:
    magic = file.read(6)
    file.seek(0)
    if magic != b"ARROW1":
        stream = ipc.open_stream(file)
        return stream.schema, iter(stream)
    whole = ipc.open_file(file)
    return whole.schema, (whole.get_batch(number) for number in range(whole.num_record_batches))


def _csv(file: BinaryIO, types: Types) -> tuple["pa.Schema", Batches]:
    """An empty cell is null, an empty text in quotes is a text."""
    nulls = {"null_values": [""], "strings_can_be_null": True, "quoted_strings_can_be_null": False}
    reader = pa_csv.open_csv(
        file,
        read_options=pa_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),  # errors name rows then
        parse_options=pa_csv.ParseOptions(newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(column_types=dict(types(())), **nulls),
    )
    return reader.schema, iter(reader)


READERS: dict[Format, Callable[[BinaryIO, Types], tuple["pa.Schema", Batches]]] = {
    Format.PARQUET: _parquet,
    Format.ARROW: _arrow,
    Format.CSV: _csv,
    Format.NDJSON: read_ndjson,
}
