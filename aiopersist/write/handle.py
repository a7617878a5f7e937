"""The write handle: append by compare-and-append, and know what came of it.

1. Check the call, without any I/O: bounds, the form of `txn`, rows, times.
2. Settle an append of this handle whose outcome is not known yet.
3. Leave early, by frontiers and transaction numbers that never go back: a repeat, a mismatch.
4. Stage the rows (`shard/upload.py`): a small batch in the state, others as parts in the blob store.
5. Commit one `Append`. If it is refused, delete what was staged: nothing references it.

Appends of one handle take turns. A cancelled append leaves its attempt in the slot, or, when
nothing was sent yet, nothing but blobs, which are deleted.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from aiopersist.data.codec import Schema
from aiopersist.errors import Indeterminate, InvalidUsage, LeaseExpired, UpperMismatch, UsageKind
from aiopersist.frontier import Antichain, Time, frontier, minimum
from aiopersist.resource import RELEASE_DEADLINE_S, Resource, Scope
from aiopersist.shard.attempt import Slot, Unknowable
from aiopersist.shard.catalog import ShardId, is_text
from aiopersist.shard.commit import commit, settle
from aiopersist.shard.flush import flush_inline, must_flush
from aiopersist.shard.lease import keep_alive
from aiopersist.shard.shard import Shard
from aiopersist.shard.upload import Upload
from aiopersist.state.writing import (
    Append,
    Appended,
    ExpireWriter,
    HeartbeatWriter,
    RegisterWriter,
    Write,
    repeated,
)
from aiopersist.write.combine import Combiner
from aiopersist.write.doubt import Case, Committed, Doubt, NotCommitted

K = TypeVar("K")
V = TypeVar("V")

Txn = tuple[str, int]


class WriteHandle(Resource, Generic[K, V]):
    """Appends to one shard. Serves many tasks at once; its own appends take turns."""

    def __init__(self, shard: Shard, schema: Schema[K, V, Any], schema_id: int, scope: Scope) -> None:
        self._shard = shard
        self._stack = shard.stack
        self._schema = schema
        self._schema_id = schema_id
        self._scope = Scope(f"the writer of {shard.id}", scope, shard.id)
        self._slot = Slot()
        self._turn = asyncio.Lock()
        self._case: Case | None = None  # the last append whose caller does not know
        self._pending: Doubt | None = None  # of the attempt in the slot
        self._beating: asyncio.Task[None] | None = None
        self._combiner = Combiner(self, shard, schema)
        self.writer_id = ""

    @classmethod
    async def open(cls, shard: Shard, schema: Schema[K, V, Any], scope: Scope) -> "WriteHandle[K, V]":
        """Create the shard if need be, and register a writer: one commit, two for a new shard."""
        await shard.open_or_create(schema)
        handle = cls(shard, schema, shard.schema_id(schema), scope)
        try:
            await handle._register()
        except BaseException:
            handle._scope.close()
            raise
        return handle

    @property
    def shard_id(self) -> ShardId:
        return self._shard.id

    @property
    def upper(self) -> Antichain:
        """The shard's upper, as last seen by this process."""
        return self._shard.state.upper

    async def fetch_recent_upper(self) -> Antichain:
        """The shard's upper, by a linearizable read: one request."""
        with self._scope.call():
            return (await self._shard.open()).upper

    async def wait_for_upper_past(self, frontier: Antichain | Time) -> None:
        """Return once `frontier < upper`, strictly."""
        with self._scope.call():
            past = self._frontier(frontier)
            if not past.elements:
                raise InvalidUsage(
                    UsageKind.INVALID_TIME, "no upper is past the empty frontier {}", time=past
                )
            await self._shard.register.wait(lambda state: True if past < state.upper else None)

    # --- appends ---------------------------------------------------------------------------------

    async def compare_and_append(
        self,
        updates: Any,
        expected_upper: Antichain | Time,
        new_upper: Antichain | Time,
        txn: Txn | None = None,
    ) -> None:
        """Append `updates`, whose times lie in `[expected_upper, new_upper)`, iff the shard's upper is
        `expected_upper`; else `UpperMismatch`, and nothing is written. Atomic, durable when it
        returns. Repeating a `txn` number, or an older one, succeeds and writes nothing.

        Costs one compare-and-set; and one request per part, if the data is not small."""
        with self._scope.call():
            self._case = None
            lower, upper = self._bounds(expected_upper, new_upper)
            transactions = check_txn(txn)
            await self._append(updates, lower, upper, transactions, replica=False)

    async def append(self, updates: Any, lower: Antichain | Time, upper: Antichain | Time) -> None:
        """Append definite data that replicas of this writer write as well: what the shard has already
        is dropped, so overlapping and repeated appends of the same data land once. `UpperMismatch`
        if the shard's upper is below `lower` or incomparable: there would be a gap."""
        with self._scope.call():
            self._case = None
            bounds = self._bounds(lower, upper)
            await self._append(updates, *bounds, {}, replica=True)

    async def write(self, rows: Any, diff: int = 1, txn: Txn | None = None) -> int:
        """Append `(key, val)` or `(key, val, diff)` rows at a time that the library picks, and return it.
        Calls that wait at the same moment share one commit. Int times only."""
        with self._scope.call():
            self._case = None
            return await self._combiner.write(rows, diff, check_txn(txn))

    async def settle(self) -> Committed | NotCommitted | None:
        """The outcome of this handle's last append that was cancelled, timed out or raised
        `Indeterminate`, until the next append begins; `None` where there was none. `Indeterminate`
        if it cannot be known."""
        with self._scope.call():
            while True:
                async with self._turn:
                    await self._settle()
                case = self._case
                if case is None:
                    return None
                if case.decided is None or case.decided.done():
                    break
                await asyncio.wait([case.decided])
            outcome = case.doubt.answer()
            if case.transactions and isinstance(outcome, NotCommitted):  # another recorded it: it happened
                state = await self._shard.register.refresh()
                if state is not None and repeated(state, case.transactions):
                    return Committed(state.upper)
            return outcome

    async def aclose(self) -> None:
        """End the registration. Idempotent. What was appended stays; an append whose outcome is unknown
        stays so."""
        if not self._scope.close():
            return
        if self._beating is not None:
            self._beating.cancel()
        release = self._stack.supervisor.spawn(self._release(), "release a writer")
        await asyncio.wait([release], timeout=RELEASE_DEADLINE_S)

    async def _release(self) -> None:
        async with self._turn:
            await self._settle()
            await commit(self._shard.register, ExpireWriter(self.writer_id), self._slot)

    # --- the steps of an append ------------------------------------------------------------------

    async def _append(
        self,
        updates: Any,
        lower: Antichain,
        upper: Antichain,
        transactions: Mapping[str, int],
        *,
        replica: bool,
    ) -> None:
        doubt = Doubt()
        try:
            await self._ensure_registered()
            doubt.upload = upload = self.upload(lower, upper)
            await upload.take(updates)
            async with self.turn():
                if not await self._covered(lower, upper, transactions, replica=replica):
                    await self.make_room()
                    batch = await upload.finish()
                    await self.commit(
                        Append(upload.writer, self.token(), batch, transactions, replica), doubt
                    )
        except (asyncio.CancelledError, Indeterminate):
            self.doubts(Case(transactions, doubt))
            raise
        finally:
            await doubt.tidy()

    def upload(self, lower: Antichain, upper: Antichain) -> Upload:
        """A batch in the making under this handle's registration."""
        return Upload(self._shard, self._schema, self._schema_id, self.writer_id, lower, upper)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The handle's turn for one append, with the one before it settled and a registration."""
        await self._ensure_registered()
        async with self._turn:
            await self._settle()
            yield

    def doubts(self, case: Case) -> None:
        """The caller of this append does not know its outcome: `settle` tells it."""
        self._case = case

    async def make_room(self) -> None:
        """Flush inline parts to a blob if the state holds too many: one append of some thousands pays for
        it, with a blob and a commit more."""
        if must_flush(self._shard):
            await flush_inline(self._shard, self.writer_id, self._slot)

    async def commit(self, command: Append | Write, doubt: Doubt) -> Appended:
        """One append by compare-and-append; `doubt` knows what came of it, or that it must be settled. A
        lease that ran out is found here at the latest: with nothing in the blob store it is made anew."""
        while True:
            try:
                return await self._commit(command, doubt)
            except LeaseExpired:
                await self._register()
                command = replace(command, writer=self.writer_id)

    async def _commit(self, command: Append | Write, doubt: Doubt) -> Appended:
        doubt.outcome = None
        try:
            done: Appended = await commit(self._shard.register, command, self._slot)
        except BaseException:
            if self._slot.busy:
                self._pending = doubt
            else:
                doubt.outcome = NotCommitted()
            raise
        doubt.outcome = Committed(done.upper) if done.wrote else NotCommitted()
        return done

    async def _covered(
        self, lower: Antichain, upper: Antichain, transactions: Mapping[str, int], *, replica: bool
    ) -> bool:
        """What can be said before anything is staged, by what never goes back: `True` if there is nothing
        to write any more; `UpperMismatch` after a fresh look."""
        state = self._shard.state
        for _ in range(2):
            if repeated(state, transactions) or (replica and upper <= state.upper):
                return True
            if lower == state.upper or (replica and lower <= state.upper <= upper):
                return False
            state = await self._shard.open()
        raise UpperMismatch(lower, state.upper, shard_id=self._shard.id)

    async def _settle(self) -> None:
        """Decide the pending append, if there is one, and delete its blobs if it did not happen."""
        if not self._slot.busy:
            return
        doubt = self._pending
        try:
            attempt = await settle(self._slot)
        except Unknowable as error:
            self._pending = None
            if doubt is not None:
                doubt.outcome = error
            return
        self._pending = None
        if doubt is not None and attempt is not None:
            await doubt.decide(attempt)

    def token(self) -> str:
        return self._stack.runtime.token()

    # --- registration ----------------------------------------------------------------------------

    async def _register(self) -> None:
        writer = f"w{self._stack.runtime.uuid()}"
        lease_s = self._stack.settings.writer_lease_s
        await commit(self._shard.register, RegisterWriter(writer, lease_s), self._slot)
        self.writer_id = writer
        if self._beating is not None:
            self._beating.cancel()
        self._beating = self._stack.supervisor.background(
            keep_alive(self._stack, lease_s, self._heartbeat), "heartbeats of a writer"
        )

    async def _ensure_registered(self) -> None:
        """A writer whose lease ran out registers anew: nothing of it is staged or pending here."""
        if self.writer_id not in self._shard.state.writers:
            async with self._turn:
                await self._settle()
                if self.writer_id not in self._shard.state.writers:
                    await self._register()

    async def _heartbeat(self) -> None:
        async with self._turn:
            await self._settle()
            await commit(self._shard.register, HeartbeatWriter(self.writer_id), self._slot)

    # --- checks ----------------------------------------------------------------------------------

    def _frontier(self, value: Antichain | Time) -> Antichain:
        """`value` as a frontier of this shard's times."""
        found = frontier(value)
        least = minimum(self._schema.time_length)
        if found.elements:
            least.less_equal(found.elements[0])  # raises INVALID_TIME for another shape
        return found

    def _bounds(self, lower: Antichain | Time, upper: Antichain | Time) -> tuple[Antichain, Antichain]:
        bounds = self._frontier(lower), self._frontier(upper)
        if not bounds[0] <= bounds[1]:
            raise InvalidUsage(
                UsageKind.INVALID_BOUNDS,
                f"upper {bounds[1]} is not at or beyond lower {bounds[0]}",
                shard_id=self._shard.id,
                lower=bounds[0],
                upper=bounds[1],
            )
        return bounds

    def __repr__(self) -> str:
        return f"<WriteHandle {self.writer_id} of {self._shard.id}: upper {self.upper}>"


def check_txn(txn: Txn | None) -> dict[str, int]:
    """`txn` as a mapping; `InvalidUsage` of kind `INVALID_TXN` if it is no `(app_id, number)`."""
    if txn is None:
        return {}
    if isinstance(txn, tuple) and len(txn) == 2:
        app, number = txn
        if is_text(app) and type(number) is int and 0 <= number < 2**63:
            return {app: number}
    raise InvalidUsage(
        UsageKind.INVALID_TXN, f"{txn!r} is not (app_id, number): text and an int in [0, 2**63)", txn=txn
    )
