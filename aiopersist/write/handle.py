"""The write handle: appends by compare-and-append, and their outcomes.

A call checks its bounds and its `txn` without any I/O. `append.py` has the steps that follow, `session.py`
the state that they share. `combine.py` takes these steps once for all waiting calls of `write`. `builder.py`
and `batch.py` stage batches without a commit.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.resource import Opening, Resource, Scope
from aiopersist.base.user_functions import warn_in_body
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.inputs import GivenRows, GivenUpdates, own_copy
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.model import Clock
from aiopersist.state.once import Once
from aiopersist.write.append import append_all
from aiopersist.write.batch import Batch
from aiopersist.write.batches import BatchesAppend
from aiopersist.write.builder import BatchBuilder
from aiopersist.write.checks import Txn, check_bounds, check_frontier, check_marks, check_no_table, check_once
from aiopersist.write.combine import Combiner
from aiopersist.write.pending import Committed, NotCommitted, PendingAppend
from aiopersist.write.session import Session
from aiopersist.write.staged import StagedBatch, StagingContext
from aiopersist.write.transmit import ENVELOPE, WRITER, TransmittedWriter, decode

K = TypeVar("K")
V = TypeVar("V")


class WriteHandle(Resource, Generic[K, V]):
    """Appends to one shard. Serves many tasks at once; its own appends take turns."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shard = session.shard
        self._schema = session.schema
        self._scope = session.scope
        self._combiner = Combiner(session)

    @classmethod
    async def _open(
        cls,
        shard: Shard,
        schema: Schema[K, V, Any],
        scope: Scope,
        clock: Clock | None = None,
        *,
        tables: bool = False,
    ) -> "WriteHandle[K, V]":
        """Create the shard if it does not exist, and register a writer: one commit, two for a new shard."""
        state = await shard.open_or_create(schema, clock or Clock.LOGICAL)
        if not tables:
            check_no_table(shard)
        if clock is not None and state.clock is not clock:
            text = f"{shard.label} has a {state.clock} clock, not a {clock} one; creation sets it for good"
            raise InvalidUsage(UsageKind.INVALID_CLOCK, text, shard_id=shard.id, clock=clock)
        schema = shard.as_stored(schema)
        session = Session(StagingContext(shard, schema, shard.schema_id(schema), scope))
        try:
            await session.ensure_registered()
        except BaseException:
            await session.aclose()
            raise
        return cls(session)

    @property
    def shard_id(self) -> ShardId:
        return self._shard.id

    @property
    def writer_id(self) -> str:
        """The id of its current registration."""
        return self._session.registration.writer

    @property
    def upper(self) -> Antichain:
        """The shard's upper, as last seen by this process."""
        return self._shard.state.upper

    @property
    def _queueing(self) -> int:
        """How many calls of `write` wait for the commit of their group."""
        return self._combiner.queueing

    async def fetch_recent_upper(self) -> Antichain:
        """The shard's upper, by a linearizable read: one request. Settles an append of this handle first if
        its outcome is unknown."""
        with self._scope.call():
            await self._session.decided_call()
            return (await self._shard.open()).upper

    async def wait_for_upper_past(self, frontier: Antichain | Time) -> None:
        """Return once `frontier < upper`, strictly. Settles an append of this handle first if its outcome is
        unknown."""
        with self._scope.call():
            past = check_frontier(frontier, self._schema)
            if not past.elements:
                text = "no upper is past the empty frontier {}"
                raise InvalidUsage(UsageKind.INVALID_TIME, text, time=past)
            await self._session.decided_call()
            await self._shard.register.wait(lambda state: True if past < state.upper else None)

    # --- appends ---------------------------------------------------------------------------------

    async def compare_and_append(
        self,
        updates: GivenUpdates[K, V],
        expected_upper: Antichain | Time,
        new_upper: Antichain | Time,
        txn: Txn | None = None,
        once: str | None = None,
    ) -> None:
        """Append `updates`, whose times lie in `[expected_upper, new_upper)`, iff the shard's upper is
        `expected_upper`; else `UpperMismatch`, and nothing is written. Atomic, and durable when it returns.

        `txn=(app_id, number)` is for one producer that counts its appends. The shard records the largest
        number. An append with this number or a smaller one succeeds and writes nothing.

        `once=` is for requests that may overtake each other: an id of 1 to 256 bytes of UTF-8. The shard
        remembers it for `settings.once_keep_s`, or until 100,000 newer ids came. A repeat succeeds and writes
        nothing. `INVALID_TXN` for an invalid id, for both arguments, or with product times.

        `INVALID_CLOCK` if `new_upper` is more than `settings.clock_ahead_max_s` beyond now on a wall clock.
        The empty frontier is allowed.

        Costs one compare-and-set, and one request per part if the data is not small."""
        await self._append(PendingAppend, updates, expected_upper, new_upper, txn, once)

    async def append(
        self, updates: GivenUpdates[K, V], lower: Antichain | Time, upper: Antichain | Time
    ) -> None:
        """Append definite data that replicas of this writer append, too. Drops updates before the shard's
        upper, so overlapping and repeated appends write the same data once. `UpperMismatch` if the upper is
        below `lower` or incomparable: a gap would remain. Costs the same as `compare_and_append`."""
        await self._append(PendingAppend, updates, lower, upper, replica=True)

    async def write(
        self, rows: GivenRows[K, V], diff: int = 1, txn: Txn | None = None, once: str | None = None
    ) -> int:
        """Append `(key, val)` or `(key, val, diff)` rows at a time that the library picks, and return that
        time: the upper, or now on a wall clock. Calls that wait at the same moment share one commit. Int
        times only. `txn` and `once` work as in `compare_and_append`; a repeat of `once` returns the first
        time. An id is recorded even without rows."""
        warn_in_body(self._shard.stack, "WriteHandle.write", "tx.append")
        with self._scope.call():
            self._session.unsettled = None
            return await self._combiner.write(rows, diff, *self._marks(txn, once))

    def _marks(self, txn: Txn | None, once: str | None) -> tuple[dict[str, int], Once]:
        return check_marks(txn, once, self._shard.stack.settings, self._schema.time_length)

    async def settle(self) -> Committed | NotCommitted | None:
        """The outcome of this handle's last append if that was cancelled, timed out or raised
        `Indeterminate`; else `None`. Raises `Indeterminate` if nobody can know the outcome.

        A call that is cancelled before its first step (`asyncio.wait_for` with a timeout of 0) never began.
        Then `settle` still answers for the append before it."""
        with self._scope.call():
            return await self._session.outcome()

    # --- staged batches --------------------------------------------------------------------------

    async def batch(
        self, updates: GivenUpdates[K, V], lower: Antichain | Time, upper: Antichain | Time
    ) -> Batch:
        """Stage `updates`, whose times lie in `[lower, upper)`, for an append later or by another process.
        Uploads parts while it reads the input; a small batch stays in memory. No commit."""
        with self._scope.call():
            bounds, context = check_bounds(lower, upper, self._schema), self._session.context
            inline = context.inline(updates, *bounds)
            if inline is None:
                updates = own_copy(updates)
            registration = await self._session.begin_batch()
            upload = context.upload(bounds[0], registration)
            try:
                if inline is not None:
                    return Batch(StagedBatch(context, registration, inline))
                await upload.take(updates)
                upload.check_upper(bounds[1])
                return Batch(StagedBatch(context, registration, await upload.finish(bounds[1])))
            except BaseException:
                upload.discard()
                raise
            finally:
                registration.release()

    def builder(self, lower: Antichain | Time) -> Opening[BatchBuilder]:
        """A builder of a batch of any size, whose times lie at or beyond `lower`. No request."""

        async def open_builder() -> BatchBuilder:
            with self._scope.call():
                least = check_frontier(lower, self._schema)
                registration = await self._session.begin_batch()
                try:
                    return BatchBuilder(self._session.context, self._scope, registration, least)
                except BaseException:
                    registration.release()
                    raise

        return Opening(open_builder, "writer.builder(...)")

    def to_transmittable(self) -> bytes:
        """This writer as bytes: other processes build batches under its registration with
        `client.workers`. Keep the writer open until these batches are appended; after that
        they cannot be. No request."""
        self._scope.check()
        writer, schema_id = self.writer_id, self._session.context.schema_id
        self._session.registration.lent = True
        transmitted = TransmittedWriter(shard=self.shard_id, writer=writer, schema_id=schema_id)
        return WRITER.encode(transmitted)

    async def compare_and_append_batch(
        self,
        batches: Sequence[Batch],
        expected_upper: Antichain | Time,
        new_upper: Antichain | Time,
        txn: Txn | None = None,
        once: str | None = None,
    ) -> None:
        """Append staged batches, all at one moment, iff the shard's upper is `expected_upper`. Truncates a
        batch to `[expected_upper, new_upper)`: readers see only these times.

        Success consumes the batches; a repeated `txn` or `once` deletes their blobs. After `UpperMismatch`
        the caller may append them again or delete them. `AlreadyAppended` for a batch that was appended
        elsewhere, `BatchExpired` for one whose writer's lease ran out. One compare-and-set."""
        await self._append(BatchesAppend, batches, expected_upper, new_upper, txn, once)

    async def append_batch(self, batch: Batch, lower: Antichain | Time, upper: Antichain | Time) -> None:
        """`append` of a staged batch: drops updates before the shard's upper. If none remain, it consumes the
        batch and deletes its blobs."""
        await self._append(BatchesAppend, [batch], lower, upper, replica=True)

    async def _append(
        self,
        kind: type[PendingAppend],
        updates: Any,
        lower: Antichain | Time,
        upper: Antichain | Time,
        txn: Txn | None = None,
        once: str | None = None,
        *,
        replica: bool = False,
    ) -> None:
        with self._scope.call():
            self._session.unsettled = None
            bounds = check_bounds(lower, upper, self._schema)
            await append_all([kind(self._session, *bounds, updates, *self._marks(txn, once), replica)])

    async def batch_from_transmittable(self, data: bytes) -> Batch:
        """The batch of these bytes, which `Batch.to_transmittable` returned. Renews the registration of its
        writer until the batch is consumed; `BatchExpired` if that registration has ended. `InvalidUpdate` for
        bytes that are no batch, `BATCH_NOT_FROM_THIS_SHARD` for a batch of another shard. One commit for the
        first batch of each writer."""
        with self._scope.call():
            transmitted = decode(data, self._shard.id)
            if any(part.schema_id not in self._shard.state.schemas for part in transmitted.batch.parts):
                await self._shard.open()
            registration = await self._session.registration_of(transmitted.writer)
            staged = StagedBatch(
                self._session.context,
                registration,
                transmitted.batch,
                transmitted.id,
                rewrite=transmitted.rewrite,
                handed_over=True,
            )
            staged.trace = ENVELOPE.trace(data)
            registration.release()  # the batch has a hold of its own
            return Batch(staged)

    # --- the end ---------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End the registration. If staged batches still need it, end only its heartbeats. Idempotent. Does
        not settle an append whose outcome is unknown."""
        await self._session.aclose()

    def __repr__(self) -> str:
        return f"<WriteHandle {self.writer_id} of {self._shard.id}: upper {self.upper}>"


async def happened(shards: Shards, name: str, once: str) -> int | None:
    """See `Client.happened`."""
    shard = await shards.existing(name)
    ids = check_once(once, None, shard.stack.settings)
    await shard.settle_senders()
    state = await shard.open()
    return ids.done_at(state.once, await shard.register.now())


async def time_of_write(handle: WriteHandle[Any, Any], upper: int) -> int:
    """The time at which `handle.write` would append to a shard with that upper."""
    return await handle._combiner.time(Antichain(upper))


def session_of(handle: WriteHandle[Any, Any]) -> Session:
    """The session of a handle, for appends by several handles."""
    return handle._session
