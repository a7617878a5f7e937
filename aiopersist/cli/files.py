"""Files of columns, read block by block: Parquet, CSV, NDJSON and Arrow, and standard input."""

import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.csv as pa_csv  # type: ignore[import-untyped]  # pyarrow ships no stubs
import pyarrow.json as pa_json  # type: ignore[import-untyped]
import pydantic_core

from aiopersist.cli.command import CannotBegin, Problems
from aiopersist.cli.formats import Format
from aiopersist.data.lazy import ipc, pa, pq

STDIN = "-"
BLOCK_BYTES = 8 * 1024 * 1024  # of text that is parsed at once
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

Types = Callable[[Collection[str]], Mapping[str, "pa.DataType"]]
"""The types that columns of texts are read in, by the names in the first row, if these are known; of others
the first block decides. JSON may leave out those of nulls."""
Batches = Iterator["pa.RecordBatch | pa.Table"]


def format_of_file(path: str, form: Format | None) -> Format:
    """The format that the user says, or that the ending of the name says."""
    if form is Format.TABLE:
        raise CannotBegin("--format table is for people: choose parquet, csv, ndjson or arrow")
    found = form or ENDINGS.get(Path(path).suffix.lower())
    if found is None:
        raise CannotBegin(f"{path}: say its --format: parquet, csv, ndjson or arrow")
    return found


@contextmanager
def opened(path: str, form: Format) -> Iterator[BinaryIO]:
    """The file, or standard input; spooled to disk where its end must be read first."""
    if path != STDIN:
        with open(path, "rb") as file:
            yield file
    elif form in (Format.CSV, Format.NDJSON):
        yield sys.stdin.buffer
    else:
        with tempfile.TemporaryFile() as spool:
            shutil.copyfileobj(sys.stdin.buffer, spool)
            spool.seek(0)
            yield spool


def batches_of(file: BinaryIO, form: Format, types: Types) -> tuple["pa.Schema", Batches]:
    """The columns of a file, and its rows."""
    return READERS[form](file, types)


def check_there(paths: Sequence[str]) -> None:
    """`CannotBegin` for a file that is not there."""
    for path in paths:
        if path != STDIN and not Path(path).is_file():
            raise CannotBegin(f"{path}: there is no such file")


@contextmanager
def bad_rows(path: str) -> Iterator[None]:
    """Turns what Arrow says of a file into `Problems` that name it."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise Problems(f"{path}: {' '.join(str(error).split())}; nothing was written") from None


def _parquet(file: BinaryIO, types: Types) -> tuple["pa.Schema", Batches]:
    found = pq.ParquetFile(file)
    return found.schema_arrow, found.iter_batches(BATCH_ROWS)


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


def _ndjson(file: BinaryIO, types: Types) -> tuple["pa.Schema", Batches]:
    """The first block decides on the columns; a later one that has others is refused."""
    blocks = _lines(file)
    row = 0

    def parsed(block: bytes, columns: Any, behavior: str) -> Any:
        nonlocal row
        options = pa_json.ParseOptions(explicit_schema=columns, unexpected_field_behavior=behavior)
        try:
            table = pa_json.read_json(
                io.BytesIO(block), pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1), options
            )
        except pa.ArrowInvalid as error:
            text, _, at = str(error).rpartition(" in row ")
            raise pa.ArrowInvalid(
                f"row {row + int(at) + 1}: {text}" if at.isdigit() else str(error)
            ) from None
        row += table.num_rows
        return table

    first = next(blocks, None)
    if first is None:
        return pa.schema([]), iter(())
    known = types(_names(first))
    table = parsed(first, pa.schema(list(known.items())), "infer")

    def rest() -> Batches:
        yield table
        for block in blocks:
            yield parsed(block, table.schema, "error")

    return table.schema, rest()


def _names(block: bytes) -> Collection[str]:
    """The names in the first line; none if it is no object, which parsing it tells."""
    try:
        first = pydantic_core.from_json(block.lstrip().partition(b"\n")[0])
    except ValueError:
        return ()
    return first.keys() if isinstance(first, dict) else ()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of whole lines."""
    left = b""
    while data := file.read(BLOCK_BYTES):
        data = left + data
        end = data.rfind(b"\n") + 1
        left = data[end:]
        if data[:end].strip():
            yield data[:end]
    if left.strip():
        yield left


READERS: dict[Format, Callable[[BinaryIO, Types], tuple["pa.Schema", Batches]]] = {
    Format.PARQUET: _parquet,
    Format.ARROW: _arrow,
    Format.CSV: _csv,
    Format.NDJSON: _ndjson,
}
