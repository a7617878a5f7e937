"""Garbage collection: deletes data that no reader's hold can reach, in an order that is safe against crashes.

Let `r` be a version with a rollup, named by the head, at or below every reader's seqno hold.

1. Delete the part blobs that a version from the earliest live one up to `r` names and the state at `r` does
   not: they were dropped in between, and a key never comes back.
2. Truncate the versions below `r`. `r` has its rollup, so it can be the earliest version.
3. Delete the blobs of the rollups below `r`. Not before the truncation, since the earliest version needs its
   rollup.
4. Commit: remove the names of these rollups from the state, and note that all up to `r` is collected.

After a crash between two steps the next collection repeats some deletes.

Blobs that this process may not delete, because another user made their folder, do not stop a collection. They
become leaks, which a sweep with the permission deletes.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from aiopersist.shard.commit import commit
from aiopersist.shard.log import Truncated, consensus_key, read_rollup, versions_between
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.lifecycle import EndCollection, MarkDeleted
from aiopersist.state.model import State
from aiopersist.state.seal import decode_version
from aiopersist.state.trail import Trail
from aiopersist.storage.blob import NotDeleted

log = logging.getLogger("aiopersist").getChild("maintenance")


class Collected(NamedTuple):
    """The counts of a collection."""

    parts: int = 0
    versions: int = 0
    rollups: int = 0


def oldest_held(state: State) -> int:
    """The oldest version that a reader may still need."""
    holds = (reader.seqno_hold for reader in state.readers.values())
    return min((seqno for seqno in holds if seqno is not None), default=state.seqno)


def horizon(state: State) -> int | None:
    """The version below which no reader needs anything: the newest with a rollup at or below all holds."""
    oldest = oldest_held(state)
    return max((seqno for seqno in state.rollups if seqno <= oldest), default=None)


def can_collect(state: State) -> bool:
    """Whether a collection would delete anything, perhaps after a new rollup. It would not if a rollup was
    written since the last drop, and a reader holds an earlier version."""
    oldest, has_garbage = oldest_held(state), state.collected < state.dropped_at
    if any(seqno <= oldest and seqno != min(state.rollups) for seqno in state.rollups):
        return True  # the first rollup is not needed
    rollups = [seqno for seqno in state.rollups if seqno >= state.dropped_at]
    return has_garbage and min(rollups, default=state.dropped_at) <= oldest


async def collect(shard: Shard, writer: str | None = None) -> Collected:
    """One collection, claimed by `writer`, or unclaimed. Costs reads of the earliest version and of the head,
    a delete per thousand parts, a truncation and a commit. Unless this process has followed the versions
    below the horizon, also a scan of these and a read of their first rollup. Without work, the two reads."""
    with shard.stack.work("collection", shard.known_as) as work:
        collected = await _collect(shard, writer)
        work.done = any(collected)
        return collected


async def _collect(shard: Shard, writer: str | None) -> Collected:
    stack, key = shard.stack, consensus_key(shard.id)
    first = await stack.consensus.scan(key, 0, 1)
    # The head is read last: it tells whether the store was restored from a backup meanwhile. The restored
    # history may name blobs that were dropped in the known one.
    state = await shard.register.refresh()
    if state is None or (r := horizon(state)) is None:
        return Collected()
    parts = versions = 0
    if first and first[0].seqno < r:
        garbage = shard.register.drops.between(first[0].seqno, r)
        if garbage is None:
            try:
                garbage = (await trail_from(stack, state, first[0].seqno, r)).dropped
            except Truncated:
                return Collected()
        parts, versions = await _deleted(shard, sorted(garbage)), await stack.consensus.truncate(key, r)
    old = [rollup.key for seqno, rollup in state.rollups.items() if seqno < r]
    rollups = await _deleted(shard, old) if old else 0
    await commit(shard.register, EndCollection(r, writer))
    return Collected(parts, versions, rollups)


async def _deleted(shard: Shard, keys: Sequence[str]) -> int:
    """Delete blobs that no state names any more. Returns the number of deleted blobs."""
    try:
        await shard.stack.blob.delete(keys)
    except NotDeleted as error:
        text = "a collection left %d blobs behind; a sweep deletes them once it may: %s"
        left = len(error.keys)
        log.warning(text, left, error, extra={"shard": shard.known_as, "blobs": left})
        return len(keys) - left
    return len(keys)


async def delete_data(shard: Shard) -> Collected:
    """Delete the data of a finalized shard: all blobs under its id, then all versions but the newest, its
    tombstone. A last commit records this in the tombstone. All later versions are tombstones, too, so no
    deleted blob is ever named again. After a crash, a repetition finishes the work. A later upload is deleted
    with the tombstone (`tombstones.py`). Two requests and a commit, besides a listing and the deletions."""
    stack, key = shard.stack, consensus_key(shard.id)
    head = await stack.consensus.head(key)
    changes = None if head is None else decode_version(head.data, shard.id).changes
    if head is None or changes is None or not changes.finalized or changes.collected:
        return Collected()
    blobs = [blob async for blob, _ in stack.blob.list(f"{shard.id}/")]
    await stack.blob.delete(blobs)
    versions = await stack.consensus.truncate(key, head.seqno)
    await shard.register.refresh()
    await commit(shard.register, MarkDeleted())
    rollups = sum(blob.endswith(".rollup") for blob in blobs)
    return Collected(len(blobs) - rollups, versions, rollups)


async def trail_from(stack: Stack, state: State, earliest: int, last: int) -> Trail:
    """The blobs that the live versions up to `last` name, and the rollup of the earliest. `Truncated` if a
    version or that rollup was deleted: another process collects."""
    base: State | None = None
    if earliest > 0:
        rollup = state.rollups.get(earliest)
        base = await read_rollup(stack, rollup.key, rollup.checksum) if rollup is not None else None
        if base is None:
            raise Truncated(f"the rollup of version {earliest}")
    trail = Trail(base)
    async for versions in versions_between(stack, state.shard, earliest, last):
        await stack.compute(trail.add, [version.data for version in versions], state.shard)
    return trail
