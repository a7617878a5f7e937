"""Creating the tables of a schema, whoever comes first."""

from typing import TYPE_CHECKING, NamedTuple

from aiopersist.errors import InvalidLocation

if TYPE_CHECKING:
    from aiopersist.storage.postgres.pool import Connection

# First users take turns: IF NOT EXISTS alone is not safe for them. The number is ours, no more.
_LOCK = "SELECT pg_advisory_xact_lock(7164775410254338405)"
# Read from the tables of the catalog: to_regclass() may answer from a cache that a lock does not refresh.
_HAS_TABLE = "SELECT EXISTS (SELECT FROM pg_catalog.pg_tables WHERE schemaname = $1 AND tablename = $2)"
_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)"


def quoted(name: str) -> str:
    """`name` as an identifier."""
    return '"' + name.replace('"', '""') + '"'


class Tables(NamedTuple):
    """The tables of one schema: `ddl` creates them all, and they are there when `mark` is."""

    schema: str
    mark: str
    ddl: str

    async def exist(self, connection: "Connection") -> bool:
        there: bool = await connection.fetchval(_HAS_TABLE, self.schema, self.mark)
        return there

    async def require(self, connection: "Connection") -> None:
        """`InvalidLocation` where they are not."""
        if not await self.exist(connection):
            raise InvalidLocation(f"postgres: the schema {self.schema!r} holds no location")

    async def ensure(self, connection: "Connection") -> None:
        """Create what is not there. Safe for first users at the same time; where all is there it needs no
        privilege."""
        if await self.exist(connection):
            return
        async with connection.transaction():
            await connection.execute(_LOCK)
            if await self.exist(connection):
                return
            # Not with IF NOT EXISTS, which asks for a privilege even where there is nothing to do.
            if not await connection.fetchval(_HAS_SCHEMA, self.schema):
                await connection.execute(f"CREATE SCHEMA {quoted(self.schema)}")
            await connection.execute(self.ddl)
