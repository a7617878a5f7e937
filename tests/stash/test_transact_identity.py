"""Goal: a table stays readable and writable, for all classes of keys and vals with their own equality, all
codecs, and transactions that change vals in place."""

import datetime as dt
import math
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.stash import Stash, StashError, TableTransaction, TypedCollection, transact


class Key(BaseModel, frozen=True):
    """Equal by its number alone."""

    number: int
    label: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)


@dataclass(frozen=True)
class Record:
    number: int
    label: str = field(default="", compare=False)


class Pair(NamedTuple):
    number: int
    label: str = ""


@dataclass(frozen=True, eq=False)
class Unequal:
    number: int


@dataclass(frozen=True)
class Place:
    at: float
    label: str = ""


@dataclass(frozen=True)
class Meeting:
    begin: dt.datetime


class Val(BaseModel):
    count: int = 0
    tags: list[str] = []


class Sets(ap.Codec):
    """Sets in an order that is another one each time."""

    name = "sets"
    arrow_type = pa.list_(pa.string())
    turns = count()

    def encode(self, values: Sequence[Any]) -> pa.Array:
        return pa.array([sorted(v, reverse=next(self.turns) % 2 == 0) for v in values], self.arrow_type)

    def decode(self, array: pa.Array) -> list[Any]:
        return [frozenset(v) for v in array.to_pylist()]


class Lowered(ap.Codec):
    """Texts, which it makes small."""

    name = "lowered"
    arrow_type = pa.string()

    def encode(self, values: Sequence[Any]) -> pa.Array:
        return pa.array([v.lower() for v in values], self.arrow_type)

    def decode(self, array: pa.Array) -> list[Any]:
        return list(array.to_pylist())


@pytest.fixture
async def stash() -> AsyncIterator[Stash]:
    async with ap.stash.open(f"mem://{uuid.uuid4().hex}") as stash:
        yield stash


@pytest.mark.parametrize("make", [lambda n, label: Key(number=n, label=label), Record, Pair])
async def test_a_key_that_its_class_takes_for_another(stash: Stash, make: Callable[[int, str], Any]) -> None:
    """Goal: what goes is what was stored, not what is equal to it."""
    table = TypedCollection[Any, int]("keys", type(make(1, "")), int)
    await table.upsert(stash, [(make(1, "old"), 1), (make(2, "old"), 2)])
    old = make(1, "old")
    await transact(stash, lambda t: (t.set(old, None), t.set(make(1, "new"), 1)), table)
    assert [(key.label, val) for key, val in (await table.peek_one(stash)).items()] == [
        ("new", 1),
        ("old", 2),
    ]
    await transact(stash, lambda t: t.delete(lambda key, val: True), table)
    assert await table.peek_one(stash) == {}


def test_a_transaction_tells_such_keys_apart() -> None:
    old, new = Record(1, "old"), Record(1, "new")
    table = TableTransaction({old: 5})
    table.set(new, 5)
    assert [(key.label, val, diff) for key, val, diff in table.pending()] == [("old", 5, -1), ("new", 5, 1)]


BERLIN = ZoneInfo("Europe/Berlin")
FIRST = dt.datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)  # clocks show this twice
SECOND = FIRST.replace(fold=1)


@pytest.mark.parametrize(
    ("kind", "make", "other"),
    [
        (Place, lambda: Place(math.nan, "a"), Place(math.nan, "b")),
        (dt.datetime, lambda: FIRST, SECOND),
        (Meeting, lambda: Meeting(SECOND), Meeting(FIRST)),
    ],
)
async def test_a_key_that_does_not_equal_itself(
    stash: Stash, kind: type[Any], make: Callable[[], Any], other: Any
) -> None:
    """Goal: a key that was read is found by the key that was written, and no other key is: so its val is
    replaced, by both kinds of transactions."""
    table = TypedCollection[Any, int]("keys", kind, int)
    await table.upsert(stash, [(make(), 1), (other, 7)])
    await transact(stash, lambda t: t.set(make(), 2), table)
    c = await table.get(stash)
    read = TableTransaction(await table.peek_one(stash))
    assert (read.set(make(), 3), read.get(other)) == (2, 7)
    batch = await c.make_batch(stash)
    for change in read.pending():
        c.append_to_batch(batch, *change)
    await stash.append([batch])
    assert sorted((await table.peek_one(stash)).values()) == [3, 7]
    assert await table.peek_key_one(stash, make()) == 3


@pytest.mark.parametrize(("old", "new"), [(FIRST, SECOND), (Meeting(FIRST), Meeting(SECOND))])
def test_points_in_time_of_an_hour_that_clocks_repeat(old: Any, new: Any) -> None:
    """Goal: a val becomes the other one, though both are equal to Python."""
    table = TableTransaction({"a": old})
    table.set("a", new)
    assert [(str(val), diff) for _, val, diff in table.pending()] == [(str(old), -1), (str(new), 1)]


async def test_a_codec_that_writes_one_val_in_several_ways(stash: Stash) -> None:
    table = TypedCollection[str, frozenset[str]]("sets", str, Sets())
    await table.upsert(stash, [("a", frozenset("xyz")), ("b", frozenset("xy"))])
    for letters in ("pq", "rst", "u"):
        await transact(stash, lambda t, letters=letters: t.set("a", frozenset(letters)), table)
        assert await table.peek_one(stash) == {"a": frozenset(letters), "b": frozenset("xy")}


async def test_a_val_that_was_changed_in_place(stash: Stash) -> None:
    """Goal: it is written, and can be deleted."""
    table = TypedCollection("vals", str, Val)
    await table.upsert(stash, [("a", Val()), ("b", Val())])

    def changed(t: TableTransaction[str, Val]) -> None:
        val = t.get("a")
        assert val is not None
        val.count += 1
        val.tags.append("x")
        t.set("a", val)

    for number in (1, 2):
        await transact(stash, changed, table)
        assert await table.peek_one(stash) == {"a": Val(count=number, tags=["x"] * number), "b": Val()}
    await transact(stash, lambda t: (changed(t), t.set("a", None)), table)
    assert await table.peek_one(stash) == {"b": Val()}


async def test_two_keys_that_are_stored_as_one_are_refused(stash: Stash) -> None:
    folded = TypedCollection[str, int]("folded", Lowered(), int)
    unequal = TypedCollection("unequal", Unequal, int)
    await folded.upsert(stash, [("a", 1)])
    await unequal.upsert(stash, [(Unequal(1), 1)])
    for table, key in ((folded, "A"), (unequal, Unequal(1))):
        before = await table.peek_one(stash)
        with pytest.raises(StashError, match="two keys"):
            await transact(stash, lambda t, key=key: t.set(key, 2), table)
        assert str(await table.peek_one(stash)) == str(before)
