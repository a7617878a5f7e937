"""The owner of the tasks of a client, and the wait for their end.

A failure of a task is logged and counted; it never cancels the user's code. Closing never hangs if a store is
gone: leases end the rest.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from aiopersist.base.ending import ended, when_cancelled
from aiopersist.base.failures import Failures
from aiopersist.base.runtime import SYSTEM, OwnProcess, Runtime, begun

RELEASE_DEADLINE_S = 5.0  # seconds for the release of resources
UNCLOSED_S = 0.5  # the same if the loop ends and nothing was closed

Job = Coroutine[Any, Any, Any]


class Supervisor:
    """Owns tasks until they end or the supervisor closes."""

    def __init__(
        self, runtime: Runtime = SYSTEM, label_of: Callable[[str], str | None] = lambda shard_id: None
    ) -> None:
        self.background_context: Callable[[], Context | None] = lambda: None  # the context of background work
        self.failures = Failures(runtime, label_of)
        """The failures of background work, also of loops that continue after a failure."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: set[asyncio.Task[Any]] = set()
        self._last: asyncio.Task[None] | None = None
        self._closed = self._ending = False
        self.process = OwnProcess("a client")
        self._waits_from: float | None = None
        """The moment when the wait for the end began, or of a release since."""

    @property
    def closed(self) -> bool:
        """Whether it has ended its tasks."""
        return self._closed

    def spawn(self, work: Job, name: str, *, abandon: bool = False, eager: bool = False) -> asyncio.Task[Any]:
        """Run `work`. The caller awaits its outcome, or has given up. `eager`: as `begun`. When the
        supervisor closes, the task has a moment to end by itself, unless `abandon`."""
        task = begun(work, name) if eager else asyncio.create_task(work, name=name)
        (self._loops if abandon else self._tasks).add(task)
        task.add_done_callback(self._done)
        self._last = self._last or when_cancelled(self._end_unclosed, "end the tasks of a client")
        return task

    def background(self, work: Job, name: str) -> asyncio.Task[Any]:
        """Run `work`, which nobody awaits: a failure is logged and counted, and closing cancels it."""
        task = asyncio.create_task(work, name=name, context=self.background_context())
        self._loops.add(task)
        task.add_done_callback(self._loop_done)
        if self._ending:
            task.cancel()
        return task

    def begin_end(self) -> None:
        """Further releases belong to the end of all: see `patience_s`."""
        self._waits_from = asyncio.get_running_loop().time()

    def patience_s(self) -> float:
        """How long to wait for the release of a resource: `RELEASE_DEADLINE_S` for all of an end."""
        if self._waits_from is None:
            return RELEASE_DEADLINE_S
        return max(self._waits_from + RELEASE_DEADLINE_S - asyncio.get_running_loop().time(), 0.0)

    async def released(self, *tasks: asyncio.Task[None]) -> None:
        """Wait for the release of resources. It continues if it takes too long, or after a cancellation."""
        for task in tasks:
            task.add_done_callback(self._released)
        while (left := [task for task in tasks if not task.done()]) and (patience_s := self.patience_s()):
            await asyncio.wait(left, timeout=patience_s)
            if self._waits_from is None:
                return

    def _released(self, task: asyncio.Task[None]) -> None:
        """The store answers: the other resources may take as long again, unless the deadline is over."""
        is_ending = self._waits_from is not None and self.patience_s() > 0
        if is_ending and not task.cancelled() and task.exception() is None:
            self.begin_end()

    async def aclose(self) -> None:
        """Cancel the background work, give the other tasks `patience_s` to end, then cancel them."""
        self._closed = True
        if self._last is not None:
            self._last.cancel()
        await self._end(self.patience_s())

    async def _end_unclosed(self) -> None:
        if not self._closed:
            await self._end(UNCLOSED_S)

    async def _end(self, deadline_s: float) -> None:
        self._ending = True
        for task in self._loops - {asyncio.current_task()}:
            task.cancel()
        await ended(lambda: {*self._loops, *self._tasks}, deadline_s)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._loops.discard(task)
        if not task.cancelled():
            task.exception()  # so that asyncio does not report it as never retrieved

    def _loop_done(self, task: asyncio.Task[Any]) -> None:
        self._loops.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.report(task.get_name(), error)
