"""Garbage collection: what no reader's hold can reach any more goes, in an order that a crash cannot harm.

Let `r` be a version with a rollup, named by the head, at or below every reader's seqno hold.

1. Part blobs that were named somewhere from the earliest live version up to `r`, and that the state at
   `r` does not name: they were dropped in between, and keys never come back. Deleted.
2. Versions below `r`: truncated. `r` has its rollup, so it can be the earliest.
3. The blobs of rollups below `r`: deleted.
4. Their names: removed from the state, which says from now on that all up to `r` is collected.

Whoever crashes between two steps leaves nothing but work that is repeated: deletes of what is gone.
Rollup blobs are deleted after the truncation, since until then the earliest version needs its own.
"""

from typing import NamedTuple

from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.log import Truncated, consensus_key, read_rollup, versions_between
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.diff import decode_diff
from aiopersist.state.lifecycle import EndCollection, MarkBuried
from aiopersist.state.model import State
from aiopersist.state.names import Trail


class Collected(NamedTuple):
    """What a collection removed."""

    parts: int = 0
    versions: int = 0
    rollups: int = 0


def held(state: State) -> int:
    """The oldest version that a reader may still need."""
    holds = (reader.seqno_hold for reader in state.readers.values())
    return min((seqno for seqno in holds if seqno is not None), default=state.seqno)


def horizon(state: State) -> int | None:
    """The version below which nobody needs anything: the newest with a rollup that no hold is below."""
    oldest = held(state)
    return max((seqno for seqno in state.rollups if seqno <= oldest), default=None)


def can_collect(state: State) -> bool:
    """Whether there is anything to collect that no reader holds, perhaps after a rollup of now; but not where
    a rollup was written since the last drop and a reader still holds a version before it."""
    oldest, owed = held(state), state.collected < state.dropped_at
    if any(seqno <= oldest and seqno != min(state.rollups) for seqno in state.rollups):
        return True  # the first of them is not needed
    rollups = [seqno for seqno in state.rollups if seqno >= state.dropped_at]
    return owed and min(rollups, default=state.dropped_at) <= oldest


async def collect(shard: Shard, writer: str | None = None) -> Collected:
    """One collection, claimed by `writer` or by nobody. Costs a scan of the versions below the horizon, a
    read of the rollup they begin with, a delete per thousand parts, and a commit; a look at the head where
    there is nothing to do."""
    stack, key = shard.stack, consensus_key(shard.id)
    state = await shard.register.refresh()
    if state is None or (r := horizon(state)) is None:
        return Collected()
    first = await stack.consensus.scan(key, 0, 1)
    parts = versions = 0
    if first and first[0].seqno < r:
        try:
            trail = await trail_from(stack, state, first[0].seqno, r)
        except Truncated:
            return Collected()
        garbage = sorted(trail.dropped)
        await stack.blob.delete(garbage)
        parts, versions = len(garbage), await stack.consensus.truncate(key, r)
    old = {seqno: rollup for seqno, rollup in state.rollups.items() if seqno < r}
    if old:
        await stack.blob.delete([rollup.key for rollup in old.values()])
    await commit(shard.register, EndCollection(r, writer), Slot())
    return Collected(parts, versions, len(old))


async def bury(shard: Shard) -> Collected:
    """Delete the data of a finalized shard: every blob under its id, then all versions but the newest, its
    tombstone, which says at the end that this was done. Every later version is a tombstone, too, so none of
    it is ever named again. Repeated, it finishes what a crash left; an upload that comes later goes with the
    tombstone (`graves`). Two requests and a commit, beside a listing and the deletions."""
    stack, key = shard.stack, consensus_key(shard.id)
    head = await stack.consensus.head(key)
    if head is None or not (changes := decode_diff(head.data).changes).finalized or changes.collected:
        return Collected()
    blobs = [blob async for blob, _ in stack.blob.list(f"{shard.id}/")]
    await stack.blob.delete(blobs)
    versions = await stack.consensus.truncate(key, head.seqno)
    await shard.register.refresh()
    await commit(shard.register, MarkBuried(), Slot())
    rollups = sum(blob.endswith(".rollup") for blob in blobs)
    return Collected(len(blobs) - rollups, versions, rollups)


async def trail_from(stack: Stack, state: State, earliest: int, last: int) -> Trail:
    """What the live versions from the earliest to `last` have named, the rollup that `state` names for the
    earliest included. `Truncated` if any of that is not there: somebody else collects."""
    base: State | None = None
    if earliest > 0:
        rollup = state.rollups.get(earliest)
        base = await read_rollup(stack, rollup.key, rollup.checksum) if rollup is not None else None
        if base is None:
            raise Truncated(f"the rollup of version {earliest}")
    return await _trail_of(stack, state.shard, base, earliest, last)


async def _trail_of(stack: Stack, shard: str, base: State | None, first: int, last: int) -> Trail:
    """What the versions from `first`, whose state is `base`, to `last` have named. `Truncated`."""
    trail = Trail(base)
    async for versions in versions_between(stack, shard, first, last):
        await stack.compute(trail.add, [version.data for version in versions])
    return trail
