"""Goal: a small append keeps its budget: turns of the event loop, tasks, and calls of functions. They are
counted, so the test says the same on every machine. `docs/performance.md` has the budget."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from tests.support.callbacks import calls

SCHEMA = ap.Schema(key=bytes, val=bytes)
APPENDS = 20
EAGER = sys.version_info >= (3, 12)  # tasks can take their first step at once
TURNS = 2 if EAGER else 3
TASKS = 1  # the statement, which goes on when its caller is cancelled
FRAMES = 0 if EAGER else 85  # of comprehensions, which are functions on Python 3.11
CALLS = {"tuples": 475 + FRAMES, "table": 545 + FRAMES}  # for ten rows, Python's and C's


class Spent:
    """What was spent in the event loop's thread."""

    def __init__(self) -> None:
        self.turns = self.tasks = self.calls = 0

    def called(self) -> None:
        self.calls += 1


@contextmanager
def counted() -> Iterator[Spent]:
    """Count until the end."""
    spent, loop_type = Spent(), asyncio.BaseEventLoop
    run_once = loop_type._run_once  # type: ignore[attr-defined]

    def turn(self: Any) -> None:
        spent.turns += 1
        run_once(self)

    class CountedTask(asyncio.Task[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            spent.tasks += 1
            super().__init__(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_type, "_run_once", turn)
        patch.setattr(asyncio, "Task", CountedTask)
        patch.setattr(asyncio.tasks, "Task", CountedTask)
        with calls(spent.called):
            yield spent


def updates(kind: str, time: int) -> Any:
    rows = [(b"key %d" % n, b"v" * 64, time, 1) for n in range(10)]
    if kind == "tuples":
        return rows
    types = {"key": pa.binary(), "val": pa.binary(), "time": pa.int64(), "diff": pa.int64()}
    columns = dict(zip(types, zip(*rows, strict=True), strict=True))
    return pa.table({name: pa.array(column, types[name]) for name, column in columns.items()})


@pytest.mark.parametrize("kind", CALLS)
async def test_an_append_of_ten_rows_keeps_its_budget(kind: str) -> None:
    async with ap.open("mem://", maintenance=False) as client, client.writer("t", SCHEMA) as w:
        given = [updates(kind, time) for time in range(2 * APPENDS)]
        for time in range(APPENDS):
            await w.compare_and_append(given[time], time, time + 1)
        with counted() as spent:
            for time in range(APPENDS, 2 * APPENDS):
                await w.compare_and_append(given[time], time, time + 1)
    assert spent.tasks == TASKS * APPENDS
    assert spent.turns <= TURNS * APPENDS + 1
    assert spent.calls <= CALLS[kind] * APPENDS
