"""A worker thread: it runs jobs in order, and all jobs that wait at the same moment as one group.

A blocking driver gets worker threads so that the event loop never waits for it. While the thread runs one
group of jobs, the next jobs gather; it then takes all of them at once. So a group can be one transaction,
which is the whole of group commit. The outcomes of a group go back to each event loop in one call, and what
nobody waits for is done behind it, while the callers wake.

A caller that is cancelled stops waiting; its job runs nevertheless. The thread starts with the first job,
goes back to its executor when none has come for a while, which takes longer than to wake it here, and ends
with `close`. A job that its group has not settled has failed: silence is no success.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from aiopersist.base.errors import Indeterminate
from aiopersist.base.runtime import OwnProcess
from aiopersist.base.threads import kept_from_forks
from aiopersist.storage.keys import closed

T = TypeVar("T")

After = Callable[[], None]
"""What a group does behind its answers."""

LINGER_S = 0.05

log = logging.getLogger("aiopersist").getChild("storage")


class ThreadJob(Generic[T]):
    """A caller's `work`, which is given the thread's resource, and its outcome."""

    __slots__ = ("error", "future", "outcome_known", "result", "work")

    def __init__(self, work: Callable[[Any], T], future: asyncio.Future[T]) -> None:
        self.work = work
        self.future = future
        self.outcome_known = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def succeed(self, result: T) -> None:
        """Settle the job for good: the effects of `work` can no longer be taken back."""
        self.outcome_known, self.result, self.error = True, result, None

    def fail(self, error: BaseException) -> None:
        """Settle the job with an error."""
        self.outcome_known, self.result, self.error = True, None, error


class WorkerThread:
    """One thread. `execute(jobs)` runs a group of jobs in it and settles each of them."""

    def __init__(self, name: str, execute: Callable[[list[ThreadJob[Any]]], After | None]) -> None:
        self._execute = execute
        self._name = name
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)  # starts no thread yet
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: list[ThreadJob[Any]] = []
        self._running = False
        self._lingers = False
        self._wake = threading.Lock()
        """Is released to wake the thread, by whoever finds that it lingers."""
        self._wake.acquire()
        self._closed = False
        self._process = OwnProcess("a store")

    async def run(self, work: Callable[[Any], T]) -> T:
        """Run `work(resource)` in the thread, in a group with the other jobs that wait."""
        self._process.check()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._closed:
                raise closed("store")
            if not self._running:
                self._begin(self._run_groups)  # if this raises, no job waits
                self._running = True
            self._waiting.append(ThreadJob(work, future))
            self._rouse()
        return await future

    async def close(self, release: Callable[[], None]) -> None:
        """Let the waiting jobs finish, then run `release` in the thread and end it. Idempotent. If the
        caller is cancelled, the thread ends nevertheless."""
        self._process.check()
        with self._lock:
            first, self._closed = not self._closed, True
            if not first:
                return
            self._rouse()
            done = self._begin(partial(_kept_from_forks, release))
        self._executor.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(done))

    def _begin(self, work: Callable[[], None]) -> Future[None]:
        """Run it in the thread. All executors end with the main thread; an event loop in another thread goes
        on, perhaps for long: then each run has a thread of its own."""
        try:
            return self._executor.submit(self._in_turn, work)
        except RuntimeError:
            done: Future[None] = Future()
            target = partial(_run, partial(self._in_turn, work), done)
            threading.Thread(target=target, name=self._name, daemon=True).start()
            return done

    def _in_turn(self, work: Callable[[], None]) -> None:
        with self._turn:
            work()

    def _rouse(self) -> None:
        """Wake it if it lingers. Under the lock."""
        if self._lingers:
            self._lingers = False
            self._wake.release()

    def _run_groups(self) -> None:
        while True:
            with self._lock:
                jobs, self._waiting = self._waiting, []
                self._running = bool(jobs) or not self._closed
                self._lingers = self._running and not jobs
            if jobs:
                self._run_group(jobs)
            elif not self._running or not self._roused():
                return

    def _roused(self) -> bool:
        """Linger; whether it was roused."""
        if self._wake.acquire(timeout=LINGER_S):
            return True
        with self._lock:
            roused = not self._lingers
            self._lingers, self._running = False, roused
        return roused and self._wake.acquire()

    def _run_group(self, jobs: list[ThreadJob[Any]]) -> None:
        try:
            with kept_from_forks():
                after = self._execute(jobs)
                _deliver(jobs, Indeterminate("the store did not report the outcome of this call"))
                if after is not None:
                    after()
        except BaseException as error:
            extra = {"op": "group", "error": type(error).__name__}
            log.exception("a group of calls to the store broke off", extra=extra)
            _deliver(jobs, error)  # to those that have no answer yet


def _kept_from_forks(work: Callable[[], None]) -> None:
    with kept_from_forks():
        work()


def _run(work: Callable[[], None], done: Future[None]) -> None:
    try:
        work()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def _deliver(jobs: list[ThreadJob[Any]], failure: BaseException) -> None:
    """Give them their outcomes; those that are not settled have failed with `failure`."""
    by_loop: dict[asyncio.AbstractEventLoop, list[ThreadJob[Any]]] = {}
    for job in jobs:
        if not job.outcome_known:
            job.fail(failure)
        by_loop.setdefault(job.future.get_loop(), []).append(job)
    for loop, its_jobs in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(_settle, its_jobs)


def _settle(jobs: list[ThreadJob[Any]]) -> None:
    for job in jobs:
        if job.future.done():  # cancelled: the caller stopped waiting; or it has its outcome
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
