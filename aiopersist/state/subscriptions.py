"""Commands of subscriptions: consumers whose position is kept in the shard's own state.

- A position only moves forward, and only by the opening that the record names as its *owner*. Owners are
  fresh, so a take-over fences the earlier opening for ever.
- A subscription keeps since at its position and never moves it. A new one takes its position and its hold in
  one version, so nothing is lost in between.
- A subscription that may expire does so in any commit after its time. Then it holds no history.

So refusals are final: a passed position, a replaced owner and a dropped name never come back. Any known state
is enough to decide them.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import takewhile
from typing import Any, NamedTuple

from msgspec import Struct

from aiopersist.base.errors import (
    Error,
    InvalidUsage,
    OpaqueMismatch,
    SinceViolation,
    SubscriptionExpired,
    UsageKind,
    shown,
)
from aiopersist.base.frontier import Antichain, last_before, minimum
from aiopersist.state.command import Commit, Context, Keep, commit, live
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.position import Position, SubscriptionRecord, WithinContents, subscription_key


class Beginning(StrEnum):
    """Where a new subscription begins, if not at a position."""

    SNAPSHOT = "snapshot"
    """With the current contents."""
    NOW = "now"
    """At the upper."""


class Ack(NamedTuple):
    """An acknowledgement: all updates before `position` are done."""

    key: str
    owner: str
    position: Position


class OpenSubscription(Struct, frozen=True):
    """Take over the subscription, or create it. The result is its record."""

    name: str
    share: tuple[int, int] | None
    owner: str
    lease_s: float
    expire_after_s: float | None
    start: Position | Beginning | None
    """Where a new or expired subscription begins; `None`: with the contents, but not an expired one."""
    resume: Position | None = None
    """The position where it continues, or begins."""

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        key = subscription_key(self.name, self.share)
        earlier = state.subscriptions.get(key)
        over = [at for at, record in self._of_name(state).items() if has_expired(record, context.now)]
        if self._divided_otherwise(state, over):
            return Keep(error=self._of_other_shares(state))
        if over and (key in over or earlier is None) and self.start is None:
            return Keep(error=_expired(self.name))
        if earlier is None or key in over:
            earlier, position = None, self.resume or _begun(self.start, state)
        else:
            position = earlier.position if self.resume is None else self.resume
            if position.is_before(earlier.position):
                return Keep(error=SinceViolation(position.as_of, earlier.position.hold))
        if not state.since <= position.hold:
            return Keep(error=SinceViolation(position.as_of, state.since))
        opened: dict[str, Any] = {
            "position": position,
            "owner": self.owner,
            "heartbeat": context.now,
            "lease_s": self.lease_s,
            "expire_after_s": self.expire_after_s,
        }
        if earlier is None:
            record = SubscriptionRecord(name=self.name, share=self.share, **opened)
        else:
            record = earlier.replace(**opened, token="")
        record = record.replace(waits_since=_waits_since(record, earlier, state, context.now))
        gone = tuple(at for at in over if not _divides_alike(state.subscriptions[at], self.share))
        drop = {"subscriptions": gone}
        return commit(state, context, result=record, drop=drop, subscriptions={key: record})

    def _of_name(self, state: State) -> dict[str, SubscriptionRecord]:
        return {at: record for at, record in state.subscriptions.items() if record.name == self.name}

    def _divided_otherwise(self, state: State, over: Iterable[str]) -> bool:
        return any(
            at not in over and not _divides_alike(record, self.share)
            for at, record in self._of_name(state).items()
        )

    def _of_other_shares(self, state: State) -> InvalidUsage:
        text = (
            f"subscription {self.name!r} with share={self.share} while there are "
            f"{shown(sorted(self._of_name(state)))}: drop_subscription ends all of them"
        )
        return InvalidUsage(UsageKind.INVALID_SHARE, text, share=self.share)

    def happened(self, state: State) -> bool | None:
        """Unknown if not: a later opening may have taken it over."""
        record = state.subscriptions.get(subscription_key(self.name, self.share))
        return True if record is not None and record.owner == self.owner else None


class Acknowledge(Struct, frozen=True):
    """Move positions forward. With `is_strict` a position that was passed before is refused (`CONSUMED`), so
    that other changes in the commit are not written twice; else it is no change."""

    acks: tuple[Ack, ...]
    token: str
    is_strict: bool = False

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        moved = acknowledged(state, self.acks, context.now, self.token, is_strict=self.is_strict)
        if isinstance(moved, Error):
            return Keep(error=moved)
        return commit(state, context, subscriptions=moved) if moved else Keep()

    def happened(self, state: State) -> bool | None:
        """The token proves it. An owner with a position before the acknowledged one proves the contrary."""
        records = [(ack, state.subscriptions.get(ack.key)) for ack in self.acks]
        mine = [(ack, record) for ack, record in records if record is not None and record.owner == ack.owner]
        if any(record.token == self.token for _, record in records if record is not None):
            return True
        if any(record.position.is_before(ack.position) for ack, record in mine):
            return False
        return True if not self.is_strict and len(mine) == len(records) else None


def acknowledged(
    state: State, acks: Iterable[Ack], now: float, token: str, *, is_strict: bool
) -> dict[str, SubscriptionRecord] | Error:
    """The records that the acknowledgements change, or the refusal of one of them."""
    moved: dict[str, SubscriptionRecord] = {}
    for ack in acks:
        current = moved.get(ack.key) or state.subscriptions.get(ack.key)
        if (refusal := refused(ack, current)) is not None:
            return refusal
        assert current is not None
        if not current.position.is_before(ack.position):
            if is_strict:
                return consumed(ack.key)
            continue
        record = current.replace(position=ack.position, token=token, last_ack=now, heartbeat=now)
        moved[ack.key] = record.replace(waits_since=_waits_since(record, current, state, now))
    return moved


def refused(ack: Ack, record: SubscriptionRecord | None) -> Error | None:
    """The refusal of `ack` if its opening may not move the position."""
    if record is None or record.owner != ack.owner:
        return _lost(ack.key, ack.owner, record)
    return _expired(ack.key) if record.expired else None


def _lost(key: str, owner: str, record: SubscriptionRecord | None) -> OpaqueMismatch:
    """The refusal of an opening that is no longer the owner."""
    what = "was dropped" if record is None else "was taken over by another opening"
    actual = None if record is None else record.owner
    return OpaqueMismatch(owner, actual, text=f"subscription {key!r} {what}")


def consumed(key: str) -> InvalidUsage:
    """The refusal of a position that was passed before."""
    return InvalidUsage(UsageKind.CONSUMED, f"subscription {key!r} has acknowledged this step already")


def skipped(key: str) -> InvalidUsage:
    """The refusal of a position that a later acknowledgement has passed."""
    text = (
        f"subscription {key!r} has acknowledged a later step: this one counts as done, though nothing shows "
        "that its own commit happened"
    )
    return InvalidUsage(UsageKind.SKIPPED, text)


def _expired(name: str) -> SubscriptionExpired:
    return SubscriptionExpired(f"subscription {name!r} has given up its position: say where it begins anew")


class BeatSubscription(Struct, frozen=True):
    """Renew the heartbeat of the owner."""

    key: str
    owner: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        current = state.subscriptions.get(self.key)
        if current is None or current.owner != self.owner:
            return Keep(error=_lost(self.key, self.owner, current))
        record = current.replace(heartbeat=context.now)
        return commit(state, context, subscriptions={self.key: record})


class LeaveSubscription(Struct, frozen=True):
    """Acknowledge for the last time, and give up the ownership; no change if it is lost."""

    ack: Ack
    token: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or state.finalized:
            return Keep()
        current = state.subscriptions.get(self.ack.key)
        if current is None or current.owner != self.ack.owner:
            return Keep()
        moved = acknowledged(state, [self.ack], context.now, self.token, is_strict=False)
        record = current if isinstance(moved, Error) else moved.get(self.ack.key, current)
        return commit(state, context, subscriptions={self.ack.key: record.replace(owner=None)})


class DropSubscription(Struct, frozen=True):
    """End the subscription of that name with all its shares. The result is whether there was one."""

    name: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        keys = tuple(key for key, record in state.subscriptions.items() if record.name == self.name)
        if not keys:
            return Keep(result=False)
        return commit(state, context, result=True, drop={"subscriptions": keys})

    def happened(self, state: State) -> bool | None:
        """Another process may have created it anew."""
        return None if any(r.name == self.name for r in state.subscriptions.values()) else True


def has_expired(record: SubscriptionRecord, now: float) -> bool:
    """Whether it has given up its position, or will do so in the next commit."""
    return record.expired or record.expires_at < now


def is_passed(state: State, position: Position) -> bool:
    """Whether no update can be beyond the position, by the descriptions of batches."""
    return not any(batch.parts for batch in batches_beyond(state, position))


def batches_beyond(state: State, position: Position) -> list[HollowBatch]:
    """The batches that may have updates beyond the position, or contents that it has not passed."""
    if position.contents is not None:
        return list(state.batches.values())
    newest_first = reversed(state.batches.values())
    return list(takewhile(lambda batch: not batch.upper <= position.frontier, newest_first))


def _waits_since(
    record: SubscriptionRecord, before: SubscriptionRecord | None, state: State, now: float
) -> float | None:
    """The moment since which updates wait for the subscription, whose record was `before`. If its position
    does not change, the old moment counts: batches may no longer tell, since an earlier version of the
    library may have merged passed and empty batches."""
    if record.expire_after_s is None:
        return None
    if before is not None and before.expire_after_s is not None and before.position == record.position:
        return before.waits_since
    earlier = None if before is None else before.waits_since
    return None if is_passed(state, record.position) else now if earlier is None else earlier


def with_new_updates(
    state: State, changed: Mapping[str, SubscriptionRecord], now: float
) -> dict[str, SubscriptionRecord]:
    """The changed records after an append: subscriptions that may expire now have updates to acknowledge."""
    records = {**state.subscriptions, **changed}
    begin = {
        key: record.replace(waits_since=now)
        for key, record in records.items()
        if record.expire_after_s is not None and record.waits_since is None and not record.expired
    }
    return {**changed, **begin}


def _divides_alike(record: SubscriptionRecord, share: tuple[int, int] | None) -> bool:
    return (record.share or (0, 0))[1] == (share or (0, 0))[1]


def _begun(start: Position | Beginning | None, state: State) -> Position:
    """Where a new subscription begins."""
    if isinstance(start, Position):
        return start
    if start is Beginning.NOW or state.upper == minimum(None):
        return Position(frontier=state.upper)
    as_of = last_before(state.upper)
    return Position(frontier=Antichain(as_of), contents=WithinContents(as_of=as_of))
