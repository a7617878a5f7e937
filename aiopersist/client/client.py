"""The client: all calls on a location, each forwarded to the package that carries it out.

A client belongs to the process and the event loop that opened it. `aclose` closes its handles, gives requests
under way a moment to end, and closes the stores that the client opened.

Each call imports the package that carries it out (`services.py`). `table` and `stash` import theirs without a
thread, since they return without an await.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.resource import Closeable, Opening
from aiopersist.client.admin import Admin
from aiopersist.client.moved import MovedCalls
from aiopersist.client.versions import VersionCalls
from aiopersist.client.workers import Workers
from aiopersist.data.types.schema import Schema
from aiopersist.measure.metrics import Metrics
from aiopersist.read.handle import ReadHandle
from aiopersist.read.open import open_reader
from aiopersist.shard import catalog
from aiopersist.shard.catalog import ShardId, check_name

if TYPE_CHECKING:
    from aiopersist.indexed.indexed import Indexed
    from aiopersist.read.since import SinceHandle
    from aiopersist.stash.stash import Stash
    from aiopersist.subscription.step import SubscribedUpdates, SubscriptionStep
    from aiopersist.subscription.subscription import Subscription
    from aiopersist.table.commit.plan import Repeated
    from aiopersist.table.table import Table
    from aiopersist.table.transaction.transaction import Transaction
    from aiopersist.write.append_many import Append
    from aiopersist.write.checks import Txn
    from aiopersist.write.handle import WriteHandle

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
H = TypeVar("H", bound=Closeable)

STASH = "stash"  # the name of a stash, unless the user says another


class Client(MovedCalls, VersionCalls):
    """A client of one location: opens writers and readers of its shards. Serves many tasks at once."""

    @cached_property
    def admin(self) -> Admin:
        """The calls of operators: inspect, maintain, check, copy, erase, drop."""
        return Admin(self._services)

    @cached_property
    def workers(self) -> Workers:
        """The calls for reads, batches and compactions that several processes share."""
        return Workers(self._services)

    @property
    def metrics(self) -> Metrics:
        """What this client has done: `client.metrics()` gives a frozen `MetricsView` with a JSON form,
        `client.metrics["blob.get"]` the requests to one operation of a store. No request."""
        return self._services.metrics

    async def ping(self) -> None:
        """Return if both stores answer and belong together. `StorageUnavailable` after
        `settings.open_timeout_s` if a store does not answer, `InvalidLocation` if the stores do not belong
        together. Two requests, and one for the clock of a consensus store that has its own."""
        with self._calls.call():
            await self._services.ping()

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

        return self._services.later("aiopersist.write.open", opening, f"client.writer({shard!r}, ...)")

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
        """The table of that name, with keys and values of those types: at most one value per key. Its first
        change, feed, subscription or transaction, or `await table`, creates it: a shard with a wall clock
        that keeps a day of history until `retain` says otherwise. A read creates nothing. `TypeError` for
        types that cannot be stored, `INVALID_TYPE` for those that admit `None`; the first use raises
        `NOT_A_TABLE` for a shard that is no table, `CodecMismatch` for other types.

        `resident`: whether this client keeps all contents in memory; `None`: while they take less than
        `settings.table_resident_bytes`. All handles of a table share one view; the last `resident` that is
        not `None` counts. No request. It needs no running event loop; its calls need that of the client."""
        self._calls.check_open()
        from aiopersist.table.schema import TableSchema
        from aiopersist.table.table import Table

        return Table(self._services.tables, TableSchema(check_name(name), key, val), resident)

    def critical_since(self, shard: str, critical_reader_id: str, opaque: int = 0) -> Opening[SinceHandle]:
        """The hold of that id, which never expires. A new hold is made at the shard's since, with `opaque`.
        `UnknownShard` if the shard does not exist. One commit for a new hold."""

        def opening() -> Opening[SinceHandle]:
            from aiopersist.read.since import open_since

            return open_since(self._shards, shard, critical_reader_id, opaque)

        return self._services.later(
            "aiopersist.read.since", opening, f"client.critical_since({shard!r}, ...)"
        )

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
        """The consumer of that name. The shard keeps its position, and the history that it needs: the
        consumer resumes after its last durable acknowledgement. A new one begins with the current contents
        (`start=None` or `"snapshot"`), at the upper (`"now"`), or strictly after a time. An opening takes the
        name over; the opening before it gets `OpaqueMismatch`.

        `resume`: go on after that cursor, which the consumer kept itself; `SinceViolation` if it lies before
        the position. `expire_after`: give up the position after that time without an acknowledgement while
        there was something to acknowledge; then `SubscriptionExpired`, unless `start` says where to begin
        anew. `share=(i, n)`: the i-th of n consumers that divide the keys, each with its own position and
        owner; `INVALID_SHARE` for another n. `lease_s`: without a heartbeat for that time, the subscription
        is shown without an owner.

        `UnknownShard` if the shard does not exist, `SinceViolation` if the history is gone, `INVALID_TIME`
        for a shard with product times. One commit, and those of a reader."""

        def opening() -> Opening[Subscription[SubscribedUpdates[Any, Any]]]:
            from aiopersist.subscription.open import SubscriptionArguments, open_subscription

            arguments = SubscriptionArguments(name, start, resume, expire_after, share, lease_s)
            return open_subscription(self._shards, shard, schema, arguments)

        return self._services.later(
            "aiopersist.subscription.open", opening, f"client.subscription({shard!r}, ...)"
        )

    def indexed(self, name: str, *, readonly: bool = False, background: bool = True) -> Opening[Indexed]:
        """The `Indexed` of that name, created on first use; it takes over from the instance before it.
        `readonly=True`: it follows along, as any number of instances may; `UnknownStream` if it does not
        exist. `background=False`: its maintenance is done by hand (`step`). Two commits (one with
        `readonly`), and a request for its name."""

        def opening() -> Opening[Indexed]:
            from aiopersist.indexed.open import open_indexed

            return open_indexed(self._shards, name, readonly=readonly, background=background)

        return self._services.later("aiopersist.indexed.open", opening, f"client.indexed({name!r})")

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
        return self._services.stash(name, exclusive, readonly, savepoint)

    async def shard_id(self, name: str) -> ShardId:
        """The id of the shard of that name or id; `UnknownShard`. One request."""
        with self._calls.call():
            shard_id = await catalog.resolve(self._stack, name)
            return (await self._shards.existing(shard_id)).id if shard_id == name else shard_id

    async def list_shards(self) -> dict[str, ShardId]:
        """The ids of all shards by name. Two requests, and one more for every few hundred names."""
        with self._calls.call():
            return await catalog.names(self._stack, ShardId)

    async def upper(self, shard: str) -> Antichain:
        """The shard's upper. Linearizable: one request."""
        with self._calls.call():
            return (await self._shards.existing(shard)).state.upper

    async def txn_number(self, shard: str, app_id: str) -> int | None:
        """The last transaction number of that application; `None` if there is none. Linearizable: one
        request."""
        with self._calls.call():
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
        """Run `body`, which reads and writes tables through its `Transaction`, and return its result.
        Strictly serializable: all of it happens at one moment between the call and its return. `body` runs
        again if its reads have changed meanwhile: without limit, or `max_attempts` times and then `Conflict`.
        If it raises, nothing is written.

        A repeat of `once`, or of `txn` or a smaller number, writes nothing and returns `Repeated`; the
        location remembers both. `acks`: pairs of a subscription and one of its steps, acknowledged in the
        same commit. `InvalidUsage` of kind `CONSUMED` if a step was acknowledged before (nothing is written;
        a repeat after a lost answer learns that it happened), `SKIPPED` if only a later step was,
        `WOULD_SKIP` if a call that acknowledges an earlier step fails meanwhile. `Unsupported` where the
        store cannot write several shards at one moment. One commit; a request for each table that another
        process has written since, and with `once` or `txn` one for their shard."""
        steps = tuple(acks)
        with self._calls.call(), ExitStack() as turn:
            call = None
            if steps:  # takes its place among other calls before it waits
                from aiopersist.subscription.subscription import JointCall

                call = turn.enter_context(JointCall(steps, self._stack))
            await self._stack.imported("aiopersist.table.transaction.transact")
            return await self._services.transactions.run(body, txn, once, call, max_attempts)

    async def happened(self, once: str, shard: str | None = None) -> int | None:
        """The time of the commit that recorded `once` in the shard (without `shard`: of the transaction);
        `None` if it did not happen or is forgotten. Waits until the outcome of this client's appends is
        known. Linearizable: one request, two for a transaction."""
        with self._calls.call():
            if self._services.has_tables:
                await self._services.tables.group.decided()
            if shard is not None:
                await self._stack.imported("aiopersist.write.handle")
                from aiopersist.write.handle import happened

                return await happened(self._shards, shard, once)
            await self._stack.imported("aiopersist.table.transaction.transact")
            return await self._services.transactions.happened(once)

    def clock(self) -> tuple[float, float]:
        """The consensus store's clock in seconds since 1970, and its greatest error in seconds. No request:
        the client measures at opening, and in the background when a measurement is a minute old."""
        self._calls.check()
        return self._shards.clock()

    async def compare_and_append_many(self, appends: Sequence[Append]) -> None:
        """Append to several shards at one moment: all of `appends` happen, or none. `UpperMismatch` names the
        shard whose upper differs; `INVALID_APPEND` for a shard named twice or a writer of another client;
        `Unsupported` if the consensus store cannot do it. After a cancellation, the `settle` of each writer
        answers for its shard. One request to the consensus store, after staging."""
        with self._calls.call():
            from aiopersist.write.append_many import append_to_many

            await append_to_many(appends, self._stack)

    async def schema(self, shard: str) -> tuple[int, Schema[Any, Any, Any]]:
        """The id of the current schema of the shard, and that schema. Linearizable: one request."""
        with self._calls.call():
            opened = await self._shards.existing(shard)
            return opened.state.schema_id, opened.schema(opened.state.schema_id)

    async def compare_and_evolve_schema(
        self, shard: str, expected_id: int, schema: Schema[Any, Any, Any]
    ) -> int:
        """Make `schema` the current one; it may add optional fields to the current schema. Returns its id.
        `SchemaMismatch` if the current id is not `expected_id`, `IncompatibleSchema` for any other change.
        One commit."""
        async with self._services.calling("aiopersist.shard.evolve"):
            from aiopersist.shard.evolve import evolve_schema

            return await evolve_schema(await self._shards.existing(shard), expected_id, schema)
