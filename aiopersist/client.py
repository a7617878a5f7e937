"""The client: what a user can ask of a location, and where it is answered.

It belongs to the process and the event loop that opened it. Closing it closes what it opened,
gives statements under way a moment to end, and closes the stores it opened itself.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from aiopersist.compact.shared_compaction import Goal, SharedCompaction, compact_piece, shared_compaction
from aiopersist.data.lazy import is_warm, warm_up
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.updates import Updates
from aiopersist.frontier import Antichain, Time
from aiopersist.gc.collect import Collected
from aiopersist.gc.drop import drop, finalize
from aiopersist.gc.sweep import Sweep, Usage, sweep, usage
from aiopersist.indexed.indexed import Indexed
from aiopersist.indexed.open import open_indexed
from aiopersist.maintenance.background import Maintenance
from aiopersist.maintenance.fsck import FsckReport, fsck
from aiopersist.maintenance.inspect import ShardView, inspect
from aiopersist.maintenance.on_demand import force_gc, retain
from aiopersist.maintenance.rounds import MaintenanceRound, Rounds
from aiopersist.read.handle import ReadHandle
from aiopersist.read.leased import fetch_part
from aiopersist.read.open import open_reader, open_since
from aiopersist.read.shared_read import SharedRead, read_piece, shared_read
from aiopersist.read.since import SinceHandle
from aiopersist.read.snapshot import Items
from aiopersist.resource import Opening, Root
from aiopersist.runtime import Runtime
from aiopersist.settings import Settings
from aiopersist.shard import catalog
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.evolve import evolve_schema
from aiopersist.shard.shards import Shards
from aiopersist.stash.open import DEFAULT_NAME, Mode, opened, stash_beside
from aiopersist.stash.stash import Stash
from aiopersist.storage.identity import check_in_time
from aiopersist.storage.layers import Metrics, wrap_stores
from aiopersist.storage.readonly import refuse
from aiopersist.storage.urls import Stores
from aiopersist.write.append_many import Append, append_to_many
from aiopersist.write.builder import BatchBuilder
from aiopersist.write.handle import WriteHandle
from aiopersist.write.open import open_writer
from aiopersist.write.remote import open_builder, register_writer, release_writer

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

K = TypeVar("K")
V = TypeVar("V")

_closing: set[asyncio.Task[None]] = set()  # a close goes on when its caller is cancelled


class Client(Root):
    """Opens writers and readers of the shards of one location. Serves many tasks at once."""

    def __init__(self, stores: Stores, settings: Settings, runtime: Runtime, maintenance: bool) -> None:
        readonly = stores.readonly
        blob, consensus, self._metrics = wrap_stores(*stores.guarded(), settings, runtime)
        hasty = settings.model_copy(update={"retry_timeout_s": settings.open_timeout_s})
        self._hasty = wrap_stores(*stores.guarded(), hasty, runtime)[:2]
        self._stores = stores
        self._shards = Shards(blob, consensus, settings, runtime, readonly=readonly)
        self._stack = self._shards.stack
        self._maintenance = Maintenance(self._stack, background=maintenance and not readonly)
        self._shards.on_new = self._maintenance.add
        self._rounds = Rounds(
            self._stack, lambda shard: self._maintenance.of(self._shards.at(catalog.id_of(shard)))
        )
        self._closing: asyncio.Task[None] | None = None

    @property
    def metrics(self) -> Metrics:
        """Requests of both stores by kind: counts, errors, bytes, seconds."""
        return self._metrics

    async def ping(self) -> None:
        """Return if both stores answer and belong together; else `StorageUnavailable` after
        `settings.open_timeout_s`, or `InvalidLocation`. Two requests."""
        with self._shards.calls.call():
            create, deadline_s = not self._stack.readonly, self._stack.settings.open_timeout_s
            await check_in_time(*self._hasty, self._stack.runtime, create=create, deadline_s=deadline_s)

    # --- handles ---------------------------------------------------------------------------------

    def writer(self, shard: str, schema: Schema[K, V, Any]) -> Opening[WriteHandle[K, V]]:
        """A writer of the shard of that name or id, which is created on first use with
        `since = upper = {minimum}`. `CodecMismatch` if it is stored with another schema. One commit
        (two for a new shard)."""
        return open_writer(self._shards, shard, schema, self._ready_to_write)

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
        return open_reader(
            self._shards, shard, schema, hold=hold, hold_name=hold_name, lease_s=lease_s, create=create
        )

    def critical_since(self, shard: str, critical_reader_id: str, opaque: int = 0) -> Opening[SinceHandle]:
        """The hold of that id, which never expires; made at the shard's since, with `opaque`, if it is not
        there. `UnknownShard` if the shard is not. One commit for a new one."""
        return open_since(self._shards, shard, critical_reader_id, opaque)

    def indexed(self, name: str, *, readonly: bool = False, background: bool = True) -> Opening[Indexed]:
        """The `Indexed` of that name, made on first use; it takes over from the instance before it.
        `readonly`: any number of these follow along; `UnknownStream` if it is not there. `background=False`:
        its maintenance is done by hand (`step`). Two commits (one for a reader), and a request for its name.
        """
        return open_indexed(self._shards, name, readonly=readonly, background=background)

    def stash(
        self,
        name: str = DEFAULT_NAME,
        *,
        exclusive: bool = True,
        readonly: bool = False,
        savepoint: bool = False,
    ) -> Opening[Stash]:
        """The stash of that name in the consensus database of this location; modes and errors are those of
        `aiopersist.stash.open`. `Unsupported` if the consensus store was given as an instance."""
        mode = Mode(exclusive, readonly, savepoint)
        mode.check()
        if self._stack.readonly and not readonly:
            refuse("a stash that is not opened with readonly=True")
        stores, settings, runtime = self._stores, self._stack.settings, self._stack.runtime
        found = stash_beside(stores.consensus_url, stores.consensus, name, runtime=runtime, settings=settings)
        opener = partial(opened, found, mode, settings, runtime, self._shards.scope)
        return self._shards.opening(opener, "client.stash(...)")

    # --- shards ----------------------------------------------------------------------------------

    async def shard_id(self, name: str) -> ShardId:
        """The id of the shard of that name; `UnknownShard`. One request; for an id a look at the shard."""
        with self._shards.calls.call():
            found = await catalog.resolve(self._stack, name)
            return (await self._shards.existing(found)).id if found == name else found

    async def list_shards(self) -> dict[str, ShardId]:
        """All names in use. Two requests, one more for every few hundred."""
        with self._shards.calls.call():
            return await catalog.names(self._stack)

    async def upper(self, shard: str) -> Antichain:
        """The shard's upper. Linearizable: one request."""
        with self._shards.calls.call():
            return (await self._shards.existing(shard)).state.upper

    async def txn_number(self, shard: str, app_id: str) -> int | None:
        """The last transaction number of that application; `None` if there is none. Linearizable."""
        with self._shards.calls.call():
            record = (await self._shards.existing(shard)).state.transactions.get(app_id)
            return record.number if record else None

    async def compare_and_append_many(self, appends: Sequence[Append]) -> None:
        """Append to several shards at one moment: all of `appends` happen, or none. `UpperMismatch` says
        which shard's upper was not the expected one; `INVALID_APPEND` for a shard that is named twice or
        a writer of another client; `Unsupported` where the consensus store cannot do it. After a
        cancellation each writer's `settle` answers for its own shard. One request to the consensus
        store, beside what staging costs."""
        with self._shards.calls.call():
            await append_to_many(appends, self._stack)

    async def schema(self, shard: str) -> tuple[int, Schema[Any, Any, Any]]:
        """The current schema of the shard and its id. Linearizable."""
        with self._shards.calls.call():
            found = await self._shards.existing(shard)
            return found.state.schema_id, found.schema(found.state.schema_id)

    async def compare_and_evolve_schema(
        self, shard: str, expected_id: int, schema: Schema[Any, Any, Any]
    ) -> int:
        """Make `schema`, which may add optional fields to the current one, the current one; returns its
        id. `SchemaMismatch` if the current id is not `expected_id`, `IncompatibleSchema` for any
        other change. One commit."""
        with self._shards.calls.call():
            return await evolve_schema(await self._shards.existing(shard), expected_id, schema)

    async def drop(self, name: str) -> None:
        """Finalize the shard and free its name: both frontiers become empty, every handle is fenced, what
        waits ends with `ShardFinalized`. A shard that was named and is not there yet is never made.
        Repeating it after a crash finishes the work. What is left, so that handles elsewhere find it
        finalized, `maintain` removes after `settings.tombstone_retention_s`."""
        with self._shards.calls.call():
            await drop(self._shards, name)

    async def finalize(self, shard: str) -> None:
        """Delete the data of a shard that nobody can read or write any more: since and upper are both empty,
        else `FINALIZATION_ERROR`. A tombstone stays for as long as the shard has a name, and then for
        `settings.tombstone_retention_s`. Repeating it after a crash finishes the work."""
        with self._shards.calls.call():
            await finalize(self._shards, shard)

    # --- work shared by several processes --------------------------------------------------------

    def shared_read(
        self,
        shard: str,
        as_of: Time | None = None,
        *,
        start: int | None = None,
        end: int | None = None,
        wait: bool = True,
        lease_s: float | None = None,
        keep: bool = False,
    ) -> Opening[SharedRead]:
        """A read to be shared among processes: the contents at `as_of` (`None`: the greatest complete time),
        or, with `start`, the changes of `[start, end)`, unmodified (`end=None`: up to the shard's upper).

        `SinceViolation` if history there is gone: changes need `since < start`, or both at the minimum.
        What is not complete yet is waited for, or `NotReadable` with `wait=False`; contents without `as_of`
        of a shard that nothing was appended to are `NotReadable` at once. The lease lasts
        `lease_s` (that of readers); it is renewed until it is closed; with `keep=True` it is neither, and
        ends by itself. One commit, one more to end it."""
        return shared_read(self._shards, shard, as_of, start, end, wait=wait, lease_s=lease_s, keep=keep)

    def read_piece(self, data: bytes, where: Any = None) -> "Items[pa.RecordBatch]":
        """The rows of a piece of a shared read, here or in another process, as Arrow batches in order:
        `key, val, diff` of contents, `key, val, time, diff` of changes, consolidated. `where` as of a
        snapshot. In memory are `settings.read_memory_bytes`, about, and a row group of each run of parts as
        it was fetched.

        The lease is renewed if nobody did for a quarter of it. `InvalidUpdate` for what is no piece,
        `LeaseExpired` once the read was closed and a part is gone."""
        self._shards.calls.check()
        return read_piece(self._shards, data, where)

    async def fetch_part(
        self, data: bytes, schema: Schema[Any, Any, Any] | None = None
    ) -> Updates[Any, Any, Any]:
        """The updates of a part that a snapshot gave, here or in another process: at times `<= as_of`, told
        as of that time, not consolidated across parts. By the stored schema, or one that is the same.

        `InvalidUpdate` for what is no part; `LeaseExpired` once the snapshot was closed, or its lease lost,
        and the part is gone. One request for the shard's head (its whole state, if this client does not
        know it), and one for the part if it is not inline."""
        with self._shards.calls.call():
            return await fetch_part(self._shards, data, schema)

    async def register_writer(self, shard: str, schema: Schema[Any, Any, Any], lease_s: float) -> bytes:
        """A writer for others alone, as `WriteHandle.to_transmittable` names it: no handle keeps it, its
        lease lasts `lease_s` from the last heartbeat of those who build under it. The shard is made if it is
        not there. One commit, two for a new shard."""
        with self._shards.calls.call():
            return await register_writer(self._shards, shard, schema, lease_s)

    async def release_writer(self, data: bytes) -> None:
        """End that registration: what is staged under it can no longer be appended, and is the sweep's. One
        commit; none if it has ended."""
        with self._shards.calls.call():
            await release_writer(self._shards, data)

    def builder_from_transmittable(
        self, data: bytes, lower: Antichain | Time, schema: Schema[Any, Any, Any] | None = None
    ) -> Opening[BatchBuilder]:
        """A builder under the writer that `WriteHandle.to_transmittable` named, whose registration it keeps
        alive. By the writer's schema, as it is stored, or one that is the same. `BatchExpired` if that
        writer is gone, or 65,536 batches of it were appended or deleted: then a new one is to be named.
        `InvalidUpdate` for what names none. One request, a commit if a heartbeat is due."""
        return open_builder(self._shards, data, lower, schema)

    def shared_compaction(self, shard: str, goal: Goal | None = None) -> Opening[SharedCompaction]:
        """One round of a compaction of all that is there, to be shared among processes: applies `retain`, and
        claims; waits where another process has claimed a part of it. `goal`: that of the round before, if
        this goes on with it. Three commits, one more to end it."""
        return shared_compaction(self._shards, shard, goal)

    async def compact_piece(self, data: bytes) -> bytes:
        """Do a piece of a compaction, here or in another process; the result is for its `apply`. In memory
        are `settings.compaction_memory_bytes`. Whatever it raises, what was written is deleted.
        `InvalidUpdate` for what is no piece, `LeaseExpired` if a part is gone: the claim was lost, and others
        have replaced it. Requests for every part that is read or written."""
        with self._shards.calls.call():
            return await compact_piece(self._shards, data)

    # --- maintenance -----------------------------------------------------------------------------

    async def retain(self, shard: str, keep: int | timedelta | None) -> None:
        """How much history maintenance keeps, from now on and for every client: it moves since to
        `upper - keep`, never nearer, at rest within `2 * keep`, and no further than holds allow. A
        `timedelta`: to the upper that the shard had that long ago. It never passes the last complete time, so
        the current contents stay readable. `None`: maintenance does not move since. One commit."""
        with self._shards.calls.call():
            await retain(self._shards, self._maintenance, shard, keep)

    async def maintain(self) -> MaintenanceRound:
        """One round of maintenance over *all* shards of the location, for a process that does nothing else:
        moves since where a policy says so, compacts what the spines ask for, collects what nobody needs, ends
        what was finalized. Any number of processes may do it: claims in the shards' states share the work
        out. A shard that fails is told in the result and logged. A share of a request for a shard that has
        not changed since the round before; a few for one with nothing to do."""
        with self._shards.calls.call():
            return await self._rounds.once()

    async def force_compaction(self, shard: str) -> None:
        """Apply `retain`, merge all that is there into one batch, sorted, consolidated, with times advanced
        to since, and return when that is applied. In memory are `settings.compaction_memory_bytes`, at any
        size."""
        with self._shards.calls.call():
            await self._maintenance.of(await self._shards.existing(shard)).force_compaction()

    async def force_gc(self, shard: str) -> Collected:
        """Write a rollup, then delete the blobs and versions that no reader's hold can reach. Says what was
        removed. What the snapshots of this client have let go of is told first; a reader with a hold of its
        own tells with its next heartbeat."""
        with self._shards.calls.call():
            return await force_gc(self._shards, self._maintenance, shard)

    async def inspect(self, shard: str) -> ShardView:
        """The shard from within, at its newest version. Two requests."""
        with self._shards.calls.call():
            return await inspect(await self._shards.existing(shard))

    async def fsck(self, shard: str) -> FsckReport:
        """Read everything and say what is not as it must be: `ok` is false for damage only, a store that is
        away is `StorageUnavailable`. Changes nothing."""
        with self._shards.calls.call():
            return await fsck(self._shards.at(await catalog.resolve(self._stack, shard), shard))

    async def sweep_leaked_blobs(self, dry_run: bool = True) -> Sweep:
        """Find the blobs that crashed or cancelled writers left, which no state names and none can name any
        more; with `dry_run=False` delete them. Safe beside everything else that goes on."""
        with self._shards.calls.call():
            return await sweep(self._stack, dry_run=dry_run)

    async def usage(self) -> Usage:
        """Bytes in the blob store: all, referenced by some live version, current, live."""
        with self._shards.calls.call():
            return await usage(self._stack)

    # --- the end ---------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close every handle and release what the client holds. Idempotent; goes on in the background if
        the caller is cancelled."""
        if self._closing is None or not self._closing.done():
            self._shards.calls.check_place()
        if self._closing is None:
            self._tasks = None
            task = self._closing = asyncio.create_task(self._close(), name="close a client")
            _closing.add(task)
            task.add_done_callback(_closing.discard)
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._shards.release()
        await self._maintenance.aclose()
        self._shards.scope.close()
        await self._stack.supervisor.aclose()
        for store in self._stores.mine:
            await store.aclose()

    async def _ready_to_write(self) -> None:
        """What the first writer needs is imported on a thread."""
        if not is_warm():
            await self._stack.compute(warm_up)
        self._maintenance.expect_writes()
