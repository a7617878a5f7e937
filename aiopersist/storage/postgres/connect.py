"""How a connection to Postgres is made: to the server itself, or to a pooler before it.

*A pooler* (such as pgbouncer) gives a client another connection of the server with each transaction, and
shares it with others. So nothing of a session lasts there: no setting, no prepared statement, no LISTEN; a
name may have the prepared statement of another client. A pooler shows itself: the number that it gives a
session is not that of the server's process. The first statement of a connection asks
for it. That statement also sets what a pooler refuses, or drops, when it comes with the start; and the driver
does not prepare it, since it may go to a pooler already.

- At the server the settings hold for the session, and each statement is prepared once.
- At a pooler each write is a transaction that begins with the settings, and no statement gets a name. `hints`
  reads instead of listening. If the server is not the primary any more, the transaction ends before it did
  anything.
"""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import asyncpg

from aiopersist.base.errors import Error, StorageUnavailable
from aiopersist.storage.postgres.address import CONNECT_TIMEOUT_S, PostgresAddress

if TYPE_CHECKING:
    _Connection = asyncpg.Connection[asyncpg.Record]
else:
    _Connection = asyncpg.Connection

STATEMENTS_KEPT = 100  # prepared, by connection
SESSION = {
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "jit": "off",  # compiling takes longer than any statement here
}
# Which servers are no use, by `target_session_attrs`; the driver asks the others.
_UNWANTED = {
    "primary": "pg_is_in_recovery()",
    "read-write": "current_setting('transaction_read_only')::bool",
}
_KEEPALIVES = {  # by option, that of the socket, where the system has it
    "keepalives_idle": "TCP_KEEPIDLE",
    "keepalives_interval": "TCP_KEEPINTVL",
    "keepalives_count": "TCP_KEEPCNT",
    "tcp_user_timeout": "TCP_USER_TIMEOUT",
}
# Waiting does not help: wrong password or user, missing database, missing privilege, read-only, disk full.
LASTING = ("28", "3D", "42501", "25006", "53100")
# No server, or none that is the primary: one may be promoted in a moment.
_UNREACHABLE = (OSError, TimeoutError, asyncpg.TargetServerAttributeNotMatched)
_STATEMENT_MODE = "statement pooling"


class Connection(_Connection):
    """One connection. `pooled`: it leads to a pooler. `idle_since`: when it was put back."""

    pooled = False
    idle_since = 0.0


class NotThePrimary(StorageUnavailable):
    """The server is not the primary: nothing happened."""


class Connector:
    """Connects to `address`. `session` has the settings beside `SESSION`."""

    def __init__(self, address: PostgresAddress, session: Mapping[str, str]) -> None:
        self._address = address
        self._session = {**SESSION, **session}
        self._unwanted = _UNWANTED.get(address.servers, "false")
        self._pooled: bool | None = True if address.pooled else None  # `None`: nobody has asked yet
        self._ssl: ssl.SSLContext | None = None

    async def connect(self) -> Connection:
        """A new connection, which the caller closes."""
        try:
            while True:
                # The driver asks servers which one is the primary by a statement that it prepares.
                by_driver = self._address.several or self._address.may_lag
                named = not (by_driver if self._pooled is None else self._pooled)
                connection = await self._open(named, by_driver)
                if named is not connection.pooled:
                    return connection
                connection.terminate()
        except Exception as error:
            raise self.failure(error) from None  # its text may hold the URL

    async def _open(self, named: bool, by_driver: bool) -> Connection:
        """A connection that knows whether it is pooled."""
        address = self._address
        more: dict[str, Any] = {**address.arguments}
        if not by_driver:
            more["target_session_attrs"] = "any"
        if address.trusts_system:
            self._ssl = self._ssl or await anyio.to_thread.run_sync(ssl.create_default_context)
            more["ssl"] = self._ssl
        connection: Connection = await asyncpg.connect(
            **more,
            timeout=address.numbers.get("connect_timeout", CONNECT_TIMEOUT_S),
            server_settings=dict(address.startup),
            connection_class=Connection,
            statement_cache_size=STATEMENTS_KEPT if named else 0,
        )
        try:
            self._keep_alive(connection)
            pooled = f"pg_backend_pid() <> {connection.get_server_pid()}"
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                bits = await self._settle(connection, pooled, "pooled")
            self._pooled = connection.pooled = bool(bits & 1) or address.pooled
            if bits & 2:
                raise NotThePrimary(f"postgres: cannot connect: the server is not {address.servers}")
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def begin(self, connection: Connection) -> "asyncpg.transaction.Transaction":
        """A transaction that has the settings, for a connection to a pooler."""
        transaction = connection.transaction(isolation="read_committed")
        await transaction.start()
        if await self._settle(connection, "false", "true") & 2:
            raise NotThePrimary(f"postgres: the server is not {self._address.servers}")
        return transaction

    async def _settle(self, connection: Connection, pooled: str, local: str) -> int:
        """Set the settings, of the transaction where `local` is true; 1 if `pooled` is true, and 2 if the
        server is of no use. One request: the number of rows tells, since the driver prepares what has
        values."""
        names = ", ".join(
            f"set_config('{name}', '{value}', {local})" for name, value in self._session.items()
        )
        tag = await connection.execute(
            f"SELECT {names} FROM (SELECT {pooled} AS pooled, {self._unwanted} AS unwanted) AS found, "
            "generate_series(1, 1 + pooled::int + 2 * unwanted::int)"
        )
        return int(tag.removeprefix("SELECT ")) - 1

    def _keep_alive(self, connection: Connection) -> None:
        """Set the options of the socket that the URL names."""
        sock = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
        numbers = self._address.numbers
        if sock is None or sock.family == getattr(socket, "AF_UNIX", None):
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, numbers.get("keepalives", 1))
        for name, option in _KEEPALIVES.items():
            if numbers.get(name) and hasattr(socket, option):  # 0: the default of the system
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), numbers[name])

    def failure(self, error: Exception) -> Exception:
        """The error of this library for a failure to connect: nothing of the caller was sent."""
        if isinstance(error, Error):
            return error
        text = f"postgres: cannot connect: {type(error).__name__}"
        if isinstance(error, (*_UNREACHABLE, asyncpg.PostgresError)):
            secret = self._address.arguments.get("password") or ""
            text = f"{text}: {error}"
            text = text.replace(secret, "***") if secret else text
            return StorageUnavailable(text, retry=isinstance(error, _UNREACHABLE) or not is_lasting(error))
        return StorageUnavailable(text, retry=False)


def is_lasting(error: asyncpg.PostgresError) -> bool:
    """Whether waiting does not help."""
    of_pooler = "startup parameter" in str(error) or _STATEMENT_MODE in str(error)
    return of_pooler or (error.sqlstate or "").startswith(LASTING)
