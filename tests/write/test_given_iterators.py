"""Goal: a call takes from an iterator as long as the call runs, and from a sequence as its kind allows."""

import asyncio
import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import aiopersist as ap


class Source:
    """Rows one by one. The second waits until `go`."""

    def __init__(self) -> None:
        self.taken = 0
        self.waits, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()

    def rows(self, *, times: bool) -> Iterator[Any]:
        try:
            for i in range(1000):
                self.taken += 1
                if i == 1:
                    self.waits.set()
                    assert self.go.wait(30)
                yield (i, i, 0, 1) if times else (i, i)
        finally:
            self.ended.set()


@pytest.mark.parametrize("door", ["write", "compare_and_append"])
async def test_a_cancelled_call_takes_no_more_from_an_iterator(door: str) -> None:
    """Goal: what a queue gives later is there for the next call, and no thread is left behind."""
    source = Source()
    async with ap.open("mem://") as client, client.writer("s", ap.Schema(key=int, val=int)) as w:
        rows = source.rows(times=door != "write")
        call = asyncio.create_task(w.write(rows) if door == "write" else w.compare_and_append(rows, 0, 1))
        del rows
        while not source.waits.is_set():
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        del call
        source.go.set()
        while not source.ended.is_set():  # as it is collected
            gc.collect()
            await asyncio.sleep(0)
        assert source.taken == 2
        assert isinstance(await w.settle(), ap.NotCommitted)


async def test_iterators_that_wait_leave_threads_to_others() -> None:
    """Goal: calls whose iterators wait do not keep the client from computing."""
    sources = [Source() for _ in range(64)]
    async with ap.open("mem://") as client, client.writer("s", ap.Schema(key=int, val=int)) as w:
        calls = [asyncio.create_task(w.write(source.rows(times=False))) for source in sources]
        while not all(source.waits.is_set() for source in sources):
            await asyncio.sleep(0)
        await w.write([(i, i) for i in range(1000)])
        for source in sources:
            source.go.set()
        await asyncio.gather(*calls)


class Rows(Sequence[Any]):
    """Takes a number, and no slice."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, at: Any) -> Any:
        if not 0 <= at < len(self):
            raise IndexError(at)
        return at, at, 0, 1


async def test_a_sequence_that_takes_no_slices() -> None:
    async with ap.open("mem://") as client, client.writer("s", ap.Schema(key=int, val=int)) as w:
        await w.compare_and_append(Rows(), 0, 1)
        async with client.reader("s") as r, r.snapshot() as s:
            assert await s.rows() == [(i, i, 1) for i in range(3000)]


class OneList(Sequence[Any]):
    """A sequence that fills one list anew for each row."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.row: list[Any] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: Any) -> Any:
        if at >= self.count:
            raise IndexError(at)
        self.row[:] = [at, at]
        return self.row


@pytest.mark.parametrize("count", [3, 3000])
async def test_a_sequence_that_fills_one_list(count: int) -> None:
    async with ap.open("mem://") as client, client.writer("s", ap.Schema(key=int, val=int)) as w:
        await w.write(OneList(count))
        async with client.reader("s") as reader, reader.snapshot() as snapshot:
            assert await snapshot.rows() == [(at, at, 1) for at in range(count)]
