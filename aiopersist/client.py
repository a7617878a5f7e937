"""The client: builds the stack once, opens handles, owns every task.

It belongs to the process and the event loop that opened it. Closing it closes what it opened,
gives statements under way a moment to end, and closes the stores it opened itself.
"""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar, overload
from weakref import WeakValueDictionary

from aiopersist.compact.shared import SharesCompactions
from aiopersist.data.codec import Schema
from aiopersist.data.evolve import check_evolution
from aiopersist.data.lazy import arrow_is_imported, import_arrow, is_warm, warm_up
from aiopersist.errors import (
    IncompatibleSchema,
    Indeterminate,
    SchemaMismatch,
    StorageUnavailable,
    UnknownShard,
    shown,
)
from aiopersist.frontier import Antichain, Time, frontier
from aiopersist.gc.collect import bury
from aiopersist.maintenance.background import Maintenance
from aiopersist.maintenance.rounds import Rounds
from aiopersist.maintenance.shard import ShardUpkeep
from aiopersist.maintenance.upkeep import Upkeep
from aiopersist.more import OpensMore
from aiopersist.read.handle import ReadHandle
from aiopersist.read.leased import FetchesParts
from aiopersist.read.shared import SharesReads
from aiopersist.read.since import SinceHandle
from aiopersist.resource import RELEASE_DEADLINE_S, Handle, Opening, Root, Scope, Supervisor, run_bounded
from aiopersist.runtime import SYSTEM, Runtime
from aiopersist.settings import Settings, settings_from_environment
from aiopersist.shard import catalog
from aiopersist.shard.attempt import Slot
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.client_part import SHARDS_KEPT, labels
from aiopersist.shard.commit import commit
from aiopersist.shard.follow import Follower
from aiopersist.shard.lease import check_lease_s
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.lifecycle import EvolveSchema, Finalize
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.identity import check_identity
from aiopersist.storage.layers import Metrics, stack
from aiopersist.storage.urls import Location, Stores, open_stores, parse_location
from aiopersist.write.append_many import Append, append_to_many
from aiopersist.write.handle import WriteHandle
from aiopersist.write.remote import BuildsElsewhere

K = TypeVar("K")
V = TypeVar("V")
H = TypeVar("H", bound=Handle)

CLOSE_AT_ONCE = 64  # handles released at the same time: their commits go as a few statements

_closing: set[asyncio.Task[None]] = set()  # a close goes on when its caller is cancelled


def open(  # noqa: A001  # `ap.open`
    location: str | os.PathLike[str] | Location | None = None,
    *,
    blob: str | Blob | None = None,
    consensus: str | Consensus | None = None,
    settings: Settings | None = None,
    maintenance: bool = True,
    readonly: bool = False,
    runtime: Runtime = SYSTEM,
) -> Opening["Client"]:
    """A client of a location: a directory, `mem://`, or two stores as URLs or instances; with nothing
    given, what the environment says (`AIOPERSIST_LOCATION`, or `AIOPERSIST_BLOB` and
    `AIOPERSIST_CONSENSUS`).

    `InvalidLocation` at once for what cannot be used, `StorageUnavailable` after
    `settings.open_timeout_s` for a store that cannot be reached. Costs two requests.
    `maintenance=False` runs no upkeep but the heartbeats of its own handles.

    `readonly=True` needs no right to write, to a directory, a role or a bucket, and makes no location
    (`InvalidLocation` where none is). It takes no leases and does no upkeep: a snapshot, a listen reads what
    the retention of others leaves, and `LeaseExpired` or `SinceViolation` says that it was left no longer.
    Every call that writes is `Unsupported`.
    """
    found = parse_location(location, blob, consensus)
    chosen = settings or settings_from_environment()
    stores = open_stores(found, runtime=runtime, readonly=readonly)

    async def connect() -> Client:
        client = Client(stores, chosen, runtime, maintenance)
        try:
            await client.ping()
            if not arrow_is_imported():
                await client._stack.compute(import_arrow)
        except BaseException:
            await client.aclose()
            raise
        client._tasks = client._stack.supervisor
        return client

    return Opening(connect, "aiopersist.open(...)")


