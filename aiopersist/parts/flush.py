"""Inline parts become blobs, many at once, so that the state stays small under small appends."""

from functools import reduce

from aiopersist.base.errors import BatchExpired
from aiopersist.base.frontier import Antichain
from aiopersist.data.updates.consolidate import diff_sum
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
    """Merge the largest group of neighbouring inline batches into one batch with one blob. Returns whether
    that was done. One blob and one commit. The updates keep their times: readers see no difference. The
    upload is added to `uploads`; their owner discards it if the attempt stays in the slot."""
    state = shard.state
    ordinals = largest_inline_run(state)
    if not ordinals:
        return False
    batches = [state.batches[ordinal] for ordinal in ordinals]
    upload, batch, read = await _upload(shard, writer, batches, uploads)
    command = Replace(writer, dict(zip(ordinals, batches, strict=True)), batch, read, upload.wrote)
    try:
        done: bool = await commit(shard.register, command, slot)
    except BatchExpired:
        done = False
    except Unknowable:  # the state may name the blob, so it must not be deleted
        slot.pending = None
        return False
    except BaseException:
        if not slot.busy:  # no statement was sent
            upload.discard()
        raise
    if not done:
        upload.discard()
    return done


async def _upload(
    shard: Shard, writer: str, batches: list[HollowBatch], uploads: list[Uploaded]
) -> tuple[Upload, HollowBatch, Total]:
    """Write all parts of the batches as one blob. The upload, its batch, and the total that was read."""
    named = [(batch, part) for batch in batches for part in batch.parts]
    schema_id = max(part.schema_id for _, part in named)
    schema = shard.schema(schema_id)
    since = reduce(Antichain.join, (batch.since for batch in batches))
    upload = Upload(shard, schema, schema_id, writer, batches[0].lower, one_blob=True, since=since)
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
    """`batch` with all its inline parts as one blob, which is a run of its own. The upload is added to
    `uploads`; their owner discards it if the batch is not appended."""
    inline = tuple(part for part in batch.parts if part.inline is not None)
    _, flushed, _ = await _upload(shard, writer, [batch.replace(parts=inline)], uploads)
    parts, runs = _without_inline(batch)
    runs += [len(parts)] if parts and flushed.parts else []
    return batch.replace(parts=(*parts, *flushed.parts), runs=tuple(runs))


def _without_inline(batch: HollowBatch) -> tuple[list[HollowPart], list[int]]:
    """The blobs of a batch, and where their runs begin: an inline part between two blobs also ends a run."""
    parts: list[HollowPart] = []
    runs: list[int] = []
    starts = {0, *batch.runs}
    for number, part in enumerate(batch.parts):
        if part.inline is None:
            follows = number not in starts and batch.parts[number - 1].inline is None
            runs += [len(parts)] if parts and not follows else []
            parts.append(part)
    return parts, runs
