"""A view of a shard's state for people, dashboards and tests."""

from collections.abc import Iterable
from math import inf
from typing import Literal, NamedTuple

from pydantic import BaseModel

from aiopersist.base.frontier import Antichain
from aiopersist.maintenance.tags import TagView, views_of_tags
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
from aiopersist.state.streams import Arrangement
from aiopersist.subscription.view import SubscriptionView, views_of

GROWTH_S = 60.0  # a rate is over about this time
GROWTH_MIN_S = 10.0  # no rate over less


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
    """A hold: its owner, and the frontier from which on it keeps history."""

    kind: Literal["reader", "named", "critical", "subscription", "retention"]
    """A leased reader, a named hold, a critical since, a subscription, or the policy of `retain`."""
    id: str
    """The reader's id, the name of the hold or the subscription, or the id of the critical since."""
    owner: str | None
    """Its client and process, `name/host:pid`; `None` for a critical since, a policy, a subscription without
    an owner, and a hold of an earlier version of the library."""
    since: Antichain
    behind: int | None
    """Times between its since and the shard's upper; `None` unless both are one int."""
    pins: bool
    """Whether it stops the shard's since from moving."""
    until: float | None = None
    """When the subscription expires, or the lease ends unless renewed, in Unix seconds of the consensus
    store's clock; `None`: it stays until somebody ends it."""

    @classmethod
    def of(
        cls,
        kind: str,
        id: str,
        since: Antichain,
        state: State,
        signed: str | None = None,
        until: float | None = None,
    ) -> "HoldView":
        return cls.model_validate(
            {
                "until": None if until == inf else until,
                "kind": kind,
                "id": id,
                "owner": signer(signed),
                "since": since,
                "behind": _behind(since, state.upper),
                "pins": bool(since.elements) and since <= state.since,
            }
        )


class StreamSummary(BaseModel, frozen=True):
    """One stream of an `Indexed`."""

    since: int
    seal: int
    """Updates at times before it are complete."""
    unsealed_batches: int
    trace_batches: int
    updates: int
    """In all its batches."""
    bytes: int
    """In the blobs of its parts."""

    @classmethod
    def of(cls, arrangement: Arrangement) -> "StreamSummary":
        parts = list(arrangement.parts)
        return cls(
            since=arrangement.since,
            seal=arrangement.seal,
            unsealed_batches=len(arrangement.unsealed),
            trace_batches=len(arrangement.trace),
            updates=sum(part.rows for part in parts),
            bytes=sum(part.size for part in parts),
        )


class ShardView(BaseModel, frozen=True):
    """One shard, table or `Indexed` at its newest version."""

    shard_id: str
    since: Antichain
    upper: Antichain
    clock: Clock
    """The meaning of its times: `logical` ones count, `wall` ones are microseconds since 1970."""
    table: bool
    """Whether it is a table."""
    finalized: bool
    seqno: int
    earliest_seqno: int
    """The oldest version that the consensus store has."""
    live_diffs: int
    """The number of versions in the consensus store."""
    batches: list[BatchView]
    """Oldest first."""
    levels: dict[int, Level]
    """The spine: neighbouring batches, by ordinal, that count as one."""
    claims: dict[int, Claim]
    readers: dict[str, LeasedReader]
    critical: dict[str, CriticalReader]
    holds: list[HoldView]
    """All holds; those that pin since first, the furthest behind before others. So a forgotten critical since
    is near the begin; `critical_since(...)` and `release` end it."""
    retention: Retention | None
    subscriptions: dict[str, SubscriptionView]
    """By name, shares as `name[i/n]`."""
    tags: dict[str, TagView]
    """By name. A tag keeps blobs, and is no hold: history and versions go on."""
    writers: dict[str, Writer]
    transactions: dict[str, TransactionRecord]
    rollups: dict[int, Rollup]
    streams: dict[str, StreamSummary] | None
    """The streams of an `Indexed`, by name; it has no batches. `None` for a shard or a table."""
    written_at: float
    """When this version was written, in Unix seconds of the consensus store's clock."""
    now: float
    """The time of this view, by the same clock: a lease that ends before now is overdue."""
    blob_bytes: int
    """Bytes of the blobs of parts that the newest version names."""
    inline_bytes: int


