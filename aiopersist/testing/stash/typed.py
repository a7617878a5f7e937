"""The part of `StashConformance` about `TypedCollection`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from aiopersist.base.errors import CodecMismatch, InvalidUpdate, InvalidUsage
from aiopersist.base.frontier import Antichain
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Codec
from aiopersist.stash import NothingSealed, StaleLower, Stash, TableTransaction, TypedCollection, transact
from aiopersist.testing.stash.append import refused, sealed, visible

Users = TypedCollection[str, int]
Write = Callable[[Users, Stash], Awaitable[Any]]

USERS = TypedCollection("users", str, int)

# The first write of a collection: its result, the frontiers after it, and the contents.
FIRST_WRITES: dict[str, tuple[Write, Any, tuple[int, int], dict[str, int]]] = {
    "insert": (lambda t, s: t.insert_without_overwrite(s, "a", 1), 1, (1, 2), {"a": 1}),
    "insert many": (
        lambda t, s: t.insert_many_without_overwrite(s, [("b", 2), ("a", 1), ("b", 3)]),
        {"b": 2, "a": 1},
        (1, 2),
        {"a": 1, "b": 2},
    ),
    "insert none": (lambda t, s: t.insert_many_without_overwrite(s, []), {}, (0, 1), {}),
    "upsert key": (lambda t, s: t.upsert_key(s, "a", 1), None, (1, 2), {"a": 1}),
    "upsert": (lambda t, s: t.upsert(s, [("b", 3), ("a", 1), ("b", 2)]), None, (1, 2), {"a": 1, "b": 2}),
    "upsert none": (lambda t, s: t.upsert(s, []), None, (1, 2), {}),
    "delete": (lambda t, s: t.delete(s, lambda k, v: True), [], (0, 1), {}),
}
# A write on {"a": 1, "b": 2}: its result, the number of its appends, and the contents.
WRITES: dict[str, tuple[Write, Any, int, dict[str, int]]] = {
    "insert, there": (lambda t, s: t.insert_without_overwrite(s, "a", 9), 1, 0, {"a": 1, "b": 2}),
    "insert, new": (lambda t, s: t.insert_without_overwrite(s, "c", 3), 3, 1, {"a": 1, "b": 2, "c": 3}),
    "insert some": (
        lambda t, s: t.insert_many_without_overwrite(s, iter([("c", 3), ("a", 9), ("c", 4)])),
        {"c": 3, "a": 1},
        1,
        {"a": 1, "b": 2, "c": 3},
    ),
    "insert, all there": (
        lambda t, s: t.insert_many_without_overwrite(s, [("b", 9), ("a", 9)]),
        {"b": 2, "a": 1},
        0,
        {"a": 1, "b": 2},
    ),
    "insert none": (lambda t, s: t.insert_many_without_overwrite(s, []), {}, 0, {"a": 1, "b": 2}),
    "upsert key, new": (lambda t, s: t.upsert_key(s, "c", 3), None, 1, {"a": 1, "b": 2, "c": 3}),
    "upsert key, there": (lambda t, s: t.upsert_key(s, "a", 9), None, 1, {"a": 9, "b": 2}),
    "upsert key, equal": (lambda t, s: t.upsert_key(s, "a", 1), None, 1, {"a": 1, "b": 2}),
    "upsert": (
        lambda t, s: t.upsert(s, iter([("c", 3), ("a", 8), ("c", 4)])),
        None,
        1,
        {"a": 8, "b": 2, "c": 4},
    ),
    "upsert, equal": (lambda t, s: t.upsert(s, [("a", 1)]), None, 1, {"a": 1, "b": 2}),
    "upsert none": (lambda t, s: t.upsert(s, []), None, 1, {"a": 1, "b": 2}),
    "delete": (lambda t, s: t.delete(s, lambda k, v: k == "b" and v == 2), [("b", 2)], 1, {"a": 1}),
    "delete all": (lambda t, s: t.delete(s, lambda k, v: True), [("a", 1), ("b", 2)], 1, {}),
    "delete none": (lambda t, s: t.delete(s, lambda k, v: v == 9), [], 0, {"a": 1, "b": 2}),
}


class Account(BaseModel, frozen=True):
    number: int
    bank: str


class Owner(BaseModel):
    names: list[str]
    note: str | None = None


class Backwards(Codec):
    """Text that is stored reversed."""

    arrow_type = pa.string()

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, values: Sequence[str]) -> Any:
        return pa.array([value[::-1] for value in values], pa.string())

    def decode(self, array: Any) -> list[str]:
        return [value[::-1] for value in array.to_pylist()]


class StashTyped:
    """Needs the fixtures `stash` and `other`: two handles on one stash that do not fence each other."""

    async def test_a_first_write_seals(self, stash: Stash, other: Stash) -> None:
        for name, (write, result, frontiers, contents) in FIRST_WRITES.items():
            users = TypedCollection(name, str, int)
            assert await users.upper(other) == Antichain(0)
            for read in (users.peek_one(other), users.peek_key_one(other, "a")):
                with refused(f"'{name}'", "since is {0}", "upper is {0}", kind=NothingSealed):
                    await read
            assert await users.upper(other) == Antichain(0)
            assert await write(users, stash) == result, name
            c = await users.get(other)
            assert c == await stash.collection(name, str, int)
            assert (await other.since(c), await other.upper(c)) == tuple(map(Antichain, frontiers)), name
            assert list((await users.peek_one(other)).items()) == list(contents.items()), name

    async def test_writes(self, stash: Stash, other: Stash) -> None:
        for name, (write, result, appends, contents) in WRITES.items():
            users = TypedCollection(name, str, int)
            await users.upsert(stash, [("b", 2), ("a", 1)])
            assert await write(users, other) == result, name
            assert await users.upper(stash) == Antichain(2 + appends), name
            assert await stash.since(await users.get(stash)) == Antichain(1 + appends), name
            assert list((await users.peek_one(stash)).items()) == list(contents.items()), name
            assert [await users.peek_key_one(stash, key) for key in "abc"] == list(map(contents.get, "abc"))

    async def test_a_write_where_all_is_compacted_seals_first(self, stash: Stash, other: Stash) -> None:
        c = await USERS.get(stash)
        await stash.update(c, ("a", 1), 2, 1)
        await stash.seal(c, 5)
        await stash.compact(c, 5)
        assert await USERS.insert_without_overwrite(stash, "a", 9) == 1
        assert await visible(other, c) == [([(("a", 1), 5, 1)], Antichain(5), Antichain(6))]
        await stash.seal(c, Antichain())
        with refused("'users'"):
            await USERS.upsert_key(stash, "a", 9)
        assert await USERS.peek_one(other) == {"a": 1}

    async def test_models(self, stash: Stash, other: Stash) -> None:
        accounts = TypedCollection("accounts", Account, Owner)
        one, two = Account(number=9, bank="b"), Account(number=10, bank="a")
        ann, bob = Owner(names=["Ann", "A."], note="x"), Owner(names=[])
        await accounts.upsert(stash, [(two, bob), (one, ann)])
        assert list((await accounts.peek_one(other)).items()) == [(one, ann), (two, bob)]
        assert await accounts.insert_without_overwrite(other, one, bob) == ann
        await accounts.upsert_key(other, one, bob)
        assert await accounts.peek_key_one(stash, one) == bob
        assert await accounts.delete(stash, lambda account, owner: account.number == 9) == [(one, bob)]
        assert await accounts.peek_one(other) == {two: bob}

    async def test_own_codecs(self, stash: Stash, other: Stash) -> None:
        """Entries are in the order of the stored values; the name of a codec must not change."""
        words: TypedCollection[str, str] = TypedCollection("words", *[Annotated[str, Backwards("one")]] * 2)
        await words.upsert(stash, [("abc", "xy"), ("ca", "z")])
        assert list((await words.peek_one(other)).items()) == [("ca", "z"), ("abc", "xy")]
        assert await words.peek_key_one(other, "abc") == "xy"
        for wrong in (Annotated[str, Backwards("two")], str):
            with pytest.raises(CodecMismatch):
                await other.collection("words", wrong, Annotated[str, Backwards("one")])

    async def test_what_cannot_be_a_typed_collection(self, stash: Stash) -> None:
        vals: list[Any] = [int | None, None, Owner | None]
        for val in vals:
            with pytest.raises(InvalidUsage):
                TypedCollection("c", str, val)
        await USERS.upsert_key(stash, "a", 1)
        others: list[TypedCollection[Any, Any]] = [
            TypedCollection("users", str, str),
            TypedCollection("users", int, int),
        ]
        for users in others:
            for call in (users.get(stash), users.peek_one(stash), users.upsert(stash, [])):
                with pytest.raises(CodecMismatch):
                    await call
        for write in (USERS.upsert_key(stash, "b", "1"), USERS.insert_without_overwrite(stash, 1, 1)):  # type: ignore[arg-type]  # that is the test
            with pytest.raises(InvalidUpdate, match="'users'"):
                await write
        assert await USERS.upper(stash) == Antichain(2)

    async def test_a_key_that_is_there_twice(self, stash: Stash, other: Stash) -> None:
        """`upsert` reads as `peek_one` does."""
        c = await USERS.get(stash)
        await sealed(stash, c, [("x", 1, 1), ("x", 2, 1), ("a", 1, 1)])
        for call in (USERS.peek_one(other), USERS.peek_key_one(other, "x"), USERS.upsert(other, [("a", 2)])):
            with refused("'users'", "'x'"):
                await call
        assert await USERS.peek_key_one(other, "a") == 1
        assert await USERS.upper(stash) == Antichain(1)

    async def test_writes_at_once_try_again(self, stash: Stash, other: Stash) -> None:
        handles = [stash, other] * 4
        inserted = [USERS.insert_without_overwrite(h, "a", i) for i, h in enumerate(handles)]
        winners = set(await asyncio.gather(*inserted))
        assert winners == {await USERS.peek_key_one(stash, "a")}
        upper = (await USERS.upper(stash)).time
        assert isinstance(upper, int)
        await asyncio.gather(
            *(USERS.upsert(h, [(f"k{i}", i), ("last", i)]) for i, h in enumerate(handles)),
            *(USERS.upsert_key(h, f"l{i}", i) for i, h in enumerate(handles)),
        )
        contents = await USERS.peek_one(other)
        assert contents.keys() == {"a", "last", *(f"{k}{i}" for k in "kl" for i in range(8))}
        assert await USERS.upper(stash) == Antichain(upper + 16)
        gone = await asyncio.gather(*(USERS.delete(h, lambda k, v: True) for h in handles))
        assert sorted(entry for one in gone for entry in one) == sorted(contents.items())
        assert await USERS.peek_one(other) == {}

    async def test_a_table_transaction_is_appended(self, stash: Stash, other: Stash) -> None:
        await USERS.upsert(stash, [("a", 1), ("b", 2)])
        table = TableTransaction(await USERS.peek_one(stash), lambda a, b: a == b)
        assert table.set("a", None) == 1
        table.insert("c", 1)
        c = await USERS.get(stash)
        batch = await c.make_batch(stash)
        for key, val, diff in table.pending():
            c.append_to_batch(batch, key, val, diff)
        await stash.append([batch])
        assert await USERS.peek_one(other) == {"b": 2, "c": 1}
        optional: TableTransaction[str, int | None] = TableTransaction({}, lambda a, b: False)
        with refused():
            optional.insert("a", None)
        with refused():
            TableTransaction({"a": None}, lambda a, b: False)

    async def test_a_batch_that_came_too_late(self, stash: Stash, other: Stash) -> None:
        """A batch of values that were read before another append is refused: no key has two values."""
        await USERS.upsert(stash, [("a", 1), ("b", 2)])
        c = await USERS.get(stash)
        upper = await stash.upper(c)
        await USERS.upsert_key(other, "a", 5)
        now, then = await c.make_batch(stash), await c.make_batch(stash, upper)
        for batch in (now, then):
            c.append_to_batch(batch, "a", 1, -1)
            c.append_to_batch(batch, "a", 2, 1)
        with refused("'users'", "'a'"):
            await stash.append([now])
        with refused("'users'", str(upper), kind=StaleLower):
            await stash.append([then])
        assert await USERS.peek_one(other) == {"a": 5, "b": 2}

    async def test_transactions_at_once(self, stash: Stash, other: Stash) -> None:
        """Each transaction sees all writes of the ones before it, in all tables."""
        log = TypedCollection("log", int, int)

        def add(users: TableTransaction[str, int], entries: TableTransaction[int, int]) -> int:
            sum_ = (users.get("sum") or 0) + 1
            users.set("sum", sum_)
            entries.insert(len(entries.items()), sum_)
            return sum_

        done = await asyncio.gather(*(transact(handle, add, USERS, log) for handle in [stash, other] * 5))
        assert sorted(done) == list(range(1, 11))
        assert await USERS.peek_one(other) == {"sum": 10}
        assert await log.peek_one(stash) == {number: number + 1 for number in range(10)}
