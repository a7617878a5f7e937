"""Positions of subscriptions, and their records in the state."""

from collections.abc import Mapping
from math import inf

from aiopersist.base.frontier import Antichain, int_time, last_before, predecessor
from aiopersist.state.record import Record


class WithinContents(Record, frozen=True, kw_only=True):
    """A place within the contents at one time, which come in the order of rows."""

    as_of: int
    key: str | None = None
    """The key where reading continues, as canonical JSON; `None`: at the first row."""
    is_key_done: bool = False
    """Whether all rows of `key` are before the place."""
    past: int = 0
    """If not, the number of rows from `key` on that are before it. A key may have many values."""
    schema_id: int | None = None
    """The schema of the reader: others may give more or fewer rows and keys. `None`: nothing was read."""
    chosen: str = ""
    """The chosen keys; empty: all."""
    rows: int = 0
    """The number of all rows before it, which orders places."""


class Position(Record, frozen=True, kw_only=True):
    """The position of a consumer. Int times only."""

    frontier: Antichain
    """All updates before it are done. Within the contents at one time: that time."""
    contents: WithinContents | None = None
    """The place within the contents, while these are read."""

    def is_before(self, other: "Position") -> bool:
        """Whether this position is strictly earlier."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[float, int]:
        time = int_time(self.frontier)
        return (inf if time is None else time, -1 if self.contents is None else self.contents.rows)

    @property
    def hold(self) -> Antichain:
        """The history that the consumer still needs."""
        return self.frontier if self.contents is not None else predecessor(self.frontier)

    @property
    def as_of(self) -> int:
        """The time of the contents, or the last time that is done. Reading on needs since at or before it."""
        return last_before(self.frontier) if self.contents is None else self.contents.as_of


class SubscriptionRecord(Record, frozen=True, kw_only=True):
    """One consumer, and the position that it has acknowledged, where it holds since."""

    name: str
    share: tuple[int, int] | None = None
    """`(i, n)`: number i of n consumers that divide the keys."""
    position: Position
    owner: str | None
    """The opening that may move the position. A take-over replaces it; `None`: the opening was closed."""
    heartbeat: float
    lease_s: float
    token: str = ""
    """The token of the command that moved the position last: a proof after a lost answer."""
    last_ack: float | None = None
    expire_after_s: float | None = None
    waits_since: float | None = None
    """The moment since which there are unacknowledged updates; kept only if the subscription may expire."""
    expired: bool = False
    """Whether it has given up its position: then it holds no history."""

    @property
    def hold(self) -> Antichain:
        """The history that it holds."""
        return Antichain() if self.expired else self.position.hold

    @property
    def key(self) -> str:
        """Its key in the state."""
        return subscription_key(self.name, self.share)

    @property
    def idle_since(self) -> float | None:
        """The moment since which it could acknowledge; `None`: there is nothing, or it never expires."""
        if self.expired or self.expire_after_s is None or self.waits_since is None:
            return None
        return max(self.waits_since, self.last_ack or 0.0)

    @property
    def expires_at(self) -> float:
        """The moment when it gives up its position, unless it acknowledges before."""
        idle_since = self.idle_since
        return inf if idle_since is None or self.expire_after_s is None else idle_since + self.expire_after_s


def subscription_key(name: str, share: tuple[int, int] | None) -> str:
    """The key of a subscription in the state. Not by a format, which changes members of an enum."""
    return name if share is None else name + f"[{share[0]}/{share[1]}]"


def changed_by_time(
    records: Mapping[str, SubscriptionRecord], now: float, latest: float
) -> dict[str, SubscriptionRecord]:
    """The subscriptions that any commit changes: those that expire; and those with moments beyond `latest`,
    which come from a wrong clock and become now."""
    changed = {}
    for key, record in records.items():
        moments = record.heartbeat, record.waits_since, record.last_ack
        heartbeat, waits_since, last_ack = (
            now if moment is not None and moment > latest else moment for moment in moments
        )
        if (heartbeat, waits_since, last_ack) != moments:
            changed[key] = record.replace(heartbeat=heartbeat, waits_since=waits_since, last_ack=last_ack)
        elif record.expires_at < now:
            changed[key] = record.replace(expired=True)
    return changed
