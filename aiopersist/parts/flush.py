"""Inline parts to the blob store, many at once: what keeps the state small under small appends."""

from functools import reduce
from typing import Any

from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import diff_sum
from aiopersist.errors import BatchExpired
from aiopersist.frontier import Antichain
from aiopersist.parts.fetch import Fetch, Selection
from aiopersist.parts.put import Uploaded
from aiopersist.parts.upload import Upload
from aiopersist.shard.attempt import Slot, Unknowable
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.compaction import Replace, Total, largest_inline_run
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart


def must_flush(shard: Shard) -> bool:
    """Whether another inline part could take the state beyond its bound."""
    settings = shard.stack.settings
    room = settings.inline_writes_total_max_bytes - shard.state.inline_bytes
    return settings.inline_writes_single_max_bytes > 0 and room < min(
        2 * settings.inline_writes_single_max_bytes, settings.inline_writes_total_max_bytes
    )


async def flush_inline(shard: Shard, writer: str, slot: Slot, uploads: list[Uploaded]) -> bool:
    """Merge the largest run of neighbouring inline batches into one batch with one blob; whether that
    was done. One blob and one commit. The updates keep their times: no reader sees a difference. What
    it uploads is told to `uploads`: theirs to discard if the attempt stays in the slot."""
    state = shard.state
    ordinals = largest_inline_run(state)
    if not ordinals:
        return False
    batches = [state.batches[ordinal] for ordinal in ordinals]
    schema_id = max(part.schema_id for batch in batches for part in batch.parts)
    upload, batch, read = await _upload(shard, shard.schema(schema_id), schema_id, writer, batches, uploads)
    command = Replace(writer, dict(zip(ordinals, batches, strict=True)), batch, read, upload.wrote)
    try:
        done: bool = await commit(shard.register, command, slot)
    except BatchExpired:
        done = False
    except Unknowable:  # it may be named: for the deletion of blobs, unknown counts as applied
        slot.pending = None
        return False
    except BaseException:
        if not slot.busy:  # nothing was sent
            upload.discard()
        raise
    if not done:
        upload.discard()
    return done


async def _upload(
    shard: Shard,
    schema: Schema[Any, Any, Any],
    schema_id: int,
    writer: str,
    batches: list[HollowBatch],
    uploads: list[Uploaded],
) -> tuple[Upload, HollowBatch, Total]:
    named = [(batch, part) for batch in batches for part in batch.parts]
    since = reduce(Antichain.join, (batch.since for batch in batches))
    upload = Upload(shard, schema, schema_id, writer, batches[0].lower, gathered=True, since=since)
    uploads.append(upload)
    try:
        table = await Fetch(shard, schema).table(named, Selection(), "")
        read = Total(table.num_rows, diff_sum(table))
        await upload.add(table)
        return upload, await upload.finish(batches[-1].upper), read
    except BaseException:
        upload.discard()
        raise


async def inline_to_blob(
    shard: Shard, writer: str, batch: HollowBatch, uploads: list[Uploaded]
) -> HollowBatch:
    """`batch` with all its inline parts as one blob, which is a run of its own. The upload of that is told
    to `uploads`, in case the batch is not appended after all."""
    inline = tuple(part for part in batch.parts if part.inline is not None)
    schema_id = max(part.schema_id for part in inline)
    gathered = batch.replace(parts=inline)
    _, flushed, _ = await _upload(shard, shard.schema(schema_id), schema_id, writer, [gathered], uploads)
    parts: list[HollowPart] = []
    runs: list[int] = []
    starts = {0, *batch.runs}
    for number, part in enumerate(batch.parts):
        if part.inline is None:
            follows = number not in starts and batch.parts[number - 1].inline is None
            runs += [len(parts)] if parts and not follows else []
            parts.append(part)
    runs += [len(parts)] if parts and flushed.parts else []
    return batch.replace(parts=(*parts, *flushed.parts), runs=tuple(runs))
