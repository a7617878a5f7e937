"""Files of JSON, an object a line, read block by block. What would crash Arrow's reader is refused before.

Arrow's reader ends the process on a block whose first value is null, and on thousands of lists or structs
within each other. So, in each block,

1. each line begins with a brace, or is blank;
2. the first block, which decides on the columns, has few lists and structs within each other;
3. there are as many rows as lines that are not blank.

The checks pass over all bytes at once. Only a block that is refused is read again line by line, to name
the row.
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

BLOCK_BYTES = 8 * 1024 * 1024  # of text that is parsed at once
LINE_BYTES_MAX = 256 * 1024 * 1024  # four times as long as an update may be by default
LEVELS_MAX = 64  # of lists and structs; a schema stores 32, Arrow crashes beyond some thousands
BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r\n"
LONG = re.compile(rb"\d{16,}")  # fewer digits each float holds
NO_OBJECT = re.compile(rb"\n[ \t\r]*+[^{ \t\r\n]")
BLANK = re.compile(rb"\n[ \t\r]*+(?=\n)")
TEXT = re.compile(rb'"(?:[^"\\\n]++|\\.)*+"')
STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # of the level, as signed bytes
NO_STEPS = bytes(set(range(256)) - set(b"[{]}"))

Types = Callable[[Collection[str]], Mapping[str, "pa.DataType"]]
"""The types that columns of texts are read in, by the names in the first row, if these are known; of others
the first block decides. JSON may leave out those of nulls."""


def read_ndjson(file: BinaryIO, types: Types) -> tuple["pa.Schema", Iterator["pa.Table"]]:
    """The columns of a file, and its rows. The first block decides on the columns; a later one that has
    others is refused. `pa.ArrowInvalid`, with the row, for what is no JSON object."""
    blocks = _lines(file)
    first = next(blocks, None)
    if first is None:
        return pa.schema([]), iter(())
    known = types(_names(first))
    table = _parsed(first, pa.schema(list(known.items())), "infer", 0)
    if not known:
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
    """The rows of a block that begins with row `row`, counted from 0 on."""
    if NO_OBJECT.search(b"\n" + block) or (behavior == "infer" and _levels(block) > LEVELS_MAX):
        raise _refusal(block, row)
    try:
        table = _read(block, columns, behavior)
    except pa.ArrowInvalid as error:
        text, _, at = str(error).rpartition(" in row ")
        if at.isdigit():
            raise pa.ArrowInvalid(f"row {row + int(at) + 1}: {text}") from None
        raise _refusal(block, row, lambda some: _read(some, columns, behavior), str(error)) from None
    if table.num_rows != _count(block):
        raise _refusal(block, row)
    return table


def _read(block: bytes, columns: Any, behavior: str) -> "pa.Table":
    """As Arrow does."""
    reading = pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    parsing = pa_json.ParseOptions(explicit_schema=columns, unexpected_field_behavior=behavior)
    return pa_json.read_json(io.BytesIO(block), reading, parsing)


def _check_integers(block: bytes, columns: Any) -> None:
    """`pa.ArrowInvalid` for an integer of a first block, of unknown types, that no float is, in a column of
    floats: different ones would become the same. Arrow makes floats of integers of more than 64 bits, and of
    those beside fractions."""
    row = 0
    for line in block.split(b"\n"):
        row += bool(line.strip(BLANKS))
        if LONG.search(line):
            try:
                row_of_values = json.loads(line)
            except ValueError as error:  # Python reads some thousand digits at most
                raise pa.ArrowInvalid(f"row {row}: {error}") from None
            for name, value in row_of_values.items():
                if (lost := _lost(value, columns.field(name).type)) is not None:
                    text = f"{str(lost)[:40]} is no float: in quotes it is a text"
                    raise pa.ArrowInvalid(f"row {row}: {name}: {text}")


def _lost(value: Any, of: "pa.DataType") -> int | None:
    """An integer within the value that the type of its column does not hold."""
    if isinstance(value, dict):
        found = (_lost(inner, of.field(name).type) for name, inner in value.items())
    elif isinstance(value, list):
        found = (_lost(inner, of.value_type) for inner in value)
    else:
        is_lost = pa.types.is_floating(of) and type(value) is int and not _is_float(value)
        return value if is_lost else None
    return next((lost for lost in found if lost is not None), None)


def _is_float(value: int) -> bool:
    try:
        return float(value) == value  # exactly: neither is converted
    except OverflowError:
        return False


def _levels(block: bytes) -> int:
    """How many lists and structs are within each other, at most."""
    steps = TEXT.sub(b"", block).translate(STEPS, NO_STEPS)
    if not steps:
        return 0
    array = pa.Array.from_buffers(pa.int8(), len(steps), [None, pa.py_buffer(steps)])
    return int(pc.max(pc.cumulative_sum(array.cast(pa.int64()))).as_py())


def _count(block: bytes) -> int:
    """How many lines are not blank."""
    lines = b"\n" + block.rstrip(BLANKS)
    return lines.count(b"\n") - len(BLANK.findall(lines))


def _refusal(
    block: bytes, row: int, read: Callable[[bytes], object] | None = None, otherwise: str = ""
) -> "pa.ArrowInvalid":
    """Names the first line that is no JSON object; the first that `read` refuses, where each is one. If that
    takes several lines, there is what Arrow said `otherwise`."""
    lines, before = [line for line in block.split(b"\n") if line.strip(BLANKS)], row
    for row, line in enumerate(lines, before + 1):
        try:
            if not isinstance(pydantic_core.from_json(line), dict):
                return pa.ArrowInvalid(f"row {row}: a line holds a JSON object, not {line[:40]!r}")
        except ValueError as error:
            return pa.ArrowInvalid(f"row {row}: {error} in {line[:40]!r}")
        if _levels(line) > LEVELS_MAX:
            return pa.ArrowInvalid(f"row {row}: more than {LEVELS_MAX} lists and structs within each other")
    if read and (found := first_refused(len(lines), lambda begin, end: read(b"\n".join(lines[begin:end])))):
        return pa.ArrowInvalid(f"row {before + found[0] + 1}: {found[1]}")
    return pa.ArrowInvalid(otherwise or f"a line holds one JSON object, not {block[:40]!r}")


def _names(block: bytes) -> Collection[str]:
    """The names in the first line; none if it is no object, which parsing it tells."""
    try:
        first = pydantic_core.from_json(block.lstrip().partition(b"\n")[0])
    except ValueError:
        return ()
    return first.keys() if isinstance(first, dict) else ()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of whole lines. What has come of a line is kept in pieces until its end comes: each byte is
    copied once. `pa.ArrowInvalid` for a line that is longer than one value may be."""
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
    if (left := b"".join(pieces)).strip(BLANKS):
        yield left
