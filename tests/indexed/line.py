"""Lines to stores that fail. Once a line is cut, nothing arrives any more of what its process still does:
that is how a process is killed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, Outcome
from tests.support.internals import stack_of


class Line:
    """Between one process and the stores; it passes for the `Faults` of its stores."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.is_cut = False

    @property
    def losing_hints(self) -> bool:
        return self.faults.losing_hints

    async def call(self, op: str, act: Callable[[], Awaitable[Any]]) -> Any:
        await self.wait()
        result = await self.faults.call(op, act)
        await self.wait()
        return result

    def outcome(self, op: str) -> Outcome:
        return self.faults.outcome(op)

    async def wait(self) -> None:
        """For ever, once it is cut."""
        if self.is_cut:
            await asyncio.Event().wait()


class LineBlob(FaultyBlob):
    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async for item in super().list(prefix):
            await self.faults.wait()
            yield item


async def kill(line: Line, client: ap.Client) -> None:
    """End a process in the middle of its work, without notice."""
    line.is_cut = True
    while tasks := _tasks_of(client):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=0.01)


def _tasks_of(client: ap.Client) -> "set[asyncio.Task[Any]]":
    supervisor = stack_of(client).supervisor
    supervisor._closed = True  # what is begun in the background from now on ends at once
    closing = client._closing
    return {*supervisor._tasks, *supervisor._loops, *([] if closing is None or closing.done() else [closing])}
