"""Waits and growth; see `test_hazards.py`."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs
import pytest

import aiopersist as ap
from aiopersist.data.updates.buffer import Buffer
from aiopersist.data.updates.times import GREATEST_ROWS, Greatest
from tests.batches.hazards_kit import rig
from tests.support.internals import stack_of
from tests.support.schemas import SCHEMA


def times_table(times: np.ndarray[Any, Any]) -> pa.Table:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(times.ravel()), times.shape[1])
    return pa.table({"time": pa.chunked_array([lists])})


def kept(greatest: Greatest) -> int:
    return sum(map(len, greatest._seen))


def rows_until(go_on: threading.Event) -> Iterator[Any]:
    """A row, and then a wait that only another thread ends."""
    yield ("a", 1, 0, 1)
    go_on.wait(30)


async def test_iterators_that_wait_take_no_thread_from_others() -> None:
    """Goal: as many as there are worker threads, and more, stand still; a large batch is made meanwhile."""
    go_on = threading.Event()
    async with rig() as r:
        w = await r.writer()
        threads = stack_of(r.client).threads.most
        waiting = [asyncio.create_task(w.batch(rows_until(go_on), 0, 1)) for _ in range(max(4, 2 * threads))]
        try:
            await asyncio.sleep(0.05)
            async with asyncio.timeout(50):
                large = await w.batch([(f"{i:05}", i, 0, 1) for i in range(5000)], 0, 1)
            assert not any(task.done() for task in waiting)
        finally:
            go_on.set()
            batches = await asyncio.gather(*waiting)
        for batch in (large, *batches):
            await batch.delete()


async def test_an_iterator_that_waits_does_not_keep_its_caller() -> None:
    """Goal: a cancelled call returns, though the thread of its iterator cannot be stopped."""
    go_on = threading.Event()
    async with rig() as r:
        w = await r.writer()
        try:
            async with asyncio.timeout(50):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await w.batch(rows_until(go_on), 0, 1)
        finally:
            go_on.set()


@pytest.mark.parametrize("at_once", [300_000, 10_000, 50])
def test_of_random_product_times_few_are_kept(at_once: int) -> None:
    """Goal: however they come; and they hold any frontier against all."""
    times = np.random.default_rng(0).integers(0, 2**40, (300_000, 2))
    greatest = Greatest()
    for n in range(0, len(times) if at_once > 50 else 20_000, at_once):
        greatest.add(times_table(times[n : n + at_once]))
    assert kept(greatest) <= (100 if at_once == 300_000 else GREATEST_ROWS)
    assert len(greatest._seen) <= 64
    if at_once > 50:
        for first in (0, 2**39, 2**40 - 2**30):
            second = max(times[times[:, 0] >= first][:, 1].tolist())
            found = greatest.beyond(ap.Antichain((first, second)))
            assert isinstance(found, tuple)
            assert found[0] >= first
            assert found[1] == second
            assert greatest.beyond(ap.Antichain((first, second + 1))) is None


@pytest.mark.parametrize("shuffled", [False, True])
def test_of_product_times_that_run_against_each_other_all_are_held(shuffled: bool) -> None:
    """Goal: none is greater than another, so none may be forgotten."""
    count = 20_000
    times = np.stack([np.arange(count), count - np.arange(count)], axis=1)
    if shuffled:
        np.random.default_rng(0).shuffle(times)
    greatest = Greatest()
    for n in range(0, count, 3000):
        greatest.add(times_table(times[n : n + 3000]))
    assert kept(greatest) == count
    for i in (0, 1, 2999, 3000, 12_345, count - 1):
        assert greatest.beyond(ap.Antichain((i, count - i))) == (i, count - i)
        assert greatest.beyond(ap.Antichain((i, count - i + 1))) is None
        assert greatest.beyond(ap.Antichain((i + 1, count - i))) is None


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("bound", [3, 30, 2**62])
def test_greatest_product_times_against_all_of_them(length: int, bound: int) -> None:
    """Goal: any frontier is answered as by a look at every time, with ties and with sums past 64 bits."""
    chance, random_times = random.Random(length), np.random.default_rng(bound % 1000)
    times = random_times.integers(0, bound, (1500, length))
    greatest, part, start = Greatest(), Greatest(), 0
    while start < len(times):
        size = chance.choice([1, 40, 63, 64, 200, 500])
        chance.choice([greatest, part]).add(times_table(times[start : start + size]))
        start += size
    greatest.merge(part)
    rows = times.tolist()
    seen = set(map(tuple, rows))
    held = np.concatenate(greatest._seen)
    assert {tuple(row) for row in held.tolist()} <= seen
    at_the_edge = [row for row in rows if ((times >= row).all(axis=1) & (times > row).any(axis=1)).sum() == 0]
    answers = Counter[bool]()
    for _ in range(150):
        elements = [
            tuple(min(2**62, value + chance.choice([0, 0, 0, 1])) for value in chance.choice(at_the_edge))
            for _ in range(chance.choice([1, 1, 2]))
        ]
        frontier = ap.Antichain(*elements)
        expected = any((times >= np.array(element)).all(axis=1).any() for element in elements)
        found = greatest.beyond(frontier)
        assert (found is not None) == expected
        assert found is None or (found in seen and frontier.less_equal(found))
        answers[expected] += 1
    assert min(answers[True], answers[False]) > 20


def test_a_buffer_holds_few_tables_however_many_came() -> None:
    """Goal: 20,000 tables of 64 rows; a table costs kilobytes, however little it holds."""
    total = 20_000
    column = pa.array(np.repeat(np.arange(total), 64))
    columns = {"key": pa.array(["key"]).take(pa.array(np.zeros(64 * total, np.int64)))}
    table = pa.table({**columns, "val": column, "time": column, "diff": column})
    buffer = Buffer(SCHEMA)
    for n in range(total):
        buffer.add(table.slice(64 * n, 64))
        assert len(buffer._tables) + len(buffer._small) <= total // 64 + 64
    assert buffer.rows == 64 * total
    taken = []
    target = buffer.goodbytes // 3 + 1
    while buffer.goodbytes >= target:
        taken.append(buffer.take_reaching(target))
    taken.append(buffer.take())
    assert len(taken) == 3
    assert pa.concat_tables(taken)["val"].combine_chunks() == column
    assert (buffer.rows, buffer.goodbytes) == (0, 0)
