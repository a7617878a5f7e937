"""`aiopersist diff` and `tail`: the changes between two times, and new changes as they happen."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import typer

from aiopersist.cli.cat import (
    Columns,
    Form,
    Limit,
    Where,
    chosen_columns,
    condition_of,
    format_of,
    write_batches,
)
from aiopersist.cli.command import CannotBegin, Invocation
from aiopersist.cli.formats import as_json, cell
from aiopersist.cli.names import ShardName
from aiopersist.cli.shown import shown_time
from aiopersist.cli.tables import key_type
from aiopersist.cli.terminal import output
from aiopersist.cli.when import complete_times, read_time, time_of
from aiopersist.client.client import Client
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.updates import Updates
from aiopersist.read.snapshot import some_batches
from aiopersist.state.model import Clock

Line = dict[str, Any]


async def diff(
    run: Invocation,
    shard: ShardName,
    before: Annotated[str, typer.Argument(metavar="A", help="17, 2026-01-31T12:00Z or now-5min.")],
    after: Annotated[str | None, typer.Argument(metavar="B", help="By default the newest time.")] = None,
    where: Where = None,
    columns: Columns = None,
    limit: Limit = None,
    form: Form = None,
) -> None:
    """Write the changes of a shard after one time, up to another."""
    first, last = time_of("A", before), None if after is None else time_of("B", after)
    chosen, names = format_of(run, form), None if columns is None else tuple(columns.split(","))
    async with run.reading() as client:
        _, schema = await client.schema(shard)
        condition, whole = condition_of(where, schema), chosen_columns(schema, names)
        with complete_times(shard, first, last):
            start, end = [await read_time(run, client, shard, time) for time in (first, last)]
            async with (
                client.reader(shard, schema) as reader,
                reader.snapshot(end, wait=False) as new,
                reader.snapshot(start, wait=False) as old,  # opened last, so that the other has its history
            ):
                if isinstance(old.as_of, int) and isinstance(new.as_of, int) and new.as_of < old.as_of:
                    raise CannotBegin(f"{after or 'the newest time'} is before {before}")
                batches = some_batches(new, condition, old.as_of, lambda named: True, names)
                await write_batches(run, batches, whole, limit, chosen)


async def tail(
    run: Invocation,
    shard: ShardName,
    cursor: Annotated[str | None, typer.Option(help="Continue after the line with this cursor.")] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin with the contents.")] = False,
) -> None:
    """Write the changes of a shard as they happen, one per line, until interrupted."""
    if cursor is not None and from_start:
        raise CannotBegin("give --cursor or --from-start, not both")
    as_lines = run.as_json or not sys.stdout.isatty()
    async with run.reading() as client:
        _, schema = await client.schema(shard)
        view = await client.admin.inspect(shard)
        changes = _of_table if view.table else _of_shard
        async with aclosing(changes(client, shard, schema, cursor, from_start)) as lines:
            async for line in lines:
                out = output()
                out.write(f"{as_json(line) if as_lines else _line_text(line, view.clock)}\n".encode())
                out.flush()


async def _of_table(
    client: Client, name: str, schema: Schema[Any, Any, Any], cursor: str | None, from_start: bool
) -> AsyncGenerator[Line, None]:
    """Old and new values. The last line of a step has the cursor after the step, the other lines the cursor
    before it. So a program that continues after any line misses nothing."""
    table = client.table(name, key_type(schema.key.arrow("key")), schema.val.arrow("val"), resident=False)
    start = None if cursor is not None or from_start else "now"
    async with aclosing(table.changes(cursor, start=start)) as feed:
        async for step in feed:
            for number, change in enumerate(step.changes, 1):
                if number == len(step.changes):
                    cursor = step.cursor
                key = change.key._asdict() if hasattr(change.key, "_asdict") else change.key
                yield {
                    "time": change.time,
                    "key": key,
                    "old": change.old,
                    "new": change.new,
                    "cursor": cursor,
                }
            cursor = step.cursor


async def _of_shard(
    client: Client, name: str, schema: Schema[Any, Any, Any], cursor: str | None, from_start: bool
) -> AsyncGenerator[Line, None]:
    """Updates, with cursors like those of a table."""
    async with client.reader(name, schema) as reader:
        begin = reader.subscribe if from_start else reader.listen
        async with begin(cursor=cursor) as listen:
            last: Line | None = None
            async for item in listen:
                if isinstance(item, Updates):
                    for row in await asyncio.to_thread(item.to_arrow().to_pylist):
                        if last is not None:
                            yield {**last, "cursor": cursor}
                        last = {name: row[name] for name in ("time", "key", "val", "diff")}
                    continue
                cursor = item.cursor
                if last is not None:
                    yield {**last, "cursor": cursor}
                    last = None


def _line_text(line: Line, clock: Clock) -> str:
    """A line without characters that move the cursor of the terminal."""
    time = shown_time(line["time"], clock)
    if "diff" in line:
        text = f"{time} {line['diff']:+d} {cell(line['key'])} {cell(line['val'])}"
    else:
        old, new = ("-" if line[name] is None else cell(line[name]) for name in ("old", "new"))
        text = f"{time} {cell(line['key'])}: {old} -> {new}"
    return text if text.isprintable() else as_json(text)
