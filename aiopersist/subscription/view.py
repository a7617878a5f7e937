"""What a state says of its subscriptions."""

from pydantic import BaseModel

from aiopersist.base.frontier import Antichain, int_time
from aiopersist.state.model import State
from aiopersist.state.position import SubscriptionRecord
from aiopersist.state.subscriptions import batches_beyond, has_expired


class SubscriptionView(BaseModel, frozen=True):
    """One consumer, or one share."""

    position: Antichain
    """Everything before it is acknowledged."""
    contents: bool
    """Whether it stands within the contents, which come first."""
    lag: int | None
    """Times between its position and the shard's upper; `None` once the shard is closed, and it is not at the
    end."""
    lag_updates: int
    """How many updates may be beyond its position, by the descriptions of batches: at most so many."""
    held_bytes: int
    """Bytes of the parts that may hold these: what is kept for it."""
    owner: str | None
    """The opening that has it, and after an `@` its client and process; `None` without a heartbeat within its
    lease."""
    last_ack: float | None
    """When it acknowledged last, in Unix seconds of the consensus store's clock."""
    expired: bool
    """Whether it gave up its position, and holds nothing."""

    @classmethod
    def _of(cls, record: SubscriptionRecord, state: State, now: float) -> "SubscriptionView":
        position, expired = record.position, has_expired(record, now)
        ahead = batches_beyond(state, position)
        is_alive = now <= record.heartbeat + record.lease_s
        return cls(
            position=position.frontier,
            contents=position.contents is not None,
            lag=_lag(position.frontier, state.upper),
            lag_updates=sum(batch.len for batch in ahead),
            held_bytes=0 if expired else sum(part.size for batch in ahead for part in batch.parts),
            owner=record.owner if is_alive and not expired else None,
            last_ack=record.last_ack,
            expired=expired,
        )


def views_of(state: State, now: float) -> dict[str, SubscriptionView]:
    """All subscriptions of the shard, by name."""
    return {key: SubscriptionView._of(record, state, now) for key, record in state.subscriptions.items()}


def _lag(position: Antichain, upper: Antichain) -> int | None:
    first, last = int_time(position), int_time(upper)
    if first is None:
        return 0
    return None if last is None else max(last - first, 0)
