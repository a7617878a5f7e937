"""`aiopersist cat`: the contents of a shard as of a time, for people and for programs."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Annotated, Any

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
from aiopersist.data.part.select import project, resolve_columns
from aiopersist.data.part.where_text import parse_where
from aiopersist.data.types.schema import Schema

ROWS_SHOWN = 100  # of a table, without --limit
CELL_WIDTH = 60  # characters of a cell of a table

AsOf = Annotated[str | None, typer.Option(help="17, 2026-01-31T12:00Z or now-5min; by default the newest.")]
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
    where: Where = None,
    columns: Columns = None,
    limit: Limit = None,
    form: Form = None,
) -> None:
    """Write the contents of a shard as of a time."""
    time = as_of_option(as_of)
    names = None if columns is None else tuple(columns.split(","))
    chosen = format_of(run, form)
    async with run.reading() as client:
        _, schema = await client.schema(shard)
        condition = condition_of(where, schema)
        shown = chosen_columns(schema, names)
        with complete_times(shard, time):
            at = await read_time(run, client, shard, time)
            # no wait: nobody may ever complete the time
            async with client.reader(shard, schema) as reader, reader.snapshot(at, wait=False) as snapshot:
                await write_batches(run, snapshot.batches(condition, names), shown, limit, chosen)


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
