"""Connections to Postgres, and the meaning of its errors.

Every use of a connection runs in a task of the pool. So a caller that is cancelled stops waiting, while its
statement goes on, and its connection is used again only after the answer. A connection whose answer did not
come (a timeout, an error of the connection) is never used again. One that nobody used for a while is closed,
but for a few. `connect` makes them.

*Errors* are mapped here, once. An error of severity ERROR ended the statement's transaction: surely nothing
happened (`ServerRefused`). It counts only if the server itself reports it. The server names the place in its
source, which no pooler does; and a pooler may say ERROR after it lost the server's answer. Two codes of the
server say that it does not know. A failure before there was a connection sent nothing: `StorageUnavailable`.
So does a failure at a pooler before a commit was sent. Any other failure (FATAL, PANIC, a lost connection, a
timeout, whatever a pooler says) tells nothing: `Indeterminate`. A read can be sent again, so after a lost
connection it is sent on fresh ones before it fails: a server that closed idle connections fails no read.

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
from typing import Any, TypeVar

import asyncpg

from aiopersist.base.ending import spawn_with_result
from aiopersist.base.errors import Corruption, Error, Indeterminate, StorageUnavailable
from aiopersist.base.runtime import OwnProcess, begun
from aiopersist.storage.keys import closed
from aiopersist.storage.postgres.address import IDLE_CONNECTIONS, PostgresAddress
from aiopersist.storage.postgres.connect import Connection, Connector, NotThePrimary, is_lasting

T = TypeVar("T")

STATEMENT_TIMEOUT_S = 60.0  # statements take milliseconds: after it the connection is dead
CLOSE_TIMEOUT_S = 5.0
IDLE_S = 60.0  # after it a connection that nobody used is closed
READ_ATTEMPTS = 3

# Waiting helps: conflicts, resources, objects in use, interventions of an operator.
_PASSING = ("40", "53", "55", "57", "58", "08")
_CORRUPT = ("XX001", "XX002")
_UNKNOWN = ("40003", "08007")  # whether the transaction was committed
# A failover: read-only; shut down, crashed, starting up, database dropped or idle for too long (57P0x).
_MOVED = ("25006", "57P0")


class ServerRefused(StorageUnavailable):
    """The server refused this statement: nothing happened."""


class Pool:
    """At most `size` connections, or as many as the URL says, opened when needed; `idle` of them stay open
    when nobody uses them. `prepare` is awaited with the first one. `session` has settings of each
    connection."""

    def __init__(
        self,
        address: PostgresAddress,
        size: int,
        prepare: Callable[[Connection], Awaitable[None]] | None = None,
        session: Mapping[str, str] = MappingProxyType({}),
        idle: int | None = None,
    ) -> None:
        self._connector = Connector(address, session)
        self._prepare = prepare
        self._gate = asyncio.Semaphore(size)
        self._idle: list[Connection] = []  # the one that was used last is the last
        self._idle_max = address.numbers.get("idle_connections", IDLE_CONNECTIONS) if idle is None else idle
        self._trimming: asyncio.TimerHandle | None = None
        self._watchdog = _Watchdog()
        self._failovers = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False
        self._process = OwnProcess("a store")

    async def read(self, use: Callable[[Connection], Awaitable[T]]) -> T:
        """Use a connection for a read, which may be sent again."""
        return await self._in_task(partial(self._read, use))

    async def write(self, use: Callable[[Connection], Awaitable[T]]) -> T:
        """Use a connection once. After `ServerRefused` or `StorageUnavailable` surely nothing happened."""
        return await self._in_task(partial(self.use, use))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` in a task that the pool owns. It begins at once, where Python can (`begun`)."""
        if self.closed or not self._process.is_here:
            work.close()
            self._process.check()
            raise closed("store")
        task = begun(work, "use a connection to Postgres")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def use(self, use: Callable[[Connection], Awaitable[T]], *, writes: bool = True) -> T:
        """`write`, for callers that run in a task of the pool already."""
        async with self._gate:
            failovers = self._failovers  # a failover meanwhile makes the connection useless
            connection = await self._checked_out()
            try:
                with self._watchdog.watching(connection):
                    result = await self._used(use, connection, writes)
            except BaseException as error:
                failure = _of_statement(error)
                if _has_moved(error) or _has_moved(error.__cause__):
                    self._fail_over()
                usable = (
                    isinstance(failure, ServerRefused | Corruption)
                    and not connection.is_closed()
                    and not connection.is_in_transaction()
                )
                self._put_back(connection, usable and failovers == self._failovers)
                if failure is None or failure is error:
                    raise
                raise failure from error
            self._put_back(connection, failovers == self._failovers)
            return result

    async def _used(
        self, use: Callable[[Connection], Awaitable[T]], connection: Connection, writes: bool
    ) -> T:
        if not (writes and connection.pooled):
            return await use(connection)
        where = "before the commit, as a transaction began, which a pooler must allow"
        try:
            transaction = await self._connector.begin(connection)
            where = "before the commit"
            result = await use(connection)
        except Exception as error:
            failure = _of_statement(error)
            if isinstance(failure, Indeterminate):
                text = f"{where}: {failure}"
                lasting = isinstance(error, asyncpg.PostgresError) and is_lasting(error)
                failure = StorageUnavailable(text, retry=not lasting)
            raise failure or error from error
        await transaction.commit()
        return result

    async def _in_task(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, in a task of the pool, which goes on when the caller is cancelled."""
        _, answer = spawn_with_result(work, self.spawn)
        return await answer

    async def connect(self) -> Connection:
        """A new connection, which the caller closes."""
        connection = await self._connector.connect()
        try:
            await self._prepare_once(connection)
        except BaseException as error:
            connection.terminate()
            if isinstance(error, Exception):
                raise self._connector.failure(error) from error
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
            if self._trimming is not None:
                self._trimming.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        await asyncio.sleep(0)  # noqa: TID251  # the loop closes sockets one turn after they are dropped

    async def _read(self, use: Callable[[Connection], Awaitable[T]]) -> T:
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return await self.use(use, writes=False)
            except Indeterminate:  # the idle ones are likely lost as well
                self._drop_idle()
        try:
            return await self.use(use, writes=False)
        except Indeterminate as error:
            raise StorageUnavailable(str(error)) from error.__cause__

    async def _checked_out(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await self.connect()

    def _put_back(self, connection: Connection, usable: bool) -> None:
        if not usable or self.closed:
            connection.terminate()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        if self._trimming is None and len(self._idle) > self._idle_max:
            self._trimming = asyncio.get_running_loop().call_later(IDLE_S, self._trim)

    def _trim(self) -> None:
        """Close the connections that were not used for a while, but for some."""
        loop, self._trimming = asyncio.get_running_loop(), None
        while len(self._idle) > self._idle_max:
            wait_s = self._idle[0].idle_since + IDLE_S - loop.time()
            if wait_s > 0:
                self._trimming = loop.call_later(wait_s, self._trim)
                return
            self.spawn(self._idle.pop(0).close(timeout=CLOSE_TIMEOUT_S))

    def _fail_over(self) -> None:
        """Use no connection again that exists now."""
        self._failovers += 1
        self._drop_idle()

    async def _prepare_once(self, connection: Connection) -> None:
        if self._prepare is not None:
            async with asyncio.timeout(STATEMENT_TIMEOUT_S):
                await self._used(self._prepare, connection, True)
            self._prepare = None

    def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.terminate()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, though its caller may have stopped waiting


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


def _has_moved(error: BaseException | None) -> bool:
    if isinstance(error, NotThePrimary):
        return True
    return isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "").startswith(_MOVED)


def _is_of_the_server(error: asyncpg.PostgresError) -> bool:
    """Whether the server itself reports an error that ended the transaction, and no pooler."""
    return (
        error.severity_en == "ERROR"
        and error.sqlstate not in _UNKNOWN
        and bool(error.server_source_filename and error.server_source_line)
    )


def _of_statement(error: BaseException) -> Exception | None:
    """The error of this library for the failure of a statement; `None` for a cancellation."""
    if isinstance(error, Error | ValueError) and not isinstance(error, asyncpg.InterfaceError):
        return error
    if isinstance(error, asyncpg.PostgresError) and _is_of_the_server(error):
        state = error.sqlstate or ""
        text = f"postgres: {state} {error}"
        if state in _CORRUPT:
            return Corruption(text)
        return ServerRefused(text, retry=state.startswith(_PASSING) and not is_lasting(error))
    if isinstance(error, asyncpg.DataError):  # the driver could not encode an argument
        return ServerRefused(f"postgres: {type(error).__name__}", retry=False)
    if isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError | OSError | TimeoutError):
        return Indeterminate(f"postgres: lost the answer: {type(error).__name__}: {error}")
    if isinstance(error, Exception):
        return Indeterminate(f"postgres: lost the answer: {type(error).__name__}")
    return None  # the store closes
