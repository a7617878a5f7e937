"""`aiopersist cat`: the contents of a shard as of a time, for people and for programs."""

import csv
import io
import sys
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

import pydantic_core
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aiopersist.cli.location import LocationOptions
from aiopersist.opening import open as open_client

ROWS_SHOWN = 100  # of a table for people, unless they say how many
CELL_WIDTH = 60  # characters of a cell for people


class Format(StrEnum):
    """How contents are written."""

    TABLE = "table"
    NDJSON = "ndjson"
    CSV = "csv"


class CatOptions(NamedTuple):
    """What of the contents is written, and how."""

    as_of: int | datetime | None
    columns: tuple[str, ...] | None
    limit: int | None
    format: Format


def time_of(text: str) -> int | datetime:
    """The time that a text says: an int, or an instant with its zone; `ValueError` for others."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither an int nor an instant such as 2026-01-31T12:00Z") from None
    if instant.tzinfo is None:
        raise ValueError(f"{text!r} has no zone: say {text}Z, or {text}+01:00")
    return instant


async def run(location: LocationOptions, shard: str, options: CatOptions, console: Console) -> None:
    """Write the contents to standard output, in key order. Nothing is written to the location: a time that
    is not complete yet is `NotReadable`."""
    where, blob, consensus = location
    async with (
        open_client(where, blob=blob, consensus=consensus, readonly=True) as client,
        client.reader(shard) as reader,
        reader.snapshot(options.as_of, wait=False) as snapshot,
    ):
        batches = snapshot.batches(columns=options.columns)
        if options.format is Format.TABLE:
            await _show(_rows(batches, ROWS_SHOWN if options.limit is None else options.limit), console)
        else:
            write = _ndjson if options.format is Format.NDJSON else _csv
            first = True
            async for rows in _rows(batches, options.limit):
                sys.stdout.write(write(rows, first))
                first = False


async def _rows(batches: AsyncIterator[Any], limit: int | None) -> AsyncIterator[list[dict[str, Any]]]:
    """The rows of batches, so many at most."""
    left = limit
    async for batch in batches:
        rows = (batch if left is None else batch.slice(0, left)).to_pylist()
        if rows:
            yield rows
        if left is not None and (left := left - len(rows)) <= 0:
            return


async def _show(slices: AsyncIterator[list[dict[str, Any]]], console: Console) -> None:
    table = Table()
    async for rows in slices:
        if not table.columns:
            for name in rows[0]:
                table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=CELL_WIDTH)
        for row in rows:
            table.add_row(*(Text(_shown(value)) for value in row.values()))
    if table.columns:
        console.print(table)


def _ndjson(rows: Iterable[dict[str, Any]], first: bool) -> str:
    return "".join(_json(row) + "\n" for row in rows)


def _csv(rows: list[dict[str, Any]], first: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if first:
        writer.writerow(rows[0])
    writer.writerows(map(_cell, row.values()) for row in rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    """A value alone: texts as they are, all else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else _json(value).strip('"')


def _shown(value: Any) -> str:
    """The same for people: nothing in it moves the cursor."""
    cell = _cell(value)
    return cell if cell.isprintable() else _json(cell)


def _json(value: Any) -> str:
    return pydantic_core.to_json(value, bytes_mode="base64", inf_nan_mode="strings").decode()
