"""The tables that a client has open: one view and one writer for each, shared by all who name it."""

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
from aiopersist.base.resource import Opening, Resource, Scope, shared
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

FOLLOW_EVERY_S = 0.02  # views take the commits of others together: one by one they cost as much as our own
PASSED_S = 0.001  # until the clock of the store is beyond a moment
PARQUET, POLARS = "pyarrow.parquet", "polars"
FILTERS = ("pyarrow.acero",)  # imported by the first condition on a table

UNCHANGING = frozenset({str, bytes, int, float, bool, datetime})  # types of values that nobody changes

K = TypeVar("K")
R = TypeVar("R")
V = TypeVar("V")
T = TypeVar("T")


class NotMade(UnknownShard):
    """A read came before the table was made: there is nothing to read. Reads make none."""


class OpenTable(Resource):
    """One table of this client: its view, which follows the shard, and its writer."""

    def __init__(
        self,
        kind: TableSchema[Any, Any],
        reading: ReadSession[Any, Any],
        writing: Session | None,
        resident: bool | None,
    ) -> None:
        self.kind = kind
        self.shard = reading.shard
        self.reading = reading
        self.view = View(kind, reading, resident)
        self._writing = writing
        self._member = None if writing is None else TableParticipant(self.view, writing)
        self._following: asyncio.Task[None] | None = None
        self._scope = reading.scope
        self._scope.what = f"table {kind.name!r}"
        self.users = 0
        """Handles, subscriptions and transactions; the last one closes it."""

    @classmethod
    async def open(
        cls, shards: Shards, kind: TableSchema[Any, Any], resident: bool | None, *, make: bool
    ) -> "OpenTable":
        """Read the contents, if they are to be resident. If the shard does not exist, create it, or, unless
        `make`, raise `NotMade`."""
        shard = await _table_shard(shards, kind, make=make)
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
    def member(self) -> TableParticipant:
        """What the group commit writes; `Unsupported` for a readonly client."""
        if self._member is None:
            refuse("a change of a table")
        return self._member

    async def _follow(self) -> None:
        """Keep the view near the newest state, for gets that look at no head: the first commit of others at
        once, and those that follow it within `FOLLOW_EVERY_S` together."""
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
        """Stop following, and release the writer and what is held. Idempotent."""
        if not self._scope.close():
            return
        if self._following is not None:
            self._following.cancel()
        self.view.close()
        tasks = [] if self._writing is None else self._writing.closing()
        tasks.append(self.shard.stack.supervisor.spawn(self.reading.release(), "release a table"))
        await self.shard.stack.supervisor.released(*tasks)


_Key = tuple[str, str]


def _key(kind: TableSchema[Any, Any]) -> _Key:
    """The name, and the types: those of a table may gain fields, and then the old ones are views of their
    own, which cannot write."""
    return kind.name, kind.identity


