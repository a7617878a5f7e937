"""Goal: whatever keys and vals hold, each change is one event that reads back as it was; whatever is cut off
where, the rest of the changes follows, each once."""

import datetime
import json
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.fastapi.events import EventPlace, StepPlaces, change_events, event, place_of
from tests.fastapi.backend import events_in

HOSTILE = [
    "a\nb",
    "a\r\nevent: problem\r\ndata: {}\r\n\r\n",
    "\n\n",
    "id: x",
    ":",
    "\0",
    "\u2028\u2029\x85",
    "<script>alert(1)</script>",
    "‮‏",
    '"\\',
    "",
    "x" * 100_000,
]


def read(data: bytes) -> list[Any]:
    """As a browser splits lines: at each CR LF, CR and LF."""
    text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
    return list(events_in(text.split("\n")[:-1]))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_keys_and_vals_are_one_event(text: str) -> None:
    change = ap.Change(text, None, {"v": text}, 1)
    (found,) = read(change_events([change], "change", ["c"]))
    assert (found.name, found.id) == ("change", "c")
    assert found.data == {"key": text, "old": None, "new": {"v": text}, "time": 1}


class Size(Enum):
    SMALL = 1


class Photo(BaseModel):
    name: str
    data: bytes
    size: Size


def test_bytes_that_are_no_text_do_not_end_a_stream() -> None:
    """Goal: as text by default; where pydantic has none, all bytes of that event are base64."""
    photos = [Photo(name="é", data=data, size=Size.SMALL) for data in (b"text", b"\xff\xd8")]
    changes = [ap.Change(photo.name, None, photo, 1) for photo in photos]
    found = read(change_events(changes, "change", ["c", "d"]))
    assert [event.data["new"] for event in found] == [
        {"name": "é", "data": "text", "size": 1},
        {"name": "é", "data": "_9g=", "size": 1},
    ]


class Item(BaseModel):
    at: datetime.date
    price: Decimal


def test_vals_are_written_as_pydantic_writes_them() -> None:
    item = Item(at=datetime.date(2026, 1, 2), price=Decimal("1.50"))
    change = ap.Change(b"\xff\x00", item, float("nan"), 2**60)
    (found,) = read(change_events([change], "change", ["c"]))
    assert found.data == {
        "key": "_wA=",
        "old": json.loads(item.model_dump_json()),
        "new": None,
        "time": 2**60,
    }


@given(st.text(alphabet="abcXYZ019-_.", min_size=1), st.integers(0, 2**52))
def test_a_place_reads_back(cursor: str, past: int) -> None:
    place = EventPlace(cursor, past)
    assert place_of(str(place)) == place


@given(st.text())
def test_any_text_is_a_place_that_reads_back_or_is_refused(text: str) -> None:
    try:
        place = place_of(text)
    except ap.InvalidUsage:
        return
    assert place_of(str(place)) == place


Steps = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(Steps, Steps, st.data())
def test_who_comes_back_gets_the_rest(first: list[int], second: list[int], data: st.DataObject) -> None:
    """Though the steps are cut elsewhere when they are read again, from the cursor on that the id names."""
    count = sum(first)
    second = [*second, max(0, count - sum(second))]
    sent = sends([ap.Change(n, None, n, n) for n in range(count)], 0, first, EventPlace("c0"))
    if not sent:
        return
    broken = data.draw(st.integers(0, len(sent) - 1))
    last = place_of(sent[broken][1])
    begin = int(last.cursor[1:])
    rest = sends([ap.Change(n, None, n, n) for n in range(begin, sum(second))], begin, second, last)
    assert [key for key, _ in rest] == [*range(broken + 1, sum(second))]


def sends(changes: list[Any], begin: int, sizes: list[int], place: EventPlace) -> list[tuple[int, str]]:
    """The keys and ids that a stream sends of these changes, cut into steps; the cursor behind n changes is
    cn."""
    found, left, at = [], place.past, begin
    place = EventPlace(place.cursor)
    for size in [*sizes, len(changes)]:
        some = changes[at - begin : at - begin + size]
        at += len(some)
        step = StepPlaces(place, left, f"c{at}")
        half = len(some) // 2  # the changes of a step come some at a time
        for part, is_last in ((some[:half], False), (some[half:], True)):
            sent, places = step.take(part, is_last=is_last)
            found += [(c.key, str(p)) for c, p in zip(sent, places, strict=True)]
            assert all("\n" not in str(p) for p in places)
        place, left = step.behind, step.to_skip
    return found


def test_an_event_without_a_place() -> None:
    assert event("cut-off", {"a": 1}) == b'event: cut-off\ndata: {"a":1}\n\n'
