"""The knowledge of a type checker about reads, writes, tables, transactions and streams; `tox -e types` has
mypy check it. Nothing of it runs."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, assert_type

import polars as pl
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.indexed import Listener, Sealed, Stream, StreamSnapshot


class Item(BaseModel):
    count: int


def one_more(item: Item | None) -> Item:
    return Item(count=item.count + 1 if item else 1)


async def reads(client: ap.Client) -> None:
    schema = ap.Schema(key=str, val=int)
    assert_type(schema, ap.Schema[str, int, int])
    async with client.reader("s", schema) as r, r.snapshot() as s, r.listen() as listen:
        assert_type(await s.rows(), list[tuple[str, int, int]])
        assert_type(await s.rows(columns=["key"]), list[tuple[Any, ...]])
        async for row in s:
            assert_type(row, tuple[str, int, int])
        async for step in listen.steps():
            for update in step.updates:
                assert_type(update.key, str)
                assert_type(update.val, int)
                update.key + 1  # type: ignore[operator]


async def writes(client: ap.Client) -> None:
    async with client.writer("s", ap.Schema(key=str, val=int)) as w:
        await w.write([("a", 3)])
        await w.write([("a", 3, 1), ("b", 4, -1)])
        await w.write(("a", n) for n in range(3))
        await w.compare_and_append([("a", 3, 0, 1)], 0, 1)
        await w.compare_and_append([], 1, 2)
        await w.append([], 0, 1)
        await w.batch([("a", 3, 0, 1)], 0, 1)
        await w.write(pa.table({"key": ["a"], "val": [3]}))
        await w.write(pl.DataFrame({"key": ["a"], "val": [3]}))
        await w.write([pl.DataFrame({"key": ["a"], "val": [3]})])
        await w.write([("a", "3")])  # type: ignore[arg-type]
        await w.write([(3, 3)])  # type: ignore[arg-type]
        await w.write(["a"])  # type: ignore[arg-type]
        await w.compare_and_append([("a", 3)], 0, 1)  # type: ignore[arg-type]
        await w.append([("a", "3", 0, 1)], 0, 1)  # type: ignore[arg-type]
        await w.batch([(3, 3, 0, 1)], 0, 1)  # type: ignore[arg-type]
        async with w.builder(0) as builder:
            await builder.add("a", 3, 0, 1)
    async with client.writer("p", ap.Schema(key=str, val=None, time=2)) as pairs:
        await pairs.compare_and_append([("a", None, (0, 1), 1)], (0, 0), ap.Antichain((1, 0), (0, 2)))


async def tables(client: ap.Client, once: str | None) -> None:
    stock = client.table("stock", str, Item)
    assert_type(stock, ap.Table[str, Item])
    assert_type(await stock.get("a"), Item | None)
    assert_type(await stock.update("a", one_more), Item | None)
    assert_type(await stock.update("a", one_more, None), Item | None)
    assert_type(await stock.update("a", one_more, once="id"), Item | ap.Repeated | None)
    assert_type(await stock.update("a", one_more, once), Item | ap.Repeated | None)
    await stock.put("a", 3)  # type: ignore[arg-type]
    doors: ap.Table[str, Literal["open", "shut"]] = client.table("doors", str, Literal["open", "shut"])
    await doors.put("front", "ajar")  # type: ignore[arg-type]
    counts: ap.Table[str, int] = client.table("counts", str, pa.int32())
    assert_type(await counts.get("a"), int | None)


async def puts(client: ap.Client, items: Mapping[str, Item], coming: AsyncIterator[tuple[str, Item]]) -> None:
    stock, sizes = client.table("stock", str, Item), client.table("sizes", str, float)
    await stock.put_many({"a": Item(count=3)})
    await stock.put_many({key: Item(count=1) for key in "abc"})
    await stock.put_many({})
    await stock.put_many(items)
    await stock.put_many(items.items())
    await stock.put_many([("a", Item(count=3))], txn=("app", 1))
    await stock.put_many((key, Item(count=1)) for key in "abc")
    await stock.put_many(zip("ab", items.values(), strict=True))
    await stock.put_many(pa.table({"key": ["a"], "count": [3]}))
    await stock.put_many(iter(pa.table({"key": ["a"], "count": [3]}).to_batches()))
    await stock.put_many(pl.DataFrame({"key": ["a"], "count": [3]}))
    await stock.put_many([pl.DataFrame({"key": ["a"], "count": [3]})])
    await sizes.put_many({"a": 3})
    await stock.put_many({"a": 3})  # type: ignore[arg-type]
    await stock.put_many({3: Item(count=3)})  # type: ignore[arg-type]
    await stock.put_many([("a", 3)])  # type: ignore[arg-type]
    await stock.put_many(("a", n) for n in range(3))  # type: ignore[arg-type]
    await stock.put_many([("a", Item(count=3), 1)])  # type: ignore[arg-type]
    await stock.put_many("abc")  # type: ignore[arg-type]
    await stock.put_many(coming)  # type: ignore[arg-type]


async def transactions(client: ap.Client, once: str | None) -> None:
    stock = client.table("stock", str, Item)

    async def body(tx: ap.Transaction) -> int:
        assert_type(await tx.get(stock, "a"), Item | None)
        tx.put_many(stock, {"a": Item(count=3)})
        tx.put_many(stock, {})
        tx.put_many(stock, [("a", Item(count=3))])
        tx.put_many(stock, pl.DataFrame({"key": ["a"], "count": [3]}))
        tx.put_many(stock, {"a": 3})  # type: ignore[misc]
        tx.put_many(stock, [("a", 3)])  # type: ignore[misc]
        tx.put_many(stock, {3: Item(count=3)})  # type: ignore[misc]
        return 3

    async def nothing(tx: ap.Transaction) -> None: ...

    assert_type(await client.transact(body), int)
    assert_type(await client.transact(body, acks=[], max_attempts=3), int)
    assert_type(await client.transact(body, once="id"), int | ap.Repeated)
    assert_type(await client.transact(body, once=once), int | ap.Repeated)
    assert_type(await client.transact(body, txn=("app", 1)), int | ap.Repeated)
    await client.transact(nothing)
    assert_type(await client.transact(nothing, once="id"), ap.Repeated | None)


async def streams(client: ap.Client) -> None:
    async with client.indexed("orders") as ix:
        placed, items = await ix.register("placed", str, int), await ix.register("items", str, Item)
        assert_type(placed, Stream[str, int])
        assert_type(await ix.register("keys", str, None), Stream[str, None])
        assert_type(await ix.load("placed", str, int), Stream[str, int] | None)
        either: Stream[str, int | None] = await ix.register("either", str, int | None)
        await ix.write([(placed, [("a", 3, 1, 1)]), (items, [("a", Item(count=3), 1, 1)])])
        await ix.write([(either, pl.DataFrame({"key": ["a"], "val": [3], "time": [1], "diff": [1]}))])
        await ix.write((stream, (("a", n, n, 1) for n in range(3))) for stream in (placed, either))
        await ix.write([(placed, [("a", "3", 1, 1)])])  # not seen: see docs/limits.md
        await ix.write([(placed, [("a", 3)])])  # type: ignore[list-item]
        await ix.write([(placed, 3)])  # type: ignore[list-item]
        await ix.write([placed])  # type: ignore[list-item]
        async with ix.snapshot(placed) as snapshot, ix.listen(items) as (begin, events):
            assert_type(snapshot, StreamSnapshot[str, int])
            assert_type(await snapshot.rows(), list[ap.Update[str, int, int]])
            assert_type(begin, StreamSnapshot[str, Item])
            assert_type(events, Listener[str, Item])
            async for event in events:
                if not isinstance(event, Sealed):
                    for update in event.updates:
                        assert_type(update.val, Item)
