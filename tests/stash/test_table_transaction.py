"""Goal: a transaction on a table does what a transaction on a dict would, for keys of any type; a refused
call changes nothing; and the pending changes are no more than the difference, in the order of a
collection."""

from __future__ import annotations

import copy
import math
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.stash import StashError, TableTransaction, TypedCollection, transact
from tests.data import data_oracle as oracle
from tests.support.schemas import INT_MAX, NAN

SIZE = 6  # keys of each type

Rule = Callable[[int, int], bool]


class Suit(Enum):
    SPADES, HEARTS, CLUBS, DIAMONDS, JOKER, BACK = range(6)


class Level(StrEnum):
    """By name and by value in other orders."""

    LOW, MIDDLE, HIGH, TOP, NONE, ANY = "3", "2", "1", "0", "", "4"


_uuids = [uuid.UUID(int=number) for number in (0, 1, 2**64, 2**127, 2**127 + 1, 2**128 - 1)]
_models = [
    oracle.Key(name="", number=None),
    oracle.Key(name="", number=-(2**63)),
    oracle.Key(name="", number=0, inner=oracle.Inner(text="")),
    oracle.Key(name="\uffff", number=0, inner=oracle.Inner(text="", score=-1.5)),
    oracle.Key(name="\uffff", number=0, inner=oracle.Inner(text="", score=NAN)),
    oracle.Key(name="\U00010000", number=0),
]
KEYS: dict[str, tuple[Any, list[Any]]] = {
    "str": (str, ["", "a", "ab", "\x00", "\uffff", "\U00010000"]),
    "int": (int, [0, -1, 1, 10, INT_MAX, -(2**63)]),
    "bytes": (bytes, [b"", b"\x00", b"\xff", b"a", b"\x7f", b"\x80"]),
    "float": (float, [0.0, -1.5, float("inf"), float("-inf"), 5e-324, NAN]),
    "bool": (bool, [True, False]),
    "enum": (Suit, list(Suit)),
    "str enum": (Level, list(Level)),
    "uuid": (uuid.UUID, _uuids),
    "optional int": (int | None, [None, 0, -1, 1, 10, INT_MAX]),
    "optional str": (str | None, [None, "", "a", "\x00", "\uffff", "\U00010000"]),
    "models": (oracle.Key, _models),
}
RULES: dict[str, Rule] = {
    "never": lambda a, b: False,
    "equal": lambda a, b: a == b,
    "near": lambda a, b: abs(a - b) <= 1,
    "always": lambda a, b: True,
}


def rank(value: Any) -> Any:
    """An enum is known by its names, also one whose vals are texts."""
    return oracle.rank(value.name if isinstance(value, Enum) else value)


class Refused(Exception):
    pass


class Table:
    """What a transaction should do, on a list of the vals by the number of their key."""

    def __init__(self, initial: dict[int, int], rule: Rule) -> None:
        self.initial, self.now, self.rule = dict(initial), dict(initial), rule

    def put(self, changes: dict[int, int]) -> None:
        result = {**self.now, **changes}
        if any(i != j and self.rule(result[i], result[j]) for i in result for j in result):
            raise Refused
        self.now = result

    def insert(self, key: int, val: int | None) -> None:
        if key in self.now or val is None:
            raise Refused
        self.put({key: val})

    def set(self, key: int, val: int | None) -> int | None:
        previous = self.now.get(key)
        if val is None:
            self.now.pop(key, None)
        else:
            self.put({key: val})
        return previous

    def update(self, changes: dict[int, int]) -> int:
        changes = {key: val for key, val in changes.items() if key in self.now}
        self.put(changes)
        return len(changes)

    def delete(self, keys: set[int]) -> dict[int, int]:
        return {key: self.now.pop(key) for key in keys & set(self.now)}

    def pending(self) -> dict[int, list[tuple[int, int]]]:
        """Per key the vals and diffs, retraction first."""
        changed = {
            key: (self.initial.get(key), self.now.get(key))
            for key in {**self.initial, **self.now}
            if self.initial.get(key) != self.now.get(key)
        }
        return {
            key: [(val, diff) for val, diff in zip(vals, (-1, 1), strict=True) if val is not None]
            for key, vals in changed.items()
        }


class Call(NamedTuple):
    what: str
    key: int
    val: int | None
    changes: dict[int, int]


_numbers, _some_vals = st.integers(0, SIZE - 1), st.integers(0, 5)
calls = st.builds(
    Call,
    st.sampled_from(["insert", "insert", "set", "update", "swap", "delete"]),
    _numbers,
    st.none() | _some_vals,
    st.dictionaries(_numbers, _some_vals, max_size=3),
)