class OpenTables:
    """See the header. One per client."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.group = TableCommits(shards.stack)
        self.pace = ConversionPace()
        self._open: dict[_Key, asyncio.Task[OpenTable]] = {}
        self._warming: asyncio.Task[None] | None = None
        self._is_ready = True

    def met(self, kind: TableSchema[Any, Any]) -> None:
        """Calls on such a table follow: `ready` waits for what their values need."""
        self._is_ready &= kind.imports_nothing or _is_warm()

    async def ready(self) -> None:
        """Return when the event loop can make columns of the values of the tables that were met."""
        if not self._is_ready:
            await self._imported()

    async def ready_to_filter(self, *given: object) -> None:
        """Return when the event loop can filter rows by what is given of it; at once where all is `None`."""
        if any(bound is not None for bound in given):
            await self._imported()

    async def _imported(self) -> None:
        """Import what makes columns of any values, and filters them: also pandas, if it is installed. It is
        imported on a thread, and calls that wait go on in their order."""
        if not _is_warm():
            self.shards.calls.check()
            if self._warming is None or self._warming.done():
                work = self.shards.stack.compute(_warm_up)
                self._warming = self.shards.stack.supervisor.spawn(work, "import what columns need")
            await asyncio.shield(self._warming)
        self._is_ready = True

    async def converted(self, convert: Callable[..., R], *given: object) -> R:
        """What `convert` makes of keys and values as they are at the call, when it is `ready`: their owner
        may change them later."""
        if not self._is_ready:
            given = _copied(given)
            await self.ready()
        if not UNCHANGING.issuperset(map(type, given)):
            result = convert(*given)
            await self.pace.turn(*given)
            return result
        await self.pace.turn(*given)
        return convert(*given)

    async def decoded(self, kind: TableSchema[Any, V], texts: Sequence[tuple[K, str]]) -> dict[K, V]:
        """The values by key, of their texts."""
        keys, vals = [key for key, _ in texts], [text for _, text in texts]
        compute = self.shards.stack.compute_few
        return dict(
            zip(keys, await compute(sum(map(len, vals)), kind.vals, vals) if vals else (), strict=True)
        )

    async def passed(self, as_of: int | datetime) -> bool:
        """Whether the moment has passed, for a table that does not exist: one that a later look does not find
        was empty then, for good. Commits of this client come later, and those of others by the store's clock.
        If not, a while passes."""
        stack, time = self.shards.stack, wall_time(as_of)
        if await has_passed(stack.clock, time):
            stack.clock.saw(Antichain(time + 1))
            return True
        await stack.runtime.sleep(min(max(time / 1e6 - stack.clock.read()[0], 0.0), LOOK_S) + PASSED_S)
        return False

    async def _ready_for(self, kind: TableSchema[Any, Any]) -> None:
        """Import what the views of such tables need on the event loop."""
        if not kind.is_plain:
            await self.ready()
        modules = [PARQUET, POLARS] if kind.has_lists else [PARQUET]
        if not are_imported(modules):
            await self.shards.stack.compute(import_all, modules)

    def acquiring(
        self, kind: TableSchema[Any, Any], resident: bool | None, *, make: bool
    ) -> "asyncio.Task[OpenTable]":
        """A task that acquires the table, whoever waits for it."""
        self.shards.calls.check()
        return self.shards.stack.supervisor.spawn(self.acquire(kind, resident, make=make), "open a table")

    async def acquire(
        self, kind: TableSchema[Any, Any], resident: bool | None = None, *, make: bool = True
    ) -> OpenTable:
        """The open table of that name and those types, opened if it is not; `CodecMismatch` if these are not
        stored, `NotMade` if it does not exist, unless `make`. The last caller who says so decides whether it
        is resident."""
        await self._ready_for(kind)
        table = await until_made(lambda: self._opening(kind, resident, make=make), make=make)
        kind.encode_as(table.kind.schema)
        table.users += 1
        try:
            await table.view.become(resident)
        except BaseException:
            await self.release(table)
            raise
        return table

    def _opening(
        self, kind: TableSchema[Any, Any], resident: bool | None, *, make: bool
    ) -> "tuple[asyncio.Task[OpenTable], bool]":
        """The task that opens the table, and whether this call began it."""
        key = _key(kind)
        task = self._open.get(key)
        if task is not None and not has_failed(task) and not (task.done() and _is_over(task)):
            return task, False
        opening = self.shards.opening(
            lambda: OpenTable.open(self.shards, kind, resident, make=make), f"client.table({kind.name!r})"
        )
        task = self._open[key] = self.shards.stack.supervisor.spawn(opened(opening), "open a table")
        task.add_done_callback(partial(self._forget, key))
        return task, True

    def _forget(self, key: _Key, task: "asyncio.Task[OpenTable]") -> None:
        """Keep no opening that failed."""
        if has_failed(task) and self._open.get(key) is task:
            del self._open[key]

    async def releasing(self, acquiring: "asyncio.Task[OpenTable]") -> None:
        """Release what was acquired. Waits for an opening that is under way, but not for ever: then it goes
        on by itself."""
        if not acquiring.done():
            release = self.shards.stack.supervisor.spawn(self._release_later(acquiring), "release a table")
            await self.shards.stack.supervisor.released(release)
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


def _is_warm() -> bool:
    return is_warm() and are_imported(FILTERS)


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


async def until_made(
    opening: "Callable[[], tuple[asyncio.Task[OpenTable], bool]]", *, make: bool
) -> OpenTable:
    """The table that the task of `opening` opens, which tells whether this call began it. `NotMade`, unless
    `make`, if a task says so that began after this call: the first one may be that of another, which has
    looked before. One that is for a read makes no table."""
    has_begun = False
    while True:
        task, is_own = opening()
        has_begun |= is_own
        try:
            return await shared(task)
        except NotMade:
            if has_begun and not make:
                raise
        has_begun = True  # a task that failed is not joined again: the next one is new


def has_failed(task: "asyncio.Task[OpenTable]") -> bool:
    """Whether there is no table, and none comes."""
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _table_shard(shards: Shards, kind: TableSchema[Any, Any], *, make: bool) -> Shard:
    if shards.stack.readonly:
        shard = await shards.existing(kind.name)
    elif not make:
        try:
            shard = await shards.existing(kind.name)
        except UnknownShard as error:
            raise NotMade(f"table {kind.name!r} was not made yet") from error
    else:
        shard = await shards.named(kind.name)
        await shard.open_or_create(kind.schema, Clock.WALL, table=True)
    if not shard.state.table:
        text = (
            f"{shard.label} is a shard, not a table: read and write it with client.reader and client.writer"
        )
        raise InvalidUsage(UsageKind.NOT_A_TABLE, text, shard_id=shard.id)
    kind.encode_as(shard.as_stored(kind.schema))
    return shard
