"""A lane: one thread that runs jobs in order, all that wait at the same moment together.

A blocking driver gets lanes so that the event loop never waits for it. While the thread works on one
round of jobs, the next ones gather; it then takes all of them at once. That is the whole of group
commit: a round is one transaction. A job's outcome goes back to the loop that asked for it, and all
outcomes of a round that belong to one loop go in one call.

A caller that is cancelled stops waiting; its job runs nevertheless. The thread starts with the first
job and ends with `close`. A job of which nothing was told in its round has failed: silence is no success.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from aiopersist.errors import Indeterminate, InvalidUsage, UsageKind
from aiopersist.storage.keys import closed

T = TypeVar("T")

log = logging.getLogger("aiopersist")


class LaneTask(Generic[T]):
    """What a caller wants done, and what came of it. `work` is given the lane's resource."""

    __slots__ = ("error", "future", "result", "settled", "work")

    def __init__(self, work: Callable[[Any], T], future: asyncio.Future[T]) -> None:
        self.work = work
        self.future = future
        self.settled = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def succeed(self, result: T) -> None:
        """Final: what `work` did can no longer be taken back."""
        self.settled, self.result, self.error = True, result, None

    def fail(self, error: BaseException) -> None:
        self.settled, self.result, self.error = True, None, error


class Lane:
    """One thread. `execute(jobs)` runs a round in it and settles each job."""

    def __init__(self, name: str, execute: Callable[[list[LaneTask[Any]]], None]) -> None:
        self._name = name
        self._execute = execute
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)  # starts no thread yet
        self._lock = threading.Lock()
        self._waiting: list[LaneTask[Any]] = []
        self._running = False
        self._closed = False
        self._pid = os.getpid()

    async def run(self, work: Callable[[Any], T]) -> T:
        """Run `work(resource)` in the thread, together with what else waits."""
        if os.getpid() != self._pid:
            raise InvalidUsage(UsageKind.WRONG_LOOP, "a store cannot be used after a fork: open it anew")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._closed:
                raise closed("store")
            if not self._running:
                self._executor.submit(self._rounds)  # raises where no thread can be had: nobody waits then
                self._running = True
            self._waiting.append(LaneTask(work, future))
        return await future

    async def close(self, release: Callable[[], None]) -> None:
        """Let what waits finish, then run `release` in the thread and end it. Idempotent; when
        cancelled, the thread ends nevertheless."""
        with self._lock:
            first, self._closed = not self._closed, True
            if not first:
                return
            done = self._executor.submit(release)
        self._executor.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(done))

    def _rounds(self) -> None:
        while True:
            with self._lock:
                jobs, self._waiting = self._waiting, []
                if not jobs:
                    self._running = False
                    return
            failure: BaseException = Indeterminate("the store did not say what came of it")
            try:
                self._execute(jobs)
            except BaseException as error:  # told to those who wait
                failure = error
                log.exception("a round of the store broke off")
            for job in jobs:
                if not job.settled:
                    job.fail(failure)
            _deliver(jobs)


def _deliver(jobs: list[LaneTask[Any]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[LaneTask[Any]]] = {}
    for job in jobs:
        by_loop.setdefault(job.future.get_loop(), []).append(job)
    for loop, its_jobs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, its_jobs)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass


def _settle(jobs: list[LaneTask[Any]]) -> None:
    for job in jobs:
        if job.future.done():  # cancelled: the caller stopped waiting
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
