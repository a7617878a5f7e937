"""Staged batches: parts in the blob store, or in memory if small, that no state names yet.

`staged.py` prevents a second append of a batch, and a deletion after an append.
"""

import asyncio
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.frontier import Antichain, Time
from aiopersist.data.part.inline import decode_inline
from aiopersist.data.part.stats import ColumnStats, decode_key_lower, decode_stats, key_lower, of_part
from aiopersist.data.types.schema import Schema
from aiopersist.parts.upload import Upload
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.shard import Shard
from aiopersist.state.record import HollowPart
from aiopersist.write.checks import check_frontier
from aiopersist.write.staged import StagedBatch, StagingContext, claim_free, delete_all
from aiopersist.write.transmit import Transmittable, encode


class Part:
    """One part of a batch."""

    def __init__(self, hollow: HollowPart, context: StagingContext) -> None:
        self._hollow = hollow
        self._context = context

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
        """A lower bound of the keys, perhaps shortened; `None` if Python has no value for it."""
        stored = self._hollow.key_lower
        if self._hollow.inline is not None:
            stored = key_lower(self._table())
        return decode_key_lower(stored, self._schema())

    @cached_property
    def stats(self) -> dict[str, ColumnStats] | None:
        """Bounds of the values of each leaf column, by its dotted name; `None` without statistics."""
        stored = self._hollow.stats
        settings = self._context.shard.stack.settings
        if self._hollow.inline is not None and settings.stats_collection_enabled:
            untrimmable = settings.stats_untrimmable_columns
            stored = of_part(self._table(), settings.stats_budget_bytes, untrimmable)
        return None if stored is None else decode_stats(stored, self._schema())

    def _schema(self) -> Schema[Any, Any, Any]:
        context, schema_id = self._context, self._hollow.schema_id
        return context.schema if schema_id == context.schema_id else context.shard.schema(schema_id)

    def _table(self) -> Any:
        return inline_table(self._hollow, self._context.shard)

    def __repr__(self) -> str:
        return f"<Part {self.key or 'inline'}: {self.encoded_size_bytes} bytes>"


def inline_table(part: HollowPart, shard: Shard) -> Any:
    """The updates of an inline part as they were written."""
    assert part.inline is not None
    return decode_inline(part.inline, shard.schema(part.schema_id), part.checksum)


