"""Calls of tables, and transactions, with one fault: all of it is there or nothing, in both tables and the
journal; the id tells which; the views agree with the shards; a repeat does it once."""

from collections.abc import Awaitable, Callable
from typing import Any

import aiopersist as ap
from tests.cuts.scenes import SCENES, Call, Scene
from tests.cuts.stage import Stage

Contents = tuple[dict[str, int], dict[str, int], dict[str, int]]
"""Of the tables `a` and `b`, and of the journal `j`."""
ENTRY: ap.Schema[str, int, int] = ap.Schema(str, int)
BEFORE: Contents = ({"k": 1, "l": 2, "m" + 90 * "-": 3}, {"k": 10}, {})
ID = "request"


class TableStage:
    """Two tables and a journal: what they were before the call, or what they were to be after it."""

    def __init__(self, s: Stage, after: Contents, shard: str | None) -> None:
        self.s = s
        self.may_be: list[Contents] = [BEFORE, after]
        self.after = after
        self.shard = shard
        """Where the id is kept; empty: there is none."""
        self.call: Callable[[TableStage], Awaitable[Any]] | None = None
        self.journal: Any = None

    def tables(self, client: Any) -> tuple[Any, Any]:
        return client.table("a", str, int), client.table("b", str, int)

    async def open(self, client: Any) -> None:
        self.a, self.b = self.tables(client)
        self.journal = await client.writer("j", ENTRY, clock="wall")

    async def make(self) -> None:
        """The call, and what its answer says of the contents."""
        assert self.call is not None
        try:
            await self.call(self)
        except ap.StorageUnavailable:
            self.may_be = self.may_be[:1]
            raise
        self.may_be = self.may_be[-1:]

    async def read(self, client: Any) -> Contents:
        """By snapshots of the shards."""
        found: list[dict[str, int]] = []
        for name in "abj":
            async with client.reader(name) as r:
                upper: Any = (await r.fetch_recent_upper()).time
                if not upper:
                    found.append({})
                    continue
                async with r.snapshot() as snapshot:
                    rows = await snapshot.rows()
            assert [diff for _, _, diff in rows] == [1] * len(rows), rows
            found.append({key: val for key, val, _ in rows})
        return found[0], found[1], found[2]

    async def check(self, client: Any, *, stale: bool) -> None:
        """The contents, by snapshots and by the views, are one of those that may be, from now on; so the id
        says."""
        happened = None if self.shard == "" else await client.happened(ID, self.shard)
        found = await self.read(client)
        assert found in self.may_be, (found, self.may_be)
        self.may_be = [found]
        assert self.shard == "" or (happened is not None) == (found == self.after), (happened, found)
        for table, contents in zip(self.tables(client), found, strict=False):
            keys = {*BEFORE[0], *contents, "new"}
            assert await table.get_many(keys) == contents
            assert not stale or await table.get_many(keys, stale=True) == contents
            view = await table.view()
            assert not view.resident or view.keys == len(contents)

    async def verify(self) -> None:
        """The same client goes on, and makes the call again."""
        client = self.s.client
        await self.check(client, stale=True)
        await self.open(client)
        await self.a.put("later", 5)
        self.expect(later=5)
        await self.check(client, stale=True)
        self.may_be = [self.after]
        assert self.call is not None
        for _ in range(2):
            await self.call(self)
            await self.check(client, stale=True)

    def expect(self, **vals: int) -> None:
        """So they are in `a` now."""
        self.may_be = [(one[0] | vals, *one[1:]) for one in self.may_be]
        self.after = (self.after[0] | vals, *self.after[1:])

    async def afresh(self, client: Any) -> None:
        """A client that saw nothing of it."""
        await self.check(client, stale=False)
        table, _ = self.tables(client)
        number = len(await table.get_many(["f0", "f1", "f2"]))
        await table.put(f"f{number}", number)
        self.expect(**{f"f{number}": number})
        await self.check(client, stale=True)


def table_scene(
    after: Contents, call: Callable[[TableStage], Awaitable[Any]], shard: str | None = "a", **settings: Any
) -> Scene:
    """`call` makes `after` of what was there, and has the id."""

    async def prepare(s: Stage) -> Call:
        if settings:
            await s.client.aclose()
            s.client = await s.opened(**settings)
        there = TableStage(s, after, shard)
        await there.open(s.client)
        await there.a.put_many(BEFORE[0])
        await there.b.put_many(BEFORE[1])
        there.call = call
        s.after.append(there.verify)
        s.afresh.append(there.afresh)
        return there.make

    return prepare


A, B, J = BEFORE


async def _update(there: TableStage) -> Any:
    return await there.a.update("k", lambda old: (old or 0) + 1, once=ID)


async def _insert(there: TableStage) -> Any:
    return await there.a.insert("new", 7, once=ID)


async def _transfer(there: TableStage) -> Any:
    a, b = there.a, there.b

    async def body(tx: ap.Transaction) -> None:
        one, other = await tx.get(a, "k") or 0, await tx.get(b, "k") or 0
        assert [key async for key, _ in tx.items(b)] == ["k"]
        tx.put(a, "k", one - 1)
        tx.put(b, "k", other + 1)
        tx.append(there.journal, [(90 * "j", 1)])

    return await there.s.client.transact(body, once=ID)


