"""`aiopersist cat`: the contents of a shard as of a time, for people and for programs."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aiopersist.base.errors import InvalidUsage
from aiopersist.cli.command import CannotBegin, Invocation
from aiopersist.cli.formats import BINARY, Format, as_json, cell, sink_of
from aiopersist.cli.names import ShardName
from aiopersist.cli.shown import safe
from aiopersist.cli.terminal import escaped, output
from aiopersist.cli.when import as_of_option, complete_times, read_time
from aiopersist.client.client import Client
from aiopersist.data.part.select import project, resolve_columns
from aiopersist.data.part.where_text import parse_where
from aiopersist.data.types.schema import Schema
from aiopersist.read.snapshot import Snapshot

ROWS_SHOWN = 100  # of a table, without --limit
CELL_WIDTH = 60  # characters of a cell of a table

AsOf = Annotated[str | None, typer.Option(help="17, 2026-01-31T12:00Z or now-5min; by default the newest.")]
Tag = Annotated[str | None, typer.Option(metavar="NAME", help="The contents that this tag keeps.")]
Where = Annotated[
    str | None, typer.Option(metavar="EXPR", help="""Only rows like 'key >= "a" and val.amount > 3'.""")
]
Columns = Annotated[str | None, typer.Option(help="Only these columns, like key,val.amount.")]
Limit = Annotated[int | None, typer.Option(min=0, help="At most N rows; by default a table shows 100.")]
Form = Annotated[Format | None, typer.Option("--format", help="By default table on a terminal, else ndjson.")]


def format_of(run: Invocation, form: Format | None) -> Format:
    """The format by the options; `CannotBegin` for bytes on a terminal."""
    if run.as_json and form not in (None, Format.NDJSON):
        raise CannotBegin(f"--json is --format ndjson, not {form}")
    if form in BINARY and sys.stdout.isatty():
        raise CannotBegin(f"{form} cannot go to a terminal: send it to a file or a pipe")
    return form or (Format.NDJSON if run.as_json or not sys.stdout.isatty() else Format.TABLE)


async def cat(
    run: Invocation,
    shard: ShardName,
    as_of: AsOf = None,
    tag: Tag = None,
    where: Where = None,
    columns: Columns = None,
    limit: Limit = None,
    form: Form = None,
) -> None:
    """Write the contents of a shard as of a time, or those of a tag."""
    asked = asked_contents(as_of, tag)
    names = None if columns is None else tuple(columns.split(","))
    chosen = format_of(run, form)
    async with run.reading() as client:
        _, schema = await client.schema(shard)
        condition = condition_of(where, schema)
        shown = chosen_columns(schema, names)
        async with opened_contents(run, client, shard, schema, asked) as snapshot:
            await write_batches(run, snapshot.batches(condition, names), shown, limit, chosen)


class AskedContents(NamedTuple):
    """The contents that the options ask for: of a tag, as of a time, or the newest."""

    as_of: int | datetime | None
    tag: str | None


def asked_contents(as_of: str | None, tag: str | None) -> AskedContents:
    """By the texts of `--as-of` and `--tag`; `CannotBegin` for both."""
    if as_of is not None and tag is not None:
        raise CannotBegin("give --as-of or --tag, not both: a tag has its own time")
    return AskedContents(as_of_option(as_of), tag)


@asynccontextmanager
async def opened_contents(
    run: Invocation, client: Client, name: str, schema: Schema[Any, Any, Any], asked: AskedContents
) -> AsyncIterator[Snapshot[Any, Any]]:
    """A snapshot of the contents. Waits for nobody, since nobody may ever complete the time."""
    with complete_times(name, asked.as_of):
        at = await read_time(run, client, name, asked.as_of)
        async with client.reader(name, schema) as reader:
            async with reader.snapshot(at, wait=False, tag=asked.tag) as snapshot:
                yield snapshot


def condition_of(text: str | None, schema: Schema[Any, Any, Any]) -> Any:
    """The condition in the text of `--where`."""
    try:
        return None if text is None else parse_where(text, schema)
    except InvalidUsage as error:
        message = str(error).removeprefix(f"{error.kind}: ")
        hint = "; write texts in quotes" if message.startswith("no column") else ""
        raise CannotBegin(f"--where: {message}{hint}") from None


def chosen_columns(schema: Schema[Any, Any, Any], columns: tuple[str, ...] | None) -> Any:
    """The Arrow schema of contents with these columns; `CannotBegin` for an unknown one."""
    whole = schema.contents_schema
    if columns is None:
        return whole
    try:
        return project(whole.empty_table(), resolve_columns(columns, schema)).schema
    except InvalidUsage as error:
        raise CannotBegin(f"--columns: {str(error).removeprefix(f'{error.kind}: ')}") from None


async def write_batches(
    run: Invocation, batches: AsyncIterator[Any], columns: Any, limit: int | None, form: Format
) -> None:
    """Write batches to standard output, at most `limit` rows."""
    if form is Format.TABLE:
        await _show(_limited(batches, ROWS_SHOWN if limit is None else limit), run.out)
        return
    sink = sink_of(form, output(), columns)
    async for batch in _limited(batches, limit):
        await asyncio.to_thread(sink.write, batch)
    sink.close()


async def _limited(batches: AsyncIterator[Any], limit: int | None) -> AsyncIterator[Any]:
    left = limit
    async for batch in batches:
        rows = batch if left is None else batch.slice(0, left)
        if rows.num_rows:
            yield rows
        if left is not None and (left := left - rows.num_rows) <= 0:
            return


async def _show(batches: AsyncIterator[Any], console: Console) -> None:
    table = Table()
    async for batch in batches:
        if not table.columns:
            for name in batch.schema.names:
                table.add_column(safe(name), overflow="ellipsis", no_wrap=True, max_width=CELL_WIDTH)
        for row in batch.to_pylist():
            table.add_row(*(Text(_shown(value)) for value in row.values()))
    if table.columns:
        console.print(table)


def _shown(value: Any) -> str:
    """A value without characters that move the cursor."""
    text = cell(value)
    return text if text.isprintable() else escaped(as_json(text))
