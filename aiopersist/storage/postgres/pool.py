"""Connections to Postgres, and the meaning of its errors.

Every use of a connection runs in a task of the pool. So a caller that is cancelled stops waiting, while its
statement goes on, and its connection is used again only after the answer. A connection whose answer did not
come (a timeout, an error of the connection) is never used again.

*Errors* are mapped here, once. An error that the server reports with severity ERROR ended the statement's
transaction: surely nothing happened (`ServerRefused`). A failure before there was a connection sent nothing:
`StorageUnavailable`. Any other failure (FATAL, PANIC, a lost connection, a timeout) tells nothing:
`Indeterminate`. A read can be sent again, so after a lost connection it is sent on fresh ones before it
fails: a server that closed idle connections fails no read.

*A failover* leaves connections that are of no more use: to a server that was read-only when they were made,
or that recovers or shuts down. If one connection reports this, it is closed together with all idle
connections, and those in use are closed when they are returned. The next use connects anew, to the server
that is the primary then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from aiopersist.ending import told
from aiopersist.errors import Corruption, Error, Indeterminate, StorageUnavailable
from aiopersist.runtime import begun
from aiopersist.storage.keys import closed

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0  # after it the retry layer takes over
STATEMENT_TIMEOUT_S = 60.0  # statements take milliseconds: after it the connection is dead
CLOSE_TIMEOUT_S = 5.0
READ_ATTEMPTS = 3

# Waiting does not help: wrong password or user, missing database, missing privilege, read-only, disk full.
_LASTING = ("28", "3D", "42501", "25006", "53100")
# Waiting helps: conflicts, resources, objects in use, interventions of an operator.
_PASSING = ("40", "53", "55", "57", "58", "08")
_CORRUPT = ("XX001", "XX002")
# A failover: read-only; shut down, crashed, starting up, database dropped or idle for too long (57P0x).
_MOVED = ("25006", "57P0")
# No server, or none that is the primary: one may be promoted in a moment.
_UNREACHABLE = (OSError, TimeoutError, asyncpg.TargetServerAttributeNotMatched)

SESSION = {
    "application_name": "aiopersist",
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "jit": "off",  # compiling takes longer than any statement here
}


class ServerRefused(StorageUnavailable):
    """The server refused this statement: nothing happened."""


class Pool:
    """At most `size` connections, opened when needed. `prepare` is awaited with the first one. `session` has
    settings of each connection, beside `SESSION`."""

    def __init__(
        self,
        arguments: dict[str, str],
        size: int,
        prepare: Callable[[Connection], Awaitable[None]] | None = None,
        session: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._arguments: dict[str, Any] = dict(arguments)
        self._session = {**SESSION, **session}
        self._prepare = prepare
        self._gate = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._watchdog = _Watchdog()
        self._failovers = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False

    async def read(self, use: Callable[[Connection], Awaitable[T]]) -> T:
        """Use a connection for a read, which may be sent again."""
        return await self._told(partial(self._read, use))

    async def write(self, use: Callable[[Connection], Awaitable[T]]) -> T:
        """Use a connection once. After `ServerRefused` or `StorageUnavailable` surely nothing happened."""
        return await self._told(partial(self.use, use))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` in a task that the pool owns. It begins at once, where Python can (`begun`)."""
        if self.closed:
            work.close()
            raise closed("store")
        task = begun(work, "use a connection to Postgres")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def use(self, use: Callable[[Connection], Awaitable[T]]) -> T:
        """`write`, for callers that run in a task of the pool already."""
        async with self._gate:
            failovers = self._failovers  # a failover meanwhile makes the connection useless
            connection = await self._checked_out()
            try:
                with self._watchdog.watching(connection):
                    result = await use(connection)
            except BaseException as error:
                failure = _of_statement(error)
                if _has_moved(error):
                    self._fail_over()
                usable = (
                    isinstance(failure, ServerRefused | Corruption)
                    and not connection.is_closed()
                    and not connection.is_in_transaction()
                )
                self._put_back(connection, usable and failovers == self._failovers)
                if failure is None:
                    raise
                raise failure from error
            self._put_back(connection, failovers == self._failovers)
            return result

    async def _told(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, in a task of the pool, which goes on when the caller is cancelled."""
        _, answer = told(work, self.spawn)
        return await answer

    async def connect(self) -> Connection:
        """A new connection, which the caller closes."""
        try:
            connection: Connection = await asyncpg.connect(
                **self._arguments, timeout=CONNECT_TIMEOUT_S, server_settings=self._session
            )
        except Exception as error:
            raise self._of_connecting(error) from None  # its text may hold the URL
        try:
            await self._prepare_once(connection)
        except BaseException as error:
            connection.terminate()
            if isinstance(error, Exception):
                raise self._of_connecting(error) from error
            raise
        return connection

    async def aclose(self) -> None:
        """Give running tasks a moment to end, then close all connections."""
        self.closed = True
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        finally:
            for task in self._tasks:
                task.cancel()
            self._drop_idle()
            self._watchdog.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        await asyncio.sleep(0)  # noqa: TID251  # the loop closes sockets one turn after they are dropped

    async def _read(self, use: Callable[[Connection], Awaitable[T]]) -> T:
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return await self.use(use)
            except Indeterminate:  # the idle ones are likely lost as well
                self._drop_idle()
        try:
            return await self.use(use)
        except Indeterminate as error:
            raise StorageUnavailable(str(error)) from error.__cause__

    async def _checked_out(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await self.connect()

    def _put_back(self, connection: Connection, usable: bool) -> None:
        if usable:
            self._idle.append(connection)
        else:
            connection.terminate()

    def _fail_over(self) -> None:
        """Use no connection again that exists now."""
        self._failovers += 1
        self._drop_idle()

    async def _prepare_once(self, connection: Connection) -> None:
        if self._prepare is not None:
            async with asyncio.timeout(STATEMENT_TIMEOUT_S):
                await self._prepare(connection)
            self._prepare = None

    def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.terminate()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, though its caller may have stopped waiting

    def _of_connecting(self, error: Exception) -> Exception:
        """The error of this library for a failure to connect: nothing of the caller was sent."""
        if isinstance(error, Error):
            return error
        secret = self._arguments.get("password") or ""
        text = f"postgres: cannot connect: {type(error).__name__}: {error}"
        if isinstance(error, _UNREACHABLE):
            return StorageUnavailable(text.replace(secret, "***") if secret else text)
        if isinstance(error, asyncpg.PostgresError):
            lasting = (error.sqlstate or "").startswith(_LASTING)
            return StorageUnavailable(text.replace(secret, "***") if secret else text, retry=not lasting)
        return StorageUnavailable(f"postgres: cannot connect: {type(error).__name__}", retry=False)


class _Watchdog:
    """Ends connections whose answer does not come: `STATEMENT_TIMEOUT_S` after they were taken, their
    statement fails. One timer for all: a timer for each statement takes longer than all else here."""

    def __init__(self) -> None:
        self._deadlines: dict[Connection, float] = {}  # in the order in which they end
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self, connection: Connection) -> Iterator[None]:
        """Within, the connection has so long."""
        loop = asyncio.get_running_loop()
        self._deadlines[connection] = loop.time() + STATEMENT_TIMEOUT_S
        if self._timer is None:
            self._timer = loop.call_later(STATEMENT_TIMEOUT_S, self._look)
        try:
            yield
        finally:
            del self._deadlines[connection]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        for connection, deadline in self._deadlines.items():
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._look)
                break
            with suppress(Exception):  # the others end nevertheless
                connection.terminate()


def _has_moved(error: BaseException) -> bool:
    return isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "").startswith(_MOVED)


def _of_statement(error: BaseException) -> Exception | None:
    """The error of this library for the failure of a statement; `None` for a cancellation."""
    if isinstance(error, Error | ValueError) and not isinstance(error, asyncpg.InterfaceError):
        return error
    if isinstance(error, asyncpg.PostgresError) and error.severity_en == "ERROR":
        state = error.sqlstate or ""
        text = f"postgres: {state} {error}"
        if state in _CORRUPT:
            return Corruption(text)
        return ServerRefused(text, retry=state.startswith(_PASSING) and not state.startswith(_LASTING))
    if isinstance(error, asyncpg.DataError):  # the driver could not encode an argument
        return ServerRefused(f"postgres: {type(error).__name__}", retry=False)
    if isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError | OSError | TimeoutError):
        return Indeterminate(f"postgres: lost the answer: {type(error).__name__}: {error}")
    if isinstance(error, Exception):
        return Indeterminate(f"postgres: lost the answer: {type(error).__name__}")
    return None  # the store closes
