"""Entries that replace all contents of a table, as one commit."""

from typing import Any

from aiopersist.table.handle import opened
from aiopersist.table.put_many import replace_contents
from aiopersist.table.table import Table


async def overwrite(table: Table[Any, Any], entries: Any) -> int:
    """Give keys their values, as `Table.put_many` does, and delete all other keys, at one time, which is
    returned. What other commits did until then is replaced, too. Any number of entries, in bounded memory:
    all are written to the blob store, and all contents are read. An entry that is there already is not
    written again."""
    found = await opened(table)
    with found.scope.call():
        return (await replace_contents(found.member, table._tables.group, entries)).time
