"""The page of contents: what its address says. Pure."""

import re
from typing import NamedTuple

from starlette.datastructures import QueryParams

from aiopersist.base.errors import InvalidUsage, NotReadable, SinceViolation, UsageKind, shown
from aiopersist.base.frontier import Time, less_equal
from aiopersist.state.model import Clock
from aiopersist.web.readable import Readable, Scale, time_given, time_known
from aiopersist.web.reading import Question, RowPlace, RowTrail
from aiopersist.web.rows import Column
from aiopersist.web.words import time_text

HOWS = ("from", "is", "prefix")
COLUMNS_SHOWN = 12  # unless they are chosen


class WantedRows(NamedTuple):
    """What a page of contents shows."""

    name: str
    stream: str = ""
    """Of an `Indexed`; empty for a shard."""
    at: str = ""
    """The time; empty: the newest."""
    since: str = ""
    """What changed after that time; empty: the contents."""
    how: str = ""
    key: str = ""
    where: str = ""
    """A condition that rows fulfil; empty for none."""
    columns: tuple[str, ...] = ()
    """Empty: the first few."""
    place: RowPlace = RowPlace()
    trail: RowTrail = RowTrail()

    @classmethod
    def of(cls, query: QueryParams, scale: Scale | None, clock: Clock) -> "WantedRows":
        """From the address; `InvalidUsage` names the value at fault. A position of the slider counts where
        it was moved; it has been if it is not at the time that is written beside it."""
        how, key = query.get("how", ""), query.get("key", "")
        if how not in ("", *HOWS):
            raise InvalidUsage(UsageKind.INVALID_COLUMN, f"how={shown(how)}: one of {', '.join(HOWS)}")
        return cls(
            name=query.get("name", ""),
            stream=query.get("stream", ""),
            at=_moved(query, "at", scale, clock),
            since=_moved(query, "since", scale, clock) if query.get("changes") else "",
            how=how if key else "",
            key=key,
            where=query.get("where", "").strip(),
            columns=tuple(query.getlist("column")),
            place=RowPlace.of(query.get("after", "")),
            trail=RowTrail.of(query.get("before", "")),
        )

    @property
    def next_trail(self) -> RowTrail:
        """Of the page behind this one."""
        return self.trail.to(self.place)

    @property
    def previous(self) -> tuple[RowPlace, RowTrail] | None:
        """The page before this one, as far as the address knows it."""
        places = self.trail.places
        return (places[-1], RowTrail(places[:-1])) if places else None

    def times(self, readable: Readable, now: float) -> list[Time]:
        """Those that are written."""
        return [time_given(text, readable, now) for text in (self.at, self.since) if text]

    def is_at_rest(self, readable: Readable, now: float) -> bool:
        """Whether nobody has written since the time that is wanted."""
        return bool(self.at) and readable.upper.less_equal(time_given(self.at, readable, now))

    def question(self, readable: Readable, now: float) -> Question:
        """The rows that are wanted. `NotReadable`, `SinceViolation`, `InvalidUsage`."""
        as_of = self._time(self.at, readable, now) if self.at else readable.late
        since = self._time(self.since, readable, now) if self.since else None
        for time in (as_of, since):
            if time is None:
                continue
            if readable.upper.less_equal(time):
                raise NotReadable(time, readable.upper)
            if not readable.since.less_equal(time):
                raise SinceViolation(time, readable.since)
        if since is not None and not less_equal(since, as_of):
            if not less_equal(as_of, since):
                text = f"{since} and {as_of} have no order: what changed is told from a time to one beyond it"
                raise InvalidUsage(UsageKind.INVALID_TIME, text)
            since, as_of = as_of, since
        return Question(as_of, since, self.place, self.how, self.key, self.where, self.stream)

    def _time(self, text: str, readable: Readable, now: float) -> Time:
        return time_known(time_given(text, readable, now), readable, now)


def _moved(query: QueryParams, name: str, scale: Scale | None, clock: Clock) -> str:
    """The time that is written, or that of the slider, if that was moved."""
    written, step, before = (query.get(f"{name}{end}", "") for end in ("", "_step", "_was"))
    if scale is None or step == before or not re.fullmatch("[0-9]{1,4}", step):
        return written
    if name == "at" and int(step) >= scale.steps:
        return ""  # the end of the slider is the newest time, also later
    return time_text(scale.time(int(step)), clock)


def chosen_columns(columns: tuple[Column, ...], names: tuple[str, ...]) -> list[int]:
    """The numbers of the columns that are shown: those that were chosen, or the first few."""
    chosen = [number for number, column in enumerate(columns) if column.name in names]
    return chosen or list(range(min(len(columns), COLUMNS_SHOWN)))
