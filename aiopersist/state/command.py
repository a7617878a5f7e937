"""Commands: all transitions of a shard, as pure functions `(state, context) -> Commit | Keep`.

A command decides on the exact state that its version will follow, and returns its changes. It does no I/O and
reads no clock and no settings: `now` comes with the context, sampled anew for each attempt; limits come with
the command. One loop makes commands durable (`shard/commit.py`). It runs a command again, on the newer state,
when another version came first.

`Keep` means that no version is needed. With an `error` it is a refusal, raised only after a look at a fresh
state. Without an error it is a success that follows from a frontier (or a transaction number) that never goes
back, so a cached state is enough.

A commit renews its own handle, drops the readers, writers and tags that are overdue, and ends the
subscriptions that expire. So no process is needed to end leases. A heartbeat in the future comes from a wrong
clock. A commit sets it to now, so a lease ends at most its own length after the clock is right again.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Protocol

from msgspec import Struct

from aiopersist.base.errors import BatchExpired, Error, ShardFinalized, UnknownShard
from aiopersist.base.frontier import Antichain
from aiopersist.state.diff import Changes
from aiopersist.state.model import CriticalReader, LeasedReader, Retention, State, Writer
from aiopersist.state.position import SubscriptionRecord, changed_by_time

AHEAD_S = 1.0  # two processes read the store's clock with a smaller difference


class Context(Struct, frozen=True):
    """The facts that a command may know beside the state, sampled anew for each attempt."""

    now: float
    """The consensus store's clock, Unix seconds."""
    pinned: int | None = None
    """The oldest version that an open snapshot of this process reads."""
    seen: int = 0
    """The first time beyond each commit time on a wall clock that this client has seen."""

    @property
    def wall(self) -> int:
        """The time of a commit on a wall clock, in microseconds since 1970, unless the upper is later."""
        return max(micros(self.now), self.seen)


def micros(seconds: float) -> int:
    """A moment as a time of a wall clock."""
    return max(int(seconds * 1_000_000), 0)


class Commit(Struct, frozen=True):
    """A version must be written; once it is, the command returns `result`."""

    changes: Changes
    result: Any = None


class Keep(Struct, frozen=True):
    """No version is needed: a success with `result`, or, with `error`, a refusal."""

    result: Any = None
    error: Error | None = None


class Command(Protocol):
    """One transition. A command that must not be applied twice also has `happened(state) -> bool | None`:
    whether a *later* state proves that it was applied, if its own version is gone (`None`: unknown). A
    command of a writer has its id as `writer`: when a cancelled attempt is settled, the heartbeat that takes
    its version renews the writer."""

    def __call__(self, state: State | None, context: Context) -> Commit | Keep: ...


def live(state: State | None) -> State:
    """`state` itself, if the shard exists and is not finalized. Its errors need no fresh state: a finalized
    shard stays finalized, and no command runs before the shard was created."""
    if state is None:
        raise UnknownShard("the shard was never created")
    if state.finalized:
        raise ShardFinalized("it is finalized", shard_id=state.shard)
    return state


def refusal_if_gone(state: State, writer: str) -> Keep | None:
    """The refusal to name a blob of `writer` if the writer is no longer registered."""
    if writer in state.writers:
        return None
    return Keep(error=BatchExpired(f"writer {writer} is no longer registered"))


def renewed(state: State, writer: str, context: Context) -> Writer:
    return state.writers[writer].replace(heartbeat=context.now)


def seqno_hold_of(state: State, context: Context) -> int:
    return state.seqno if context.pinned is None else min(context.pinned, state.seqno)


