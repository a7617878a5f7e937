"""Positions of subscriptions, and the records that a shard keeps of them."""

from collections.abc import Mapping
from math import inf

from aiopersist.base.frontier import Antichain, int_time, last_before, predecessor
from aiopersist.state.record import Record


class WithinContents(Record, frozen=True, kw_only=True):
    """A place within the contents at one time, which come in the order of rows."""

    as_of: int
    key: str | None = None
    """The key from which on the rest is read, as canonical JSON; `None`: from the first row on."""
    is_key_done: bool = False
    """All rows of `key` lie before the place, however many they are."""
    past: int = 0
    """Else: the rows from `key` on that lie before it. A key may have many values."""
    schema_id: int | None = None
    """The schema by which it was read: rows and keys of others may be more, or fewer. `None`: before any."""
    chosen: str = ""
    """Which keys were chosen; empty: all."""
    rows: int = 0
    """All rows that lie before it: places are ordered by it."""


class Position(Record, frozen=True, kw_only=True):
    """How far a consumer is. Int times only."""

    frontier: Antichain
    """Everything before it is behind; of the contents at one time: that time."""
    contents: WithinContents | None = None
    """The place within the contents, as long as these come."""

    def is_before(self, other: "Position") -> bool:
        """Whether this is strictly earlier."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[float, int]:
        time = int_time(self.frontier)
        return (inf if time is None else time, -1 if self.contents is None else self.contents.rows)

    @property
    def hold(self) -> Antichain:
        """The history that reading on from here needs."""
        return self.frontier if self.contents is not None else predecessor(self.frontier)

    @property
    def as_of(self) -> int:
        """The time of the contents, or the last one that is behind: reading on needs since at or before
        it."""
        return last_before(self.frontier) if self.contents is None else self.contents.as_of


class SubscriptionRecord(Record, frozen=True, kw_only=True):
    """One consumer, and how far it has acknowledged. It keeps since at its position, and never moves it."""

    name: str
    share: tuple[int, int] | None = None
    """`(i, n)`: it is one of n that divide the keys."""
    position: Position
    owner: str | None
    """The opening that may move the position. A take-over replaces it; `None`: that opening was closed."""
    heartbeat: float
    lease_s: float
    token: str = ""
    """The token of the command that moved the position last: a proof, after a lost answer."""
    last_ack: float | None = None
    expire_after_s: float | None = None
    waits_since: float | None = None
    """Since when there is something that is not acknowledged; kept only if it may expire."""
    expired: bool = False
    """It has given up its position, and holds nothing."""

    @property
    def hold(self) -> Antichain:
        """The history that it keeps."""
        return Antichain() if self.expired else self.position.hold

    @property
    def key(self) -> str:
        """Its key in the state."""
        return key_of(self.name, self.share)

    @property
    def idle_since(self) -> float | None:
        """Since when it acknowledges nothing though there is something; `None`: it does not wait, or never
        expires."""
        if self.expired or self.expire_after_s is None or self.waits_since is None:
            return None
        return max(self.waits_since, self.last_ack or 0.0)

    @property
    def expires_at(self) -> float:
        """When it gives up its position, unless an acknowledgement comes."""
        idle_since = self.idle_since
        return inf if idle_since is None or self.expire_after_s is None else idle_since + self.expire_after_s


def key_of(name: str, share: tuple[int, int] | None) -> str:
    """The key of a subscription in the state. Not by a format, which for a member of an enum is another
    text."""
    return name if share is None else name + f"[{share[0]}/{share[1]}]"


def changed_by_time(
    records: Mapping[str, SubscriptionRecord], now: float, latest: float
) -> dict[str, SubscriptionRecord]:
    """The subscriptions that any commit changes: those that expire; and those with moments beyond `latest`,
    which come from a clock that was wrong, with moments of now."""
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
