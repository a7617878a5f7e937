"""The open tables of a client: one view and one writer for each, shared by all its handles."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from aiopersist.base.errors import InvalidUsage, ShardFinalized, UnknownShard, UsageKind
from aiopersist.base.failures import Backoff
from aiopersist.base.frontier import Antichain
from aiopersist.base.resource import Opening, Resource, shared
from aiopersist.data.lazy import are_imported, import_all, is_warm, warm_up
from aiopersist.read.session import ReadSession
from aiopersist.shard.instant import LOOK_S, has_passed, wall_time
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.model import Clock
from aiopersist.storage.readonly import refuse
from aiopersist.table.commit.group import TableCommits
from aiopersist.table.commit.participant import TableParticipant
from aiopersist.table.pace import ConversionPace
from aiopersist.table.schema import TableSchema
from aiopersist.table.view.view import View
from aiopersist.write.session import Session
from aiopersist.write.staged import StagingContext

FOLLOW_EVERY_S = (
    0.02  # views take the commits of others in batches: one by one they cost as much as own commits
)
PASSED_S = 0.001  # added to a wait for a moment, so that the clock of the store is beyond it
PARQUET, POLARS = "pyarrow.parquet", "polars"
FILTERS = ("pyarrow.acero",)  # imported by the first condition on a table

IMMUTABLE = frozenset({str, bytes, int, float, bool, datetime})

K = TypeVar("K")
R = TypeVar("R")
V = TypeVar("V")
T = TypeVar("T")


class NotCreated(UnknownShard):
    """A read of a table that does not exist: reads create no table."""


class OpenTable(Resource):
    """One table of this client: its view and its writer."""

    def __init__(
        self,
        table_schema: TableSchema[Any, Any],
        reading: ReadSession[Any, Any],
        writing: Session | None,
        resident: bool | None,
    ) -> None:
        self.table_schema = table_schema
        self.shard = reading.shard
        self.reading = reading
        self.view = View(table_schema, reading, resident)
        self._writing = writing
        self._participant = None if writing is None else TableParticipant(self.view, writing)
        self._following: asyncio.Task[None] | None = None
        self.scope = self._scope = reading.scope
        """Of calls on the table."""
        self.scope.what = f"table {table_schema.name!r}"
        self.users = 0
        """Handles, subscriptions and transactions that use it; the last one closes it."""

    @classmethod
    async def open(
        cls, shards: Shards, table_schema: TableSchema[Any, Any], resident: bool | None, *, create: bool
    ) -> "OpenTable":
        """Read the contents, if they are to be resident. If the shard does not exist, create it with
        `create`, else raise `NotCreated`."""
        shard = await _table_shard(shards, table_schema, create=create)
        await shard.hold.acquire()
        schema = table_schema.schema
        reading: ReadSession[Any, Any] = ReadSession(shard, schema, shards.scope, None)
        try:
            writing = None
            if not shards.stack.readonly:
                writing = Session(StagingContext(shard, schema, shard.schema_id(schema), shards.scope))
            table = cls(table_schema, reading, writing, resident)
            await table.view.open()
        except BaseException:
            reading.scope.close()
            shards.stack.supervisor.spawn(reading.release(), "release a table")
            raise
        work = table._follow()
        table._following = shards.stack.supervisor.background(work, f"follow {shard.label}")
        return table

    @property
    def participant(self) -> TableParticipant:
        """The table in group commits; `Unsupported` for a readonly client."""
        if self._participant is None:
            refuse("a change of a table")
        return self._participant

    async def _follow(self) -> None:
        """Keep the view near the newest state, for reads with `stale=True`: apply the first commit of others
        at once, and those of the next `FOLLOW_EVERY_S` together."""
        register, own = self.shard.register, None if self._writing is None else self._writing.slot
        backoff = Backoff(self.shard.stack.supervisor.failures, f"following {self.shard.label}")
        while True:
            try:
                await register.wait(lambda state: True if self.view.is_behind else None, own=own)
                await self.view.catch_up()
                backoff.succeeded()
                await self.shard.stack.runtime.sleep(FOLLOW_EVERY_S)
            except ShardFinalized:
                return
            except Exception as error:
                await backoff.failed(error)

    async def aclose(self) -> None:
        """Stop following, and release the writer and the holds. Idempotent."""
        if not self.scope.close():
            return
        if self._following is not None:
            self._following.cancel()
        self.view.close()
        tasks = [] if self._writing is None else self._writing.closing()
        tasks.append(self.shard.stack.supervisor.spawn(self.reading.release(), "release a table"))
        await self.shard.stack.supervisor.released(*tasks)


_Key = tuple[str, str]


def _key(table_schema: TableSchema[Any, Any]) -> _Key:
    """The name and the types. If the types of a table gain fields, handles with the old types have a view of
    their own, which cannot write."""
    return table_schema.name, table_schema.identity


class OpenTables:
    """See the header. One per client."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.group = TableCommits(shards.stack)
        self.pace = ConversionPace()
        self._open: dict[_Key, asyncio.Task[OpenTable]] = {}
        self._warming: asyncio.Task[None] | None = None
        self._is_ready = True

    def met(self, table_schema: TableSchema[Any, Any]) -> None:
        """Calls on a table with this schema follow: let `ready` wait for the imports that its values need."""
        self._is_ready &= table_schema.imports_nothing or _is_warm()

    async def ready(self) -> None:
        """Return once the event loop can convert the values of the tables that were met."""
        if not self._is_ready:
            await self._imported()

    async def ready_to_filter(self, *values: object) -> None:
        """Return once the event loop can filter rows; at once if all bounds are `None`."""
        if any(bound is not None for bound in values):
            await self._imported()

    async def _imported(self) -> None:
        """Import the modules that convert and filter any values, with pandas if it is installed, on a
        thread. Waiting calls go on in their order."""
        if not _is_warm():
            self.shards.calls.check()
            if self._warming is None or self._warming.done():
                work = self.shards.stack.compute(_warm_up)
                self._warming = self.shards.stack.supervisor.spawn(work, "import what columns need")
            await asyncio.shield(self._warming)
        self._is_ready = True

    async def converted(self, convert: Callable[..., R], *values: object) -> R:
        """The result of `convert` on keys and values as they are at the call, once it is `ready`: their owner
        may change them later."""
        if not self._is_ready:
            values = _copied(values)
            await self.ready()
        if not IMMUTABLE.issuperset(map(type, values)):
            result = convert(*values)
            await self.pace.turn(*values)
            return result
        await self.pace.turn(*values)
        return convert(*values)

    async def decoded(self, table_schema: TableSchema[Any, V], texts: Sequence[tuple[K, str]]) -> dict[K, V]:
        """The decoded values by key."""
        keys, vals = [key for key, _ in texts], [text for _, text in texts]
        compute = self.shards.stack.compute_few
        return dict(
            zip(
                keys, await compute(sum(map(len, vals)), table_schema.vals, vals) if vals else (), strict=True
            )
        )

    async def passed(self, as_of: int | datetime) -> bool:
        """Whether the moment has passed, for a table that does not exist; if not, wait a while. If it has
        passed and the table still does not exist, it was empty then for good: commits of this client get
        later times, and those of others times by the store's clock."""
        stack, time = self.shards.stack, wall_time(as_of)
        if await has_passed(stack.clock, time):
            stack.clock.saw(Antichain(time + 1))
            return True
        await stack.runtime.sleep(min(max(time / 1e6 - stack.clock.read()[0], 0.0), LOOK_S) + PASSED_S)
        return False

    async def _ready_for(self, table_schema: TableSchema[Any, Any]) -> None:
        """Import the modules that views of such tables need on the event loop."""
        if not table_schema.needs_no_columns:
            await self.ready()
        modules = [PARQUET, POLARS] if table_schema.has_lists else [PARQUET]
        if not are_imported(modules):
            await self.shards.stack.compute(import_all, modules)

    def acquiring(
        self, table_schema: TableSchema[Any, Any], resident: bool | None, *, create: bool
    ) -> "asyncio.Task[OpenTable]":
        """A task that acquires the table; it goes on if its callers are cancelled."""
        self.shards.calls.check()
        return self.shards.stack.supervisor.spawn(
            self.acquire(table_schema, resident, create=create), "open a table"
        )

    async def acquire(
        self, table_schema: TableSchema[Any, Any], resident: bool | None = None, *, create: bool = True
    ) -> OpenTable:
        """The table with that name and those types, opened if it is not. `CodecMismatch` if the stored types
        differ; `NotCreated` if it does not exist, unless `create`. The last `resident` that is not `None`
        counts."""
        await self._ready_for(table_schema)
        table = await until_created(
            lambda: self._opening(table_schema, resident, create=create), create=create
        )
        table_schema.encode_as(table.table_schema.schema)
        table.users += 1
        try:
            await table.view.become(resident)
        except BaseException:
            await self.release(table)
            raise
        return table

    def _opening(
        self, table_schema: TableSchema[Any, Any], resident: bool | None, *, create: bool
    ) -> "tuple[asyncio.Task[OpenTable], bool]":
        """The task that opens the table, and whether this call began it."""
        key = _key(table_schema)
        task = self._open.get(key)
        if task is not None and not has_failed(task) and not (task.done() and _is_over(task)):
            return task, False
        opening = self.shards.opening(
            lambda: OpenTable.open(self.shards, table_schema, resident, create=create),
            f"client.table({table_schema.name!r})",
        )
        task = self._open[key] = self.shards.stack.supervisor.spawn(opened(opening), "open a table")
        task.add_done_callback(partial(self._forget, key))
        return task, True

    def _forget(self, key: _Key, task: "asyncio.Task[OpenTable]") -> None:
        """Forget an opening that failed."""
        if has_failed(task) and self._open.get(key) is task:
            del self._open[key]

    async def releasing(self, acquiring: "asyncio.Task[OpenTable]") -> None:
        """Release the acquired table. Waits for an opening that is under way, up to the deadline of a
        release; then it goes on in the background."""
        if not acquiring.done():
            release = self.shards.stack.supervisor.spawn(self._release_later(acquiring), "release a table")
            await self.shards.stack.supervisor.released(release)
        elif not acquiring.cancelled() and not acquiring.exception():
            await self.release(acquiring.result())

    async def _release_later(self, acquiring: "asyncio.Task[OpenTable]") -> None:
        await asyncio.wait([acquiring])
        await self.releasing(acquiring)

    async def release(self, table: OpenTable) -> None:
        """End one use; the last user closes the table."""
        if self.leave(table):
            await table.aclose()

    def leave(self, table: OpenTable) -> bool:
        """End one use; `True` for the last user, who has to close the table."""
        table.users -= 1
        if table.users:
            return False
        key = _key(table.table_schema)
        if key in self._open and _has_opened(self._open[key], table):
            del self._open[key]
        return True


