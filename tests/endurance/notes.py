"""What processes write down about their operations, at once, so that it survives them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KINDS = ("write", "append", "count", "transfer", "local", "tag", "publish")
ONCE = ("write", "count", "transfer")  # calls with an id: a repeat of it does nothing


class Note(NamedTuple):
    """A line. `what`: `began`, `told` (it happened), `unknown` (`Indeterminate`), or `failed` (another error,
    which callers answer by calling again)."""

    at: float
    """On the monotonic clock, which all processes of a machine share."""
    what: str
    kind: str
    op: str
    text: str = "-"


class Notes:
    """Writes lines to a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what: str, kind: str, op: str, text: str = "-") -> None:
        os.write(self._file, f"{time.monotonic():.4f} {what} {kind} {op} {text}\n".encode())


def notes_of(path: Path) -> Iterator[Note]:
    """The lines of a file, without one that was cut off."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            at, what, kind, op, text = line.rstrip("\n").split(" ", 4)
            yield Note(float(at), what, kind, op, text)
