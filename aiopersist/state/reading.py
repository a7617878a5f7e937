"""Commands of readers: leases and holds. A hold is a reader of the state."""

from msgspec import Struct

from aiopersist.base.errors import LeaseExpired, OpaqueMismatch, SinceViolation
from aiopersist.base.frontier import Antichain
from aiopersist.state.command import Commit, Context, Keep, commit, live, seqno_hold_of
from aiopersist.state.diff import Changes
from aiopersist.state.model import LeasedReader, State


class RegisterReader(Struct, frozen=True):
    """Register a leased reader that holds history at `since` (empty: none). With `reads` it also holds the
    versions from now on, so that it may read their blobs."""

    reader: str
    since: Antichain
    lease_s: float
    reads: bool = True

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if not state.since <= self.since:
            return Keep(error=SinceViolation(self.since, state.since))
        record = LeasedReader(
            since=self.since,
            seqno_hold=seqno_hold_of(state, context) if self.reads else None,
            heartbeat=context.now,
            lease_s=self.lease_s,
        )
        return commit(state, context, readers={self.reader: record})


class TakeNamedHold(Struct, frozen=True):
    """Take over the named hold at its frontier, or create it at `since` (`None`: the shard's since). The
    earlier owner's later calls are refused. The hold keeps history, but no versions: it does not read."""

    name: str
    owner: str
    since: Antichain | None
    lease_s: float

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        reader = named_reader(self.name)
        earlier = state.readers.get(reader)
        since = earlier.since if earlier else self.since or state.since
        if not state.since <= since:
            return Keep(error=SinceViolation(since, state.since))
        fields = {"heartbeat": context.now, "lease_s": self.lease_s, "owner": self.owner, "seqno_hold": None}
        new = LeasedReader(since=since, name=self.name, heartbeat=context.now, lease_s=self.lease_s)
        record = (earlier or new).replace(**fields)
        return commit(state, context, result=since, readers={reader: record})


def named_reader(name: str) -> str:
    """The reader id of the hold `name`. Not by a format: `state/position.py` says why."""
    return "name:" + name


class RenewReader(Struct, frozen=True):
    """Renew the lease. `advance_to` moves the hold, and so the shard's since. `hold` is the history that open
    snapshots and listens need (only for a shared reader). `OpaqueMismatch`: the hold has another owner."""

    reader: str
    owner: str | None = None
    advance_to: Antichain | None = None
    hold: Antichain | None = None

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        reader = state.readers.get(self.reader)
        if reader is None:
            return Keep(error=LeaseExpired(f"reader {self.reader} is no longer registered"))
        if reader.owner != self.owner:
            return Keep(error=OpaqueMismatch(self.owner, reader.owner))
        since, moving = reader.since, reader.moving
        if self.hold is not None:
            if not state.since <= self.hold:
                return Keep(error=SinceViolation(self.hold, state.since))
            since = self.hold
        if self.advance_to is not None:
            since, moving = since.join(self.advance_to), True
        held = reader.seqno_hold
        record = reader.replace(
            since=since,
            moving=moving,
            heartbeat=context.now,
            seqno_hold=None if held is None else max(held, seqno_hold_of(state, context)),
        )
        return commit(state, context, result=since, moved=moving, readers={self.reader: record})


class KeepReader(Struct, frozen=True):
    """Renew only the lease of a reader, for processes that read pieces under one lease. None of them knows
    which versions the others still need, so the reader keeps holding all its versions."""

    reader: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        reader = state.readers.get(self.reader)
        if reader is None:
            return Keep(error=LeaseExpired(f"reader {self.reader} is no longer registered"))
        return commit(state, context, readers={self.reader: reader.replace(heartbeat=context.now)})


class ExpireReader(Struct, frozen=True):
    """End a reader's registration. Since does not change."""

    reader: str
    owner: str | None = None

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        reader = state.readers.get(self.reader) if state else None
        if reader is None:
            return Keep()
        if reader.owner != self.owner:
            return Keep(error=OpaqueMismatch(self.owner, reader.owner))
        return Commit(Changes(drop={"readers": (self.reader,)}))
