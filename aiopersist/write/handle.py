"""The write handle: append by compare-and-append, and know what came of it.

1. Check the call, without any I/O: bounds, the form of `txn`, rows, times, batches.
2. Settle an append of this handle whose outcome is not known yet.
3. Leave early, by frontiers and transaction numbers that never go back: a repeat, a mismatch.
4. Stage the rows (`parts/upload.py`): a small batch in the state, others as parts in the blob store.
5. Commit one `Append`. If it is refused, delete what was staged: nothing references it.

`append.py` has the steps, `session.py` what they share, `builder.py` and `batch.py` what may happen
between staging and committing.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.given import GivenRows, GivenUpdates
from aiopersist.errors import InvalidUsage, UsageKind
from aiopersist.frontier import Antichain, Time
from aiopersist.resource import Opening, Resource, Scope
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.shard import Shard
from aiopersist.write.append import BatchesAppend, RowsAppend, append_all
from aiopersist.write.batch import Batch, Origin
from aiopersist.write.builder import BatchBuilder
from aiopersist.write.checks import Txn, check_bounds, check_frontier, check_txn
from aiopersist.write.combine import Combiner
from aiopersist.write.doubt import Committed, NotCommitted
from aiopersist.write.session import Session
from aiopersist.write.transmit import WRITER, TransmittedWriter, decode

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
    async def open(cls, shard: Shard, schema: Schema[K, V, Any], scope: Scope) -> "WriteHandle[K, V]":
        """Create the shard if need be, and register a writer: one commit, two for a new shard."""
        await shard.open_or_create(schema)
        session = Session(Origin(shard, schema, shard.schema_id(schema), scope))
        try:
            await session.ensure_registered()
        except BaseException:
            session.scope.close()
            raise
        return cls(session)

    @property
    def shard_id(self) -> ShardId:
        return self._shard.id

    @property
    def writer_id(self) -> str:
        """Its current registration."""
        return self._session.registration.writer

    @property
    def upper(self) -> Antichain:
        """The shard's upper, as last seen by this process."""
        return self._shard.state.upper

    async def fetch_recent_upper(self) -> Antichain:
        """The shard's upper, by a linearizable read: one request. An append of this handle whose outcome is
        not known is settled first."""
        with self._scope.call():
            await self._session.settled()
            return (await self._shard.open()).upper

    async def wait_for_upper_past(self, frontier: Antichain | Time) -> None:
        """Return once `frontier < upper`, strictly. An append of this handle whose outcome is not known is
        settled first."""
        with self._scope.call():
            past = check_frontier(frontier, self._schema)
            if not past.elements:
                raise InvalidUsage(
                    UsageKind.INVALID_TIME, "no upper is past the empty frontier {}", time=past
                )
            await self._session.settled()
            await self._shard.register.wait(lambda state: True if past < state.upper else None)

    # --- appends ---------------------------------------------------------------------------------

    async def compare_and_append(
        self,
        updates: GivenUpdates[K, V],
        expected_upper: Antichain | Time,
        new_upper: Antichain | Time,
        txn: Txn | None = None,
    ) -> None:
        """Append `updates`, whose times lie in `[expected_upper, new_upper)`, iff the shard's upper is
        `expected_upper`; else `UpperMismatch`, and nothing is written. Atomic, durable when it
        returns.

        `txn=(app_id, number)` is for one producer that counts: a number that was recorded before succeeds and
        writes nothing, and so does any *older* one, written or not. So it is not for requests that overtake
        each other; a request that may come twice in any order is an `app_id` of its own.

        Costs one compare-and-set; and one request per part, if the data is not small."""
        with self._scope.call():
            self._session.case = None
            lower, upper = check_bounds(expected_upper, new_upper, self._schema)
            await append_all([RowsAppend(self._session, lower, upper, check_txn(txn), updates=updates)])

    async def append(
        self, updates: GivenUpdates[K, V], lower: Antichain | Time, upper: Antichain | Time
    ) -> None:
        """Append definite data that replicas of this writer write as well: what the shard has already
        is dropped, so overlapping and repeated appends of the same data land once. `UpperMismatch`
        if the shard's upper is below `lower` or incomparable: there would be a gap."""
        with self._scope.call():
            self._session.case = None
            bounds = check_bounds(lower, upper, self._schema)
            await append_all([RowsAppend(self._session, *bounds, {}, replica=True, updates=updates)])

    async def write(self, rows: GivenRows[K, V], diff: int = 1, txn: Txn | None = None) -> int:
        """Append `(key, val)` or `(key, val, diff)` rows at a time that the library picks, and return it.
        Calls that wait at the same moment share one commit. Int times only. `txn` as of
        `compare_and_append`: an older number is a success that writes nothing."""
        with self._scope.call():
            self._session.case = None
            return await self._combiner.write(rows, diff, check_txn(txn))

    async def settle(self) -> Committed | NotCommitted | None:
        """The outcome of this handle's last append that was cancelled, timed out or raised
        `Indeterminate`, until the next append begins; `None` where there was none. `Indeterminate`
        if it cannot be known. A call that was cancelled before its first step, as `asyncio.wait_for` with no
        time left does, never began: then this is still the outcome of the one before."""
        with self._scope.call():
            return await self._session.outcome()

    # --- staged batches --------------------------------------------------------------------------

    async def batch(
        self, updates: GivenUpdates[K, V], lower: Antichain | Time, upper: Antichain | Time
    ) -> Batch:
        """Stage `updates`, whose times lie in `[lower, upper)`, to be appended later, or elsewhere. Its
        parts are uploaded while the input is taken; a small batch stays in memory. No commit."""
        with self._scope.call():
            bounds = check_bounds(lower, upper, self._schema)
            registration = await self._session.begin_batch()
            upload = self._session.upload_under(bounds[0], registration)
            try:
                await upload.take_whole(updates)
                upload.check_upper(bounds[1])
                return self._session.batch(registration, await upload.finish(bounds[1]))
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
                    return BatchBuilder(self._session, registration, least)
                except BaseException:
                    registration.release()
                    raise

        return Opening(open_builder, "writer.builder(...)")

    def to_transmittable(self) -> bytes:
        """This writer as bytes, so that other processes build batches under its registration
        (`client.builder_from_transmittable`). Keep it open until they are appended: with it ends what is
        staged under it. No request."""
        self._scope.check()
        writer, schema_id = self.writer_id, self._session.origin.schema_id
        self._session.registration.lent = True
        told = TransmittedWriter.of(shard=self.shard_id, writer=writer, schema_id=schema_id)
        return WRITER.encode(told)

    async def compare_and_append_batch(
        self,
        batches: Sequence[Batch],
        expected_upper: Antichain | Time,
        new_upper: Antichain | Time,
        txn: Txn | None = None,
    ) -> None:
        """Append staged batches, all at one moment, iff the shard's upper is `expected_upper`. A batch that
        reaches further than `[expected_upper, new_upper)` is truncated: readers see only times within.

        On success the batches are consumed, also where a repeated `txn` writes nothing: then their blobs
        are deleted. After `UpperMismatch` they are yours to append again or delete. One compare-and-set;
        `AlreadyAppended` for a batch that was appended elsewhere, `BatchExpired` for one whose writer's
        lease ran out."""
        with self._scope.call():
            self._session.case = None
            lower, upper = check_bounds(expected_upper, new_upper, self._schema)
            transactions = check_txn(txn)
            await append_all([BatchesAppend(self._session, lower, upper, transactions, batches=batches)])

    async def append_batch(self, batch: Batch, lower: Antichain | Time, upper: Antichain | Time) -> None:
        """`append` of a staged batch: what the shard has already is dropped. A batch that is not needed at
        all is consumed, and its blobs are deleted."""
        with self._scope.call():
            self._session.case = None
            bounds = check_bounds(lower, upper, self._schema)
            await append_all([BatchesAppend(self._session, *bounds, {}, replica=True, batches=[batch])])

    async def batch_from_transmittable(self, data: bytes) -> Batch:
        """The batch that `Batch.to_transmittable` made bytes of. The registration of the writer that built
        it is kept alive from here until it is consumed; `BatchExpired` if it is gone already. One commit
        for the first batch of that writer. `InvalidUpdate` for what is no batch,
        `BATCH_NOT_FROM_THIS_SHARD` for one of another shard."""
        with self._scope.call():
            found = decode(data, self._shard.id)
            if any(part.schema_id not in self._shard.state.schemas for part in found.batch.parts):
                await self._shard.open()
            registration = await self._session.registration_of(found.writer)
            origin, rewrite = self._session.origin, found.rewrite
            batch = Batch(origin, registration, found.batch, found.id, rewrite=rewrite, handed_over=True)
            registration.release()  # the batch has a hold of its own
            return batch

    # --- the end ---------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End the registration, or, while batches of it are outstanding, only its heartbeats. Idempotent.
        What was appended stays; an append whose outcome is unknown stays so."""
        await self._session.aclose()

    def __repr__(self) -> str:
        return f"<WriteHandle {self.writer_id} of {self._shard.id}: upper {self.upper}>"
