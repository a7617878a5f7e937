"""Commands that move since for good: critical readers, which never expire, the retention policy of a shard,
and a command that gives up history once, for an erasure.

A policy keeps the current contents readable, however long the shard is idle: its hold never passes the last
complete time, since all paths use `_target`. So there is always a time `t` with `since <= t < upper`, unless
a user's own hold has moved since further, or nothing was appended yet.

A policy never keeps less than it says. A move costs a commit, so it keeps some slack in addition: an eighth
for times and for seconds on a wall clock, nothing if `exact`; a quarter for seconds on a logical clock, the
distance of its marks. The wait for a look comes on top. `maintenance/due.py` has the slack during appends.
"""

from msgspec import Struct

from aiopersist.base.errors import InvalidUsage, OpaqueMismatch, UsageKind
from aiopersist.base.frontier import Antichain, predecessor
from aiopersist.state.command import (
    Commit,
    Context,
    Keep,
    commit,
    is_ahead,
    live,
    meet_of_holds,
    micros,
    overdue,
)
from aiopersist.state.diff import Changes
from aiopersist.state.model import CriticalReader, Mark, Retention, State

MARKS_PER_KEEP = 4  # uppers remembered for the kept seconds on a logical clock; looks in that time on any
SLACK_SHARE = 8


class RegisterCritical(Struct, frozen=True):
    """Create the critical reader at the shard's since, unless it exists. The result is its record."""

    reader: str
    opaque: int

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        reader = state.critical.get(self.reader)
        if reader is not None:
            return Keep(result=reader)
        record = CriticalReader(since=state.since, opaque=self.opaque)
        return commit(state, context, result=record, critical={self.reader: record})

    def happened(self, state: State) -> bool | None:
        return True if self.reader in state.critical else None


class DowngradeCritical(Struct, frozen=True):
    """If the opaque is `expected`, install `opaque`, move the hold to its join with `since`, and the
    shard's since as far as all holds allow. The result is the record."""

    reader: str
    expected: int
    opaque: int
    since: Antichain

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        reader = state.critical.get(self.reader)
        if reader is None or reader.opaque != self.expected:
            return Keep(error=OpaqueMismatch(self.expected, reader.opaque if reader else None))
        record = reader.replace(since=reader.since.join(self.since), opaque=self.opaque)
        return commit(state, context, result=record, moved=True, critical={self.reader: record})

    def happened(self, state: State) -> bool | None:
        """Unknown if it fails: a later owner may have moved it."""
        reader = state.critical.get(self.reader)
        is_ours = reader is not None and reader.opaque == self.opaque and self.since <= reader.since
        return True if is_ours and self.opaque != self.expected else None


class ReleaseCritical(Struct, frozen=True):
    """End the critical reader, if its opaque is `expected`. Since stays until another hold moves it."""

    reader: str
    expected: int

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        reader = state.critical.get(self.reader)
        if reader is None or reader.opaque != self.expected:
            return Keep(error=OpaqueMismatch(self.expected, reader.opaque if reader else None))
        return commit(state, context, drop={"critical": (self.reader,)})

    def happened(self, state: State) -> bool | None:
        """Another process may have created it anew."""
        return None if self.reader in state.critical else True


class SetRetention(Struct, frozen=True):
    """Set the policy of the shard; without `times` and `seconds`, remove it. A new policy begins at the
    shard's since; a replacement continues with the hold and marks of the old policy."""

    times: int | None
    seconds: float | None

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if self.times is None and self.seconds is None:
            if not state.retention:
                return Keep()
            return Commit(Changes(drop={"retention": (0,)}))
        if any(isinstance(time, tuple) for time in state.since.elements) and self.times is not None:
            message = "a number of times needs int times, this shard has product times: pass a timedelta"
            return Keep(error=InvalidUsage(UsageKind.INVALID_TIME, message, time=self.times))
        policy = state.retention.get(0)
        marks = () if policy is None else policy.marks
        if not marks and not state.is_wall:
            marks = (Mark(at=context.now, upper=state.upper),)
        if policy is None:
            policy = Retention(hold=state.since)
        record = policy.replace(times=self.times, seconds=self.seconds, marks=marks)
        return Keep() if record == policy else commit(state, context, retention={0: record})


class ApplyRetention(Struct, frozen=True):
    """Move the policy's hold to its target, and since as far as all holds allow. Unless `exact`, the hold
    waits for the slack of the header."""

    exact: bool

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        record = state.retention.get(0)
        if record is None:
            return Keep()
        target, marks = _target(record, state, context.now, exact=self.exact)
        hold = record.hold if target is None else record.hold.join(target)
        changed = record.replace(hold=hold, marks=marks)
        gone = overdue(state, context, {}).get("readers", ())
        gains = not meet_of_holds(state, gone, {"retention": {0: changed}}) <= state.since
        if not gains and hold == record.hold and marks == record.marks:
            return Keep()
        return commit(state, context, moved=True, retention={0: changed})


class ForgetHistory(Struct, frozen=True):
    """Move since to `frontier`, or to the last complete time if that is less, as far as all holds except the
    policy's allow. The policy's hold moves, too; its rules stay. The result is since. Int times only."""

    frontier: Antichain

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        target = self.frontier.meet(predecessor(state.upper))
        moved = {at: record.replace(hold=record.hold.join(target)) for at, record in state.retention.items()}
        gone = overdue(state, context, {}).get("readers", ())
        since = state.since.join(meet_of_holds(state, gone, {"retention": moved}).meet(target))
        if since == state.since and moved == state.retention:
            return Keep(result=since)
        return commit(state, context, result=since, since=since, retention=moved)


def first_kept(policy: Retention, upper: int, now: float, *, is_wall: bool) -> int | None:
    """The first time that `policy` must keep, never beyond the last complete one. `None` for seconds on a
    logical clock: the marks of the policy decide."""
    if policy.times is not None:
        first = upper - policy.times
    elif is_wall and policy.seconds is not None:
        first = micros(now) - micros(policy.seconds)
    else:
        return None
    return max(min(first, upper - 1), 0)


def _target(
    record: Retention, state: State, now: float, *, exact: bool
) -> tuple[Antichain | None, tuple[Mark, ...]]:
    """The target of the hold (`None` if it does not move yet), and the marks to remember from now on."""
    if record.times is not None or state.is_wall:
        upper, hold = state.upper.time, record.hold.time
        if not isinstance(upper, int) or not isinstance(hold, int):  # one of them is {}: the hold stays
            return None, record.marks
        first = first_kept(record, upper, now, is_wall=state.is_wall)
        keep = micros(record.seconds or 0) if record.times is None else record.times
        if first is None or first - hold <= (0 if exact else keep // SLACK_SHARE):
            return None, record.marks
        return Antichain(first), record.marks
    assert record.seconds is not None
    marks = tuple(_not_ahead(mark, now) for mark in record.marks)
    if state.upper != marks[-1].upper and now - marks[-1].at >= record.seconds / MARKS_PER_KEEP:
        marks = (*marks, Mark(at=now, upper=state.upper))
    old = [mark for mark in marks if mark.at <= now - record.seconds]
    if not old or not old[-1].upper.elements:
        return None, marks
    target = old[-1].upper
    return (predecessor(target) if target == state.upper else target), marks[len(old) - 1 :]


def _not_ahead(mark: Mark, now: float) -> Mark:
    """`mark`; one in the future comes from a wrong clock, and becomes a mark of now."""
    return mark.replace(at=now) if is_ahead(mark.at, now) else mark
