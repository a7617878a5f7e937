"""The text of server-sent events, and the place of each in its feed.

Each event is one change, and its id (`ids.py`) is the place behind it. A feed has cursors behind steps, and
a step has many changes, so a place is a cursor, a tilde, and how many changes behind it were sent. Steps that
are read again have the same changes in the same order, though perhaps cut elsewhere, so a feed that goes on
from there sends each change once.

Data is JSON in one line: JSON escapes line ends within texts, so no key or value can make an event of its
own."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError, to_json

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.table.feed import Change

PAST_MARK = "~"  # no cursor has it
PAST_MAX = 2**53
HEARTBEAT = b":\n\n"  # a comment
COME_BACK = b"retry: 3000\n\n"  # how many milliseconds a browser waits before it connects again
ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)


class EventPlace(NamedTuple):
    """Where a stream stands: behind a cursor, and so many changes."""

    cursor: str
    past: int = 0

    def __str__(self) -> str:
        return f"{self.cursor}{PAST_MARK}{self.past}" if self.past else self.cursor


def place_of(text: str) -> EventPlace:
    """The place of a text; `InvalidUsage` of kind `INVALID_CURSOR` for what cannot be one."""
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
    """As pydantic writes it, bytes as base64. Those of a model are as its config says, by default as text; of
    one that has no such text all are base64: one value must not end a stream, again with each connection."""
    try:
        return to_json(data, bytes_mode="base64", inf_nan_mode="null")
    except PydanticSerializationError:
        return to_json(ANYTHING.dump_python(data), bytes_mode="base64", inf_nan_mode="null")


def only_id(id: str) -> bytes:
    """No event, but the id that a client comes back with."""
    return f"id: {id}\n\n".encode()


def change_events(changes: Iterable[Change[Any, Any]], name: str, ids: Iterable[str]) -> bytes:
    """One event for each change."""
    return b"".join(
        event(name, change._asdict(), behind) for change, behind in zip(changes, ids, strict=True)
    )


class StepPlaces:
    """The places behind the changes of a step, which begins at the cursor of `place` and ends at `cursor`, as
    its changes come; `left` changes were sent before."""

    def __init__(self, place: EventPlace, left: int, cursor: str) -> None:
        self._begin = place.cursor
        self._number = 0
        """Changes of the step that came."""
        self.left = left
        """Changes, also behind the step, that were sent before."""
        self.behind = EventPlace(cursor)
        """The place behind the step."""
        self.ends_with_id = False
        """Whether the last change was sent, with the place behind the step."""

    def take(
        self, changes: Sequence[Change[Any, Any]], *, is_last: bool
    ) -> tuple[Sequence[Change[Any, Any]], Sequence[EventPlace]]:
        """Of the next changes, the last ones perhaps, those that are still to be sent; and their places."""
        sent = min(self.left, len(changes))
        first, end = self._number + sent + 1, self._number + len(changes) + 1
        self.left, self._number = self.left - sent, end - 1
        places = [EventPlace(self._begin, number) for number in range(first, end)]
        if is_last and places:
            places[-1], self.ends_with_id = self.behind, True
        return changes[sent:], places
