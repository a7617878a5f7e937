"""The types of keys and vals: what goes in comes out, from memory, from the shard, and in another client."""

import asyncio
import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.support.schemas import NAN, Colour
from tests.support.shards import refused
from tests.table.kit import entries


class Level(Enum):
    LOW = "low"
    HIGH = "high"


class Pair(NamedTuple):
    region: str
    number: int


@dataclass(frozen=True)
class Place:
    town: str
    zone: int | None


class Key(BaseModel, frozen=True):
    region: str
    at: datetime
    place: Place | None = None


PLACES = [Place("a", None), Place("a", -1), Place("a", 3), Place("b", None)]
AT = datetime(2026, 1, 1, tzinfo=UTC)

KEYS: dict[str, tuple[Any, list[Any]]] = {
    "str": (str, ["", '"\\', "a", "a\nb", "aé", "b", "é", "😀"]),
    "int": (int, [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1]),
    "bytes": (bytes, [b"", b"\x00", b"a", b"\xff"]),
    "float": (float, [-math.inf, -1.5, 0.0, 1e-300, 1.0, 1e300, math.inf, NAN]),
    "bool": (bool, [False, True]),
    "UUID": (UUID, [UUID(int=0), UUID(int=5), UUID(int=2**128 - 1)]),
    "date": (date, [date(1, 1, 1), date(2026, 1, 1), date(9999, 12, 31)]),
    "datetime": (datetime, [AT, AT + timedelta(microseconds=1)]),
    "Enum": (Level, [Level.HIGH, Level.LOW]),
    "NamedTuple": (Pair, [Pair("a", 1), Pair("a", 2), Pair("b", 0)]),
    "dataclass": (Place, PLACES),
    "model": (
        Key,
        [
            Key(region="a", at=AT),
            *(Key(region="a", at=AT, place=place) for place in PLACES),
            Key(region="a", at=AT + timedelta(1)),
            Key(region="b", at=AT),
        ],
    ),
}


def same(one: Any, other: Any) -> bool:
    """NaN equals itself."""
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or repr(one) == repr(other)


@pytest.mark.parametrize("name", KEYS)
async def test_keys(name: str, quiet: ap.Client) -> None:
    """Keys of each type, in order: by put and put_many, from memory, as of a time, in ranges, and deleted."""
    type_, keys = KEYS[name]
    table = quiet.table("t", type_, int)
    for number, key in enumerate(keys):
        await table.put(key, number)
    time = await table.put_many([(key, number) for number, key in enumerate(keys)])  # nothing new
    assert (await table.view()).keys == len(keys)
    assert same(await entries(table), list(zip(keys, range(len(keys)), strict=True)))
    for number, key in enumerate(keys):
        assert await table.get(key) == number
        assert await table.get(key, as_of=time) == number
        assert same([k async for k, _ in table.items(start=key)], keys[number:]), key
        assert same([k async for k, _ in table.items(stop=key)], keys[:number]), key
    assert same(await table.get_many(keys), dict(zip(keys, range(len(keys)), strict=True)))
    assert same(await table.get_many(keys, as_of=time), dict(zip(keys, range(len(keys)), strict=True)))
    with pytest.raises(ap.KeyExists) as caught:
        await table.insert(keys[-1], 0)
    assert same(caught.value.key, keys[-1])
    await table.delete(*keys)
    assert await table.count() == 0
    assert (await table.view()).keys == 0


@pytest.mark.parametrize("name", KEYS)
async def test_keys_in_a_feed(name: str, quiet: ap.Client) -> None:
    """A feed of one key brings that one, in its contents and behind them."""
    type_, keys = KEYS[name]
    table = quiet.table("t", type_, int)
    await table.put_many((key, 1) for key in keys)
    for key in keys:
        async with table.changes(keys=[key]) as feed:
            first = await anext(feed)
            assert same([change.key for change in first.changes], [key])
            await table.put_many((key, 2) for key in keys)
            step = await anext(feed)
            assert same([(c.key, c.old, c.new) for c in step.changes], [(key, 1, 2)])
        await table.put_many((key, 1) for key in keys)