def commit(
    state: State,
    context: Context,
    *,
    result: Any = None,
    moved: bool = False,
    drop: Mapping[str, tuple[int | str, ...]] | None = None,
    **changes: Any,
) -> Commit:
    """The commit of `changes`. It also drops overdue readers and writers, expires subscriptions, and sets
    heartbeats in the future to now. `moved`: the hold of the commit moves since."""
    dropped = {name: keys for name, keys in (drop or {}).items() if keys}
    if state.subscriptions or state.tags or not are_leases_in_order(state, context.now):
        for name, records in clock_corrections(state, context, changes).items():
            changes[name] = {**changes.get(name, {}), **records}
        dropped |= overdue(state, context, changes)
    if "writers" in dropped and (void := claims_of(state, dropped["writers"])):
        kept = (at for at in void if at not in changes.get("claims", ()))
        dropped["claims"] = tuple({*dropped.get("claims", ()), *kept})
    if moved:
        since = state.since.join(meet_of_holds(state, dropped.get("readers", ()), changes))
        if since != state.since:
            changes["since"] = since
    if dropped:
        changes["drop"] = dropped
    return Commit(Changes(**{name: value for name, value in changes.items() if value != {}}), result)


def claims_of(state: State, writers: tuple[int | str, ...]) -> tuple[int, ...]:
    """The keys of the claims of `writers`. Claims end with their writers."""
    return tuple(at for at, claim in state.claims.items() if claim.writer in writers) if writers else ()


def meet_of_holds(state: State, dropped: tuple[int | str, ...], changes: Mapping[str, Any]) -> Antichain:
    """How far since may go: the meet of all holds, whether they move since or only keep it."""
    readers: dict[str, LeasedReader] = {**state.readers, **changes.get("readers", {})}
    critical: dict[str, CriticalReader] = {**state.critical, **changes.get("critical", {})}
    policies: dict[int, Retention] = {**state.retention, **changes.get("retention", {})}
    consumers: dict[str, SubscriptionRecord] = {**state.subscriptions, **changes.get("subscriptions", {})}
    since = Antichain()
    for reader, record in readers.items():
        if reader not in dropped:
            since = since.meet(record.since)
    holds = [reader.since for reader in critical.values()]
    holds += [policy.hold for policy in policies.values()]
    for hold in (*holds, *(consumer.hold for consumer in consumers.values())):
        since = since.meet(hold)
    return since


def is_ahead(at: float, now: float) -> bool:
    """Whether only a wrong clock can have given `at`."""
    return at > now + AHEAD_S


def clock_corrections(
    state: State, context: Context, changes: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """By map, the records that any commit corrects, without those in `changes`: readers and writers with
    heartbeats in the future get heartbeats of now; subscriptions expire."""
    latest = context.now + AHEAD_S
    corrected: dict[str, dict[str, Any]] = {
        name: {
            key: record.replace(heartbeat=context.now)
            for key, record in getattr(state, name).items()
            if record.heartbeat > latest and key not in changes.get(name, ())
        }
        for name in ("readers", "writers")
    }
    if state.subscriptions:
        kept = {k: r for k, r in state.subscriptions.items() if k not in changes.get("subscriptions", ())}
        corrected["subscriptions"] = changed_by_time(kept, context.now, latest)
    return {name: records for name, records in corrected.items() if records}


def are_leases_in_order(state: State, now: float) -> bool:
    """Whether no lease has run out, and no heartbeat lies in the future. Then `clock_corrections` and
    `overdue` have no reader and no writer."""
    latest = now + AHEAD_S
    leased: Iterable[Writer | LeasedReader] = chain(state.writers.values(), state.readers.values())
    for record in leased:
        if record.heartbeat > latest or record.heartbeat + record.lease_s < now:
            return False
    return True


def overdue(state: State, context: Context, changes: Mapping[str, Any]) -> dict[str, tuple[int | str, ...]]:
    """The keys of the readers, writers and tags that a commit of `changes` drops: they have run out."""
    gone: dict[str, tuple[int | str, ...]] = {
        name: tuple(
            key
            for key, record in getattr(state, name).items()
            if record.heartbeat + record.lease_s < context.now and key not in changes.get(name, ())
        )
        for name in ("readers", "writers")
    }
    gone["tags"] = tuple(
        name
        for name, tag in state.tags.items()
        if tag.has_expired(context.now) and name not in changes.get("tags", ())
    )
    return {name: keys for name, keys in gone.items() if keys}
