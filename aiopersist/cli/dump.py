"""`aiopersist dump`: the contents of a shard as a file of columns."""

import asyncio
import sys
from contextlib import nullcontext
from typing import Annotated, Any, BinaryIO

import typer

from aiopersist.base.progress import progress
from aiopersist.cli.cat import AsOf, Tag, Where, asked_contents, condition_of, opened_contents
from aiopersist.cli.command import CannotBegin, Invocation, Problems
from aiopersist.cli.files import STDIN, format_of_file
from aiopersist.cli.formats import BINARY, Format, sink_of
from aiopersist.cli.layout import ColumnLayout
from aiopersist.cli.names import ShardName
from aiopersist.cli.progress import drawn
from aiopersist.cli.shown import counted
from aiopersist.cli.terminal import output
from aiopersist.cli.written import written
from aiopersist.data.lazy import pa, pc
from aiopersist.data.types.schema import Schema
from aiopersist.read.snapshot import Snapshot


async def dump(
    run: Invocation,
    shard: ShardName,
    to: Annotated[str, typer.Option(metavar="FILE", help="The file; - is standard output.")],
    form: Annotated[Format | None, typer.Option("--format", help="parquet, csv, ndjson or arrow.")] = None,
    as_of: AsOf = None,
    tag: Tag = None,
    where: Where = None,
) -> None:
    """Write the contents of a shard to a file of columns, for load."""
    chosen = format_of_file(to, form)
    if to == STDIN and chosen in BINARY and sys.stdout.isatty():
        raise CannotBegin(f"{chosen} cannot go to a terminal: send it to a file or a pipe")
    asked = asked_contents(as_of, tag)
    async with run.reading() as client:
        _, schema = await client.schema(shard)
        is_table = (await client.admin.inspect(shard)).table
        condition = condition_of(where, schema)
        async with opened_contents(run, client, shard, schema, asked) as snapshot:
            async with nullcontext(output()) if to == STDIN else written(to) as file:
                rows = await drawn(run.err, _write(snapshot, condition, schema, is_table, chosen, file))
    if to != STDIN:
        run.tell({"shard": shard, "file": to, "rows": rows}, f"{shard}: {counted(rows, 'row')} in {to}")


async def _write(
    snapshot: Snapshot[Any, Any],
    where: Any,
    schema: Schema[Any, Any, Any],
    is_table: bool,
    form: Format,
    file: BinaryIO,
) -> int:
    """Write the rows, and return their number."""
    others = [] if is_table else ["diff"]
    layout = ColumnLayout.of_schema(schema, others)
    columns = layout.parted(_no_rows(schema, others)).schema
    _check(columns, form)
    sink = sink_of(form, file, columns)
    rows = 0

    def write(batch: "pa.RecordBatch") -> None:
        if form is Format.NDJSON:
            _check_finite(batch)
        sink.write(batch)

    with progress("dump", (await snapshot.stats()).updates_max, "rows") as reported:
        async for batch in snapshot.batches(where):
            parted = layout.parted(batch.select(["key", "val", *others]))
            await asyncio.to_thread(write, parted)
            rows += batch.num_rows
            reported.advance(batch.num_rows)
    sink.close()
    return rows


def _no_rows(schema: Schema[Any, Any, Any], others: list[str]) -> Any:
    """A batch of contents without rows."""
    names = ["key", "val", *others]
    fields = [schema.contents_schema.field(name) for name in names]
    return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in fields], schema=pa.schema(fields))


def _check(columns: "pa.Schema", form: Format) -> None:
    """`CannotBegin` for columns that the format cannot hold."""
    for field in columns:
        if form is Format.CSV and pa.types.is_nested(field.type):
            others = "parquet, arrow or ndjson"
            raise CannotBegin(f"{form} cannot hold {field.name!r} of type {field.type}: choose {others}")


def _check_finite(batch: "pa.RecordBatch") -> None:
    """`Problems` for NaN and infinities: JSON has none, and texts in their place could not be loaded."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not _is_finite(column):
            others = "parquet or arrow" if pa.types.is_nested(field.type) else "parquet, arrow or csv"
            raise Problems(f"ndjson cannot hold the NaN or infinity in {field.name!r}: choose {others}")


def _is_finite(column: Any) -> bool:
    is_ = pa.types
    if is_.is_struct(column.type):
        return all(map(_is_finite, column.flatten()))
    if is_.is_list(column.type):
        return _is_finite(column.flatten())
    return not is_.is_floating(column.type) or pc.all(pc.is_finite(column)).as_py() is not False