@pytest.mark.parametrize("kind", KEYS)
@given(
    rule=st.sampled_from(sorted(RULES)),
    initial=st.dictionaries(_numbers, _some_vals, max_size=4),
    todo=st.lists(calls, max_size=12),
)
def test_it_is_a_dict(kind: str, rule: str, initial: dict[int, int], todo: list[Call]) -> None:
    _, keys = KEYS[kind]
    model = Table({}, RULES[rule])
    for number, val in initial.items():  # as far as the rule allows it
        try:
            model.insert(number % len(keys), val)
        except Refused:
            pass
    model.initial = dict(model.now)
    start = {keys[number]: val for number, val in model.now.items()}
    real: TableTransaction[Any, int] = TableTransaction(start, RULES[rule])
    for call in todo:
        told, found = outcome(model, call, keys), real_outcome(real, call, keys)
        assert (call, found) == (call, told)
        agree(real, model, keys)
    assert start == {keys[number]: val for number, val in model.initial.items()}, "the caller's own dict"
    ranked = sorted(model.pending().items(), key=lambda item: rank(keys[item[0]]))
    assert real.pending() == [(keys[key], *change) for key, changes in ranked for change in changes]
    refuses_everything(real, keys[0])


def outcome(model: Table, call: Call, keys: list[Any]) -> Any:
    key, changes = call.key % len(keys), {number % len(keys): val for number, val in call.changes.items()}
    try:
        if call.what == "insert":
            return model.insert(key, call.val)
        if call.what == "set":
            return model.set(key, call.val)
        if call.what == "delete":
            gone = model.delete(set(changes))
            return sorted(((keys[i], gone[i]) for i in gone), key=lambda pair: rank(pair[0]))
        return model.update(swapped(model.now) if call.what == "swap" else changes)
    except Refused:
        return Refused


def real_outcome(real: TableTransaction[Any, int], call: Call, keys: list[Any]) -> Any:
    changes = {keys[number % len(keys)]: val for number, val in call.changes.items()}
    key = keys[call.key % len(keys)]
    try:
        if call.what == "insert":
            return real.insert(key, call.val)  # type: ignore[arg-type, func-returns-value]  # None is refused
        if call.what == "set":
            return real.set(key, call.val)
        if call.what == "delete":
            return real.delete(lambda k, _: k in changes)
        if call.what == "swap":
            changes = swapped(real.items())
        return real.update(lambda k, _: changes.get(k))
    except StashError:
        return Refused


def swapped(table: dict[Any, int]) -> dict[Any, int]:
    """All vals, each given to the next key."""
    return dict(zip(table, [*list(table.values())[1:], *list(table.values())[:1]], strict=True))


def agree(real: TableTransaction[Any, int], model: Table, keys: list[Any]) -> None:
    now = {keys[number]: val for number, val in model.now.items()}
    assert real.items() == now
    assert [real.get(key) for key in keys] == [now.get(key) for key in keys]
    seen: list[Any] = []
    real.for_values(lambda key, val: seen.append((key, val)))
    assert dict(seen) == now and len(seen) == len(now)


def refuses_everything(ended: TableTransaction[Any, int], key: Any) -> None:
    for call in (
        lambda: ended.get(key),
        ended.items,
        ended.pending,
        lambda: ended.for_values(print),
        lambda: ended.insert(key, 1),
        lambda: ended.set(key, 1),
        lambda: ended.set(key, None),
        lambda: ended.update(lambda k, v: v),
        lambda: ended.delete(lambda k, v: True),
    ):
        with pytest.raises(StashError):
            call()


@pytest.mark.parametrize("kind", KEYS)
async def test_pending_is_in_the_order_of_a_collection(kind: str) -> None:
    key_type, keys = KEYS[kind]
    shuffled = random.Random(0).sample(keys, len(keys))
    table = TableTransaction(dict.fromkeys(shuffled[::2], 0), RULES["never"])
    table.update(lambda key, val: 1)
    for key in shuffled[1::2]:
        table.insert(key, 1)
    pending = table.pending()
    async with ap.stash.open(f"mem://{uuid.uuid4().hex}") as stash:
        c = await stash.collection("keys", key_type, int)
        await stash.update_many(c, [((key, 0), 0, 1) for key in keys])
        in_order = [oracle.canonical(key) for (key, _), _, _ in await stash.iter(c)]
    retracted = {oracle.canonical(key) for key in shuffled[::2]}
    expected = [
        (key, *change)
        for key in in_order
        for change in ((0, -1), (1, 1))
        if change[1] > 0 or key in retracted
    ]
    assert [(oracle.canonical(key), val, diff) for key, val, diff in pending] == expected


