"""Reads files of JSON, one object per line, in blocks, with Arrow.

Arrow's reader crashes the process on a block whose first value is null, and on thousands of nested lists or
structs. So each block is checked first:

1. each line begins with a brace, or is blank;
2. the first block, which decides on the columns, has at most `LEVELS_MAX` nested lists and structs;
3. there are as many rows as lines that are not blank.

The checks take all bytes at once. Only a refused block is read again line by line, to name the row.

`polars.read_ndjson` (2.1) is no replacement: it names no row in errors, drops unexpected fields silently,
reads `1.0` as the text `1`, refuses decimals, and panics on int8.
"""

import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, BinaryIO

import pyarrow.json as pa_json  # type: ignore[import-untyped]  # pyarrow ships no stubs
import pydantic_core

from aiopersist.cli.texts import first_refused
from aiopersist.data.lazy import pa, pc

BLOCK_BYTES = 8 * 1024 * 1024  # parsed at once
LINE_BYTES_MAX = 256 * 1024 * 1024  # four times the default limit of an update
LEVELS_MAX = 64  # of lists and structs; a schema has at most 32, Arrow crashes beyond a few thousand
BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r\n"
LONG_INTEGER = re.compile(rb"\d{16,}")  # a float holds any shorter integer
NO_OBJECT = re.compile(rb"\n[ \t\r]*+[^{ \t\r\n]")
BLANK = re.compile(rb"\n[ \t\r]*+(?=\n)")
TEXT = re.compile(rb'"(?:[^"\\\n]++|\\.)*+"')
STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # changes of the level, as signed bytes
NO_STEPS = bytes(set(range(256)) - set(b"[{]}"))

Types = Callable[[Collection[str]], Mapping[str, "pa.DataType"]]
"""The types in which columns are read, given the names in the first row, if known; the first block decides on
the types of other columns. JSON may leave out columns of nulls."""


def read_ndjson(file: BinaryIO, types: Types) -> tuple["pa.Schema", Iterator["pa.Table"]]:
    """The columns and the rows of a file. The first block decides on the columns; later blocks must have no
    others. `pa.ArrowInvalid`, with the row, for a line that is no JSON object."""
    blocks = _lines(file)
    first = next(blocks, None)
    if first is None:
        return pa.schema([]), iter(())
    column_types = types(_names(first))
    table = _parsed(first, pa.schema(list(column_types.items())), "infer", 0)
    if not column_types:
        _check_integers(first, table.schema)

    def rest() -> Iterator["pa.Table"]:
        yield table
        row = table.num_rows
        for block in blocks:
            later = _parsed(block, table.schema, "error", row)
            yield later
            row += later.num_rows

    return table.schema, rest()


def _parsed(block: bytes, columns: Any, behavior: str, row: int) -> "pa.Table":
    """The rows of a block whose first row has the number `row`, from 0 on."""
    if NO_OBJECT.search(b"\n" + block) or (behavior == "infer" and _levels(block) > LEVELS_MAX):
        raise _refusal(block, row)
    try:
        table = _read(block, columns, behavior)
    except pa.ArrowInvalid as error:
        text, _, at = str(error).rpartition(" in row ")
        if at.isdigit():
            raise pa.ArrowInvalid(f"row {row + int(at) + 1}: {text}") from None
        raise _refusal(block, row, lambda lines: _read(lines, columns, behavior), str(error)) from None
    if table.num_rows != _count(block):
        raise _refusal(block, row)
    return table


def _read(block: bytes, columns: Any, behavior: str) -> "pa.Table":
    """The rows by Arrow's reader."""
    reading = pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    parsing = pa_json.ParseOptions(explicit_schema=columns, unexpected_field_behavior=behavior)
    return pa_json.read_json(io.BytesIO(block), reading, parsing)


