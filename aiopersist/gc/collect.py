"""Garbage collection: what no reader's hold can reach any more goes, in an order that a crash cannot harm.

Let `r` be a version with a rollup, named by the head, at or below every reader's seqno hold.

1. Part blobs that were named somewhere from the earliest live version up to `r`, and that the state at
   `r` does not name: they were dropped in between, and keys never come back. Deleted.
2. Versions below `r`: truncated. `r` has its rollup, so it can be the earliest.
3. The blobs of rollups below `r`: deleted.
4. Their names: removed from the state.

Whoever crashes between two steps leaves nothing but work that is repeated: deletes of what is gone.
Rollup blobs are deleted after the truncation, since until then the earliest version needs its own.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.log import Truncated, consensus_key, read_rollup, versions_between
from aiopersist.shard.shard import Shard
from aiopersist.state.diff import decode_diff
from aiopersist.state.lifecycle import DropRollups
from aiopersist.state.model import HollowBatch, State
from aiopersist.storage.consensus import Versioned


class Collected(NamedTuple):
    """What a collection removed."""

    parts: int = 0
    versions: int = 0
    rollups: int = 0


def held(state: State) -> int:
    """The oldest version that a reader may still need."""
    return min((reader.seqno_hold for reader in state.readers.values()), default=state.seqno)


def horizon(state: State) -> int | None:
    """The version below which nobody needs anything: the newest with a rollup that no hold is below."""
    oldest = held(state)
    return max((seqno for seqno in state.rollups if seqno <= oldest), default=None)


async def collect(shard: Shard) -> Collected:
    """One collection. Costs a scan of the versions below the horizon, a read of two rollups, and a delete
    per thousand parts; a look at the head where there is nothing to do."""
    stack, key = shard.stack, consensus_key(shard.id)
    state = await shard.register.refresh()
    if state is None or (r := horizon(state)) is None:
        return Collected()
    first = await stack.consensus.scan(key, 0, 1)
    parts = versions = 0
    if first and first[0].seqno < r:
        garbage = await _dropped(shard, state, first[0].seqno, r)
        if garbage is None:
            return Collected()
        await stack.blob.delete(garbage)
        parts, versions = len(garbage), await stack.consensus.truncate(key, r)
    old = {seqno: rollup for seqno, rollup in state.rollups.items() if seqno < r}
    if old:
        await stack.blob.delete([rollup.key for rollup in old.values()])
        await commit(shard.register, DropRollups(tuple(old)), Slot())
    return Collected(parts, versions, len(old))


async def bury(shard: Shard) -> Collected:
    """Delete the data of a finalized shard, in the same order; its tombstone, the newest version, stays.
    Repeated, it finishes what a crash left; rollups that a crash left are for the sweep."""
    stack, key = shard.stack, consensus_key(shard.id)
    head = await stack.consensus.head(key)
    if head is None or not decode_diff(head.data).changes.finalized:
        return Collected()
    parts: set[str] = set()
    rollups: dict[int, tuple[str, str]] = {}
    first = await stack.consensus.scan(key, 0, 1)
    earliest = first[0].seqno if first else head.seqno
    try:
        async for found in versions_between(stack, shard.id, earliest, head.seqno - 1):
            parts |= await stack.compute(_named, found)
            for version in found:
                name = decode_diff(version.data).rollup
                rollups |= {name.seqno: (name.key, name.checksum)} if name is not None else {}
    except Truncated:
        return Collected()  # somebody else does it
    if earliest in rollups:
        base = await read_rollup(stack, *rollups[earliest])
        parts |= part_keys(base.batches.values()) if base is not None else set()
        rollups |= {s: (r.key, r.checksum) for s, r in base.rollups.items()} if base is not None else {}
    await stack.blob.delete(sorted(parts))
    versions = await stack.consensus.truncate(key, head.seqno)
    await stack.blob.delete([key for key, _ in rollups.values()])
    return Collected(len(parts), versions, len(rollups))


async def _dropped(shard: Shard, state: State, earliest: int, r: int) -> list[str] | None:
    """The keys of the parts that were dropped between the two versions; `None` if that cannot be told,
    since somebody else collects, too."""
    stack = shard.stack
    seen: set[str] = set()
    at = earliest
    if earliest > 0 and earliest in state.rollups:
        base = await read_rollup(stack, state.rollups[earliest].key, state.rollups[earliest].checksum)
        if base is None:
            return None
        seen |= part_keys(base.batches.values())
        at += 1
    try:
        async for found in versions_between(stack, shard.id, at, r):
            seen |= await stack.compute(_named, found)
    except Truncated:
        return None
    at_r = await read_rollup(stack, state.rollups[r].key, state.rollups[r].checksum)
    return None if at_r is None else sorted(seen - part_keys(at_r.batches.values()))


def _named(versions: Sequence[Versioned]) -> set[str]:
    return set().union(*(part_keys(decode_diff(v.data).changes.batches.values()) for v in versions))


def part_keys(batches: Iterable[HollowBatch]) -> set[str]:
    """The keys of the parts that these batches name."""
    return {part.key for batch in batches for part in batch.parts if part.key is not None}