async def _only_read(there: TableStage) -> Any:
    """Reads one table, writes the other one, which takes part."""

    async def body(tx: ap.Transaction) -> None:
        tx.put(there.b, "k", (await tx.get(there.a, "k") or 0) + 10)

    return await there.s.client.transact(body, once=ID)


SCENES["table_put"] = table_scene(({**A, "k": 5}, B, J), lambda there: there.a.put("k", 5, once=ID))
SCENES["table_put_blob"] = table_scene(
    ({**A, 90 * "n": 5}, B, J), lambda there: there.a.put(90 * "n", 5, once=ID)
)
SCENES["table_put_many"] = table_scene(
    ({**A, "k": 5, "new": 6}, B, J), lambda there: there.a.put_many({"k": 5, "new": 6}, once=ID)
)
SCENES["table_insert"] = table_scene(({**A, "new": 7}, B, J), _insert)
SCENES["table_update"] = table_scene(({**A, "k": 2}, B, J), _update)
SCENES["table_delete"] = table_scene(
    ({key: val for key, val in A.items() if key != "k"}, B, J), lambda there: there.a.delete("k", once=ID)
)
SCENES["transact"] = table_scene(({**A, "k": 0}, {"k": 11}, {90 * "j": 1}), _transfer, None)
SCENES["transact_and_read"] = table_scene((A, {"k": 11}, J), _only_read, None)
# Views that know few keys, and look others up.
PARTED: dict[str, Any] = {"table_resident_bytes": 0}
SCENES["table_update_parted"] = table_scene(({**A, "k": 2}, B, J), _update, **PARTED)
SCENES["transact_parted"] = table_scene(({**A, "k": 0}, {"k": 11}, {90 * "j": 1}), _transfer, None, **PARTED)


# --- reads, and the life of tables --------------------------------------------------------------------


async def _get(there: TableStage) -> None:
    assert await there.a.get("k") == 1
    assert await there.b.get_many(["k", "none"]) == {"k": 10}


async def _items(there: TableStage) -> None:
    assert [entry async for entry in there.a.items(stop="l0")] == [(key, A[key]) for key in "kl"]


async def _look(there: TableStage) -> None:
    """Of two tables at one moment, without a write."""

    async def body(tx: ap.Transaction) -> Any:
        return await tx.get(there.a, "k"), [val async for _, val in tx.items(there.b)]

    assert await there.s.client.transact(body) == (1, [10])


async def _open(there: TableStage) -> None:
    """By handles of their own, after the ones that are there have closed."""
    await there.a.aclose()
    await there.b.aclose()
    await there.open(there.s.client)
    assert await there.a.get("k") == 1
    assert await there.b.get("k") == 10


for _call in (_get, _items, _look, _open):
    SCENES[f"table{_call.__name__}"] = table_scene(BEFORE, _call, "")
    SCENES[f"table{_call.__name__}_parted"] = table_scene(BEFORE, _call, "", **PARTED)


async def _changes(s: Stage) -> Call:
    """What a feed told before the trouble, and what it, or one behind its last cursor, tells after it, is all
    there is, once."""
    there = TableStage(s, BEFORE, "")
    await there.open(s.client)
    told: dict[str, list[Any]] = {}
    await there.a.put_many(A)
    feed = await there.a.changes().__aenter__()
    cursors = [feed.cursor]
    await there.a.put("k", 5)
    await there.a.delete("l")

    async def follow(feed: Any) -> None:
        while told.get("l", [0])[-1] is not None or told["k"][-1] != 5:
            step = await anext(feed)
            cursors.append(step.cursor)
            for change in step.changes:
                found = told.setdefault(change.key, [None])
                assert found[-1] == change.old, (change, told)
                found.append(change.new)

    async def rest() -> None:
        try:
            await follow(feed)
        except (ap.StorageUnavailable, ap.Indeterminate, ap.LeaseExpired):
            pass
        async with there.a.changes(cursors[-1]) as behind:
            await follow(behind)
        await feed.aclose()
        there_now = {key: vals[-1] for key, vals in told.items() if vals[-1] is not None}
        assert there_now == {key: val for key, val in {**A, "k": 5}.items() if key != "l"}

    s.after.append(rest)
    return lambda: follow(feed)


async def _first_use(s: Stage) -> Call:
    """It is created, or it is not; then it is."""

    async def call() -> None:
        await s.client.table("new", str, int).insert("k", 1, once=ID)

    async def again(client: Any) -> None:
        try:
            await client.table("new", str, int).insert("k", 1, once=ID)
        except ap.KeyExists:
            raise AssertionError("the repeat was no repeat") from None
        table = client.table("new", str, int)
        assert await table.update("n", lambda old: (old or 0) + 1, once=ID) is not None
        assert dict([entry async for entry in table.items()]) == {"k": 1}

    s.after.append(lambda: again(s.client))
    s.afresh.append(again)
    return call


SCENES |= {"table_changes": _changes, "table_first_use": _first_use}