async def test_there_is_one_zero_and_one_nan(quiet: ap.Client) -> None:
    """-0.0 is 0.0, and every NaN is the same, as keys and as vals."""
    table = quiet.table("t", float, float)
    await table.put(0.0, 0.0)
    seqno = (await table.view()).upper
    await table.put(-0.0, -0.0)
    await table.put_many({-0.0: -0.0})
    assert (await table.view()).upper == seqno
    await table.put(NAN, NAN)
    await table.put(float("-nan"), float("-nan"))
    assert (await table.view()).keys == 2
    assert same(await entries(table), [(0.0, 0.0), (NAN, NAN)])
    await table.delete(-0.0, NAN)
    assert await table.count() == 0


@pytest.mark.parametrize("name", ["int", "bool"])
async def test_true_is_not_one(name: str, quiet: ap.Client) -> None:
    """Python says True == 1; a table does not."""
    type_, wrong = {"int": (int, True), "bool": (bool, 1)}[name]
    table = quiet.table("t", type_, type_)
    right = type_(1)
    for call in (
        lambda: table.put(wrong, right),
        lambda: table.put(right, wrong),
        lambda: table.get(wrong),
        lambda: table.get_many([wrong]),
        lambda: table.delete(wrong),
        lambda: table.insert(wrong, right),
        lambda: table.update(wrong, lambda old: right),
        lambda: table.update(right, lambda old: wrong),
        lambda: table.put_many({wrong: right}),
        lambda: table.count(start=wrong),
    ):
        with pytest.raises(ap.InvalidUpdate):
            await call()
    assert await table.count() == 0


@dataclass
class Line:
    text: str
    price: Decimal = Decimal("0.000000000")
    tags: list[str] = field(default_factory=list)


class Order(BaseModel):
    lines: list[Line]
    weight: float
    note: str | None = None
    at: datetime | None = None
    colour: Colour = Colour.RED


class Frozen(BaseModel, frozen=True):
    number: int
    name: str | None = None


VALS: dict[str, tuple[Any, list[Any]]] = {
    "model": (
        Order,
        [
            Order(lines=[], weight=NAN),
            Order(lines=[Line("a", Decimal("1.500000000"), ["x", "y"])], weight=math.inf, note="n", at=AT),
            Order(lines=[Line("b")] * 3, weight=1.0, colour=Colour.BLUE),
        ],
    ),
    "frozen": (Frozen, [Frozen(number=1), Frozen(number=1, name="x"), Frozen(number=2**62, name="é")]),
    "dataclass": (Line, [Line("a"), Line("a", Decimal("-3.140000000")), Line("", tags=["\n", '"'])]),
    "list": (list[int], [[], [1], [1, 2, 3]]),
    "nested": (list[list[str | None]], [[], [[]], [["a", None], []]]),
    "float": (float, [0.1, NAN, -math.inf, 5e-324, 1e16]),
    "decimal": (Decimal, [Decimal("1.5"), Decimal("-0.000000001")]),
    "bytes": (bytes, [b"", b"\x00\xff"]),
    "tuple": (Pair, [Pair("a", 1)]),
    "large": (str, ["x" * 1_500_000, "é" * 700_000]),
}