def _check_integers(block: bytes, columns: Any) -> None:
    """`pa.ArrowInvalid` for an integer in a column of floats that no float equals: different integers would
    become equal. Arrow reads integers of more than 64 bits, and those beside fractions, as floats."""
    row = 0
    for line in block.split(b"\n"):
        row += bool(line.strip(BLANKS))
        if LONG_INTEGER.search(line):
            try:
                row_of_values = json.loads(line)
            except ValueError as error:  # Python reads a few thousand digits at most
                raise pa.ArrowInvalid(f"row {row}: {error}") from None
            for name, value in row_of_values.items():
                if (lost := _lost(value, columns.field(name).type)) is not None:
                    text = f"{str(lost)[:40]} is no float: write it in quotes, as a text"
                    raise pa.ArrowInvalid(f"row {row}: {name}: {text}")


def _lost(value: Any, of: "pa.DataType") -> int | None:
    """An integer in the value that the type of its column cannot hold."""
    if isinstance(value, dict):
        losses = (_lost(inner, of.field(name).type) for name, inner in value.items())
    elif isinstance(value, list):
        losses = (_lost(inner, of.value_type) for inner in value)
    else:
        is_lost = pa.types.is_floating(of) and type(value) is int and not _is_float(value)
        return value if is_lost else None
    return next((lost for lost in losses if lost is not None), None)


def _is_float(value: int) -> bool:
    try:
        return float(value) == value  # exactly: neither is converted
    except OverflowError:
        return False


def _levels(block: bytes) -> int:
    """The greatest number of nested lists and structs."""
    steps = TEXT.sub(b"", block).translate(STEPS, NO_STEPS)
    if not steps:
        return 0
    array = pa.Array.from_buffers(pa.int8(), len(steps), [None, pa.py_buffer(steps)])
    return int(pc.max(pc.cumulative_sum(array.cast(pa.int64()))).as_py())


def _count(block: bytes) -> int:
    """The number of lines that are not blank."""
    lines = b"\n" + block.rstrip(BLANKS)
    return lines.count(b"\n") - len(BLANK.findall(lines))


def _refusal(
    block: bytes, row: int, read: Callable[[bytes], object] | None = None, otherwise: str = ""
) -> "pa.ArrowInvalid":
    """The error for the first line that is no JSON object; if all are objects, for the first line that `read`
    refuses; if it refuses no single line, `otherwise`."""
    lines, before = [line for line in block.split(b"\n") if line.strip(BLANKS)], row
    for row, line in enumerate(lines, before + 1):
        try:
            if not isinstance(pydantic_core.from_json(line), dict):
                return pa.ArrowInvalid(f"row {row}: a line must be a JSON object, not {line[:40]!r}")
        except ValueError as error:
            return pa.ArrowInvalid(f"row {row}: {error} in {line[:40]!r}")
        if _levels(line) > LEVELS_MAX:
            return pa.ArrowInvalid(f"row {row}: more than {LEVELS_MAX} nested lists and structs")
    if read and (refused := first_refused(len(lines), lambda begin, end: read(b"\n".join(lines[begin:end])))):
        return pa.ArrowInvalid(f"row {before + refused[0] + 1}: {refused[1]}")
    return pa.ArrowInvalid(otherwise or f"a line must be one JSON object, not {block[:40]!r}")


def _names(block: bytes) -> Collection[str]:
    """The names in the first line; empty if it is no object, which parsing will report."""
    try:
        first = pydantic_core.from_json(block.lstrip().partition(b"\n")[0])
    except ValueError:
        return ()
    return first.keys() if isinstance(first, dict) else ()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of whole lines. Parts of a long line are joined once at its end, so each byte is copied once.
    `pa.ArrowInvalid` for a line of more than `LINE_BYTES_MAX`."""
    pieces, size, lines, is_first = list[bytes](), 0, 0, True
    while data := file.read(BLOCK_BYTES):
        if is_first:
            data, is_first = data.removeprefix(BOM), False
        end = data.rfind(b"\n") + 1
        if end:
            block = b"".join((*pieces, data[:end]))
            pieces, size = [], 0
            lines += block.count(b"\n")
            if block.strip(BLANKS):
                yield block
        pieces.append(data[end:])
        size += len(data) - end
        if size > LINE_BYTES_MAX:
            raise pa.ArrowInvalid(f"line {lines + 1} is longer than {LINE_BYTES_MAX:,} bytes")
    if (rest := b"".join(pieces)).strip(BLANKS):
        yield rest
