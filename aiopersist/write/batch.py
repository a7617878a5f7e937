"""Staged batches: parts that lie in the blob store, or in hand if small, and that no state names yet.

A `Batch` is metadata. It is *free*, *busy* while a call that could consume it runs or has an unknown
outcome, or *consumed*: appended, deleted, or handed over. So nothing is appended twice, and nothing is
deleted that an append may have named.

A batch that was handed over to another process may be there more than once. Then objects do not
help, and the state decides: the record of the writer that built it keeps the ids that are *spent*.
An append spends the id in its own commit; a deletion spends it first, and deletes only what it spent
itself. Once the registration is gone nobody can append the batch any more, but nobody here can tell
either whether it was appended before: its blobs are left to the sweep, which can.
"""

import asyncio
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any

from aiopersist.data.part.inline import decode_inline
from aiopersist.data.part.stats import ColumnStats, decode_key_lower, decode_stats, key_lower, of_part
from aiopersist.data.types.schema import Schema
from aiopersist.errors import AlreadyAppended, Indeterminate, InvalidUsage, ShardFinalized, UsageKind
from aiopersist.frontier import Antichain, Time
from aiopersist.parts.upload import Upload
from aiopersist.resource import Scope
from aiopersist.shard.attempt import Slot
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.commit import commit
from aiopersist.shard.registration import Registration
from aiopersist.shard.shard import Shard
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart
from aiopersist.state.writing import Spend, Staged, is_spent
from aiopersist.write.checks import check_frontier
from aiopersist.write.transmit import Transmittable, encode


@dataclass(frozen=True, slots=True)
class Origin:
    """What batches know of the place they were built or restored at. It outlives the handle."""

    shard: Shard
    schema: Schema[Any, Any, Any]
    schema_id: int
    scope: Scope
    """The client's."""


class Part:
    """One part of a batch."""

    def __init__(self, hollow: HollowPart, origin: Origin) -> None:
        self._hollow = hollow
        self._origin = origin

    @property
    def key(self) -> str | None:
        """Its blob key; `None` if it is inline."""
        return self._hollow.key

    @property
    def encoded_size_bytes(self) -> int:
        return self._hollow.size

    @property
    def rewrite(self) -> Antichain | None:
        """The frontier that its times are advanced to when they are read."""
        return self._hollow.rewrite

    @cached_property
    def key_lower(self) -> Any:
        """A value of the key's type that is at or before the least key, cut where that is long; `None` where
        Python has no such value."""
        stored = self._hollow.key_lower
        if self._hollow.inline is not None:
            stored = key_lower(self._table())
        return decode_key_lower(stored, self._schema())

    @cached_property
    def stats(self) -> dict[str, ColumnStats] | None:
        """Bounds of the values of each leaf column, by its dotted name; `None` if it has none."""
        stored = self._hollow.stats
        settings = self._origin.shard.stack.settings
        if self._hollow.inline is not None and settings.stats_collection_enabled:
            untrimmable = settings.stats_untrimmable_columns
            stored = of_part(self._table(), settings.stats_budget_bytes, untrimmable)
        return None if stored is None else decode_stats(stored, self._schema())

    def _schema(self) -> Schema[Any, Any, Any]:
        origin, schema_id = self._origin, self._hollow.schema_id
        return origin.schema if schema_id == origin.schema_id else origin.shard.schema(schema_id)

    def _table(self) -> Any:
        return inline_table(self._hollow, self._origin.shard)

    def __repr__(self) -> str:
        return f"<Part {self.key or 'inline'}: {self.encoded_size_bytes} bytes>"


def inline_table(part: HollowPart, shard: Shard) -> Any:
    """The updates of an inline part as they were written."""
    assert part.inline is not None
    return decode_inline(part.inline, shard.schema(part.schema_id), part.checksum)


class _Use(Enum):
    FREE = "free"
    BUSY = "busy"
    HALF_DELETED = "half deleted"
    CONSUMED = "consumed"


