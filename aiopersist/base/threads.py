"""Worker threads, and how a task waits for one.

They belong to an own executor: the loop's executor may have few threads, all busy. anyio has threads, too,
but the first one imports all of anyio, which takes a tenth of the time of a short process.

A forked child has none of its parent's threads, but the locks that they held stay locked for ever. So a fork
waits while a thread is `kept_from_forks`.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

from aiopersist.base.runtime import OwnProcess

T = TypeVar("T")


class Threads:
    """At most `most` threads, made on demand. They end with `end`, or with this object."""

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self.begin: Callable[[], None] | None = None
        """Called in each new thread."""
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._under_way = 0
        self.process = OwnProcess(name)

    @property
    def running(self) -> int:
        """Calls that run in a thread."""
        return min(self._under_way, self.most)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return self._under_way - self.running

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which runs in a thread, in the context of the caller. After a cancellation
        the caller stops waiting; running work continues without a result; waiting work never runs."""
        self.process.check()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.most, self._name, self.begin)
        self._under_way += 1
        try:
            loop = asyncio.get_running_loop()
            try:
                running = loop.run_in_executor(self._executor, copy_context().run, work)
            except RuntimeError:  # executors end with the main thread; the loop may run on in another
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


FORK_WAIT_S = 60.0  # at most: a commit takes milliseconds, an import a second or, on a busy machine, many


class _ForkGate:
    """Threads enter and leave; a fork waits until no other thread is inside, and keeps others out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._forks = 0
        self._within = dict[int, int]()  # by thread: a thread may enter again

    def enter(self) -> None:
        me = threading.get_ident()
        with self._lock:
            if self._forks and me not in self._within:
                self._changed.wait_for(lambda: not self._forks)
            self._within[me] = self._within.get(me, 0) + 1

    def leave(self) -> None:
        me = threading.get_ident()
        with self._lock:
            self._within[me] -= 1
            if not self._within[me]:
                del self._within[me]
                if self._forks:
                    self._changed.notify_all()

    def has_others(self) -> bool:
        return bool(self._within.keys() - {threading.get_ident()})

    def shut(self) -> None:
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: not self.has_others(), FORK_WAIT_S)

    def open(self) -> None:
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()


_gate = _ForkGate()
_fell_within = False


@contextmanager
def kept_from_forks() -> Iterator[None]:
    """A scope in which a thread has locks that a forked child needs."""
    gate = _gate
    gate.enter()
    try:
        yield
    finally:
        gate.leave()


def was_forked_within() -> bool:
    """Whether this process was forked while a thread was inside for too long: a lock may be held for ever."""
    return _fell_within


def _begin_as_child() -> None:
    global _gate, _fell_within
    _fell_within = _fell_within or _gate.has_others()
    _gate = _ForkGate()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _gate.shut(), after_in_parent=lambda: _gate.open(), after_in_child=_begin_as_child
    )
