"""The tables that a client has open: one view and one writer for each, shared by all who name it."""

import asyncio
from contextlib import suppress
from copy import deepcopy
from typing import Any, TypeVar

from aiopersist.data.lazy import are_imported, import_all, warm_up
from aiopersist.errors import InvalidUsage, ShardFinalized, UsageKind
from aiopersist.failures import Backoff
from aiopersist.read.session import ReadSession
from aiopersist.resource import RELEASE_DEADLINE_S, Opening, Resource, Scope
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.model import Clock
from aiopersist.storage.readonly import refuse
from aiopersist.table.group import TableCommits
from aiopersist.table.kind import Kind
from aiopersist.table.member import TableMember
from aiopersist.table.view import View
from aiopersist.write.session import Session
from aiopersist.write.staged import StagingContext

PARQUET, POLARS = "pyarrow.parquet", "polars"
FILTERS = ("pyarrow.acero",)  # imported by the first condition on a table

T = TypeVar("T")


class OpenTable(Resource):
    """One table of this client: its view, which follows the shard, and its writer."""

    def __init__(
        self,
        kind: Kind[Any, Any],
        reading: ReadSession[Any, Any],
        writing: Session | None,
        resident: bool | None,
    ) -> None:
        self.kind = kind
        self.shard = reading.shard
        self.reading = reading
        self.view = View(kind, reading, resident)
        self._writing = writing
        self._member = None if writing is None else TableMember(self.view, writing)
        self._following: asyncio.Task[None] | None = None
        self._scope = reading.scope
        self._scope.what = f"table {kind.name!r}"
        self.users = 0
        """Handles, subscriptions and transactions; the last one closes it."""

    @classmethod
    async def open(cls, shards: Shards, kind: Kind[Any, Any], resident: bool | None) -> "OpenTable":
        """Create the shard if it does not exist, and read its contents, if they are to be resident."""
        shard = await _table_shard(shards, kind)
        await shard.hold.acquire()
        reading: ReadSession[Any, Any] = ReadSession(shard, kind.schema, shards.scope, None)
        try:
            writing = None
            if not shards.stack.readonly:
                context = StagingContext(shard, kind.schema, shard.schema_id(kind.schema), shards.scope)
                writing = Session(context)
            table = cls(kind, reading, writing, resident)
            await table.view.open()
        except BaseException:
            reading.scope.close()
            shards.stack.supervisor.spawn(reading.release(), "release a table")
            raise
        work = table._follow()
        table._following = shards.stack.supervisor.background(work, f"follow {shard.label}")
        return table

    @property
    def scope(self) -> Scope:
        """The scope of calls on it."""
        return self._scope

    @property
    def member(self) -> TableMember:
        """What the group commit writes; `Unsupported` for a readonly client."""
        if self._member is None:
            refuse("a change of a table")
        return self._member

    async def _follow(self) -> None:
        """Keep the view near the newest state, for gets that look at no head."""
        register = self.shard.register
        backoff = Backoff(self.shard.stack.supervisor.failures, f"following {self.shard.label}")
        while True:
            try:
                await register.wait(lambda state: True if self.view.is_behind else None)
                await self.view.catch_up()
                backoff.succeeded()
            except ShardFinalized:
                return
            except Exception as error:
                await backoff.failed(error)

    async def aclose(self) -> None:
        """Stop following, and release the writer and what is held. Idempotent."""
        if not self._scope.close():
            return
        if self._following is not None:
            self._following.cancel()
        self.view.close()
        if self._writing is not None:
            await self._writing.aclose()
        release = self.shard.stack.supervisor.spawn(self.reading.release(), "release a table")
        await asyncio.wait([release], timeout=RELEASE_DEADLINE_S)


_Key = tuple[str, str]


def _key(kind: Kind[Any, Any]) -> _Key:
    """The name, and the types: those of a table may gain fields, and then the old ones are views of their
    own, which cannot write."""
    return kind.name, str(kind.schema.to_record())


