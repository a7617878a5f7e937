"""What the rest of the library asks of the handle of a table: transactions, feeds, puts in place of all."""

from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.table.bulk.put_many import replace_contents
from aiopersist.table.open import OpenTable, OpenTables
from aiopersist.table.schema import TableSchema
from aiopersist.table.table import Table


def kind_of(table: object, tables: OpenTables) -> TableSchema[Any, Any]:
    """The kind of a table of this client; `InvalidUsage` for anything else."""
    if not isinstance(table, Table):
        raise TypeError(f"{shown(table)} is not an aiopersist.Table")
    if table._tables is not tables:
        raise InvalidUsage(UsageKind.INVALID_APPEND, f"table {table.name!r} belongs to another client")
    table._check_open()
    return table._kind


def is_closed(table: Table[Any, Any]) -> bool:
    """Whether the handle was closed."""
    return table._closed


async def opened(table: Table[Any, Any]) -> OpenTable:
    """The table, opened if it is not."""
    return await table._open()


async def acquired(table: Table[Any, Any], *, make: bool = True) -> OpenTable:
    """The same, with a user more, whom `leave` takes back; also if the handle was closed meanwhile.
    `UnknownShard` if it does not exist, unless `make`."""
    if table._closed:
        return await table._tables.acquire(table._kind, make=make)
    found = await table._open(make=make)
    found.users += 1
    return found


def leave(table: Table[Any, Any], found: OpenTable) -> None:
    """What was acquired is no longer needed. The last user closes it, in the background."""
    tables = table._tables
    if tables.leave(found):
        tables.shards.stack.supervisor.spawn(found.aclose(), "close a table")


async def overwrite(table: Table[Any, Any], entries: Any) -> int:
    """Give keys their values, as `Table.put_many` does, and delete all other keys, at one time, which is
    returned. What other commits did until then is replaced, too. Any number of entries, in bounded memory:
    all are written to the blob store, and all contents are read. An entry that is there already is not
    written again."""
    found = await opened(table)
    with found.scope.call():
        return (await replace_contents(found.member, table._tables.group, entries)).time
