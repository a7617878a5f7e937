"""Texts of server-sent events, and their places in the feed.

Each event is one change; its id (`ids.py`) is the place after it. A feed has cursors only after steps, and a
step has many changes. So a place is a cursor, a tilde, and the number of changes sent since that cursor. When
steps are read again, they have the same changes in the same order, maybe divided differently. So a feed that
continues from a place sends each change once.

Data is JSON in one line. JSON escapes line ends in texts, so no key or value can inject an event.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError, to_json

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.table.feed import Change

PAST_MARK = "~"  # no cursor has it
PAST_MAX = 2**53
HEARTBEAT = b":\n\n"  # a comment
COME_BACK = b"retry: 3000\n\n"  # milliseconds until a browser connects again
ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)


class EventPlace(NamedTuple):
    """A position in a stream: a cursor, and the number of changes sent after it."""

    cursor: str
    past: int = 0

    def __str__(self) -> str:
        return f"{self.cursor}{PAST_MARK}{self.past}" if self.past else self.cursor


def place_of(text: str) -> EventPlace:
    """The place in a text; otherwise `InvalidUsage` of kind `INVALID_CURSOR`."""
    cursor, mark, past = text.partition(PAST_MARK)
    if not mark:
        return EventPlace(cursor)
    if not (past.isascii() and past.isdigit() and len(past) <= 16 and int(past) < PAST_MAX):
        raise InvalidUsage(UsageKind.INVALID_CURSOR, f"{shown(text, 40)} is no id of an event")
    return EventPlace(cursor, int(past))


def event(name: str, data: Any, id: str | None = None) -> bytes:
    """An event with its name and its data as JSON."""
    written = _as_json(data)
    head = "" if id is None else f"id: {id}\n"
    return b"%bevent: %b\ndata: %b\n\n" % (head.encode(), name.encode(), written)


def _as_json(data: Any) -> bytes:
    """JSON by pydantic, with bytes as base64. Bytes in a model follow its config, by default as text; if they
    are no text, all bytes are base64, since otherwise this value would end the stream at each connection."""
    try:
        return to_json(data, bytes_mode="base64", inf_nan_mode="null")
    except PydanticSerializationError:
        return to_json(ANYTHING.dump_python(data), bytes_mode="base64", inf_nan_mode="null")


def only_id(id: str) -> bytes:
    """No event, only the id that a client will come back with."""
    return f"id: {id}\n\n".encode()


def change_events(changes: Iterable[Change[Any, Any]], name: str, ids: Iterable[str]) -> bytes:
    """One event for each change."""
    return b"".join(
        event(name, change._asdict(), behind) for change, behind in zip(changes, ids, strict=True)
    )


class StepPlaces:
    """The places after the changes of a step. The step begins at the cursor of `place` and ends at `cursor`;
    the first `to_skip` changes were sent before."""

    def __init__(self, place: EventPlace, to_skip: int, cursor: str) -> None:
        self._begin = place.cursor
        self._number = 0
        """The number of changes of the step so far."""
        self.to_skip = to_skip
        """The number of next changes that were sent before, in this step and later ones."""
        self.behind = EventPlace(cursor)
        """The place after the step."""
        self.ends_with_id = False
        """Whether the last change was sent with the place after the step."""

    def take(
        self, changes: Sequence[Change[Any, Any]], *, is_last: bool
    ) -> tuple[Sequence[Change[Any, Any]], Sequence[EventPlace]]:
        """The next changes without those sent before, and their places. `is_last`: they end the step."""
        sent = min(self.to_skip, len(changes))
        first, end = self._number + sent + 1, self._number + len(changes) + 1
        self.to_skip, self._number = self.to_skip - sent, end - 1
        places = [EventPlace(self._begin, number) for number in range(first, end)]
        if is_last and places:
            places[-1], self.ends_with_id = self.behind, True
        return changes[sent:], places
