"""Many rows as Python values, and back: how long it takes, and for how long the event loop stands still."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import polars as pl
import pytest
from pydantic import BaseModel

import aiopersist as ap


class Row(BaseModel):
    a: int
    b: str


class Pauses:
    """How long each turn of the loop was late, in seconds."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def watch(self) -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(0.001)
            self.late.append(time.perf_counter() - begin - 0.001)


@asynccontextmanager
async def timed(name: str) -> AsyncIterator[None]:
    pauses = Pauses()
    task = asyncio.create_task(pauses.watch())
    await asyncio.sleep(0.01)
    begin = time.perf_counter()
    yield
    took = time.perf_counter() - begin
    await asyncio.sleep(0.01)
    task.cancel()
    worst, usual = max(pauses.late), sorted(pauses.late)[len(pauses.late) * 99 // 100]
    print(f"{name}: {took:.2f} s, late by at most {worst * 1e3:.0f} ms, 99 of 100 by {usual * 1e3:.1f} ms")


async def every(s: Any) -> None:
    async for _ in s:
        pass


async def test_many_rows(request: pytest.FixtureRequest) -> None:
    n = 500_000 if request.config.getoption("benchmark_enable") else 2000
    schema = ap.Schema(key=int, val=Row)
    frame = pl.DataFrame({"key": range(n), "a": range(n), "b": [f"x{i}" for i in range(n)]})
    tuples = [(i, "y") for i in range(n)]
    async with ap.open("mem://") as client, client.writer("s", schema) as w, client.reader("s", schema) as r:
        await w.write(frame)
        async with client.writer("t", ap.Schema(key=int, val=str)) as t, timed("write of tuples"):
            await t.write(tuples)
        async with r.snapshot() as s:
            work: dict[str, Callable[[], Awaitable[Any]]] = {"rows()": s.rows, "async for": lambda: every(s)}
            for name, step in work.items():
                async with timed(name):
                    await step()
