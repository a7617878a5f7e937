"""What commands write, and where to: nothing that a location stores moves the cursor of a terminal, hides a
text, or turns it around.

Stored texts reach people in many ways: names of shards, keys and values, texts of errors, headers of files.
So they are escaped where they leave: what rich prints in `SafeConsole` (`cli/consoles.py`), lines and rows in
`output`, messages by `complain`. An escape is that of JSON, so JSON stays what it is."""

import logging
import os
import re
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, BinaryIO, NoReturn

import typer

PROBLEMS = 1
CANNOT_BEGIN = 2
INTERRUPTED = 130
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but for tabs and ends of lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction of texts
    "\u2028\u2029\u2060-\u2065\u206a-\u206f\ufff9-\ufffb"  # ends of lines, and what is not seen
    "\U000e0000-\U000e007f"  # tags
    "\ud800-\udfff]"  # halves of characters, which no encoding has
)


def escaped(text: str) -> str:
    """The text with JSON's escapes for what is not to reach a terminal."""
    return UNSAFE.sub(lambda found: _escape(found[0]), text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def output() -> BinaryIO:
    """Standard output for rows and lines in UTF-8: to a program as they are, to a terminal escaped."""
    sys.stdout.flush()
    return _Terminal() if sys.stdout.isatty() else sys.stdout.buffer  # type: ignore[return-value]


def drop_unwritten() -> None:
    """Drop what a standard stream holds and cannot write: the interpreter would try it once more at its end,
    and end with status 120 whatever the command found."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Terminal:
    """Takes texts as bytes, in whole characters."""

    def write(self, data: bytes) -> int:
        sys.stdout.write(escaped(bytes(data).decode(errors="backslashreplace")))
        return len(data)

    def flush(self) -> None:
        sys.stdout.flush()


def complain(text: str) -> None:
    """Write a text to standard error, if anybody reads it."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"{escaped(text)}\n")


def stop(why: object, status: int) -> NoReturn:
    """End with that status, and a line on standard error that says why."""
    line = " ".join(str(why).split()) or type(why).__name__
    complain(f"aiopersist: {line}")
    raise typer.Exit(status)


class _Escaping(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


def prepare() -> str | None:
    """Make the standard streams take each character, in whatever encoding; the fault if there is no standard
    output."""
    if logging.lastResort is not None:  # the log of the library, unless somebody handles it
        logging.lastResort.setFormatter(_Escaping())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return "standard output is closed" if sys.stdout is None else None


def open_descriptors() -> None:
    """Take the descriptors of standard streams that are closed: else the next file that is opened would have
    one, such as the database, and whoever writes to standard error would write there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # the least that is free


def decoded(value: Any) -> Any:
    """An argument that is UTF-8, whatever the locale says: its texts name what is stored."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, str) or value.isascii():
        return value
    with suppress(UnicodeError):
        return os.fsencode(value).decode()
    return value
