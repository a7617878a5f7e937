"""An overview of a location: one line for each shard.

Each summary comes from a fresh state, which is dropped again. So an overview needs the memory of its lines,
not of the states.
"""

from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Literal

from pydantic import BaseModel

from aiopersist.base.errors import Corruption
from aiopersist.base.frontier import Antichain
from aiopersist.base.progress import progress
from aiopersist.base.resource import in_order
from aiopersist.maintenance.inspect import Growth, growth_of
from aiopersist.shard.catalog import IndexedId, ShardId, names
from aiopersist.shard.log import load
from aiopersist.shard.stack import Stack
from aiopersist.state.model import Clock, State
from aiopersist.subscription.view import views_of

AHEAD = 16  # states that are read at once

ShardKind = Literal["shard", "table", "indexed"]


class ShardSummary(BaseModel, frozen=True):
    """One shard, table or `Indexed` at its newest version, in a line."""

    name: str
    shard_id: str
    kind: ShardKind
    clock: Clock = Clock.LOGICAL
    """The meaning of its times: `logical` ones count, `wall` ones are microseconds since 1970."""
    since: Antichain | None = None
    """`None` for an `Indexed`: each of its streams has a since and a seal."""
    upper: Antichain | None = None
    """`None` for an `Indexed`."""
    finalized: bool = False
    seqno: int | None = None
    """The newest version; `None` for a name without a shard yet."""
    written_at: float | None = None
    """When the newest version was written, even by maintenance or a heartbeat, in Unix seconds."""
    streams: int | None = None
    """Of an `Indexed`."""
    batches: int = 0
    parts: int = 0
    updates: int = 0
    """In its parts, before consolidation."""
    blob_bytes: int = 0
    """Bytes of the blobs of its parts."""
    inline_bytes: int = 0
    """Bytes of the inline parts in its state."""
    holds: int = 0
    """Readers, named holds, critical sinces, subscriptions, a policy of retention: each may keep history."""
    tags: int = 0
    """Each may keep blobs of the past; it keeps no history."""
    subscriptions: int = 0
    lag_updates: int | None = None
    """An upper bound of the updates that its slowest subscription lags; `None` without subscriptions."""
    updates_per_s: float | None = None
    """Its recent growth, on a wall clock: over its newest batches that reach back about a minute. Does not
    count updates that a compaction has cancelled. `None` without such batches."""
    bytes_per_s: float | None = None
    problem: str | None = None
    """Why its state cannot be read: then the figures are empty."""

    @property
    def bytes(self) -> int:
        """Bytes of all its parts."""
        return self.blob_bytes + self.inline_bytes


async def overview(stack: Stack, prefix: str) -> list[ShardSummary]:
    """See `Admin.overview`. A shard and an `Indexed` may have the same name. The names cost six requests, and
    two more for every few hundred."""
    ids = [*(await names(stack, ShardId)).items(), *(await names(stack, IndexedId)).items()]
    named = sorted(pair for pair in ids if pair[0].startswith(prefix))
    lines: list[ShardSummary] = []
    with progress("overview", len(named), "shards") as step:
        async for summary in summaries(stack, named):
            lines.append(summary)
            step.advance(1)
    return lines


async def summaries(stack: Stack, named: Iterable[tuple[str, ShardId]]) -> AsyncIterator[ShardSummary]:
    """The summaries of these shards, in order. Each reads the head, the rollup and later diffs."""
    now = await stack.consensus.now()
    async for summary in in_order(
        [partial(_summary, stack, name, shard, now) for name, shard in named], AHEAD, stack.supervisor
    ):
        yield summary


async def _summary(stack: Stack, name: str, shard: ShardId, now: float) -> ShardSummary:
    kind: ShardKind = "indexed" if isinstance(shard, IndexedId) else "shard"
    try:
        state = await load(stack, shard)
    except Corruption as error:
        return ShardSummary(name=name, shard_id=shard, kind=kind, problem=str(error))
    if state is None:
        return ShardSummary(name=name, shard_id=shard, kind=kind)
    return summary_of(name, state, now)


def summary_of(name: str, state: State, now: float) -> ShardSummary:
    """The summary of a state; `now` is by the consensus store's clock."""
    parts = list(state.parts)
    blob_bytes = sum(part.size for part in parts if part.key is not None)
    lags = [view.lag_updates for view in views_of(state, now).values() if not view.expired]
    streams = state.streams
    arrangements = () if streams is None else streams.arrangements.values()
    grown = None if streams is not None or state.clock is not Clock.WALL else _growth(state, now)
    return ShardSummary(
        name=name,
        shard_id=state.shard,
        kind="indexed" if streams is not None else "table" if state.table else "shard",
        clock=state.clock,
        since=None if streams else state.since,
        upper=None if streams else state.upper,
        finalized=state.finalized,
        seqno=state.seqno,
        written_at=state.at,
        streams=None if streams is None else len(streams.names),
        batches=len(state.batches) + sum(len(a.unsealed) + len(a.trace) for a in arrangements),
        parts=len(parts),
        updates=sum(part.rows for part in parts),
        blob_bytes=blob_bytes,
        inline_bytes=sum(part.size for part in parts) - blob_bytes,
        holds=_holds(state),
        tags=len(state.tags),
        subscriptions=len(state.subscriptions),
        lag_updates=max(lags, default=None),
        updates_per_s=grown and grown.updates_per_s,
        bytes_per_s=grown and grown.bytes_per_s,
    )


def _growth(state: State, now: float) -> Growth | None:
    batches = reversed(state.batches.values())
    return growth_of(((b.lower, b.len, sum(part.size for part in b.parts)) for b in batches), now)


def _holds(state: State) -> int:
    readers = sum(1 for reader in state.readers.values() if reader.since.elements)
    return readers + len(state.critical) + len(state.retention) + len(state.subscriptions)
