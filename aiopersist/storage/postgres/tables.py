"""Creates the tables of a schema; safe for first users at the same time."""

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from aiopersist.base.errors import InvalidLocation

if TYPE_CHECKING:
    from aiopersist.storage.postgres.connect import Connection

# First users take turns: IF NOT EXISTS alone is not safe. The number means nothing but this lock.
_LOCK = "SELECT pg_advisory_xact_lock(7164775410254338405)"
# The catalog is read: to_regclass() may answer from a cache that taking a lock does not refresh.
_HAS_TABLE = "SELECT EXISTS (SELECT FROM pg_catalog.pg_tables WHERE schemaname = $1 AND tablename = $2)"
_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)"


def quoted(name: str) -> str:
    """`name` as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


class Tables(NamedTuple):
    """The tables of one schema: `ddl` creates all of them; they exist if the table `mark` does."""

    schema: str
    mark: str
    ddl: str

    async def exist(self, connection: "Connection") -> bool:
        exists: bool = await connection.fetchval(_HAS_TABLE, self.schema, self.mark)
        return exists

    async def require(self, connection: "Connection") -> None:
        """Raise `InvalidLocation` if they do not exist."""
        if not await self.exist(connection):
            raise InvalidLocation(f"postgres: the schema {self.schema!r} holds no location yet")

    async def ensure(self, connection: "Connection") -> None:
        """Create the tables if they do not exist. Safe for first users at the same time; needs no privilege
        if the tables exist."""
        if await self.exist(connection):
            return
        async with connection.transaction():
            await connection.execute(_LOCK)
            if await self.exist(connection):
                return
            # IF NOT EXISTS would need a privilege even if the schema exists.
            if not await connection.fetchval(_HAS_SCHEMA, self.schema):
                await connection.execute(f"CREATE SCHEMA {quoted(self.schema)}")
            await connection.execute(self.ddl)


def advisory_lock(name: str) -> int:
    """The number of the advisory lock of that name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
