"""The knowledge of a type checker about reads and writes; `tox -e types` has mypy check it. Nothing of it
runs."""

from typing import Any, assert_type

import polars as pl
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

import aiopersist as ap


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
