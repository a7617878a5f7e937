"""Goal: many rows become Python values, and back, without blocking the event loop: in slices, on worker
threads, with no task for each row; and every promise to callers holds for any number of rows."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.data.updates import slices
from aiopersist.data.updates.convert import to_table
from aiopersist.parts import upload
from aiopersist.read.query import Query
from aiopersist.write import combine


class Val(BaseModel):
    a: int
    b: str | None


ROWS = 20_000
MODELS = ap.Schema(key=int, val=Val)


def models(n: int = ROWS) -> list[tuple[int, Val, int, int]]:
    return [(i, Val(a=i, b="x" if i % 2 else None), 0, 1) for i in range(n)]


class Turns:
    """How many turns the loop takes, and how many tasks begin, while something is done."""

    def __init__(self) -> None:
        self.turns = self.tasks = 0

    async def __aenter__(self) -> "Turns":
        self._loop = asyncio.get_running_loop()
        self._on = True
        self._loop.call_soon(self._turn)
        self._loop.set_task_factory(self._begin)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._on = False
        self._loop.set_task_factory(None)

    def _turn(self) -> None:
        self.turns += 1
        if self._on:
            self._loop.call_soon(self._turn)

    def _begin(self, loop: Any, work: Any, **more: Any) -> Any:
        self.tasks += 1
        return asyncio.Task(work, loop=loop, **more)


async def test_rows_are_made_in_slices(quiet_mem: ap.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no step makes more than a slice of rows, so the loop has its turns in between."""
    sizes: list[int] = []
    rows_of: Callable[..., Any] = Query.rows

    def seen_rows(query: Query, table: Any) -> Any:
        sizes.append(table.num_rows)
        return rows_of(query, table)

    monkeypatch.setattr(Query, "rows", seen_rows)
    async with quiet_mem.writer("s", MODELS) as w, quiet_mem.reader("s", MODELS) as r:
        await w.compare_and_append(models(), 0, 1)
        async with r.snapshot(0) as s:
            async with Turns() as seen:
                rows = await s.rows()
            assert seen.turns >= len(sizes) >= ROWS / slices.ROWS_MAX
            assert max(sizes) <= slices.ROWS_MAX
            assert rows == [(key, val, diff) for key, val, _, diff in models()]
            sizes.clear()
            assert [row async for row in s] == rows
            assert max(sizes) <= slices.ROWS_MAX


async def test_async_for_takes_no_task_for_each_row(quiet_mem: ap.Client) -> None:
    async with quiet_mem.writer("s", MODELS) as w, quiet_mem.reader("s", MODELS) as r:
        await w.compare_and_append(models(), 0, 1)
        async with r.snapshot(0) as s, Turns() as seen:
            assert len([row async for row in s]) == ROWS
        assert seen.tasks < ROWS / 100


async def test_each_of_several_tasks_gets_rows_of_its_own(quiet_mem: ap.Client) -> None:
    """Goal: together all, none twice, also where a wait is cut off."""
    async with quiet_mem.writer("s", MODELS) as w, quiet_mem.reader("s", MODELS) as r:
        await w.compare_and_append(models(), 0, 1)
        async with r.snapshot(0) as s:
            rows = aiter(s)
            found: list[int] = []

            async def take() -> None:
                async for key, _, _ in rows:
                    found.append(key)
                    if key % 100 == 0:
                        await asyncio.sleep(0)

            async def be_cut_off() -> None:
                for _ in range(50):
                    wait = asyncio.ensure_future(anext(rows))
                    await asyncio.sleep(0)
                    if not wait.cancel():
                        found.append(wait.result()[0])
                    else:
                        await asyncio.wait([wait])
                        assert wait.cancelled()

            await asyncio.gather(take(), take(), be_cut_off(), return_exceptions=False)
            assert sorted(found) == list(range(ROWS))


async def test_an_iteration_ends_as_its_snapshot_closes(quiet_mem: ap.Client) -> None:
    """Goal: rows that are here already are not given after that."""
    async with quiet_mem.writer("s", MODELS) as w, quiet_mem.reader("s", MODELS) as r:
        await w.compare_and_append(models(100), 0, 1)
        s = await r.snapshot(0)
        rows = aiter(s)
        await anext(rows)
        await s.aclose()
        with pytest.raises(ap.InvalidUsage) as e:
            await anext(rows)
        assert e.value.kind is ap.UsageKind.CLOSED


async def test_many_tuples_are_converted_in_slices(
    quiet_mem: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:

    sizes: list[int] = []

    def seen(rows: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(rows))
        return to_table(rows, *args, **kwargs)

    for module in (upload, combine):
        monkeypatch.setattr(module, "to_table", seen)
    async with quiet_mem.writer("s", MODELS) as w, quiet_mem.reader("s", MODELS) as r:
        await w.compare_and_append(models(), 0, 1)
        await w.write([(key, val, -1) for key, val, _, _ in models()])
        assert sum(sizes) >= 2 * ROWS and max(sizes) <= slices.ROWS_MAX
        async with r.snapshot() as s:
            assert await s.rows() == []


async def test_many_tuples_are_taken_or_refused_as_a_whole(quiet_mem: ap.Client) -> None:
    """Goal: the row is that of the whole input, and bad data is told before a bad time, wherever it is."""
    schema = ap.Schema(key=int, val=str)
    rows: list[Any] = [(i, "x", 5, 1) for i in range(ROWS)]
    async with quiet_mem.writer("s", schema) as w:
        rows[0] = (0, "x", 1, 1)
        with pytest.raises(ap.InvalidUsage) as early:
            await w.compare_and_append(rows, 0, 5)
        assert early.value.kind is ap.UsageKind.UPDATE_BEYOND_UPPER
        rows[-2] = (0, 7, 1, 1)
        with pytest.raises(ap.InvalidUpdate) as e:
            await w.append(rows, 2, 6)
        assert e.value.row == ROWS - 2
        with pytest.raises(ap.InvalidUpdate) as e:
            await w.write([(key, val) for key, val, _, _ in rows])
        assert e.value.row == ROWS - 2
        assert w.upper == ap.Antichain(0)


@pytest.mark.blocks_loop  # the collector does
async def test_the_collector_does_not_look_at_kept_rows(quiet_mem: ap.Client) -> None:
    """Goal: no full collection because of the rows that `rows()` makes; and what the application froze
    stays frozen."""
    gc.unfreeze()  # what `conftest.py` froze
    async with quiet_mem.writer("s", MODELS) as w, quiet_mem.reader("s", MODELS) as r:
        await w.compare_and_append(models(), 0, 1)
        async with r.snapshot(0) as s:
            gc.collect()
            before = gc.get_stats()[2]["collections"]
            kept = [await s.rows() for _ in range(5)]
            assert gc.get_stats()[2]["collections"] <= before + 1
            assert len(kept) == 5 and gc.get_freeze_count() == 0
            try:
                gc.freeze()
                frozen = gc.get_freeze_count()
                await s.rows()
                assert 0 < gc.get_freeze_count() <= frozen
            finally:
                gc.unfreeze()
                gc.collect()
                gc.freeze()