class OpenTables:
    """See the header. One per client."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.group = TableCommits(shards.stack)
        self._open: dict[_Key, asyncio.Task[OpenTable]] = {}
        self._warming: asyncio.Task[None] | None = None
        self._is_ready = False

    async def ready(self) -> None:
        """Return when the event loop can make columns of values, and filter them: what is imported then, also
        pandas, if it is installed, is imported on a thread. Calls that wait go on in their order."""
        if not self._is_ready:
            if self._warming is None or self._warming.done():
                work = self.shards.stack.compute(_warm_up)
                self._warming = self.shards.stack.supervisor.spawn(work, "import what columns need")
            await asyncio.shield(self._warming)
            self._is_ready = True

    async def taken(self, *given: T) -> tuple[T, ...]:
        """Keys and vals as they are at the call, when it is `ready`: their owner may change them later."""
        if self._is_ready:
            return given
        taken = _copied(given)
        await self.ready()
        return taken

    async def _ready_for(self, kind: Kind[Any, Any]) -> None:
        """Import what the views of such tables need on the event loop."""
        if not kind.is_plain:
            await self.ready()
        modules = [PARQUET, POLARS] if kind.has_lists else [PARQUET]
        if not are_imported(modules):
            await self.shards.stack.compute(import_all, modules)

    def acquiring(self, kind: Kind[Any, Any], resident: bool | None) -> "asyncio.Task[OpenTable]":
        """A task that acquires the table, whoever waits for it."""
        self.shards.calls.check()
        return self.shards.stack.supervisor.spawn(self.acquire(kind, resident), "open a table")

    async def acquire(self, kind: Kind[Any, Any], resident: bool | None = None) -> OpenTable:
        """The open table of that name and those types, opened if it is not; `CodecMismatch` if these are not
        stored. The last caller who says so decides whether it is resident."""
        await self._ready_for(kind)
        key = _key(kind)
        task = self._open.get(key)
        if task is not None and task.done() and (task.cancelled() or task.exception() or _is_over(task)):
            task = None
        if task is None:
            opening = self.shards.opening(
                lambda: OpenTable.open(self.shards, kind, resident), f"client.table({kind.name!r})"
            )
            task = self._open[key] = self.shards.stack.supervisor.spawn(opened(opening), "open a table")
        table: OpenTable = await asyncio.shield(task)
        table.users += 1
        try:
            await table.view.become(resident)
        except BaseException:
            await self.release(table)
            raise
        return table

    async def releasing(self, acquiring: "asyncio.Task[OpenTable]") -> None:
        """Release what was acquired. Waits for an opening that is under way, but not for ever: then it goes
        on by itself."""
        if not acquiring.done():
            release = self.shards.stack.supervisor.spawn(self._release_later(acquiring), "release a table")
            await asyncio.wait([release], timeout=RELEASE_DEADLINE_S)
        elif not acquiring.cancelled() and not acquiring.exception():
            await self.release(acquiring.result())

    async def _release_later(self, acquiring: "asyncio.Task[OpenTable]") -> None:
        await asyncio.wait([acquiring])
        await self.releasing(acquiring)

    async def release(self, table: OpenTable) -> None:
        """The last user closes it. Its name may be that of another table by now."""
        if self.leave(table):
            await table.aclose()

    def leave(self, table: OpenTable) -> bool:
        """One user less; whether it was the last one, who is to close it."""
        table.users -= 1
        if table.users:
            return False
        key = _key(table.kind)
        if key in self._open and _gave(self._open[key], table):
            del self._open[key]
        return True


def _copied(given: tuple[T, ...]) -> tuple[T, ...]:
    """A copy, or the same if there is no equal copy: a class may make another value of what it keeps, as an
    int of cents that is made of euros."""
    with suppress(Exception):  # what cannot be copied or compared is converted as it is
        copies = deepcopy(given)
        if copies == given:
            return copies
    return given


def _warm_up() -> None:
    warm_up()
    import_all(FILTERS)


async def opened(opening: Opening[OpenTable]) -> OpenTable:
    return await opening


def _gave(task: "asyncio.Task[OpenTable]", table: OpenTable) -> bool:
    return task.done() and not task.cancelled() and not task.exception() and task.result() is table


def _is_over(task: "asyncio.Task[OpenTable]") -> bool:
    table = task.result()
    return table._scope.closed or table.shard.state.finalized


async def _table_shard(shards: Shards, kind: Kind[Any, Any]) -> Shard:
    if shards.stack.readonly:
        shard = await shards.existing(kind.name)
    else:
        shard = await shards.named(kind.name)
        await shard.open_or_create(kind.schema, Clock.WALL, table=True)
    if not shard.state.table:
        text = (
            f"{shard.label} is a shard, not a table: read and write it with client.reader and client.writer"
        )
        raise InvalidUsage(UsageKind.NOT_A_TABLE, text, shard_id=shard.id)
    shard.schema_id(kind.schema)
    return shard
