"""Worker threads, and how a task waits for one.

They are those of an executor of its own: of the loop's, an application may have few, all at work. anyio has
threads, too, but its first one imports all of it, which takes a tenth of the time of a short process.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """At most `most` threads, each made when it is needed. They end with `end`, or with this object."""

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._under_way = 0

    @property
    def running(self) -> int:
        """Calls whose work is in a thread now."""
        return min(self._under_way, self.most)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return self._under_way - self.running

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which runs in a thread, in the context of the caller. A cancelled caller
        stops waiting: work that runs goes on, and its result is dropped; work that waits never runs."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.most, self._name)
        self._under_way += 1
        try:
            loop = asyncio.get_running_loop()
            try:
                running = loop.run_in_executor(self._executor, copy_context().run, work)
            except RuntimeError:  # all executors end with the main thread; the loop may go on in another one
                import anyio.to_thread

                return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
            return await running
        finally:
            self._under_way -= 1

    def end(self) -> None:
        """End the threads, each after its work. A later call makes new ones."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)