class Batch:
    """A staged batch, made by `w.batch` or a builder: append it, delete it, or hand it over."""

    def __init__(self, staged: StagedBatch) -> None:
        self._staged = staged
        self.id = staged.id

    @property
    def lower(self) -> Antichain:
        return self._staged.hollow.lower

    @property
    def upper(self) -> Antichain:
        return self._staged.hollow.upper

    @property
    def shard_id(self) -> ShardId:
        return self._staged.context.shard.id

    @property
    def len(self) -> int:
        """Updates in its parts, after consolidation."""
        return self._staged.hollow.len

    @property
    def runs(self) -> tuple[int, ...]:
        """Index of the first part of each run after the first. The parts of a run are in order."""
        return self._staged.hollow.runs

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(Part(part, self._staged.context) for part in self._staged.hollow.parts)

    def rewrite_ts(self, frontier: Antichain | Time, new_upper: Antichain | Time) -> None:
        """Advance all times to `frontier` at each read, and end the batch at `new_upper`: for data whose time
        is decided last. Changes metadata only. `INVALID_REWRITE` if the frontier or the upper goes back, or
        unless `lower <= frontier < new_upper`; `INVALID_TIME` for product times."""
        staged, schema = self._staged, self._staged.context.schema
        staged.check_free()
        if schema.time_length is not None:
            text = "rewrite_ts is for int times; these are product times"
            raise staged.usage_error(UsageKind.INVALID_TIME, text)
        target, upper = check_frontier(frontier, schema), check_frontier(new_upper, schema)
        floor = self.lower if staged.rewrite is None else staged.rewrite
        if not floor <= target:
            raise self._refused(f"frontier {target} is not at or beyond {floor}")
        if not target < upper:
            raise self._refused(f"frontier {target} is not before upper {upper}")
        if not self.upper <= upper:
            raise self._refused(f"upper {upper} is not at or beyond {self.upper}")
        staged.rewrite = target
        parts = tuple(part.replace(rewrite=target) for part in staged.hollow.parts)
        staged.hollow = staged.hollow.replace(parts=parts, upper=upper)

    def _refused(self, reason: str) -> InvalidUsage:
        return self._staged.usage_error(UsageKind.INVALID_REWRITE, reason, reason=reason)

    async def delete(self) -> None:
        """Delete its blobs and consume it. `AlreadyAppended`, with nothing deleted, if another process got
        the batch and appended or deleted it. One request for up to a thousand blobs; one commit more for a
        batch that was handed over. Continues if the caller is cancelled."""
        with self._staged.context.scope.call():
            await self._staged.delete()

    async def flush_to_blob(self) -> None:
        """Write an inline part to a blob; it keeps its rewrite frontier. One request, if it is inline."""
        staged = self._staged
        with staged.context.scope.call():
            staged.claim()
            supervisor = staged.context.shard.stack.supervisor
            await asyncio.shield(supervisor.spawn(_flush(staged), "flush a batch to a blob"))

    def to_transmittable(self) -> bytes:
        """The batch as bytes, with inline data but without its blobs, for `w.batch_from_transmittable` in any
        process. Consumes the batch: the process that restores it owns it. Keep its writer open until then;
        else the registration ends with its lease."""
        staged = self._staged
        staged.check_free()
        value = Transmittable(
            library=_library(),
            shard=self.shard_id,
            writer=staged.registration.writer,
            id=self.id,
            batch=staged.hollow,
            rewrite=staged.rewrite,
        )
        data = encode(value)
        staged.registration.handed_over.add(self.id)
        staged.consume()
        return data

    def __repr__(self) -> str:
        bounds = f"[{self.lower}, {self.upper})"
        updates = f"{self.len} updates in {len(self._staged.hollow.parts)} parts"
        return f"<Batch {self.id} {bounds}: {updates}, {self._staged.use.value}>"


def inside(batch: Batch) -> StagedBatch:
    """The inside of a batch, for calls of the library."""
    return batch._staged


def rebound(batch: Batch, lower: Antichain, upper: Antichain) -> None:
    """Change the bounds of a free batch to `[lower, upper)`, which must have all its times."""
    staged = batch._staged
    staged.check_free()
    staged.hollow = staged.hollow.replace(lower=lower, upper=upper)


async def discard_all(batches: Sequence[Batch]) -> None:
    """Delete those that are free. One commit for all, if any was handed over; after a failure the sweep
    deletes them. Continues if the caller is cancelled."""
    if free := claim_free([batch._staged for batch in batches]):
        await asyncio.wait([delete_all(free)])


@cache
def _library() -> str:
    return version("aiopersist")


async def _flush(batch: StagedBatch) -> None:
    try:
        if any(part.inline is not None for part in batch.hollow.parts):
            (part,) = batch.hollow.parts  # a batch with an inline part has no other
            (flushed,) = await _uploaded(batch, part)  # `one_blob`: it stays one part
            batch.hollow = batch.hollow.replace(parts=(flushed.replace(rewrite=part.rewrite),))
    finally:
        batch.unclaim()


async def _uploaded(batch: StagedBatch, part: HollowPart) -> Sequence[HollowPart]:
    shard, hollow = batch.context.shard, batch.hollow
    schema, writer = shard.schema(part.schema_id), batch.registration.writer
    upload = Upload(shard, schema, part.schema_id, writer, hollow.lower, one_blob=True)
    try:
        await upload.add(inline_table(part, shard))
        return (await upload.finish(hollow.upper)).parts
    except BaseException:
        upload.discard()
        raise
