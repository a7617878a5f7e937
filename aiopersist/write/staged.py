"""The inside of a `Batch`: its parts, the registration that keeps them, and who may use it.

A batch is in one of four states of use:

- *free*;
- *busy*: a call claimed it, and the outcome of that call is unknown;
- *half deleted*: a deletion failed, so it can only be deleted again;
- *consumed*: appended, deleted or handed over.

So no batch is appended twice, and no deleted blob may be named by an append.

A batch that was handed over may exist in several processes, which do not know of each other. Then the state
of the shard decides: the record of the writer that built the batch keeps the ids of consumed batches. An
append adds the id in its own commit. A deletion adds the id first, and deletes the blobs only if its own
commit added it. Once the registration has ended, the batch cannot be appended, but it may have been. So its
blobs stay for the sweep, which can see that.
"""

import asyncio
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aiopersist.base.errors import AlreadyAppended, Indeterminate, InvalidUsage, ShardFinalized, UsageKind
from aiopersist.base.frontier import Antichain, minimum
from aiopersist.base.resource import Scope
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.tiny import Tiny, tiny
from aiopersist.parts.put import inline_part_of
from aiopersist.parts.upload import Upload, fits_inline
from aiopersist.shard.commit import commit
from aiopersist.shard.registration import Registration
from aiopersist.shard.shard import Shard
from aiopersist.state.consuming import MarkConsumed, Staged, is_consumed
from aiopersist.state.model import HollowBatch


@dataclass(frozen=True, slots=True)
class StagingContext:
    """The shard and schema of all batches of a handle. It outlives the handle."""

    shard: Shard
    schema: Schema[Any, Any, Any]
    schema_id: int
    scope: Scope
    """The client's."""

    def inline(self, updates: Any, lower: Antichain, upper: Antichain) -> HollowBatch | None:
        """The updates as an inline batch; `None` unless they are a few plain rows within these bounds. It
        raises no error: then `upload` does."""
        rows = updates if isinstance(updates, Tiny) else tiny(updates, self.schema)
        if rows is None or not lower.less_equal(rows.least_time) or upper.less_equal(rows.greatest_time):
            return None
        settings = self.shard.stack.settings
        most = min(settings.update_size_max, settings.blob_target_size - 1)
        if rows.goodbytes > most or not fits_inline(rows.goodbytes, settings):
            return None
        parts = (inline_part_of(rows.message(), rows.rows, self.schema_id),) if rows.rows else ()
        return HollowBatch(lower=lower, upper=upper, since=minimum(self.schema.time_length), parts=parts)

    def upload(self, lower: Antichain, registration: Registration) -> Upload:
        """The upload of a new batch under that registration."""
        return Upload(self.shard, self.schema, self.schema_id, registration.writer, lower)


class Use(Enum):
    """See the header."""

    FREE = "free"
    BUSY = "busy"
    HALF_DELETED = "half deleted"
    CONSUMED = "consumed"


