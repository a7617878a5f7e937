"""The page of contents, parsed from its address. Pure."""

import re
from typing import NamedTuple

from starlette.datastructures import QueryParams

from aiopersist.base.errors import InvalidUsage, NotReadable, SinceViolation, UsageKind, shown
from aiopersist.base.frontier import Time, less_equal
from aiopersist.read.tagged import check_alone, check_tag
from aiopersist.state.model import Clock, State
from aiopersist.web.readable import Readable, Scale, parse_time, read_time
from aiopersist.web.reading import EarlierPages, Question, RowPlace
from aiopersist.web.rows import Column
from aiopersist.web.words import time_text

HOWS = ("from", "is", "prefix")
COLUMNS_SHOWN = 12  # unless they are chosen


class RowsQuery(NamedTuple):
    """The rows that a page of contents shows."""

    name: str
    stream: str = ""
    """A stream of an `Indexed`; empty for a shard."""
    at: str = ""
    """The time; empty: the newest one."""
    since: str = ""
    """Show the changes after this time; empty: show the contents."""
    tag: str = ""
    """Show the contents that this tag keeps, instead of those at a time."""
    how: str = ""
    key: str = ""
    where: str = ""
    """A condition on the rows; empty for none."""
    columns: tuple[str, ...] = ()
    """Empty: the first few."""
    place: RowPlace = RowPlace()
    earlier: EarlierPages = EarlierPages()

    @classmethod
    def of(cls, params: QueryParams, scale: Scale | None, clock: Clock) -> "RowsQuery":
        """From the address; `InvalidUsage` names the wrong value. The position of a slider counts if it was
        moved: if it differs from the time in the field beside it."""
        how, key = params.get("how", ""), params.get("key", "")
        if how not in ("", *HOWS):
            raise InvalidUsage(UsageKind.INVALID_COLUMN, f"how={shown(how)}: one of {', '.join(HOWS)}")
        at, tag = _moved(params, "at", scale, clock), params.get("tag", "")
        since = _moved(params, "since", scale, clock) if params.get("changes") else ""
        if tag:
            check_alone(at or None, since or None)
        return cls(
            name=params.get("name", ""),
            stream=params.get("stream", ""),
            at=at,
            since=since,
            tag=tag,
            how=how if key else "",
            key=key,
            where=params.get("where", "").strip(),
            columns=tuple(params.getlist("column")),
            place=RowPlace.of(params.get("after", "")),
            earlier=EarlierPages.of(params.get("before", "")),
        )

    @property
    def earlier_of_next(self) -> EarlierPages:
        """The pages before the next page."""
        return self.earlier.with_page(self.place)

    @property
    def previous(self) -> tuple[RowPlace, EarlierPages] | None:
        """The page before this one, if the address has it."""
        places = self.earlier.places
        return (places[-1], EarlierPages(places[:-1])) if places else None

    def times(self, readable: Readable, now: float) -> list[Time]:
        """The times in the address."""
        return [parse_time(text, readable, now) for text in (self.at, self.since) if text]

    def is_at_rest(self, readable: Readable, now: float) -> bool:
        """Whether nobody wrote since the requested time."""
        return bool(self.at) and readable.upper.less_equal(parse_time(self.at, readable, now))

    def question(self, readable: Readable, now: float) -> Question:
        """The requested rows. `NotReadable`, `SinceViolation`, `InvalidUsage`."""
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
                text = f"{since} and {as_of} have no order: changes need one time beyond the other"
                raise InvalidUsage(UsageKind.INVALID_TIME, text)
            since, as_of = as_of, since
        return Question(as_of, since, self.place, self.how, self.key, self.where, self.stream)

    def question_of_tag(self, state: State) -> Question:
        """The requested rows of the tag. `UnknownTag`."""
        check_tag(state, self.tag)
        as_of = state.tags[self.tag].as_of.time
        assert as_of is not None  # a tag has one time
        return Question(as_of, None, self.place, self.how, self.key, self.where, tag=self.tag)

    def _time(self, text: str, readable: Readable, now: float) -> Time:
        return read_time(parse_time(text, readable, now), readable, now)


def _moved(params: QueryParams, name: str, scale: Scale | None, clock: Clock) -> str:
    """The time in the field, or the time of the slider if that was moved."""
    written, step, before = (params.get(f"{name}{end}", "") for end in ("", "_step", "_was"))
    if scale is None or step == before or not re.fullmatch("[0-9]{1,4}", step):
        return written
    if name == "at" and int(step) >= scale.steps:
        return ""  # the end of the slider means the newest time, also on later looks
    return time_text(scale.time(int(step)), clock)


def chosen_columns(columns: tuple[Column, ...], names: tuple[str, ...]) -> list[int]:
    """The numbers of the columns to show: the chosen ones, or the first few."""
    chosen = [number for number, column in enumerate(columns) if column.name in names]
    return chosen or list(range(min(len(columns), COLUMNS_SHOWN)))
