"""Output of commands: no stored text can move the cursor of a terminal, hide a text, or reverse it.

Stored texts reach people in many ways: names of shards, keys and values, texts of errors, headers of files.
So they are escaped on output: rich's texts in `SafeConsole` (`cli/consoles.py`), lines and rows in `output`,
messages in `complain`. Escapes are those of JSON, so JSON stays valid.
"""

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
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, except tabs and ends of lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of texts
    "\u2028\u2029\u2060-\u2065\u206a-\u206f\ufff9-\ufffb"  # ends of lines, and invisible characters
    "\U000e0000-\U000e007f"  # tags
    "\ud800-\udfff]"  # surrogates, which no encoding has
)


def escaped(text: str) -> str:
    """The text with JSON's escapes for unsafe characters."""
    return UNSAFE.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def output() -> BinaryIO:
    """Standard output for rows and lines in UTF-8; on a terminal they are escaped."""
    sys.stdout.flush()
    return _Terminal() if sys.stdout.isatty() else sys.stdout.buffer  # type: ignore[return-value]


def drop_unwritten() -> None:
    """Drop output that cannot be written; otherwise the interpreter would exit with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Terminal:
    """Takes texts as bytes; no call may split a character."""

    def write(self, data: bytes) -> int:
        sys.stdout.write(escaped(bytes(data).decode(errors="backslashreplace")))
        return len(data)

    def flush(self) -> None:
        sys.stdout.flush()


def complain(text: str) -> None:
    """Write a text to standard error, if it is open."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"{escaped(text)}\n")


def stop(reason: object, status: int) -> NoReturn:
    """Exit with the status, after a line on standard error with the reason."""
    line = " ".join(str(reason).split()) or type(reason).__name__
    complain(f"aiopersist: {line}")
    raise typer.Exit(status)


class _Escaping(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


def prepare() -> str | None:
    """Let standard streams accept every character. Returns an error message if standard output is closed."""
    if logging.lastResort is not None:  # the library's log, unless the program handles it
        logging.lastResort.setFormatter(_Escaping())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return "standard output is closed" if sys.stdout is None else None


def open_descriptors() -> None:
    """Reopen closed standard streams. Otherwise the next opened file, like the database, would get such a
    descriptor, and messages to standard error would go into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number


def decoded(value: Any) -> Any:
    """An argument decoded as UTF-8 in any locale, since stored names are UTF-8."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, str) or value.isascii():
        return value
    with suppress(UnicodeError):
        return os.fsencode(value).decode()
    return value
