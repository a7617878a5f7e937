"""The leak sweep: it deletes blobs that no version names, and no version can ever name.

The sweep first lists the blobs, then reads the head and all live states. The writer of a listed blob had
registered before. If it is not registered at the later head, it never will be: every command that would name
the blob is refused by the state that it is applied to. So a blob of such a writer that no live state names
can be deleted, whatever other processes do.

Leases end by commits, and an idle shard has none. So if a lease has run out, the sweep commits before it
reads the head. A dry run does not commit, and treats these writers as ended.
"""

from collections.abc import AsyncIterator, Set
from typing import NamedTuple

from aiopersist.base.errors import Corruption
from aiopersist.base.progress import progress
from aiopersist.gc.collect import trail_from
from aiopersist.gc.tombstones import read_heads
from aiopersist.shard.commit import commit
from aiopersist.shard.log import Truncated, consensus_key, list_shards
from aiopersist.shard.register import Register
from aiopersist.shard.resting import read_resting
from aiopersist.shard.stack import Stack
from aiopersist.state.command import Context, overdue
from aiopersist.state.keys import writer_of
from aiopersist.state.lifecycle import ExpireOverdue
from aiopersist.state.model import State
from aiopersist.state.names import current_parts, live_parts, registered
from aiopersist.storage.blob import NotDeleted


class Sweep(NamedTuple):
    """The leaked blobs that a sweep found; `deleted`: whether it deleted them."""

    keys: tuple[str, ...] = ()
    bytes: int = 0
    deleted: bool = False


class Usage(NamedTuple):
    """Bytes in the blob store, from all blobs to those that the newest contents need."""

    total: int = 0
    """All blobs of shards."""
    referenced: int = 0
    """Blobs that a live version names: open snapshots may need them."""
    current: int = 0
    """Blobs that the newest versions name, rollups included."""
    live: int = 0
    """Parts that the newest contents need."""
    tagged: int = 0
    """Blobs that no live part is among, and that tags name."""

    def plus(self, other: "Usage") -> "Usage":
        return Usage(*(a + b for a, b in zip(self, other, strict=True)))


async def sweep(stack: Stack, *, dry_run: bool) -> Sweep:
    """Sweep all shards. Requests for each shard: a listing, a scan of its live versions, a read of its
    rollups; for some hundred dropped shards, one request. Damaged shards, and blobs that this process may not
    delete, are skipped; at the end the first `Corruption` or `NotDeleted` is raised."""
    leaked, damage = dict[str, int](), list[Corruption | NotDeleted]()
    shards = await list_shards(stack)
    with progress("sweep", len(shards), "shards") as step:
        async for shard in _without_tombstones(stack, shards):
            try:
                leaks = await leaks_of(stack, shard, expire=not dry_run)
                if not dry_run:
                    await stack.blob.delete(list(leaks))
                leaked |= leaks
            except (Corruption, NotDeleted) as error:
                damage.append(error)
            step.advance(1)
    if damage:
        raise damage[0]
    return Sweep(tuple(leaked), sum(leaked.values()), not dry_run)


async def leaks_of(stack: Stack, shard: str, *, expire: bool) -> dict[str, int]:
    """The leaked blobs of the shard, with sizes. `expire`: a commit ends leases that have run out."""
    listed = await _listed(stack, shard)  # before the head is read
    named = await _named(stack, shard, expire=expire)
    if named is None:
        return {}
    return {
        key: size
        for key, size in listed.items()
        if key not in named.referenced and writer_of(key) not in named.writers
    }


async def usage(stack: Stack) -> Usage:
    """The sums over all shards. As many requests as a sweep."""
    total, shards = Usage(), await list_shards(stack)
    with progress("usage", len(shards), "shards") as step:
        async for shard in _without_tombstones(stack, shards):
            total = total.plus(await _usage(stack, shard))
            step.advance(1)
    return total


async def _usage(stack: Stack, shard: str) -> Usage:
    listed = await _listed(stack, shard)
    named = await _named(stack, shard, expire=False)
    sets = (listed.keys(), *(named[1:] if named else ()))
    return Usage(*(sum(listed.get(key, 0) for key in keys) for keys in sets))


class _Named(NamedTuple):
    """The blobs and writers that the states of a shard name."""

    writers: Set[str] = frozenset()
    """The registered writers."""
    referenced: Set[str] = frozenset()
    current: Set[str] = frozenset()
    parts: Set[str] = frozenset()
    tagged: Set[str] = frozenset()
    """Keys of blobs, as `Usage` counts them."""


async def _without_tombstones(stack: Stack, shards: list[str]) -> AsyncIterator[str]:
    resting = await read_resting(stack)
    seqnos = {s: resting[key] for s in shards if (key := consensus_key(s)) in resting}
    async for heads in read_heads(stack, shards, seqnos):
        for shard in heads.moved:
            yield shard


async def _listed(stack: Stack, shard: str) -> dict[str, int]:
    return {key: size async for key, size in stack.blob.list(f"{shard}/")}


async def _newest(stack: Stack, shard: str, *, expire: bool) -> State | None:
    """The newest state without writers whose leases have run out. `expire`: a commit ends these."""
    register = Register(stack, shard)
    if (state := await register.refresh()) is None or state.finalized:
        return state
    if expire:
        await commit(register, ExpireOverdue())
        return register.state
    gone = overdue(state, Context(now=await stack.consensus.now()), {}).get("writers", ())
    return state.replace(writers={key: value for key, value in state.writers.items() if key not in gone})


async def _named(stack: Stack, shard: str, *, expire: bool) -> _Named | None:
    """The blobs and writers that the head and all live states name; read again after a truncation."""
    before: tuple[int, int] | None = None
    while True:
        head = await _newest(stack, shard, expire=expire)
        if head is None:
            return None
        if head.finalized:
            return _Named()
        first = await stack.consensus.scan(consensus_key(shard), 0, 1)
        earliest = first[0].seqno if first else head.seqno + 1
        parts, live = current_parts(head), live_parts(head)
        current = live | {rollup.key for rollup in head.rollups.values()}
        try:
            trail = await trail_from(stack, head, earliest, head.seqno)
        except Truncated as error:
            if before == (earliest, head.seqno):  # not the effect of a collection
                text = f"its earliest version has no rollup, or its versions are not contiguous: {error}"
                raise Corruption(text, shard_id=shard) from error
            before = earliest, head.seqno
            continue
        older = trail.parts | {rollup.key for rollup in trail.rollups.values()}
        return _Named(registered(head), current | older, current, parts, live - parts)
