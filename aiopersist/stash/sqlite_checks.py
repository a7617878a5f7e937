"""Checks of each column that SQLite gives: it may hold values of any type, whatever it was declared as.
`Corruption` names the stash, the collection and the value; it is not retried.

A row that holds another value of the right type is not noticed: rows have no checksum.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiopersist.base.errors import Corruption, shown
from aiopersist.stash.model import StoredRows

KINDS = (("key", str), ("val", str), ("time", int), ("diff", int))


def corrupt(stash: str, collection: str | None, what: str) -> Corruption:
    """The error for a row that the library has not written."""
    place = "" if collection is None else f", collection {collection!r}"
    return Corruption(f"stash {stash!r}{place}: {what}")


def check_columns(stash: str, collection: str | None, kinds: Iterable[tuple[str, type]], values: Any) -> None:
    """`Corruption` unless each value has its type."""
    for (name, kind), value in zip(kinds, values, strict=True):
        if type(value) is not kind:
            raise corrupt(stash, collection, f"{name} is {shown(value)}, and no {kind.__name__}")


def check_rows(stash: str, collection: str, rows: StoredRows) -> StoredRows:
    """The rows; `Corruption` unless keys and values are texts, times ints from 0 on, and diffs ints."""
    for (name, kind), column in zip(KINDS, rows.columns, strict=True):
        if set(map(type, column)) - {kind}:
            wrong = next(value for value in column if type(value) is not kind)
            raise corrupt(stash, collection, f"a row has {name} {shown(wrong)}, and no {kind.__name__}")
    if rows and min(rows.times) < 0:
        raise corrupt(stash, collection, f"a row has time {min(rows.times)}")
    return rows


def check_sums(stash: str, collection: str, sums: Sequence[tuple[Any, ...]]) -> None:
    """`Corruption` unless groups `(key, val, time, high, low, rows, wrong)` are of rows of these types."""
    wrong = [group for group in sums if group[-1]]
    if wrong:
        text = f"a row of key {shown(wrong[0][0])} has a key or val that is no str, or a time or diff no int"
        raise corrupt(stash, collection, text)


@contextmanager
def readable(stash: str, collection: str | None = None) -> Iterator[None]:
    """Turn the error for texts that are not UTF-8 into `Corruption`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "decode to UTF-8" not in str(error):  # which is of Python's module, and has no code
            raise
        raise corrupt(stash, collection, str(error)) from error
