"""The tombstones of dropped shards, and when they are removed.

A *tombstone* is the newest version of a finalized shard. It fences: every process that has the shard open, or
was about to create it, finds that it is finalized. The tombstone is removed once no process can need it any
more, after `settings.tombstone_retention_s`:

- A handle that has been open since before then finds no version of a shard that it last saw longer ago than
  that. It takes this for the tombstone (`Register`). A store that was restored from a backup loses younger
  versions, too.
- A process that creates a shard under a name reads the name afterwards, and the name was freed before the
  tombstone went. So even a process that stood still for that long creates no shard that a process could
  write to.
- A statement that creates a shard is not on its way for that long.

The blobs under the id of the shard go first: an upload may have come after the end of the shard.
"""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from aiopersist.base.errors import Corruption
from aiopersist.shard.log import consensus_key
from aiopersist.shard.stack import Stack
from aiopersist.state.seal import decode_version
from aiopersist.storage.consensus import Versioned, sliced

AT_ONCE = 256  # shards: their heads are in memory


class Tombstone(NamedTuple):
    """The newest version of a finalized shard whose data is deleted."""

    seqno: int
    at: float


class Heads(NamedTuple):
    """The result of a look at some shards: the heads that moved, and the tombstones."""

    moved: dict[str, Versioned]
    tombstones: dict[str, Tombstone]


async def read_heads(stack: Stack, shards: Sequence[str], seqnos: dict[str, int]) -> AsyncIterator[Heads]:
    """Those heads of `shards` that differ from the known ones, tombstones apart, in slices of `AT_ONCE`. One
    request for each slice."""
    keys = {consensus_key(shard): shard for shard in shards}
    for part in sliced({key: seqnos.get(shard) for key, shard in keys.items()}, AT_ONCE):
        by_key = await stack.consensus.heads(part)
        heads = {keys[key]: head for key, head in by_key.items() if head is not None}
        yield await stack.compute(_divided, heads)


def _divided(heads: dict[str, Versioned]) -> Heads:
    results = {shard: _tombstone(shard, head) for shard, head in heads.items()}
    tombstones = {shard: tombstone for shard, tombstone in results.items() if tombstone is not None}
    return Heads({shard: head for shard, head in heads.items() if shard not in tombstones}, tombstones)


def _tombstone(shard: str, head: Versioned) -> Tombstone | None:
    """The tombstone that `head` is, if the shard is finalized and its data deleted. Other heads are not
    decoded: they may be large, or damaged."""
    if b'"finalized":true' not in head.data:
        return None
    try:
        diff = decode_version(head.data, shard)
    except Corruption:  # raised again by the work on that shard
        return None
    is_deleted = diff.changes.finalized and diff.changes.collected
    return Tombstone(head.seqno, diff.at) if is_deleted else None


async def remove_tombstone(stack: Stack, shard: str, tombstone: Tombstone) -> None:
    """Remove the tombstone of a shard that no process knows any more. By now another process may have removed
    it and created a shard under the same id. So only blobs are deleted that were listed before a look finds
    the tombstone, and that very version is removed, not any version of its number. Four requests.
    `Unsupported` where the store cannot remove keys."""
    late = [key async for key, _ in stack.blob.list(f"{shard}/")]
    head = await stack.consensus.head(consensus_key(shard))
    if head is None or _tombstone(shard, head) != tombstone:
        return
    await stack.blob.delete(late)
    await stack.consensus.remove(consensus_key(shard), head)