def _copied(values: tuple[T, ...]) -> tuple[T, ...]:
    """A copy, or the values themselves if no copy is equal: a class may convert its arguments."""
    with suppress(Exception):  # values that cannot be copied or compared
        copies = deepcopy(values)
        if copies == values:
            return copies
    return values


def _is_warm() -> bool:
    return is_warm() and are_imported(FILTERS)


def _warm_up() -> None:
    warm_up()
    import_all(FILTERS)


async def opened(opening: Opening[OpenTable]) -> OpenTable:
    return await opening


def _has_opened(task: "asyncio.Task[OpenTable]", table: OpenTable) -> bool:
    return task.done() and not task.cancelled() and not task.exception() and task.result() is table


def _is_over(task: "asyncio.Task[OpenTable]") -> bool:
    table = task.result()
    return table.scope.closed or table.shard.state.finalized


async def until_created(
    opening: "Callable[[], tuple[asyncio.Task[OpenTable], bool]]", *, create: bool
) -> OpenTable:
    """The table that the task of `opening` opens; `opening` also tells whether this call began the task.
    Unless `create`: `NotCreated` if a task that began after this call raises it. The first task may be one of
    another call, which looked earlier, and a task of a read creates no table."""
    has_begun = False
    while True:
        task, is_own = opening()
        has_begun |= is_own
        try:
            return await shared(task)
        except NotCreated:
            if has_begun and not create:
                raise
        has_begun = True  # a failed task is not joined again: the next one is new


def has_failed(task: "asyncio.Task[OpenTable]") -> bool:
    """Whether the task ended without a table."""
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _table_shard(shards: Shards, table_schema: TableSchema[Any, Any], *, create: bool) -> Shard:
    if shards.stack.readonly:
        shard = await shards.existing(table_schema.name)
    elif not create:
        try:
            shard = await shards.existing(table_schema.name)
        except UnknownShard as error:
            raise NotCreated(f"table {table_schema.name!r} does not exist yet") from error
    else:
        shard = await shards.named(table_schema.name)
        await shard.open_or_create(table_schema.schema, Clock.WALL, table=True)
    if not shard.state.table:
        text = (
            f"{shard.label} is a shard, not a table: read and write it with client.reader and client.writer"
        )
        raise InvalidUsage(UsageKind.NOT_A_TABLE, text, shard_id=shard.id)
    table_schema.encode_as(shard.as_stored(table_schema.schema))
    return shard