class Batch:
    """A batch that is staged: append it, delete it, or hand it over. `w.batch` and builders make them."""

    def __init__(
        self,
        origin: Origin,
        registration: Registration,
        hollow: HollowBatch,
        batch_id: str,
        *,
        rewrite: Antichain | None = None,
        handed_over: bool = False,
    ) -> None:
        self._origin = origin
        self._registration = registration
        self._hollow = hollow
        self.id = batch_id
        self._rewritten = rewrite
        """The frontier of the last `rewrite_ts`."""
        self._handed_over = handed_over
        """Other processes may have it, too."""
        self._use = _Use.FREE
        self._is_let_go = False
        self._dropped_quietly = not hollow.parts
        registration.hold()

    @property
    def lower(self) -> Antichain:
        return self._hollow.lower

    @property
    def upper(self) -> Antichain:
        return self._hollow.upper

    @property
    def shard_id(self) -> ShardId:
        return self._origin.shard.id

    @property
    def len(self) -> int:
        """Updates in its parts: what consolidation left."""
        return self._hollow.len

    @property
    def runs(self) -> tuple[int, ...]:
        """Index of the first part of every run but the first. Parts of a run are in order."""
        return self._hollow.runs

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(Part(part, self._origin) for part in self._hollow.parts)

    @property
    def _staged(self) -> Staged:
        """As commands know it."""
        return Staged(self._registration.writer, self.id, self._handed_over)

    def rewrite_ts(self, frontier: Antichain | Time, new_upper: Antichain | Time) -> None:
        """Advance every time to `frontier` when it is read, and end at `new_upper`: for data whose time is
        decided last. Metadata only. `INVALID_REWRITE` if the frontier or the upper goes back, or
        unless lower <= frontier < new_upper; `INVALID_TIME` on product times."""
        self._check_free()
        schema = self._origin.schema
        if schema.time_length is not None:
            raise self._usage(UsageKind.INVALID_TIME, "rewrite_ts is for int times; these are product times")
        target, upper = check_frontier(frontier, schema), check_frontier(new_upper, schema)
        floor = self.lower if self._rewritten is None else self._rewritten
        if not floor <= target:
            raise self._rewrite(f"frontier {target} is not at or beyond {floor}")
        if not target < upper:
            raise self._rewrite(f"frontier {target} is not before upper {upper}")
        if not self.upper <= upper:
            raise self._rewrite(f"upper {upper} is not at or beyond {self.upper}")
        self._rewritten = target
        parts = tuple(part.replace(rewrite=target) for part in self._hollow.parts)
        self._hollow = self._hollow.replace(parts=parts, upper=upper)

    def _rebound(self, lower: Antichain, upper: Antichain) -> None:
        """Be of `[lower, upper)`, for one who knows that all its times are."""
        self._check_free()
        self._hollow = self._hollow.replace(lower=lower, upper=upper)

    async def delete(self) -> None:
        """Delete its blobs, each once, and consume it. `AlreadyAppended` if it was handed over and appended
        (or deleted) elsewhere: then nothing is deleted. One request for up to a thousand blobs; one
        commit more for a batch that was handed over. Goes on if the caller is cancelled."""
        with self._origin.scope.call():
            again = self._use is _Use.HALF_DELETED
            if not again:
                self._begin()
            self._use = _Use.BUSY
            task = self._origin.shard.stack.supervisor.spawn(self._delete(again), "delete a batch")
            await asyncio.shield(task)

    async def _delete(self, again: bool) -> None:
        try:
            mine = again or await _blobs_of([self], strict=True)
        except BaseException as error:
            self._end(consumed=isinstance(error, Indeterminate))  # it may be spent: its blobs are the sweep's
            if isinstance(error, AlreadyAppended):
                self._is_elsewhere()
            raise
        try:
            if mine:
                await self._origin.shard.stack.blob.delete(self._keys())
        except BaseException:
            self._use = _Use.HALF_DELETED  # some of its blobs may be gone: it can only be deleted again
            raise
        self._end(consumed=True)

    def _keys(self) -> list[str]:
        """The keys of its blobs."""
        return [part.key for part in self._hollow.parts if part.key is not None]

    async def flush_to_blob(self) -> None:
        """Turn an inline part into a blob; its rewrite frontier stays. One request, none without one."""
        with self._origin.scope.call():
            self._begin()
            task = self._origin.shard.stack.supervisor.spawn(self._flush(), "flush a batch to a blob")
            await asyncio.shield(task)

    async def _flush(self) -> None:
        try:
            if any(part.inline is not None for part in self._hollow.parts):
                (part,) = self._hollow.parts  # an inline part is the only one
                (flushed,) = await self._uploaded(part)  # and what is gathered is never cut
                self._hollow = self._hollow.replace(parts=(flushed.replace(rewrite=part.rewrite),))
        finally:
            self._end(consumed=False)

    async def _uploaded(self, part: HollowPart) -> Sequence[HollowPart]:
        origin = self._origin
        schema = origin.shard.schema(part.schema_id)
        upload = Upload(
            origin.shard, schema, part.schema_id, self._registration.writer, self.lower, one_blob=True
        )
        try:
            await upload.add(inline_table(part, origin.shard))
            return (await upload.finish(self.upper)).parts
        except BaseException:
            upload.discard()
            raise

    def to_transmittable(self) -> bytes:
        """The batch as bytes, with inline data but without its blobs, for `w.batch_from_transmittable`
        anywhere. Consumes it: whoever restores it owns it. Keep its writer open until then, or the
        registration ends with its lease."""
        self._check_free()
        value = Transmittable(
            library=_library(),
            shard=self.shard_id,
            writer=self._registration.writer,
            id=self.id,
            batch=self._hollow,
            rewrite=self._rewritten,
        )
        data = encode(value)
        self._registration.handed_over.add(self.id)
        self._end(consumed=True)
        return data

    # --- its use ---------------------------------------------------------------------------------

    def _check_free(self) -> None:
        """`InvalidUsage` of kind `CONSUMED` or `OUTCOME_PENDING` unless it may be used."""
        if self._use in (_Use.CONSUMED, _Use.HALF_DELETED):
            raise self._usage(UsageKind.CONSUMED, f"batch {self.id} was appended, deleted or handed over")
        if self._use is _Use.BUSY:
            text = f"batch {self.id} is being used, or the outcome of its append is not settled"
            raise self._usage(UsageKind.OUTCOME_PENDING, text)

    def _begin(self) -> None:
        """It is busy from now on."""
        self._check_free()
        self._use = _Use.BUSY

    def _end(self, *, consumed: bool) -> None:
        """It is no longer busy. Idempotent."""
        if self._use is _Use.CONSUMED:
            return
        self._use = _Use.CONSUMED if consumed else _Use.FREE
        if consumed:
            self._let_go()

    @property
    def _is_free(self) -> bool:
        return self._use is _Use.FREE

    def _is_elsewhere(self) -> None:
        """It was appended or deleted by another process: nothing is lost with it here."""
        self._dropped_quietly = True
        self._let_go()

    def _let_go(self) -> None:
        """The registration is not needed for it any more. Idempotent."""
        if not self._is_let_go:
            self._is_let_go = True
            self._registration.release()

    def _usage(self, kind: UsageKind, message: str, **values: Any) -> InvalidUsage:
        return InvalidUsage(kind, message, shard_id=self.shard_id, **values)

    def _rewrite(self, reason: str) -> InvalidUsage:
        return self._usage(UsageKind.INVALID_REWRITE, reason, reason=reason)

    def __repr__(self) -> str:
        bounds = f"[{self.lower}, {self.upper})"
        updates = f"{self.len} updates in {len(self._hollow.parts)} parts"
        return f"<Batch {self.id} {bounds}: {updates}, {self._use.value}>"

    def __del__(self) -> None:
        if getattr(self, "_use", None) not in (_Use.FREE, _Use.HALF_DELETED):
            return
        if not self._is_let_go:
            self._registration.release_from_anywhere()
        if not self._dropped_quietly:
            keys = ", ".join(self._keys()) or "inline"
            warnings.warn(
                f"batch {self.id} of shard {self.shard_id} was dropped with {len(self._hollow.parts)} parts"
                f" that nobody appended or deleted: {keys}",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


@cache
def _library() -> str:
    return version("aiopersist")


async def discard_all(batches: Sequence[Batch]) -> None:
    """Delete those that are free: neither appended nor perhaps appended. One commit for all, if any was
    handed over; what fails is left to the sweep. Goes on if the caller is cancelled."""
    free = [batch for batch in batches if batch._is_free]
    for batch in free:
        batch._begin()
    if free:
        await asyncio.wait([delete_all(free)])


def delete_all(batches: Sequence[Batch]) -> asyncio.Task[None]:
    """Consume busy batches that nobody needs any more, and delete their blobs, in the background."""
    for batch in batches:
        batch._end(consumed=True)
    supervisor = batches[0]._origin.shard.stack.supervisor
    return supervisor.spawn(_delete_all(batches), "delete batches that were not needed")


async def _delete_all(batches: Sequence[Batch]) -> None:
    keys = [key for batch in await _blobs_of(batches, strict=False) for key in batch._keys()]
    if keys:
        await batches[0]._origin.shard.stack.blob.delete(keys)


async def _blobs_of(batches: Sequence[Batch], *, strict: bool) -> list[Batch]:
    """Those of `batches` whose blobs are surely nobody's but ours to delete. `strict`: raise
    `AlreadyAppended` for the others that are surely somebody's."""
    shared = tuple(batch._staged for batch in batches if batch._handed_over)
    if not shared:
        return list(batches)
    register = batches[0]._origin.shard.register
    try:
        mine: frozenset[str] = await commit(register, Spend(shared), Slot())
    except ShardFinalized:  # whatever it named is deleted with it
        return [batch for batch in batches if not batch._handed_over]
    state = batches[0]._origin.shard.state
    for batch in shared:
        if strict and batch.id not in mine and is_spent(state, batch.writer, batch.id):
            raise AlreadyAppended(f"batch {batch.id} was appended, or deleted, elsewhere")
    return [batch for batch in batches if not batch._handed_over or batch.id in mine]
