"""What is left of dropped shards, and when that goes.

A *tombstone* is the newest version of a finalized shard. It fences: whoever has the shard open, or was about
to make it, finds that it is finalized. It goes when nobody can need it any more, after
`settings.tombstone_retention_s`:

- A handle that was open since then finds no version, of a shard that it saw longer ago than that: it takes
  this for the tombstone (`Register`). A store that was restored from a backup loses younger ones, too.
- Who creates a shard under its name looks at the name afterwards, which was freed before the tombstone
  went; so even a process that stood still for that long makes nothing that anybody could write to.
- A statement that creates is not on its way for that long.

First go the blobs that lie under the id of the shard: what an upload left that came after its end.
"""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from aiopersist.errors import Corruption
from aiopersist.shard.log import consensus_key
from aiopersist.shard.stack import Stack
from aiopersist.state.diff import decode_diff
from aiopersist.storage.consensus import Versioned, sliced

AT_ONCE = 256  # shards: their heads are in memory


class Grave(NamedTuple):
    """The tombstone of a shard whose data is deleted."""

    seqno: int
    at: float


class Look(NamedTuple):
    """What was found of some shards: the heads of those that moved, and graves."""

    heads: dict[str, Versioned]
    graves: dict[str, Grave]


async def look(stack: Stack, shards: Sequence[str], known: dict[str, int]) -> AsyncIterator[Look]:
    """The heads of `shards` that are others than the known ones, in slices, and which of them are graves. One
    request for each slice."""
    keys = {consensus_key(shard): shard for shard in shards}
    for some in sliced({key: known.get(shard) for key, shard in keys.items()}, AT_ONCE):
        found = await stack.consensus.heads(some)
        heads = {keys[key]: head for key, head in found.items() if head is not None}
        yield await stack.compute(_told_apart, heads)


def _told_apart(heads: dict[str, Versioned]) -> Look:
    graves = {shard: grave for shard, head in heads.items() if (grave := _grave(head)) is not None}
    return Look({shard: head for shard, head in heads.items() if shard not in graves}, graves)


def _grave(head: Versioned) -> Grave | None:
    """What `head` says, if it is the tombstone of a shard whose data is deleted. Others are not decoded: they
    may be large, or damaged."""
    if b'"finalized":true' not in head.data:
        return None
    try:
        diff = decode_diff(head.data)
    except Corruption:  # for who looks at that shard
        return None
    buried = diff.changes.finalized and diff.changes.collected
    return Grave(head.seqno, diff.at) if buried else None


async def forget(stack: Stack, shard: str, grave: Grave) -> None:
    """Remove the tombstone, of a shard that nobody knows any more. By now another may have removed it, and
    somebody may have made the shard anew under its id: so what is deleted was listed before a look that finds
    the tombstone, and that very version is removed, not one of its number. Four requests. `Unsupported` where
    the store cannot."""
    late = [key async for key, _ in stack.blob.list(f"{shard}/")]
    head = await stack.consensus.head(consensus_key(shard))
    if head is None or _grave(head) != grave:
        return
    await stack.blob.delete(late)
    await stack.consensus.remove(consensus_key(shard), head)