class StagedBatch:
    """See the header. `hollow` was uploaded under `registration`; a new batch gets a new id."""

    def __init__(
        self,
        context: StagingContext,
        registration: Registration,
        hollow: HollowBatch,
        batch_id: str | None = None,
        *,
        rewrite: Antichain | None = None,
        handed_over: bool = False,
    ) -> None:
        self.context = context
        self.registration = registration
        self.hollow = hollow
        self.id = batch_id or str(context.shard.stack.runtime.uuid())
        self.rewrite = rewrite
        """The frontier of the last `rewrite_ts`."""
        self.handed_over = handed_over
        """Whether other processes may have it, too."""
        self.trace: Mapping[str, str] = {}
        """Of the process that handed it over."""
        self.use = Use.FREE
        self._needs_registration = True
        self._may_drop = not hollow.parts
        self._is_abandoned = False
        registration.hold()

    @property
    def record(self) -> Staged:
        """The batch as commands know it."""
        return Staged(self.registration.writer, self.id, self.handed_over)

    @property
    def keys(self) -> list[str]:
        """The keys of its blobs."""
        return [part.key for part in self.hollow.parts if part.key is not None]

    def usage_error(self, kind: UsageKind, message: str, **values: Any) -> InvalidUsage:
        """An error that names the shard."""
        return InvalidUsage(kind, message, shard_id=self.context.shard.id, **values)

    # --- its use ---------------------------------------------------------------------------------

    def check_free(self) -> None:
        """`InvalidUsage` of kind `CONSUMED` or `OUTCOME_PENDING` unless it is free."""
        if self.use in (Use.CONSUMED, Use.HALF_DELETED):
            text = f"batch {self.id} was appended, deleted or handed over"
            raise self.usage_error(UsageKind.CONSUMED, text)
        if self.use is Use.BUSY:
            text = f"batch {self.id} is in use, or the outcome of its append is not settled"
            raise self.usage_error(UsageKind.OUTCOME_PENDING, text)

    def claim(self) -> None:
        """Make a free batch busy."""
        self.check_free()
        self.use = Use.BUSY

    def unclaim(self) -> None:
        """Make a busy batch free again. Idempotent; a consumed batch stays consumed."""
        if self.use is not Use.CONSUMED:
            self.use = Use.FREE
            if self._is_abandoned:
                delete_all([self])

    def consume(self) -> None:
        """End its use. Idempotent."""
        self.use = Use.CONSUMED
        self._release()

    def abandon(self) -> None:
        """Delete it, once it is surely not appended."""
        self._is_abandoned = True
        if self.use is Use.FREE:
            delete_all([self])

    def consumed_elsewhere(self) -> None:
        """Another process appended or deleted it: here it may be garbage without a warning."""
        self._may_drop = True
        self._release()

    def _release(self) -> None:
        """Stop keeping the registration. Idempotent."""
        if self._needs_registration:
            self._needs_registration = False
            self.registration.release()

    def __del__(self) -> None:
        if getattr(self, "use", None) not in (Use.FREE, Use.HALF_DELETED):
            return
        if self._needs_registration:
            self.registration.release_from_anywhere()
        if not self._may_drop:
            keys = ", ".join(self.keys) or "inline"
            warnings.warn(
                f"batch {self.id} of shard {self.context.shard.id} was dropped with"
                f" {len(self.hollow.parts)} parts that were neither appended nor deleted: {keys}",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    # --- deletion --------------------------------------------------------------------------------

    async def delete(self) -> None:
        """See `Batch.delete`."""
        again = self.use is Use.HALF_DELETED
        if not again:
            self.claim()
        self.use = Use.BUSY
        await asyncio.shield(self.context.shard.stack.supervisor.spawn(self._delete(again), "delete a batch"))

    async def _delete(self, again: bool) -> None:
        try:
            own = again or await _deletable([self], strict=True)
        except Indeterminate:
            self.consume()  # another process may have appended it: leave its blobs to the sweep
            raise
        except BaseException as error:
            self.unclaim()
            if isinstance(error, AlreadyAppended):
                self.consumed_elsewhere()
            raise
        try:
            if own:
                await self.context.shard.stack.blob.delete(self.keys)
        except BaseException:
            self.use = Use.HALF_DELETED  # some of its blobs may be gone
            raise
        self.consume()


def delete_all(batches: Sequence[StagedBatch]) -> asyncio.Task[None]:
    """Consume these batches, and delete their blobs in the background. One commit for all, if any was handed
    over; after a failure the sweep deletes them."""
    for batch in batches:
        batch.consume()
    supervisor = batches[0].context.shard.stack.supervisor
    return supervisor.spawn(_delete_all(batches), "delete batches that were not needed")


def claim_free(batches: Sequence[StagedBatch]) -> list[StagedBatch]:
    """Claim those of `batches` that are free: neither appended nor perhaps appended."""
    free = [batch for batch in batches if batch.use is Use.FREE]
    for batch in free:
        batch.claim()
    return free


async def _delete_all(batches: Sequence[StagedBatch]) -> None:
    keys = [key for batch in await _deletable(batches, strict=False) for key in batch.keys]
    if keys:
        await batches[0].context.shard.stack.blob.delete(keys)


async def _deletable(batches: Sequence[StagedBatch], *, strict: bool) -> list[StagedBatch]:
    """Those of `batches` whose blobs this process surely may delete. `strict`: `AlreadyAppended` for one that
    another process surely appended or deleted."""
    shared = tuple(batch.record for batch in batches if batch.handed_over)
    if not shared:
        return list(batches)
    shard = batches[0].context.shard
    try:
        own: frozenset[str] = await commit(shard.register, MarkConsumed(shared))
    except ShardFinalized:  # whoever finalized the shard deletes the blobs that it named
        return [batch for batch in batches if not batch.handed_over]
    for record in shared:
        if strict and record.id not in own and is_consumed(shard.state, record.writer, record.id):
            raise AlreadyAppended(f"batch {record.id} was appended, or deleted, elsewhere")
    return [batch for batch in batches if not batch.handed_over or batch.id in own]
