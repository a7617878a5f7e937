"""The range of a shared read: the contents at one time, or the changes between two times. Pure."""

from typing import Any

from aiopersist.base.errors import InvalidUsage, NotReadable, SinceViolation, UsageKind, shown
from aiopersist.base.frontier import Antichain, Time, int_time, last_before, minimum, shaped
from aiopersist.data.types.schema import Schema
from aiopersist.parts.fetch import Named, Selection
from aiopersist.read.snapshot import parts_at
from aiopersist.state.model import State
from aiopersist.state.record import Record


class Range(Record, frozen=True, kw_only=True):
    """The contents at `as_of`, or the changes of `[start, end)`; `end=None`: all from `start` on."""

    as_of: int | tuple[int, ...] | None = None
    start: int | None = None
    end: int | None = None

    @property
    def selection(self) -> Selection:
        """The updates of each part that belong to the range."""
        if self.as_of is not None:
            return Selection(as_of=self.as_of)
        start = None if self.start is None else Antichain(self.start)
        return Selection(lower=start, upper=None if self.end is None else Antichain(self.end))

    def parts(self, state: State) -> list[Named]:
        """The parts that may have updates of the range."""
        if self.as_of is not None:
            return parts_at(state, self.as_of)
        lower = Antichain(self.start or 0)
        upper = Antichain() if self.end is None else Antichain(self.end)
        return [
            (batch, part)
            for batch in state.batches.values()
            if batch.parts and not batch.upper <= lower and not upper <= batch.lower
            for part in batch.parts
        ]


ALL = Range(start=0)
"""Updates at all times."""


def checked(as_of: Time | None, start: int | None, end: int | None, schema: Schema[Any, Any, Any]) -> Range:
    """The range of these arguments; `INVALID_TIME`, `INVALID_BOUNDS`."""
    if start is None and end is None:
        if as_of is None:
            if schema.time_length is not None:
                raise InvalidUsage(UsageKind.INVALID_TIME, "product times have no greatest time: give as_of")
            return Range()
        if not isinstance(as_of, int | tuple):
            raise InvalidUsage(UsageKind.INVALID_TIME, f"as_of is one time, not {shown(as_of)}", time=as_of)
        return Range(as_of=shaped(as_of, schema.time_length).elements[0])
    if as_of is not None:
        raise InvalidUsage(UsageKind.INVALID_TIME, "give as_of, or start and end, not both", time=as_of)
    if schema.time_length is not None:
        raise InvalidUsage(UsageKind.INVALID_TIME, "changes between two times need int times")
    if start is None:
        raise InvalidUsage(UsageKind.INVALID_TIME, "changes up to an end need a start", time=end)
    first = shaped(start, None).elements[0]
    last = None if end is None else shaped(end, None).elements[0]
    assert isinstance(first, int)
    assert not isinstance(last, tuple)
    if last is not None and last < first:
        text = f"end {last} is before start {first}"
        raise InvalidUsage(UsageKind.INVALID_BOUNDS, text, lower=Antichain(first), upper=Antichain(last))
    return Range(start=first, end=last)


def hold_of(times: Range) -> Antichain:
    """The history to hold until the read is planned."""
    if times.as_of is not None:
        return Antichain(times.as_of)
    return Antichain() if times.start is None else Antichain(max(times.start - 1, 0))


def not_complete(times: Range, state: State) -> NotReadable | None:
    """Why the range is not complete yet; `None` if it is."""
    if times.as_of is not None:
        return NotReadable(times.as_of, state.upper) if state.upper.less_equal(times.as_of) else None
    if times.end is not None:
        return None if Antichain(times.end) <= state.upper else NotReadable(times.end - 1, state.upper)
    if times.start is not None:
        return None
    return NotReadable(None, state.upper) if state.upper == minimum(None) else None


def check_held(times: Range, state: State) -> None:
    """`SinceViolation` if the history of the range is gone."""
    since = state.since
    if times.start is None:
        if times.as_of is not None and not since.less_equal(times.as_of):
            raise SinceViolation(times.as_of, since)
    elif not since.less_than(times.start) and not (times.start == 0 and since == minimum(None)):
        raise SinceViolation(max(times.start - 1, 0), since)


def pinned(times: Range, state: State) -> Range:
    """The range, with a missing time or end set from the upper of `state`."""
    if times.as_of is not None:
        return times
    if times.start is not None:
        end = int_time(state.upper) if times.end is None else times.end
        return times.replace(end=end if end is None else max(end, times.start))
    return times.replace(as_of=last_before(state.upper))