def test_the_rule_is_asked_for_vals_of_different_keys_only() -> None:
    asked: list[set[str]] = []

    def rule(a: str, b: str) -> bool:
        asked.append({a.split()[0], b.split()[0]})
        return False

    table = TableTransaction({"k": "k 1", "l": "l 1"}, rule)
    table.set("k", "k 2")
    table.update(lambda key, val: f"{key} 3")
    table.delete(lambda key, val: key == "l")
    table.insert("l", "l 4")
    table.set("l", "l 4")
    assert asked and all(keys == {"k", "l"} for keys in asked)


@pytest.mark.parametrize("call", ["update", "delete", "for_values"])
def test_a_function_that_fails_changes_nothing(call: str) -> None:
    def f(key: str, val: int) -> int:
        if key == "b":
            raise LookupError
        return val + 1

    table = TableTransaction({"a": 1, "b": 2}, RULES["equal"])
    with pytest.raises(LookupError):
        getattr(table, call)(f)
    assert table.items() == {"a": 1, "b": 2}
    assert table.pending() == []


def test_none_is_no_val() -> None:
    with pytest.raises(StashError):
        TableTransaction({"a": None}, RULES["never"])
    table: TableTransaction[str, Any] = TableTransaction({"a": 1}, RULES["never"])
    for key in "ab":
        with pytest.raises(StashError):
            table.insert(key, None)
    assert table.update(lambda key, val: None) == 0
    assert table.set("b", None) is None
    assert table.pending() == []


@pytest.mark.parametrize("key", [float, lambda text: oracle.Inner(text="", score=float(text))])
def test_nan_is_one_key_whatever_object_it_is(key: Callable[[str], Any]) -> None:
    """As in a collection, where a `peek_one` comes from."""
    table = TableTransaction({key("nan"): 1}, RULES["never"])
    assert table.get(key("nan")) == 1
    with pytest.raises(StashError):
        table.insert(key("nan"), 2)
    assert table.set(key("nan"), 3) == 1
    assert [(val, diff) for _, val, diff in table.pending()] == [(1, -1), (3, 1)]


@pytest.mark.parametrize(
    "val", [float, lambda text: [float(text)], lambda text: oracle.Inner(text="", score=float(text))]
)
def test_nan_is_the_same_val_whatever_object_it_is(val: Callable[[str], Any]) -> None:
    table = TableTransaction({"a": val("nan")}, lambda a, b: False)
    table.set("a", val("nan"))
    assert table.pending() == []


@dataclass
class Seen:
    name: str
    at: int = field(compare=False)


class Loose(BaseModel):
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loose)


class Place(NamedTuple):
    x: float
    y: float


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (Seen, Seen("a", 1), Seen("a", 2)),
        (Loose, Loose(name="a"), Loose(name="b")),
        (list[Seen], [Seen("a", 1)], [Seen("a", 2)]),
        (Place, Place(math.nan, 1.0), Place(math.nan, 2.0)),
    ],
)
async def test_a_change_is_one_of_what_is_stored(kind: Any, old: Any, new: Any) -> None:
    """Goal: what a class takes for equal, or cannot make again of its fields, is written as any other change,
    and no change is none."""
    typed = TypedCollection("t", str, kind)
    async with ap.stash.open("mem://") as stash:
        await typed.upsert_key(stash, "a", old)
        await transact(stash, lambda table: table.set("a", new), typed)
        (found,) = (await typed.peek_one(stash)).values()
        assert str(found) == str(new)
        before = await typed.upper(stash)
        await transact(stash, lambda table: table.set("a", copy.deepcopy(new)), typed)
        assert await typed.upper(stash) == before


async def of_a_coroutine(*arguments: Any) -> bool:
    return False


async def test_coroutine_functions_do_not_pass_for_true() -> None:
    """Goal: what would have to be awaited is a mistake, and deletes nothing."""
    decide: Any = of_a_coroutine
    table: TableTransaction[str, int] = TableTransaction({"a": 1}, lambda a, b: False)
    for call in (table.delete, table.update, table.for_values):
        with pytest.raises(TypeError, match="coroutine"):
            call(decide)
    with pytest.raises(TypeError, match="coroutine"):
        TableTransaction({"a": 1}, decide).insert("b", 2)
    assert table.items() == {"a": 1}
    typed = TypedCollection("t", str, int)
    async with ap.stash.open("mem://") as stash:
        await typed.upsert_key(stash, "a", 1)
        with pytest.raises(TypeError, match="coroutine"):
            await typed.delete(stash, decide)
        assert await typed.peek_one(stash) == {"a": 1}
