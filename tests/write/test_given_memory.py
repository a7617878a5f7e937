"""Goal: a call takes its updates as they are: later changes by their owner have no effect."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import aiopersist as ap


class Telling(list):  # type: ignore[type-arg]
    """A row that tells that it was looked at."""

    is_taken = False

    def __iter__(self) -> Any:
        self.is_taken = True
        return super().__iter__()


@pytest.mark.parametrize("change", [list.clear, list.pop, list.reverse, lambda rows: rows.append(rows[0])])
async def test_a_list_is_taken_as_the_call_begins(change: Any) -> None:
    """Goal: a list that its owner changes while the call awaits is written as it was given."""
    async with ap.open("mem://") as client:
        w = await client.writer("s", ap.Schema(key=int, val=int))
        updates = [(i, i, 0, 1) for i in range(5000)]
        pairs = [update[:2] for update in updates]
        for rows, call in ((updates, w.compare_and_append(updates, 0, 1)), (pairs, w.write(pairs))):
            first = rows[0] = Telling(rows[0])
            task = asyncio.create_task(call)
            while not first.is_taken:
                await asyncio.sleep(0)
            change(rows)
            await task
        async with client.reader("s") as r, r.snapshot() as s:
            assert await s.rows() == [(i, i, 2) for i in range(5000)]


async def test_a_view_of_a_dict_is_taken_as_the_call_begins() -> None:
    """Goal: values that their owner replaces while the call awaits are written as they were given. A dict of
    the same size gives no error when it is changed."""
    async with ap.open("mem://") as client:
        w = await client.writer("s", ap.Schema(key=int, val=int))
        updates: Any = {i: (i, 0, 0, 1) for i in range(20_000)}
        pairs: Any = {i: update[:2] for i, update in updates.items()}
        given = (
            (updates, w.compare_and_append(updates.values(), 0, 1)),
            (pairs, w.write(pairs.values())),
        )
        for held, call in given:
            first = held[0] = Telling(held[0])
            task = asyncio.create_task(call)
            while not first.is_taken:
                await asyncio.sleep(0)
            held.update((i, (i, 1, *row[2:])) for i, row in list(held.items()))
            await task
        async with client.reader("s") as r, r.snapshot() as s:
            assert await s.rows() == [(i, 0, 2) for i in range(20_000)]


class Growing(Sequence[Any]):
    """A sequence that is no list, and grows as it is read."""

    def __init__(self) -> None:
        self.rows = [(i, i, 0, 1) for i in range(5000)]

    def __getitem__(self, at: Any) -> Any:
        found = self.rows[at]
        self.rows.append((0, 0, 0, 1))
        return found

    def __len__(self) -> int:
        return len(self.rows)


async def test_another_sequence_that_changes_is_refused() -> None:
    """Goal: a part of its rows never passes for all."""
    async with ap.open("mem://") as client:
        w = await client.writer("s", ap.Schema(key=int, val=int))
        with pytest.raises(ap.InvalidUpdate, match="give a copy"):
            await w.compare_and_append(Growing(), 0, 1)
        assert w.upper == ap.Antichain(0)


async def test_any_sequence_of_rows_is_taken() -> None:
    """Goal: a deque has no slices, and is written like a list."""
    async with ap.open("mem://") as client:
        w = await client.writer("s", ap.Schema(key=int, val=int))
        await w.compare_and_append(deque((i, i, 0, 1) for i in range(5000)), 0, 1)
        async with client.reader("s") as r, r.snapshot() as s:
            assert len(await s.rows()) == 5000


# --- memory that is filled again ---------------------------------------------------------------------

N = 3000


class Refilled:
    """Arrow tables that are views of one piece of memory, filled anew for each."""

    def __init__(self) -> None:
        self.memory = np.zeros(N, dtype=np.int64)

    def table(self, n: int, columns: Sequence[str] = ("key", "val", "time", "diff")) -> pa.Table:
        self.memory[:] = n * N + np.arange(N)
        view, zeros = pa.array(self.memory), pa.array(np.zeros(N, dtype=np.int64))
        known = {"key": view, "val": view, "time": zeros, "diff": pa.array(np.ones(N, dtype=np.int64))}
        return pa.table({name: known[name] for name in columns})

    def tables(self, *columns: str) -> Iterator[pa.Table]:
        yield from (self.table(n, columns or ("key", "val", "time", "diff")) for n in range(3))

    async def later(self, *columns: str) -> AsyncIterator[pa.Table]:
        for table in self.tables(*columns):
            yield table

    async def streams(self, *columns: str) -> AsyncIterator[pa.RecordBatchReader]:
        schema = Refilled().table(0, columns or ("key", "val", "time", "diff")).schema
        batches = (table.to_batches()[0] for table in self.tables(*columns))
        yield pa.RecordBatchReader.from_batches(schema, batches)


async def by_builder(w: Any, given: Refilled) -> None:
    async with w.builder(0) as builder:
        for table in given.tables():
            await builder.extend(table)
        given.memory[:] = -1
        batch = await builder.finish(1)
    await w.append_batch(batch, 0, 1)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(by_builder, id="builder"),
        pytest.param(lambda w, given: w.compare_and_append(given.tables(), 0, 1), id="iterator"),
        pytest.param(lambda w, given: w.compare_and_append(given.later(), 0, 1), id="async iterator"),
        pytest.param(lambda w, given: w.write(given.tables("key", "val")), id="write"),
        pytest.param(lambda w, given: w.write(given.later("key", "val")), id="write, async"),
        pytest.param(lambda w, given: w.compare_and_append(given.streams(), 0, 1), id="streams"),
        pytest.param(lambda w, given: w.write(given.streams("key", "val")), id="write, streams"),
    ],
)
@pytest.mark.parametrize("inline", [0, 2**20])
async def test_memory_that_is_filled_again(write: Any, inline: int) -> None:
    """Goal: the taken updates share no memory with the given ones."""
    settings = ap.Settings(inline_writes_single_max_bytes=inline)
    async with ap.open("mem://", settings=settings) as client:
        w = await client.writer("s", ap.Schema(key=int, val=int))
        await write(w, Refilled())
        async with client.reader("s") as r, r.snapshot() as s:
            assert await s.rows() == [(i, i, 1) for i in range(3 * N)]


def refilled_rows(row: list[int]) -> Iterator[list[int]]:
    """Rows that are one list, filled anew for each."""
    for n in range(N):
        row[0] = row[1] = n
        yield row


async def refilled_rows_later(row: list[int]) -> AsyncIterator[list[int]]:
    for same in refilled_rows(row):
        yield same


@pytest.mark.parametrize("rows", [refilled_rows, refilled_rows_later])
async def test_a_list_that_is_filled_again_for_each_row(rows: Any) -> None:
    """Goal: an iterator may give the same list for each row."""
    async with ap.open("mem://") as client:
        w = await client.writer("s", ap.Schema(key=int, val=int))
        await w.compare_and_append(rows([0, 0, 0, 1]), 0, 1)
        await w.write(rows([0, 0]))
        async with w.builder(2) as builder:
            await builder.extend(rows([0, 0, 2, 1]))
            batch = await builder.finish(3)
        await w.append_batch(batch, 2, 3)
        async with client.reader("s") as r, r.snapshot() as s:
            assert await s.rows() == [(n, n, 3) for n in range(N)]
