"""A view of a shard's state for people, dashboards and tests."""

from math import inf
from typing import Literal

from pydantic import BaseModel

from aiopersist.errors import UnknownShard
from aiopersist.frontier import Antichain
from aiopersist.shard.log import consensus_key
from aiopersist.shard.shard import Shard
from aiopersist.state.compaction import run_count
from aiopersist.state.model import (
    Claim,
    Clock,
    CriticalReader,
    HollowBatch,
    LeasedReader,
    Level,
    Retention,
    Rollup,
    State,
    TransactionRecord,
    Writer,
)
from aiopersist.subscription.view import SubscriptionView, views_of


class BatchView(BaseModel, frozen=True):
    """One batch of the trace."""

    ordinal: int
    lower: Antichain
    upper: Antichain
    since: Antichain
    len: int
    """Updates in its parts."""
    parts: int
    runs: int
    blob_bytes: int
    inline_bytes: int

    @classmethod
    def of(cls, ordinal: int, batch: HollowBatch) -> "BatchView":
        return cls(
            ordinal=ordinal,
            lower=batch.lower,
            upper=batch.upper,
            since=batch.since,
            len=batch.len,
            parts=len(batch.parts),
            runs=run_count(batch),
            blob_bytes=sum(part.size for part in batch.parts if part.key is not None),
            inline_bytes=batch.inline_bytes,
        )


class HoldView(BaseModel, frozen=True):
    """A hold: its owner, and the times from which on it keeps history."""

    kind: Literal["reader", "named", "critical", "subscription", "retention"]
    """A leased reader, a named hold, a critical since, a subscription, or the policy of `retain`."""
    id: str
    """The reader's id, the name of the hold or the subscription, or the id of the critical since."""
    since: Antichain
    behind: int | None
    """Times between its since and the shard's upper; `None` unless both are one int."""
    pins: bool
    """Whether it keeps the shard's since from moving."""

    @classmethod
    def of(cls, kind: str, id: str, since: Antichain, state: State) -> "HoldView":
        return cls.model_validate(
            {
                "kind": kind,
                "id": id,
                "since": since,
                "behind": _behind(since, state.upper),
                "pins": bool(since.elements) and since <= state.since,
            }
        )


class ShardView(BaseModel, frozen=True):
    """One shard at its newest version."""

    shard_id: str
    since: Antichain
    upper: Antichain
    clock: Clock
    """What its times mean: `logical` ones count, those of `wall` are microseconds since 1970."""
    table: bool
    """Whether it is a table."""
    finalized: bool
    seqno: int
    earliest_seqno: int
    """The oldest version that the consensus store has."""
    live_diffs: int
    """How many versions the consensus store has."""
    batches: list[BatchView]
    """Oldest first."""
    levels: dict[int, Level]
    """The spine: which neighbouring batches, by ordinal, count as one."""
    claims: dict[int, Claim]
    readers: dict[str, LeasedReader]
    critical: dict[str, CriticalReader]
    holds: list[HoldView]
    """All holds, those that pin since first, of these the furthest behind first: a forgotten critical since
    is among the first, and `critical_since(...)` and `release` end it."""
    retention: Retention | None
    subscriptions: dict[str, SubscriptionView]
    """By name, shares as `name[i/n]`."""
    writers: dict[str, Writer]
    transactions: dict[str, TransactionRecord]
    rollups: dict[int, Rollup]
    blob_bytes: int
    """Bytes of the blobs of parts that the newest version names."""
    inline_bytes: int


async def inspect(shard: Shard) -> ShardView:
    """A linearizable view. Two requests."""
    state = await shard.register.refresh()
    if state is None:
        raise UnknownShard(f"there is no {shard.label}", shard_id=shard.id)
    first = await shard.stack.consensus.scan(consensus_key(shard.id), 0, 1)
    now = await shard.register.now()
    return await shard.stack.compute(_view, state, first[0].seqno if first else state.seqno, now)


def _view(state: State, earliest: int, now: float) -> ShardView:
    batches = [BatchView.of(ordinal, batch) for ordinal, batch in state.batches.items()]
    return ShardView(
        shard_id=state.shard,
        since=state.since,
        upper=state.upper,
        clock=state.clock,
        table=state.table,
        finalized=state.finalized,
        seqno=state.seqno,
        earliest_seqno=earliest,
        live_diffs=state.seqno + 1 - earliest,
        batches=batches,
        levels=state.levels,
        claims=state.claims,
        readers=state.readers,
        critical=state.critical,
        holds=_holds(state),
        retention=state.retention.get(0),
        subscriptions=views_of(state, now),
        writers=state.writers,
        transactions=dict(state.transactions),
        rollups=state.rollups,
        blob_bytes=sum(batch.blob_bytes for batch in batches),
        inline_bytes=state.inline_bytes,
    )


def _holds(state: State) -> list[HoldView]:
    readers = [
        HoldView.of("named" if r.name else "reader", r.name or reader, r.since, state)
        for reader, r in state.readers.items()
        if r.since.elements
    ]
    critical = [HoldView.of("critical", reader, c.since, state) for reader, c in state.critical.items()]
    policy = [HoldView.of("retention", "retain", p.hold, state) for p in state.retention.values()]
    consumers = [
        HoldView.of("subscription", key, consumer.hold, state)
        for key, consumer in state.subscriptions.items()
        if not consumer.expired
    ]
    return sorted(
        [*readers, *critical, *consumers, *policy], key=lambda hold: (not hold.pins, -_far(hold.behind))
    )


def _far(behind: int | None) -> float:
    return -inf if behind is None else behind


def _behind(since: Antichain, upper: Antichain) -> int | None:
    if len(since.elements) != 1 or len(upper.elements) != 1:
        return None
    first, last = since.time, upper.time
    return last - first if isinstance(first, int) and isinstance(last, int) else None