class Client(Upkeep, FetchesParts, SharesReads, BuildsElsewhere, SharesCompactions, OpensMore, Root):
    """Opens writers and readers of the shards of one location. Serves many tasks at once."""

    def __init__(self, stores: Stores, settings: Settings, runtime: Runtime, maintenance: bool) -> None:
        self._shards: WeakValueDictionary[str, Shard] = WeakValueDictionary()
        label_of = labels(self._shards)
        self._calls = Scope("the client", label_of=label_of)  # ends first: then nothing new begins
        self._scope = Scope("the client", label_of=label_of)  # of handles: ends once they are released
        self._openings: set[asyncio.Future[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._stores = stores
        blob, consensus, self._metrics = stack(*stores.guarded(), settings, runtime)
        owner = Supervisor(runtime, label_of)
        follower = Follower(consensus, settings.watch_timeout_s, owner)
        self._stack = Stack(blob, consensus, settings, runtime, owner, follower, readonly=stores.readonly)
        hasty = settings.model_copy(update={"retry_timeout_s": settings.open_timeout_s})
        self._hasty_blob, self._hasty_consensus, _ = stack(*stores.guarded(), hasty, runtime)
        self._maintenance = Maintenance(self._stack, background=maintenance and not stores.readonly)
        self._rounds = Rounds(
            self._stack, lambda shard: self._maintenance.of(self._shard(catalog.id_of(shard)))
        )
        self._handles: set[Handle] = set()
        self._recent: deque[Shard] = deque(maxlen=SHARDS_KEPT)

    @property
    def metrics(self) -> Metrics:
        """Requests of both stores by kind: counts, errors, bytes, seconds."""
        return self._metrics

    async def ping(self) -> None:
        """Return if both stores answer and belong together; else `StorageUnavailable` after
        `settings.open_timeout_s`, or `InvalidLocation`. Two requests."""
        deadline = self._stack.settings.open_timeout_s
        with self._calls.call():
            try:
                async with asyncio.timeout(deadline * 1.5):  # a store that accepts and never answers
                    create = not self._stack.readonly
                    await check_identity(
                        self._hasty_blob, self._hasty_consensus, self._stack.runtime, create=create
                    )
            except TimeoutError as error:
                raise StorageUnavailable(f"the stores did not answer within {deadline} s") from error
            except Indeterminate as error:
                raise StorageUnavailable(f"the stores cannot be used: {error}") from error

    # --- handles ---------------------------------------------------------------------------------

    def writer(self, shard: str, schema: Schema[K, V, Any]) -> Opening[WriteHandle[K, V]]:
        """A writer of the shard of that name or id, which is created on first use with
        `since = upper = {minimum}`. `CodecMismatch` if it is stored with another schema. One commit
        (two for a new shard)."""

        async def open_writer() -> WriteHandle[K, V]:
            _checked(schema)
            if not is_warm():
                await self._stack.compute(warm_up)
            self._maintenance.expect_writes()
            found = self._shard(await catalog.resolve_or_create(self._stack, shard, ShardId), shard)
            return await WriteHandle.open(found, schema, self._scope)

        return Opening(lambda: self._opened(open_writer), f"client.writer({shard!r}, ...)")

    @overload
    def reader(
        self,
        shard: str,
        schema: None = None,
        *,
        hold: Antichain | Time | None = None,
        hold_name: str | None = None,
        lease_s: float | None = None,
    ) -> Opening[ReadHandle[Any, Any]]: ...
    @overload
    def reader(
        self,
        shard: str,
        schema: Schema[K, V, Any],
        *,
        hold: Antichain | Time | None = None,
        hold_name: str | None = None,
        lease_s: float | None = None,
        create: bool = False,
    ) -> Opening[ReadHandle[K, V]]: ...

    def reader(
        self,
        shard: str,
        schema: Schema[Any, Any, Any] | None = None,
        *,
        hold: Antichain | Time | None = None,
        hold_name: str | None = None,
        lease_s: float | None = None,
        create: bool = False,
    ) -> Opening[ReadHandle[Any, Any]]:
        """A reader of the shard of that name or id; `UnknownShard` unless it is there, or `create` and a
        schema are given. Without a schema it reads by the stored one.

        `hold` keeps history at that frontier until it is downgraded, closed or expires
        (`SinceViolation` if it is gone already). `hold_name` is a hold that a restarted process
        takes over, at the frontier it had. One commit for the first reader of a process, one more
        for a hold."""

        async def open_reader() -> ReadHandle[Any, Any]:
            if schema is not None:
                _checked(schema)
            if lease_s is not None:
                check_lease_s(lease_s)
            if create and schema is not None:
                found = self._shard(await catalog.resolve_or_create(self._stack, shard, ShardId), shard)
                await found.open_or_create(schema)
            else:
                found = await self._existing(shard)
            stored = found.schema(found.state.schema_id)
            if schema is not None:
                found.schema_id(schema)
            return await ReadHandle.open(
                found,
                stored if schema is None else schema,
                self._scope,
                hold=None if hold is None else frontier(hold),
                hold_name=None if hold_name is None else catalog.check_name(hold_name),
                lease_s=lease_s,
            )

        return Opening(lambda: self._opened(open_reader), f"client.reader({shard!r})")

    def critical_since(self, shard: str, critical_reader_id: str, opaque: int = 0) -> Opening[SinceHandle]:
        """The hold of that id, which never expires; made at the shard's since, with `opaque`, if it is not
        there. `UnknownShard` if the shard is not. One commit for a new one."""

        async def open_since() -> SinceHandle:
            reader = catalog.check_name(critical_reader_id)
            found = await self._existing(shard)
            return await SinceHandle.open(found, reader, opaque, self._scope)

        return Opening(lambda: self._opened(open_since), f"client.critical_since({shard!r}, ...)")

    # --- shards ----------------------------------------------------------------------------------

    async def shard_id(self, name: str) -> ShardId:
        """The id of the shard of that name; `UnknownShard`. One request; for an id a look at the shard."""
        with self._calls.call():
            found = await catalog.resolve(self._stack, name)
            return (await self._existing(found)).id if found == name else found

    async def upper(self, shard: str) -> Antichain:
        """The shard's upper. Linearizable: one request."""
        with self._calls.call():
            return (await self._existing(shard)).state.upper

    async def list_shards(self) -> dict[str, ShardId]:
        """All names in use. Two requests, one more for every few hundred."""
        with self._calls.call():
            return await catalog.names(self._stack)

    async def drop(self, name: str) -> None:
        """Finalize the shard and free its name: both frontiers become empty, every handle is fenced, what
        waits ends with `ShardFinalized`. A shard that was named and is not there yet is never made.
        Repeating it after a crash finishes the work. What is left, so that handles elsewhere find it
        finalized, `maintain` removes after `settings.tombstone_retention_s`."""
        with self._calls.call():
            shard_id = await catalog.resolve(self._stack, name)
            shard = self._shard(shard_id, name)
            state = await shard.register.refresh()
            if state is None and name == shard_id:
                raise UnknownShard(f"there is no {shard.label}", shard_id=shard_id)
            await commit(shard.register, Finalize(shard_id), Slot())
            await bury(shard)  # first: repeated after a crash, it finds the shard by its name
            await catalog.free(self._stack, name, shard_id)

    async def txn_number(self, shard: str, app_id: str) -> int | None:
        """The last transaction number of that application; `None` if there is none. Linearizable."""
        with self._calls.call():
            found = await self._existing(shard)
            record = found.state.transactions.get(app_id)
            return record.number if record else None

    async def compare_and_append_many(self, appends: Sequence[Append]) -> None:
        """Append to several shards at one moment: all of `appends` happen, or none. `UpperMismatch` says
        which shard's upper was not the expected one; `INVALID_APPEND` for a shard that is named twice or
        a writer of another client; `Unsupported` where the consensus store cannot do it. After a
        cancellation each writer's `settle` answers for its own shard. One request to the consensus
        store, beside what staging costs."""
        with self._calls.call():
            await append_to_many(appends, self._stack)

    async def schema(self, shard: str) -> tuple[int, Schema[Any, Any, Any]]:
        """The current schema of the shard and its id. Linearizable."""
        with self._calls.call():
            found = await self._existing(shard)
            return found.state.schema_id, found.schema(found.state.schema_id)

    async def compare_and_evolve_schema(
        self, shard: str, expected_id: int, schema: Schema[Any, Any, Any]
    ) -> int:
        """Make `schema`, which may add optional fields to the current one, the current one; returns its
        id. `SchemaMismatch` if the current id is not `expected_id`, `IncompatibleSchema` for any
        other change. One commit."""
        with self._calls.call():
            found = await self._existing(shard)
            current = found.state.schema_id
            if current != expected_id:
                raise SchemaMismatch(expected_id, current, shard_id=found.id)
            try:
                check_evolution(found.schema(current), _checked(schema))
            except IncompatibleSchema as error:
                error.shard_id = found.id
                raise
            command = EvolveSchema(expected_id, schema.to_record())
            evolved: int = await commit(found.register, command, Slot())
            return evolved

    # --- the end ---------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close every handle and release what the client holds. Idempotent; goes on in the background if
        the caller is cancelled."""
        if self._closing is None or not self._closing.done():
            self._calls.check_place()
        if self._closing is None:
            self._tasks = None
            task = self._closing = asyncio.create_task(self._close(), name="close a client")
            _closing.add(task)
            task.add_done_callback(_closing.discard)
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._calls.close()
        handles = list(self._handles)
        await run_bounded(CLOSE_AT_ONCE, [self._drain, *(handle.aclose for handle in handles)])
        await self._maintenance.aclose()
        self._scope.close()
        await self._stack.supervisor.aclose()
        for store in self._stores.mine:
            await store.aclose()

    async def _opened(self, opener: Callable[[], Awaitable[H]]) -> H:
        self._calls.check()
        opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._openings.add(opening)
        try:
            with self._scope.call():
                handle = await opener()
            self._handles.add(handle)  # also one that nobody keeps must be released
            handle._scope.on_close = partial(self._ended, handle, handle._scope.on_close)
            if self._calls.closed:
                await handle.aclose()
                self._calls.check()
            return handle
        finally:
            self._openings.discard(opening)
            opening.set_result(None)

    def _ended(self, handle: Handle, before: Callable[[], None]) -> None:
        self._handles.discard(handle)
        before()

    async def _drain(self) -> None:
        """What is being opened has a moment to be there; whoever opens it then releases it."""
        if self._openings:
            await asyncio.wait(self._openings, timeout=RELEASE_DEADLINE_S)

    async def _existing(self, name: str) -> Shard:
        shard = self._shard(await catalog.resolve(self._stack, name), name)
        await shard.open()
        return shard

    def _upkeep_of(self, shard_id: str) -> ShardUpkeep:
        return self._maintenance.of(self._shard(catalog.id_of(shard_id)))

    def _shard(self, shard_id: ShardId, name: str | None = None) -> Shard:
        shard = self._shards.get(shard_id)
        if shard is None:
            shard = self._shards[shard_id] = Shard(self._stack, shard_id)
            self._maintenance.tend(shard)
        if name is not None and name != shard_id:
            shard.name = name
        return shard


def _checked(schema: object) -> Schema[Any, Any, Any]:
    if not isinstance(schema, Schema):
        raise TypeError(f"{shown(schema)} is not an aiopersist.Schema")
    return schema