async def inspect(shard: Shard) -> ShardView:
    """A linearizable view; `UnknownShard`, `ShardFinalized`. Two requests."""
    state = await shard.open()
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
        tags=views_of_tags(state),
        writers=state.writers,
        transactions=dict(state.transactions),
        rollups=state.rollups,
        streams=_streams(state),
        written_at=state.at,
        now=now,
        blob_bytes=sum(part.size for part in state.parts if part.key is not None),
        inline_bytes=state.inline_bytes,
    )


def _streams(state: State) -> dict[str, StreamSummary] | None:
    if state.streams is None:
        return None
    arrangements = state.streams.arrangements
    return {name: StreamSummary.of(arrangements.get(name, Arrangement())) for name in state.streams.names}


def _holds(state: State) -> list[HoldView]:
    readers = [
        HoldView.of(*_named(reader, r), r.since, state, r.owner if r.name else reader, lease_end(r))
        for reader, r in state.readers.items()
        if r.since.elements
    ]
    critical = [HoldView.of("critical", reader, c.since, state) for reader, c in state.critical.items()]
    policy = [HoldView.of("retention", "retain", p.hold, state) for p in state.retention.values()]
    consumers = [
        HoldView.of("subscription", key, consumer.hold, state, consumer.owner, consumer.expires_at)
        for key, consumer in state.subscriptions.items()
        if not consumer.expired
    ]
    holds = [*readers, *critical, *consumers, *policy]
    return sorted(holds, key=lambda hold: (not hold.pins, hold.behind is None, -(hold.behind or 0)))


def _named(reader: str, record: LeasedReader) -> tuple[str, str]:
    """The kind and the id of a leased reader's hold."""
    return ("named", record.name) if record.name else ("reader", reader)


def lease_end(lease: LeasedReader) -> float:
    """When its lease ends without another heartbeat."""
    return lease.heartbeat + lease.lease_s


def signer(id: str | None) -> str | None:
    """The client and process that signed an id, `name/host:pid`, if one did."""
    return (id or "").partition("@")[2] or None


def _behind(since: Antichain, upper: Antichain) -> int | None:
    if len(since.elements) != 1 or len(upper.elements) != 1:
        return None
    first, last = since.time, upper.time
    return last - first if isinstance(first, int) and isinstance(last, int) else None


# --- for operators -------------------------------------------------------------------------------


class Keeper(NamedTuple):
    """The reader that may still read the oldest version: no blob that was replaced since can be deleted."""

    reader: str
    versions: int
    """Versions since then."""
    lease_left_s: float


def keeper(view: ShardView) -> Keeper | None:
    """The reader that keeps the oldest version, if one keeps an old version."""
    readers = [(r.seqno_hold, name) for name, r in view.readers.items() if r.seqno_hold is not None]
    if not readers or (oldest := min(readers))[0] >= view.seqno:
        return None
    lease = view.readers[oldest[1]]
    return Keeper(oldest[1], view.seqno - oldest[0], lease_end(lease) - view.now)


class Growth(NamedTuple):
    """The rate at which a shard grows."""

    updates_per_s: float
    bytes_per_s: float
    span_s: float
    """The rate is over this time until now."""


def growth(view: ShardView) -> Growth | None:
    """The recent growth of a shard on a wall clock: see `growth_of`."""
    sizes = ((b.lower, b.len, b.blob_bytes + b.inline_bytes) for b in reversed(view.batches))
    return growth_of(sizes, view.now) if view.clock == "wall" else None


def growth_of(newest_first: Iterable[tuple[Antichain, int, int]], now: float) -> Growth | None:
    """The growth over the newest batches that reach back a minute, from their lowers, updates and bytes; or
    over at least `GROWTH_MIN_S`, if the batch before reaches back to the beginning of time. Does not count
    updates that a compaction has cancelled."""
    updates = size = 0
    rate: Growth | None = None
    for lower, rows, count in newest_first:
        updates, size = updates + rows, size + count
        began = now - (lower.time if isinstance(lower.time, int) else 0) / 1_000_000
        if GROWTH_MIN_S <= began < now:
            rate = Growth(updates / began, size / began, began)
        if began >= GROWTH_S:
            break
    return rate
