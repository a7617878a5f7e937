"""A view of the subscriptions in a state."""

from pydantic import BaseModel

from aiopersist.base.frontier import Antichain, int_time
from aiopersist.state.model import State
from aiopersist.state.position import SubscriptionRecord
from aiopersist.state.subscriptions import batches_beyond, has_expired


class SubscriptionView(BaseModel, frozen=True):
    """One consumer or share."""

    position: Antichain
    """Everything before it is acknowledged."""
    contents: bool
    """Whether its position is within the contents, which come first."""
    lag: int | None
    """Times between its position and the shard's upper; `None` if the closed shard has more."""
    lag_updates: int
    """An upper bound of the updates beyond its position, from the descriptions of batches."""
    held_bytes: int
    """Bytes of the parts that may have these updates: the subscription keeps them."""
    owner: str | None
    """Its opening, and after an `@` its client and process; `None` without a heartbeat within its lease."""
    last_ack: float | None
    """The time of its last acknowledgement, in Unix seconds of the consensus store's clock."""
    expired: bool
    """Whether it has lost its position, and holds nothing."""

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