@pytest.mark.parametrize("name", VALS)
async def test_vals(name: str, quiet: ap.Client) -> None:
    """Vals of each type: put, changed, found from memory, in the shard, in feeds, and deleted."""
    type_, vals = VALS[name]
    table = quiet.table("t", str, type_)
    times = [await table.put("k", val) for val in vals]
    assert len(set(times)) == len(vals)
    for time, val in zip(times, vals, strict=True):
        assert same(await table.get("k", as_of=time), val)
    assert same(await table.get("k"), vals[-1])
    await table.put_many({str(i): val for i, val in enumerate(vals)})
    for i, val in enumerate(vals):
        found = await table.get(str(i))
        assert same(found, val)
        assert type(found) is type(val)
        assert await table.put(str(i), val) == (await table.view()).upper.time - 1  # nothing new
    async with table.changes(as_of=times[0]) as feed:
        steps = [await anext(feed), await anext(feed)]
    assert same([c.new for c in steps[0].changes], [vals[0]])
    changes = [(c.old, c.new) for c in steps[1].changes if c.key == "k"]
    assert same(changes, list(pairwise(vals)))
    await table.delete("k", *(str(i) for i in range(len(vals))))
    assert await table.count() == 0


@pytest.mark.parametrize("type_", [Order, Line, list[int]], ids=["model", "dataclass", "list"])
async def test_vals_are_the_callers_own(type_: Any, quiet: ap.Client) -> None:
    """Changing a val that was given or handed out changes nothing in the table."""
    make: Any = {Order: lambda: Order(lines=[Line("a")], weight=1.0), Line: lambda: Line("a")}
    given = make[type_]() if type_ in make else [1]

    def spoil(val: Any) -> None:
        if isinstance(val, list):
            val.append(2)
        elif isinstance(val, Order):
            val.lines.append(Line("more"))
            val.lines[0].tags.append("t")
            val.weight = 2.0
        else:
            val.text = "other"
            val.tags.append("t")

    table = quiet.table("t", str, type_)
    before = repr(given)
    await table.put("k", given)
    spoil(given)
    spoil(await table.get("k"))
    spoil((await table.get_many(["k"]))["k"])
    for _, val in await entries(table):
        spoil(val)
    with pytest.raises(ZeroDivisionError):
        await table.update("k", lambda old: (spoil(old), 1 / 0)[0])
    async with table.changes() as feed:
        spoil((await anext(feed)).changes[0].new)
    assert repr(await table.get("k")) == before
    kept: list[Any] = []

    def renew(old: Any) -> Any:
        spoil(old)
        kept.append(old)
        return old

    answer = await table.update("k", renew)
    changed = repr(answer)
    assert changed != before
    spoil(answer)
    spoil(kept[0])
    assert repr(await table.get("k")) == changed
    assert repr(await table.get("k", as_of=(await table.view()).upper.time - 1)) == changed


class Renamed(BaseModel):
    number: int


@pytest.mark.parametrize(
    ("key", "val"),
    [(str | None, int), (str, int | None), (str, None), (list[int], int), (dict, int), (type(None), int)],
    ids=str,
)
async def test_types_that_no_table_has(key: Any, val: Any, quiet: ap.Client) -> None:
    """`None` stands for absent, and a key must be found again: refused at once, and no shard is made."""
    with pytest.raises((ap.InvalidUsage, TypeError)) as caught:
        quiet.table("t", key, val)
    if isinstance(caught.value, ap.InvalidUsage):
        assert caught.value.kind is ap.UsageKind.INVALID_TYPE
    assert await quiet.list_shards() == {}


async def test_types_are_those_of_the_table(quiet: ap.Client) -> None:
    """Other types than the stored ones are refused, by this client and the next handle."""
    table = quiet.table("t", str, int)
    await table.put("a", 1)
    for key, val in ((str, str), (int, int), (str, Renamed)):
        with pytest.raises(ap.CodecMismatch):
            await quiet.table("t", key, val).get(key("1") if key is int else "a")
    assert await table.get("a") == 1


class Val(BaseModel, frozen=True):
    number: int


class Wider(BaseModel, frozen=True):
    number: int
    name: str | None = None


