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
        """The updates of each part that are wanted."""
        if self.as_of is not None:
            return Selection(as_of=self.as_of)
        start = None if self.start is None else Antichain(self.start)
        return Selection(lower=start, upper=None if self.end is None else Antichain(self.end))

    def parts(self, state: State) -> list[Named]:
        """The parts that may hold wanted updates."""
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
                raise InvalidUsage(UsageKind.INVALID_TIME, "product times have no greatest one: say as_of")
            return Range()
        if not isinstance(as_of, int | tuple):
            raise InvalidUsage(UsageKind.INVALID_TIME, f"as_of is one time, not {shown(as_of)}", time=as_of)
        return Range(as_of=shaped(as_of, schema.time_length).elements[0])
    if as_of is not None:
        raise InvalidUsage(UsageKind.INVALID_TIME, "give as_of, or start and end, not both", time=as_of)
    if schema.time_length is not None:
        raise InvalidUsage(UsageKind.INVALID_TIME, "changes between two times are of int times")
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


def hold_of(wanted: Range) -> Antichain:
    """The history that must be held until the read is planned."""
    if wanted.as_of is not None:
        return Antichain(wanted.as_of)
    return Antichain() if wanted.start is None else Antichain(max(wanted.start - 1, 0))


def not_complete(wanted: Range, state: State) -> NotReadable | None:
    """Why `wanted` is not complete yet; `None` if it is."""
    if wanted.as_of is not None:
        return NotReadable(wanted.as_of, state.upper) if state.upper.less_equal(wanted.as_of) else None
    if wanted.end is not None:
        return None if Antichain(wanted.end) <= state.upper else NotReadable(wanted.end - 1, state.upper)
    if wanted.start is not None:
        return None
    return NotReadable(None, state.upper) if state.upper == minimum(None) else None


def check_held(wanted: Range, state: State) -> None:
    """`SinceViolation` if the history of `wanted` is gone."""
    since = state.since
    if wanted.start is None:
        if wanted.as_of is not None and not since.less_equal(wanted.as_of):
            raise SinceViolation(wanted.as_of, since)
    elif not since.less_than(wanted.start) and not (wanted.start == 0 and since == minimum(None)):
        raise SinceViolation(max(wanted.start - 1, 0), since)


def pinned(wanted: Range, state: State) -> Range:
    """`wanted`, with an open time or end set by the upper of `state`."""
    if wanted.as_of is not None:
        return wanted
    if wanted.start is not None:
        end = int_time(state.upper) if wanted.end is None else wanted.end
        return wanted.replace(end=end if end is None else max(end, wanted.start))
    return wanted.replace(as_of=last_before(state.upper))
