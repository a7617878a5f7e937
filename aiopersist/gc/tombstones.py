"""The tombstones of dropped shards, and when they are removed.

A *tombstone* is the newest version of a finalized shard. It is a fence: every process that has the shard
open, or is creating it, sees that it is finalized. The tombstone is removed after
`settings.tombstone_retention_s`, when no process can need it:

- A handle that has been open for longer finds no version of the shard. If it last saw the shard longer ago
  than that, it takes this for the tombstone (`Register`). If not, the store was restored from a backup.
- A process that creates a shard under a name reads the name afterwards, and the name is freed before the
  tombstone is removed. So even a process that stood still for that long creates no shard that anybody could
  write to.
- A statement that creates a shard is not under way for that long.

The blobs under the id of the shard are deleted first: an upload may have arrived after the end of the shard.
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
    """The result of a look at some shards: new heads, and tombstones."""

    moved: dict[str, Versioned]
    tombstones: dict[str, Tombstone]


async def read_heads(stack: Stack, shards: Sequence[str], seqnos: dict[str, int]) -> AsyncIterator[Heads]:
    """The heads of `shards` with other seqnos than `seqnos`, and separately the tombstones among them, in
    slices of `AT_ONCE`. One request for each slice."""
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
    """`head` as a tombstone, if the shard is finalized and its data deleted. Other heads are not decoded:
    they may be large, or damaged."""
    if b'"finalized":true' not in head.data:
        return None
    try:
        diff = decode_version(head.data, shard)
    except Corruption:  # the work on that shard raises it again
        return None
    is_deleted = diff.changes.finalized and diff.changes.collected
    return Tombstone(head.seqno, diff.at) if is_deleted else None


async def remove_tombstone(stack: Stack, shard: str, tombstone: Tombstone) -> None:
    """Remove the tombstone of a shard that no process knows any more. Another process may have removed it,
    and created a shard under the same id. So only blobs are deleted that were listed before a look sees the
    tombstone, and only this version is removed, not another one of its number. Four requests. `Unsupported`
    if the store cannot remove keys."""
    late = [key async for key, _ in stack.blob.list(f"{shard}/")]
    head = await stack.consensus.head(consensus_key(shard))
    if head is None or _tombstone(shard, head) != tombstone:
        return
    await stack.blob.delete(late)
    await stack.consensus.remove(consensus_key(shard), head)