@pytest.mark.parametrize("clients", [1, 2])
async def test_evolved_types_beside_the_old_ones(clients: int, place: Any) -> None:
    """A val type gains a field while a handle of the old type is open. The old one reads on, and writes no
    more: it does not know what it would retract."""
    one = await place.client()
    other = one if clients == 1 else await place.client()
    old = one.table("t", str, Val)
    await old.put("a", Val(number=1))
    wider = ap.Schema(str, Wider)
    schema_id, _ = await one.schema("t")
    await one.compare_and_evolve_schema("t", schema_id, wider)
    new = other.table("t", str, Wider)
    assert await new.get("a") == Wider(number=1)
    await new.put("b", Wider(number=2, name="x"))
    assert await new.update("a", lambda val: Wider(number=val.number + 1, name="y")) == Wider(
        number=2, name="y"
    )
    assert await old.get("a") == Val(number=2)
    assert await old.put("a", Val(number=2)) > 0  # as this handle sees it, nothing changes
    for write in (old.put("a", Val(number=3)), old.delete("a"), old.put("c", Val(number=1), once="id")):
        with pytest.raises(ap.CodecMismatch, match="name"):
            await write
    failed, time = await asyncio.gather(
        old.put("c", Val(number=1)), new.put("d", Wider(number=4)), return_exceptions=True
    )
    assert isinstance(failed, ap.CodecMismatch) or clients == 2
    assert time > 0
    await new.delete("d")
    assert await entries(new) == [("a", Wider(number=2, name="y")), ("b", Wider(number=2, name="x"))]
    async with one.reader("t", wider) as reader, reader.snapshot() as snapshot:
        assert [diff for _, _, diff in await snapshot.rows()] == [1, 1]


@pytest.mark.parametrize("big", [100, 10_000], ids=["char", "bytes"])
async def test_an_entry_beyond_the_limit_is_refused(big: int) -> None:
    """`update_size_max` bounds key and val together, in characters of any width; nothing is written."""
    async with ap.open("mem://", settings=ap.Settings(update_size_max=big)) as client:
        table = client.table("t", str, str)
        await table.put("a", "x" * (big // 2))
        for text in ("x" * big * 2, "é" * big, "😀" * (big // 3)):
            for call in (
                lambda: table.put("b", text),  # noqa: B023  # called in this turn
                lambda: table.insert("b", text),  # noqa: B023  # called in this turn
                lambda: table.put_many({"c": "x", "b": text}),  # noqa: B023  # called in this turn
                lambda: table.update("b", lambda old: text),  # noqa: B023  # called in this turn
                lambda: table.put(text, "x"),  # noqa: B023  # called in this turn
            ):
                with pytest.raises(ap.InvalidUpdate, match=str(big)):
                    await call()
        assert await entries(table) == [("a", "x" * (big // 2))]


async def test_arguments_that_are_none_of_the_calls(quiet: ap.Client) -> None:
    """Bad arguments get errors that name them, and write nothing."""
    table = quiet.table("t", str, int)
    for entries_ in (5, "ab", [5], [("a",)], [("a", 1, 2)], {"a": "x"}, {"a": None}, None):
        with pytest.raises(ap.InvalidUpdate):
            await table.put_many(entries_)
    for once in ("", "x" * 257, 5, b"x"):
        for call in (
            lambda: table.put("a", 1, once=once),  # noqa: B023  # called in this turn
            lambda: table.put_many({"a": 1}, once=once),  # noqa: B023  # called in this turn
            lambda: table.delete("a", once=once),  # noqa: B023  # called in this turn
            lambda: table.insert("a", 1, once=once),  # noqa: B023  # called in this turn
            lambda: table.update("a", lambda old: 1, once=once),  # noqa: B023  # called in this turn
        ):
            assert await refused(call()) is ap.UsageKind.INVALID_TXN
    assert await refused(table.put_many({"a": 1}, txn=("app", 1), once="x")) is ap.UsageKind.INVALID_TXN
    assert await refused(table.put_many({"a": 1}, txn=("app", -1))) is ap.UsageKind.INVALID_TXN
    with pytest.raises(TypeError):
        await table.update("a", 5)

    async def f(old: Any) -> int:
        return 1

    with pytest.raises(TypeError, match="coroutine function"):
        await table.update("a", f)
    assert await table.count() == 0
