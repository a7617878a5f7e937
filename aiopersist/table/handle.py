"""The calls of the rest of the library on the handle of a table."""

from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.table.bulk.put_many import replace_contents
from aiopersist.table.open import OpenTable, OpenTables
from aiopersist.table.schema import TableSchema
from aiopersist.table.table import Table


def schema_of(table: object, tables: OpenTables) -> TableSchema[Any, Any]:
    """The schema of a table of this client; `InvalidUsage` for a table of another client."""
    if not isinstance(table, Table):
        raise TypeError(f"{shown(table)} is not an aiopersist.Table")
    if table._tables is not tables:
        raise InvalidUsage(UsageKind.INVALID_APPEND, f"table {table.name!r} belongs to another client")
    table._check_open()
    return table._table_schema


def is_closed(table: Table[Any, Any]) -> bool:
    """Whether the handle was closed."""
    return table._closed


async def opened(table: Table[Any, Any]) -> OpenTable:
    """The table, opened if it is not."""
    return await table._open()


async def acquired(table: Table[Any, Any], *, create: bool = True) -> OpenTable:
    """The same, with one more user until `leave`. Works also if the handle was closed. `UnknownShard` if the
    table does not exist, unless `create`."""
    if table._closed:
        return await table._tables.acquire(table._table_schema, create=create)
    open_table = await table._open(create=create)
    open_table.users += 1
    return open_table


def leave(table: Table[Any, Any], open_table: OpenTable) -> None:
    """End an `acquired`. The last user closes the table, in the background."""
    tables = table._tables
    if tables.leave(open_table):
        tables.shards.stack.supervisor.spawn(open_table.aclose(), "close a table")


async def overwrite(table: Table[Any, Any], entries: Any) -> int:
    """Give keys their values, as `Table.put_many` does, and delete all other keys, at one time, which it
    returns. Also replaces changes that others commit meanwhile. Takes any number of entries, in bounded
    memory: it writes all of them to the blob store, and reads all contents. Equal entries are not appended
    again."""
    open_table = await opened(table)
    with open_table.scope.call():
        return (await replace_contents(open_table.participant, table._tables.group, entries)).time
