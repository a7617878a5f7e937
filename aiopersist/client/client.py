"""The client: all calls on a location, each forwarded to the package that carries it out.

A client belongs to the process and the event loop that opened it. Closing it closes its handles, gives
requests under way a moment to end, and closes the stores that it opened itself.

A process imports what its calls need, and no more: a call imports the package that carries it out, on a
worker thread where that takes longer than a millisecond (`_later`, `_calling`). Only `table` and `stash`
import theirs at once, since what they return, or raise, is not awaited.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import ref

from aiopersist.base.errors import Error
from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.resource import Closeable, Opening, Root
from aiopersist.base.runtime import Runtime
from aiopersist.base.settings import Settings
from aiopersist.client.gauges import observed
from aiopersist.data.lazy import are_imported
from aiopersist.data.types.schema import Schema
from aiopersist.maintenance.upkeep import Upkeep
from aiopersist.measure.metrics import Metrics
from aiopersist.measure.providers import Measures
from aiopersist.read.handle import ReadHandle
from aiopersist.read.open import open_reader
from aiopersist.shard import catalog
from aiopersist.shard.catalog import ShardId, check_name
from aiopersist.shard.shards import Shards
from aiopersist.storage.identity import check_in_time
from aiopersist.storage.layers import wrap_stores
from aiopersist.storage.readonly import refuse
from aiopersist.storage.urls import Stores

if TYPE_CHECKING:
    from aiopersist.backup.copy import Copied
    from aiopersist.compact.shared_compaction import Goal, SharedCompaction
    from aiopersist.data.lazy import pa
    from aiopersist.data.updates.updates import Updates
    from aiopersist.erase.erasure import Erasure
    from aiopersist.gc.collect import Collected
    from aiopersist.gc.sweep import Sweep, Usage
    from aiopersist.indexed.indexed import Indexed
    from aiopersist.maintenance.background import Maintenance
    from aiopersist.maintenance.fsck import FsckReport
    from aiopersist.maintenance.inspect import ShardView
    from aiopersist.maintenance.overview import ShardSummary
    from aiopersist.maintenance.rounds import MaintenanceRound, Rounds
    from aiopersist.read.shared_read import SharedRead
    from aiopersist.read.since import SinceHandle
    from aiopersist.read.snapshot import Items
    from aiopersist.stash.stash import Stash
    from aiopersist.subscription.step import SubscribedUpdates, SubscriptionStep
    from aiopersist.subscription.subscription import Subscription
    from aiopersist.subscription.view import SubscriptionView
    from aiopersist.table.open import OpenTables
    from aiopersist.table.plan import Repeated
    from aiopersist.table.table import Table
    from aiopersist.table.transact import Transactions
    from aiopersist.table.transaction import Transaction
    from aiopersist.write.append_many import Append
    from aiopersist.write.builder import BatchBuilder
    from aiopersist.write.checks import Txn
    from aiopersist.write.handle import WriteHandle

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
H = TypeVar("H", bound=Closeable)

STASH = "stash"  # the name of a stash, unless the user says another


class Client(Root):
    """A client of one location: opens writers and readers of its shards. Serves many tasks at once."""

    def __init__(self, stores: Stores, settings: Settings, runtime: Runtime, maintenance: bool) -> None:
        readonly = stores.readonly
        measures = Measures.new(runtime.monotonic, enabled=settings.metrics)
        blob, consensus, self._metrics = wrap_stores(*stores.guarded(), settings, runtime, measures)
        self._metrics.begin(settings.client_name)
        hasty = settings.model_copy(update={"retry_timeout_s": settings.open_timeout_s, "metrics": False})
        hasty_blob, hasty_consensus, _ = wrap_stores(*stores.guarded(), hasty, runtime)
        self._hasty = hasty_blob.uncached, hasty_consensus
        self._stores = stores
        self._failed: list[Error] = []
        """What closing handles raised, until a caller is told."""
        self._shards = Shards(blob, consensus, measures, settings, runtime, readonly=readonly)
        self._stack = self._shards.stack
        self._upkeep = Upkeep(self._stack, background=maintenance and not readonly)
        self._shards.on_new = self._upkeep.add
        self._metrics.observe = partial(observed, self._shards, partial(_waiting_in_tables, ref(self)))

    @property
    def metrics(self) -> Metrics:
        """What this client has done. `client.metrics()` gives a frozen `MetricsView` with a JSON form:
        counts, latencies, queues, leases. `client.metrics["blob.get"]` has the requests to one operation of a
        store. No request."""
        return self._metrics

    async def ping(self) -> None:
        """Return if both stores answer and belong together. `StorageUnavailable` after
        `settings.open_timeout_s` if a store does not answer, `InvalidLocation` if the stores do not belong
        together. Two requests, and one for the clock of a consensus store that has its own."""
        with self._shards.calls.call():
            create, deadline_s = not self._stack.readonly, self._stack.settings.open_timeout_s
            runtime, measure = self._stack.runtime, self._stack.clock.measure
            await check_in_time(*self._hasty, runtime, create=create, deadline_s=deadline_s, beside=measure)

    # --- handles ---------------------------------------------------------------------------------

    def writer(
        self, shard: str, schema: Schema[K, V, Any], *, clock: str | None = None
    ) -> Opening[WriteHandle[K, V]]:
        """A writer of the shard of that name or id. A new shard is created with `since = upper = {minimum}`.
        `clock="wall"` creates one whose times are microseconds since 1970; `None`: as stored, `"logical"` for
        a new shard. `CodecMismatch` if the shard has another schema, `INVALID_CLOCK` for another clock. One
        commit, two for a new shard."""

        def opening() -> Opening[WriteHandle[K, V]]:
            from aiopersist.write.open import open_writer

            return open_writer(self._shards, shard, schema, clock)

        return self._later("aiopersist.write.open", opening, f"client.writer({shard!r}, ...)")

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
        """A reader of the shard of that name or id. `UnknownShard` if it does not exist, unless `create` and
        a schema are given. Without a schema it reads by the stored one.

        `hold` keeps history at that frontier until the hold is downgraded, closed or expires;
        `SinceViolation` if that history is gone. `hold_name` names a hold that a restarted process takes
        over, at the frontier it had. One commit for the first reader of a process, one more for a hold."""
        return open_reader(
            self._shards, shard, schema, hold=hold, hold_name=hold_name, lease_s=lease_s, create=create
        )

    @overload
    def table(
        self, name: str, key: type[K], val: type[V], *, resident: bool | None = None
    ) -> Table[K, V]: ...
    @overload
    def table(self, name: str, key: Any, val: Any, *, resident: bool | None = None) -> Table[Any, Any]: ...

    def table(self, name: str, key: Any, val: Any, *, resident: bool | None = None) -> Table[Any, Any]:
        """The table of that name, with keys and values of those types: at most one value per key. It is
        created by its first change, as a shard with a wall clock that keeps a day of history until `retain`
        says otherwise; opened by hand (`await table`), by a feed, a subscription or a transaction, too. A
        read creates none: it finds nothing. `TypeError` for types that cannot be stored, `INVALID_TYPE` for
        those that admit `None`; its first use raises `NOT_A_TABLE` for a shard that is no table,
        `CodecMismatch` for other types.

        `resident`: whether all its contents are in the memory of this client; `None`: while they take less
        than `settings.table_resident_bytes`. All handles of the table share one view: the last one that said
        so decides. No request; it needs no running event loop, its calls need that of the client."""
        self._shards.calls.check_open()
        from aiopersist.table.schema import TableSchema
        from aiopersist.table.table import Table

        return Table(self._tables, TableSchema(check_name(name), key, val), resident)

    def critical_since(self, shard: str, critical_reader_id: str, opaque: int = 0) -> Opening[SinceHandle]:
        """The hold of that id, which never expires. A new hold is made at the shard's since, with `opaque`.
        `UnknownShard` if the shard does not exist. One commit for a new hold."""

        def opening() -> Opening[SinceHandle]:
            from aiopersist.read.since import open_since

            return open_since(self._shards, shard, critical_reader_id, opaque)

        return self._later("aiopersist.read.since", opening, f"client.critical_since({shard!r}, ...)")

    @overload
    def subscription(
        self,
        shard: str,
        schema: None = None,
        *,
        name: str,
        start: str | int | datetime | None = None,
        resume: str | None = None,
        expire_after: timedelta | None = None,
        share: tuple[int, int] | None = None,
        lease_s: float | None = None,
    ) -> Opening[Subscription[SubscribedUpdates[Any, Any]]]: ...
    @overload
    def subscription(
        self,
        shard: str,
        schema: Schema[K, V, int],
        *,
        name: str,
        start: str | int | datetime | None = None,
        resume: str | None = None,
        expire_after: timedelta | None = None,
        share: tuple[int, int] | None = None,
        lease_s: float | None = None,
    ) -> Opening[Subscription[SubscribedUpdates[K, V]]]: ...

    def subscription(
        self,
        shard: str,
        schema: Schema[Any, Any, Any] | None = None,
        *,
        name: str,
        start: str | int | datetime | None = None,
        resume: str | None = None,
        expire_after: timedelta | None = None,
        share: tuple[int, int] | None = None,
        lease_s: float | None = None,
    ) -> Opening[Subscription[SubscribedUpdates[Any, Any]]]:
        """The consumer of that name, whose position is durable in the shard: it goes on behind its last
        durable acknowledgement, and keeps the history that it needs. A new one begins with the contents of
        now (`start=None` or `"snapshot"`), at the upper (`"now"`), or strictly after a time. An opening takes
        the name over: an earlier one gets `OpaqueMismatch`.

        `resume`: go on behind that cursor, which the consumer kept itself; `SinceViolation` if it lies before
        the position. `expire_after`: it gives up its position after it has acknowledged nothing for so long
        while there was something; then `SubscriptionExpired`, unless `start` says where it begins anew.
        `share=(i, n)`: the i-th of n consumers that divide the keys, each with a position and an owner of its
        own; `INVALID_SHARE` for another n. `lease_s`: after how long without a heartbeat `subscriptions`
        tells no owner.

        `UnknownShard` if the shard does not exist, `SinceViolation` if the history is gone, `INVALID_TIME`
        for a shard with product times. One commit, and those of a reader."""

        def opening() -> Opening[Subscription[SubscribedUpdates[Any, Any]]]:
            from aiopersist.subscription.open import Wanted, open_subscription

            wanted = Wanted(name, start, resume, expire_after, share, lease_s)
            return open_subscription(self._shards, shard, schema, wanted)

        return self._later("aiopersist.subscription.open", opening, f"client.subscription({shard!r}, ...)")

    def indexed(self, name: str, *, readonly: bool = False, background: bool = True) -> Opening[Indexed]:
        """The `Indexed` of that name, created on first use; it takes over from the instance before it.
        `readonly=True`: it follows along, as any number of instances may; `UnknownStream` if it does not
        exist. `background=False`: its maintenance is done by hand (`step`). Two commits (one with
        `readonly`), and a request for its name."""

        def opening() -> Opening[Indexed]:
            from aiopersist.indexed.open import open_indexed

            return open_indexed(self._shards, name, readonly=readonly, background=background)

        return self._later("aiopersist.indexed.open", opening, f"client.indexed({name!r})")

    def stash(
        self,
        name: str = STASH,
        *,
        exclusive: bool = True,
        readonly: bool = False,
        savepoint: bool = False,
    ) -> Opening[Stash]:
        """The stash of that name in the consensus database of this location; modes and errors are those of
        `aiopersist.stash.open`. `Unsupported` if the consensus store was given as an instance."""
        from aiopersist.stash.open import Mode, opened, stash_beside

        mode = Mode(exclusive, readonly, savepoint).checked()
        if self._stack.readonly and not readonly:
            refuse("a stash that is not opened with readonly=True")
        stores, settings, runtime = self._stores, self._stack.settings, self._stack.runtime
        found = stash_beside(stores.consensus_url, stores.consensus, name, runtime=runtime, settings=settings)
        scope, metrics = self._shards.scope, self._stack.metrics
        opener = partial(opened, found, mode, settings, runtime, scope, metrics)
        return self._shards.opening(opener, "client.stash(...)")

    # --- shards ----------------------------------------------------------------------------------

    async def shard_id(self, name: str) -> ShardId:
        """The id of the shard of that name or id; `UnknownShard`. One request."""
        with self._shards.calls.call():
            found = await catalog.resolve(self._stack, name)
            return (await self._shards.existing(found)).id if found == name else found

    async def list_shards(self) -> dict[str, ShardId]:
        """The ids of all shards by name. Two requests, and one more for every few hundred names."""
        with self._shards.calls.call():
            return await catalog.names(self._stack, ShardId)

    async def upper(self, shard: str) -> Antichain:
        """The shard's upper. Linearizable: one request."""
        with self._shards.calls.call():
            return (await self._shards.existing(shard)).state.upper

    async def txn_number(self, shard: str, app_id: str) -> int | None:
        """The last transaction number of that application; `None` if there is none. Linearizable: one
        request."""
        with self._shards.calls.call():
            record = (await self._shards.existing(shard)).state.transactions.get(app_id)
            return record.number if record else None

    @overload
    async def transact(
        self,
        body: Callable[[Transaction], Awaitable[T]],
        *,
        txn: None = None,
        once: None = None,
        acks: Iterable[tuple[Subscription[Any], SubscriptionStep]] = (),
        max_attempts: int | None = None,
    ) -> T: ...
    @overload
    async def transact(
        self,
        body: Callable[[Transaction], Awaitable[T]],
        *,
        txn: Txn | None = None,
        once: str | None = None,
        acks: Iterable[tuple[Subscription[Any], SubscriptionStep]] = (),
        max_attempts: int | None = None,
    ) -> T | Repeated: ...

    async def transact(
        self,
        body: Callable[[Transaction], Awaitable[T]],
        *,
        txn: Txn | None = None,
        once: str | None = None,
        acks: Iterable[tuple[Subscription[Any], SubscriptionStep]] = (),
        max_attempts: int | None = None,
    ) -> T | Repeated:
        """Run `body`, which reads and writes tables through the `Transaction` that it is given, and return
        what it returns. Strictly serializable: all of it happens at one moment, between the call and its
        return. `body` runs again if what it read has changed meanwhile, without end, or `max_attempts` times:
        then `Conflict`. What it raises leaves nothing behind.

        A repeat of `once`, or of `txn` or a smaller number, runs nothing and returns `Repeated`; both are
        remembered per location. `acks`: pairs of a subscription and a step of it, which are acknowledged in
        the same commit; `InvalidUsage` of kind `CONSUMED` for a step that was acknowledged before: then
        nothing is written, and a repeat after a lost answer learns that it happened; `SKIPPED` if only a
        later step was. It waits for calls that acknowledge earlier steps: `WOULD_SKIP` if one of them fails
        meanwhile. `Unsupported` where the store cannot write several shards at one moment. One commit; a
        request for each table if another process has written since."""
        given = tuple(acks)
        with self._shards.calls.call(), ExitStack() as turn:
            call = None
            if given:  # it has its place among others before it waits for anything
                from aiopersist.subscription.subscription import JointCall

                call = turn.enter_context(JointCall(given, self._stack))
            await self._stack.imported("aiopersist.table.transact")
            return await self._transactions.run(body, txn, once, call, max_attempts)

    async def happened(self, once: str, shard: str | None = None) -> int | None:
        """The time of the commit that recorded `once` in the shard (`None`: that of the transaction); `None`
        if it did not happen, or is forgotten by now. Appends of this client whose outcome is not known are
        settled first. Linearizable: one request; for a transaction two."""
        with self._shards.calls.call():
            if self._has_tables:
                await self._tables.group.decided()
            if shard is not None:
                await self._stack.imported("aiopersist.write.handle")
                from aiopersist.write.handle import happened

                return await happened(self._shards, shard, once)
            await self._stack.imported("aiopersist.table.transact")
            return await self._transactions.happened(once)

    def clock(self) -> tuple[float, float]:
        """The consensus store's clock, in seconds since 1970, and by how many seconds that may be wrong. No
        request is waited for: the clock is measured when the client opens, and in the background when a call
        finds that the last measurement is a minute old."""
        self._shards.calls.check()
        return self._shards.clock()

    async def subscriptions(self, shard: str) -> dict[str, SubscriptionView]:
        """The subscriptions of the shard by name, shares as `name[i/n]`. Linearizable: one request."""
        async with self._calling("aiopersist.subscription.open"):
            from aiopersist.subscription.open import subscriptions

            return await subscriptions(self._shards, shard)

    async def drop_subscription(self, shard: str, name: str) -> None:
        """End the subscription of that name, with all its shares: its position is forgotten, and it holds
        nothing. `LookupError` if there is none. One commit."""
        async with self._calling("aiopersist.subscription.open"):
            from aiopersist.subscription.open import drop_subscription

            await drop_subscription(self._shards, shard, name)

    async def compare_and_append_many(self, appends: Sequence[Append]) -> None:
        """Append to several shards at one moment: all of `appends` happen, or none. `UpperMismatch` names the
        shard whose upper was not the expected one; `INVALID_APPEND` for a shard that is named twice or a
        writer of another client; `Unsupported` if the consensus store cannot do it. After a cancellation the
        `settle` of each writer answers for its own shard. One request to the consensus store, in addition to
        the cost of staging."""
        with self._shards.calls.call():
            from aiopersist.write.append_many import append_to_many

            await append_to_many(appends, self._stack)

    async def schema(self, shard: str) -> tuple[int, Schema[Any, Any, Any]]:
        """The id of the current schema of the shard, and that schema. Linearizable: one request."""
        with self._shards.calls.call():
            found = await self._shards.existing(shard)
            return found.state.schema_id, found.schema(found.state.schema_id)

    async def compare_and_evolve_schema(
        self, shard: str, expected_id: int, schema: Schema[Any, Any, Any]
    ) -> int:
        """Make `schema` the current one; it may add optional fields to the current schema. Returns its id.
        `SchemaMismatch` if the current id is not `expected_id`, `IncompatibleSchema` for any other change.
        One commit."""
        async with self._calling("aiopersist.shard.evolve"):
            from aiopersist.shard.evolve import evolve_schema

            return await evolve_schema(await self._shards.existing(shard), expected_id, schema)

    async def copy_shard(
        self,
        shard: str,
        target: Client,
        *,
        name: str | None = None,
        verify: bool = False,
        detach: bool = False,
    ) -> Copied:
        """Copy the shard or table to the location of `target`, under `name` or its own name: a backup, and
        the way back. The copy has the history from since on with times as they are, the schemas, the clock
        and the policy of retention; subscriptions, holds, and the ids of `txn=` and `once=` stay behind. It
        reads as the source at each time that both hold.

        Repeated, it brings what is new. A call that was killed leaves a copy that can be read, and is
        repeated; two at once do no harm. The copy has a hold, by which it is known again: it keeps the
        copy's history, and the next call moves it to the source's since. `detach=True` ends the hold: then
        the copy is a shard of its own, and no call follows up on it.

        `verify=True` compares the contents of both at up to nine times: `differing` is empty if they are
        the same. `track` shows how far it has come.

        `InvalidUsage` of kind `INVALID_COPY` if the name is taken by another shard, if someone has written
        the copy, or if it is ahead of the source; `Unsupported` for an `Indexed`. In memory are some row
        groups of each sorted run of parts, and the parts of a builder. It reads each part that has something
        new once, by a lease that holds the source's history meanwhile, and makes one commit for about eight
        parts that it writes."""
        async with self._calling("aiopersist.backup.copy"), target._calling():
            from aiopersist.backup.copy import CopyOptions, copy_shard

            await target._ready_to_write()
            options = CopyOptions(verify, detach)
            return await copy_shard(self._shards, shard, target._shards, name, options)

    async def drop(self, name: str) -> None:
        """Finalize the shard and free its name: both frontiers become empty, every handle is fenced, and
        calls that wait end with `ShardFinalized`. A shard that has a name but was not created yet never will
        be. Repeating it after a crash finishes the work. A tombstone tells handles of other processes that
        the shard is finalized; `maintain` removes it after `settings.tombstone_retention_s`."""
        async with self._calling("aiopersist.gc.drop"):
            from aiopersist.gc.drop import drop

            await drop(self._shards, name)

    async def finalize(self, shard: str) -> None:
        """Delete the data of a shard that can no longer be read or written: its since and upper are empty,
        else `FINALIZATION_ERROR`. A tombstone stays for as long as the shard has a name, and then for
        `settings.tombstone_retention_s`. Repeating it after a crash finishes the work."""
        async with self._calling("aiopersist.gc.drop"):
            from aiopersist.gc.drop import finalize

            await finalize(self._shards, shard)

    # --- work shared by several processes --------------------------------------------------------

    def shared_read(
        self,
        shard: str,
        as_of: Time | datetime | None = None,
        *,
        start: int | datetime | None = None,
        end: int | datetime | None = None,
        wait: bool = True,
        lease_s: float | None = None,
        keep: bool = False,
    ) -> Opening[SharedRead]:
        """A read that several processes share: the contents at `as_of` (`None`: the greatest complete time),
        or, with `start`, the changes of `[start, end)`, unmodified (`end=None`: up to the shard's upper).

        `SinceViolation` if history there is gone: changes need `since < start`, or both at the minimum. It
        waits until the range is complete, or raises `NotReadable` with `wait=False`; contents without `as_of`
        are `NotReadable` at once if nothing was appended to the shard. The lease lasts `lease_s` (default:
        `settings.reader_lease_s`) and is renewed until the read is closed; with `keep=True` it is neither
        renewed nor ended, and expires. One commit, and one more to end the lease."""

        def opening() -> Opening[SharedRead]:
            from aiopersist.read.shared_read import shared_read

            return shared_read(self._shards, shard, as_of, start, end, wait=wait, lease_s=lease_s, keep=keep)

        return self._later("aiopersist.read.shared_read", opening, f"client.shared_read({shard!r})")

    def read_piece(self, data: bytes, where: Any = None) -> Items[pa.RecordBatch]:
        """The rows of a piece of a shared read, in any process, as Arrow batches in order: `key, val, diff`
        of contents, `key, val, time, diff` of changes, consolidated. `where` as in `Snapshot.to_arrow`. In
        memory are about `settings.read_memory_bytes`, and a row group of each run of parts as it was fetched.

        The lease is renewed if that did not happen for a quarter of it. `InvalidUpdate` for bytes that are no
        piece, `LeaseExpired` if the read was closed and a part is gone."""
        self._shards.calls.check()
        from aiopersist.read.shared_read import read_piece

        return read_piece(self._shards, data, where)

    async def fetch_part(
        self, data: bytes, schema: Schema[Any, Any, Any] | None = None
    ) -> Updates[Any, Any, Any]:
        """The updates of a part that `Snapshot.parts` gave, in any process: those at times `<= as_of`, given
        that time, not consolidated across parts. By the stored schema, or one that is the same.

        `InvalidUpdate` for bytes that are no part; `LeaseExpired` if the snapshot was closed, or its lease
        lost, and the part is gone. One request for the shard's head (its whole state, if this client does not
        know it), and one for the part if it is not inline."""
        with self._shards.calls.call():
            from aiopersist.read.leased import fetch_part

            return await fetch_part(self._shards, data, schema)

    async def register_writer(self, shard: str, schema: Schema[Any, Any, Any], lease_s: float) -> bytes:
        """A writer under which other processes build, as bytes, as from `WriteHandle.to_transmittable`. No
        handle keeps it: its lease lasts `lease_s` from the last heartbeat of a builder under it. A new shard
        is created; `NOT_A_TABLE` for a table. One commit, two for a new shard."""
        async with self._calling("aiopersist.write.remote"):
            from aiopersist.write.remote import register_writer

            return await register_writer(self._shards, shard, schema, lease_s)

    async def release_writer(self, data: bytes) -> None:
        """End the registration of that writer: batches that are staged under it can no longer be appended,
        and the sweep deletes them. One commit; none if the registration has ended."""
        async with self._calling("aiopersist.write.remote"):
            from aiopersist.write.remote import release_writer

            await release_writer(self._shards, data)

    def builder_from_transmittable(
        self, data: bytes, lower: Antichain | Time, schema: Schema[Any, Any, Any] | None = None
    ) -> Opening[BatchBuilder]:
        """A builder under the writer that `WriteHandle.to_transmittable` gave, whose registration it keeps
        alive. By the writer's stored schema, or one that is the same. `BatchExpired` if that writer is gone,
        or 65,536 batches of it were appended or deleted: then transmit a new writer. `InvalidUpdate` for
        bytes that are no writer. One request, and a commit if a heartbeat is due."""

        def opening() -> Opening[BatchBuilder]:
            from aiopersist.write.remote import open_builder

            return open_builder(self._shards, data, lower, schema)

        return self._later("aiopersist.write.remote", opening, "client.builder_from_transmittable(...)")

    def shared_compaction(self, shard: str, goal: Goal | None = None) -> Opening[SharedCompaction]:
        """One round of a compaction of the whole shard that several processes share. Applies `retain`, waits
        while another process compacts any of the batches, and claims them. `goal`: the goal of the round
        before, to go on with it. Three commits, and one more to end it."""

        def opening() -> Opening[SharedCompaction]:
            from aiopersist.compact.shared_compaction import shared_compaction

            return shared_compaction(self._shards, shard, goal)

        return self._later(
            "aiopersist.compact.shared_compaction", opening, f"client.shared_compaction({shard!r})"
        )

    async def compact_piece(self, data: bytes) -> bytes:
        """Carry out a piece of a shared compaction, in any process; the result is for its `apply`. In memory
        are `settings.compaction_memory_bytes`. After any error, the parts it has written are deleted.
        `InvalidUpdate` for bytes that are no piece, `LeaseExpired` if a part is gone: the claim was lost, and
        another process has replaced the part. Requests for every part that is read or written."""
        async with self._calling("aiopersist.compact.shared_compaction"):
            from aiopersist.compact.shared_compaction import compact_piece

            return await compact_piece(self._shards, data)

    # --- maintenance -----------------------------------------------------------------------------

    async def retain(self, shard: str, keep: int | timedelta | None) -> None:
        """Set how much history maintenance keeps, from now on and for every client. Maintenance moves since
        to `upper - keep` at most, and no further than holds allow: once no more appends come, to within
        `1.25 * keep` of upper; while they come some 100 times may be kept in addition. A `timedelta`: to the
        upper that the shard had that long ago; on a wall clock, to the time of that long ago. Since never
        passes the last complete time, so the current contents stay readable. `None`: maintenance does not
        move since. One commit."""
        async with self._calling("aiopersist.maintenance.on_demand"):
            from aiopersist.maintenance.on_demand import retain

            await retain(self._shards, self._maintenance, shard, keep)

    async def maintain(self) -> MaintenanceRound:
        """One round of maintenance over *all* shards of the location, for a process that does nothing else.
        It moves since as the policies say, compacts, collects garbage, and removes finalized shards. Any
        number of processes may do it: claims in the states of the shards divide the work. A shard that fails
        is named in the result and logged. A share of a request for a shard that has not changed since the
        round before; a few requests for a shard with nothing to do."""
        async with self._calling("aiopersist.maintenance.rounds"):
            return await self._rounds.once()

    async def force_compaction(self, shard: str) -> None:
        """Apply `retain`, as far as holds allow, merge the whole shard into one batch, sorted, consolidated,
        with times advanced to since, and return once that is applied. Clients tell by their heartbeats what
        they hold no more; `force_gc` sends that of this client. In memory are
        `settings.compaction_memory_bytes`, whatever the size of the shard."""
        async with self._calling("aiopersist.maintenance.background"):
            await self._maintenance.force_compaction(await self._shards.existing(shard))

    async def force_gc(self, shard: str) -> Collected:
        """Write a rollup, then delete the blobs and versions that no reader's hold can reach. Returns a count
        of both. A heartbeat before it releases the versions that closed snapshots of this client held; a
        reader with a hold of its own releases its history with its next heartbeat."""
        async with self._calling("aiopersist.maintenance.on_demand"):
            from aiopersist.maintenance.on_demand import force_gc

            return await force_gc(self._shards, self._maintenance, shard)

    async def erase(
        self,
        table: Table[K, Any],
        keys: Iterable[K] | None = None,
        where: Any = None,
        *,
        wait: timedelta = timedelta(minutes=10),
        end_holds: Iterable[str] = (),
        dry_run: bool = False,
    ) -> Erasure:
        """Erase rows of a table from its stores: those of `keys`, and those for which `where`, as in
        `Snapshot.to_arrow`, is true, now or in the history. It deletes them, gives up the history up to then,
        compacts, collects garbage, and reads all that the stores have of the table: `done` is true only if
        no version, part or rollup has any of these rows.

        It waits for those who hold history or old versions, for as long as `wait`, and then names them
        (`holders`) and what is left (`remnants`). `end_holds`: the names of holds, critical sinces and
        subscriptions that it ends if they keep the history; no other is ended. A row that is put again
        meanwhile stays: `present`. The policy of `retain` stays, too. Repeated, it goes on.

        `dry_run`: change nothing, and say what there is. The stores may keep the bytes of deleted records for
        a while, and so do copies and backups: see "Erase personal data" in the documentation. Reads all
        versions and blobs of the table at least twice."""
        async with self._calling("aiopersist.erase.erasure", "aiopersist.table.table"):
            from aiopersist.erase.erasure import EraseOptions, erase

            options = EraseOptions(wait, end_holds, dry_run)
            return await erase(self._tables, self._maintenance, table, keys, where, options)

    async def inspect(self, shard: str) -> ShardView:
        """The batches, frontiers and registrations of the shard, table or `Indexed`, at its newest version.
        Three requests, one more for an `Indexed` by its name."""
        async with self._calling("aiopersist.maintenance.inspect"):
            from aiopersist.maintenance.inspect import inspect

            found = await catalog.resolve_any(self._stack, shard)
            return await inspect(self._shards.at(found, shard))

    async def overview(self, prefix: str = "") -> list[ShardSummary]:
        """A line for each shard, table and `Indexed` whose name begins with `prefix`, sorted by name: kind,
        frontiers, sizes, last version, holds, the lag of subscriptions. A shard whose state cannot be read is
        in it, with the problem. Four requests, two more for every few hundred names, and for each shard a
        read of the head, of the rollup and of the diffs since then; 16 shards at a time."""
        async with self._calling("aiopersist.maintenance.overview"):
            from aiopersist.maintenance.overview import overview

            return await overview(self._stack, prefix)

    async def fsck(self, shard: str) -> FsckReport:
        """Read the whole shard, table or `Indexed` and report damage; `ok` is false only for damage.
        `StorageUnavailable` if a store does not answer. Changes nothing."""
        async with self._calling("aiopersist.maintenance.fsck"):
            from aiopersist.maintenance.fsck import fsck

            return await fsck(self._shards.at(await catalog.resolve_any(self._stack, shard), shard))

    async def sweep_leaked_blobs(self, dry_run: bool = True) -> Sweep:
        """Find the blobs that crashed or cancelled writers left behind: no state names them, and none can any
        more. `dry_run=False` deletes them. Safe at any time, whatever else goes on."""
        async with self._calling("aiopersist.gc.sweep"):
            from aiopersist.gc.sweep import sweep

            return await sweep(self._stack, dry_run=dry_run)

    async def usage(self) -> Usage:
        """Bytes in the blob store: all, those that a live version references, current, live."""
        async with self._calling("aiopersist.gc.sweep"):
            from aiopersist.gc.sweep import usage

            return await usage(self._stack)

    # --- the end ---------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close every handle, and release the resources of the client. Idempotent; goes on in the background
        if the caller is cancelled. Raises, at the end, what the closing of a subscription raises."""
        if self._closing is None or not self._closing.done():
            self._shards.calls.check_place()
        await self._close_once(self._close)
        failed, self._failed = self._failed, []
        if failed:
            raise failed[0]

    async def _close(self) -> None:
        self._failed = await self._shards.release()
        await self._upkeep.aclose()
        self._shards.scope.close()
        await self._stack.supervisor.aclose()
        self._stack.threads.end()
        self._metrics.end()
        for store in self._stores.mine:
            await store.aclose()

    async def _ready_to_write(self) -> None:
        """Be ready for updates of any size and type."""
        await self._stack.ready_to_convert()

    # --- what is imported when it is needed ------------------------------------------------------

    def _later(self, module: str, opening: Callable[[], Opening[H]], call: str) -> Opening[H]:
        """What `opening` returns; it needs `module`, which is imported on a thread if it is not there."""
        if are_imported([module]):
            return opening()

        async def opened() -> H:
            self._shards.calls.check()
            await self._stack.imported(module)
            return await opening()

        return Opening(opened, call)

    @asynccontextmanager
    async def _calling(self, *modules: str) -> AsyncIterator[None]:
        """Surrounds a call that `modules` carry out."""
        with self._shards.calls.call():
            await self._stack.imported(*modules)
            yield

    @property
    def _maintenance(self) -> Maintenance:
        return self._upkeep.now()

    @cached_property
    def _rounds(self) -> Rounds:
        from aiopersist.maintenance.rounds import Rounds

        maintenance = self._maintenance
        return Rounds(self._stack, lambda shard: maintenance.of(self._shards.at(catalog.id_of(shard))))

    @cached_property
    def _tables(self) -> OpenTables:
        from aiopersist.table.open import OpenTables

        return OpenTables(self._shards)

    @cached_property
    def _transactions(self) -> Transactions:
        from aiopersist.table.transact import Transactions

        return Transactions(self._tables)

    @property
    def _has_tables(self) -> bool:
        return "_tables" in vars(self)


def _waiting_in_tables(client: ref[Client]) -> int:
    """How many operations wait for a group commit. The metrics outlive a client that is dropped, so they hold
    none."""
    found = client()
    return found._tables.group.queueing if found is not None and found._has_tables else 0
