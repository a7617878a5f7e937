"""`aiopersist sql`: a query over shards and tables, answered by DuckDB."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiopersist.base.errors import to_install
from aiopersist.cli.cat import AskedContents, AsOf, Form, format_of, opened_contents, write_batches
from aiopersist.cli.command import NAMES_SHOWN, CannotBegin, Invocation, Problems
from aiopersist.cli.files import STDIN, format_of_file
from aiopersist.cli.formats import BINARY, sink_of
from aiopersist.cli.shown import counted
from aiopersist.cli.terminal import output
from aiopersist.cli.when import as_of_option
from aiopersist.cli.written import written
from aiopersist.client.client import Client
from aiopersist.read.snapshot import entries_scan

if TYPE_CHECKING:
    import duckdb

INTERRUPT_S = 0.1
# Nothing is downloaded when a query runs.
CONFIG: dict[str, str | bool | int | float | list[str]] = {"autoinstall_known_extensions": "false"}


async def sql(
    run: Invocation,
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="A query of DuckDB, like 'select count(*) from stock'.")
    ],
    as_of: AsOf = None,
    to: Annotated[str | None, typer.Option(metavar="FILE", help="Write the result to this file.")] = None,
    form: Form = None,
) -> None:
    """Answer a query in SQL over shards and tables."""
    chosen = format_of(run, form) if to is None else format_of_file(to, form)
    if to == STDIN and chosen in BINARY and sys.stdout.isatty():
        raise CannotBegin(f"{chosen} cannot go to a terminal: send it to a file or a pipe")
    database = await asyncio.to_thread(_database)
    async with run.reading() as client, AsyncExitStack() as opened:
        opened.callback(database.close)
        names = await client.list_shards()
        for name in named(query, names):
            database.register(name, await opened.enter_async_context(_scan(run, client, name, as_of)))
        reader = await _answer(database, query, names)
        if to is None:
            await write_batches(run, _batches(reader, database), reader.schema, None, chosen)
            return
        async with nullcontext(output()) if to == STDIN else written(to) as file:
            sink, rows = sink_of(chosen, file, reader.schema), 0
            async for batch in _batches(reader, database):
                await asyncio.to_thread(sink.write, batch)
                rows += batch.num_rows
            sink.close()
    if to != STDIN:
        run.tell({"file": to, "rows": rows}, f"{counted(rows, 'row')} in {to}")


def named(query: str, names: Iterable[str]) -> list[str]:
    """The names that may stand for tables in the query. DuckDB ignores the case of names, so of names that
    differ in case only, it is the one that the query has exactly."""
    matches: dict[str, list[str]] = {}
    for name in names:
        if _has(query.lower(), name.lower()):
            matches.setdefault(name.lower(), []).append(name)
    chosen = []
    for same in matches.values():
        exact = [name for name in same if _has(query, name)] if len(same) > 1 else same
        if len(exact) != 1:
            raise CannotBegin(f"SQL does not tell apart {' and '.join(map(repr, exact or same))}: copy one")
        chosen += exact
    return chosen


def _has(query: str, name: str) -> bool:
    """Whether the query has the name as a whole word, perhaps in quotes."""
    written_name = re.escape(name.replace('"', '""'))
    return re.search(rf"(?<!\w){written_name}(?!\w)", query) is not None


def _database() -> "duckdb.DuckDBPyConnection":
    try:
        import duckdb
        import polars  # noqa: F401  # the scans are frames of polars
    except ImportError as error:
        raise CannotBegin(f"{error.name} is not installed: {to_install('sql')}") from error
    return duckdb.connect(config=CONFIG)


@asynccontextmanager
async def _scan(run: Invocation, client: Client, name: str, as_of: str | None) -> AsyncIterator[Any]:
    """The scan of a shard, or of a table, without `diff`."""
    _, schema = await client.schema(name)
    is_table = (await client.admin.inspect(name)).table
    asked = AskedContents(as_of_option(as_of), None)
    async with opened_contents(run, client, name, schema, asked) as snapshot:
        yield await entries_scan(snapshot, True) if is_table else await snapshot.scan()


async def _answer(database: "duckdb.DuckDBPyConnection", query: str, names: Iterable[str]) -> Any:
    """A reader of Arrow batches. `Problems` for a query that DuckDB refuses, with the names of shards."""
    import duckdb

    def begin() -> Any:
        relation = database.sql(query)
        if relation is None:
            raise CannotBegin("the query has no result: write a select")
        return relation.to_arrow_reader()

    try:
        return await _run(database, begin)
    except duckdb.CatalogException as error:
        existing = ", ".join(map(repr, [*names][:NAMES_SHOWN])) or "none"
        raise Problems(f"{error}; of shards and tables there are {existing}") from error


async def _batches(reader: Any, database: "duckdb.DuckDBPyConnection") -> AsyncIterator[Any]:
    while (batch := await _run(database, next, reader, None)) is not None:
        yield batch


async def _run(database: "duckdb.DuckDBPyConnection", work: Any, *args: Any) -> Any:
    """The result of `work`, made on a thread, which a cancellation interrupts. Errors of the library, which
    DuckDB wraps, come as `Problems`, too."""
    import duckdb

    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():  # it may not have begun
            database.interrupt()
            await asyncio.wait([running], timeout=INTERRUPT_S)
        raise
    except duckdb.CatalogException:
        raise
    except duckdb.Error as error:
        raise Problems(str(error)) from error


__all__ = ["named", "sql"]
