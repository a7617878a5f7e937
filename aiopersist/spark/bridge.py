"""One event loop per process, on a thread of its own, that owns the clients: Spark's drivers and workers are
threads that wait.

A process of Spark's workers is a fork that lives for a task or for a minute; what is open in it is a cache
and no more. So the bridge belongs to a process id: after a fork there is a new one.
"""

import atexit
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock, Thread
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from aiopersist.client import Client
from aiopersist.runtime import SYSTEM
from aiopersist.spark.place import SparkLocation

T = TypeVar("T")

CLOSE_DEADLINE_S = 10.0


class Bridge:
    """See the header. Its methods are called from any thread but that of the loop."""

    def __init__(self) -> None:
        ready: Future[BlockingPortal] = Future()
        # A daemon, and no context manager: neither the end of the process nor a fork may wait for its loop.
        Thread(target=_loop, args=(ready,), name="aiopersist", daemon=True).start()
        self._portal = ready.result()
        self._clients: dict[tuple[SparkLocation, bool], Future[Client]] = {}
        self._users: Counter[tuple[SparkLocation, bool]] = Counter()
        self._lasting: set[tuple[SparkLocation, bool]] = set()
        self._lock = Lock()
        self.is_worker = False
        """Whether it runs Spark's tasks."""

    def run(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of `work(*args)`, run in the loop; cancelled there if this thread is interrupted."""
        future = self._portal.start_task_soon(work, *args)
        calls = _calls.get()
        if calls is None:
            return _result(future)
        with calls.waiting(future):
            return _result(future)

    def finish(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The same, for what ends something: who cancels what this thread waits for leaves it some time."""
        future = self._portal.start_task_soon(work, *args)
        calls = _calls.get()
        if calls is None:
            return _result(future)
        with calls.waiting(future, patience_s=CLOSE_DEADLINE_S):
            return _result(future)

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """The result of `work(*args)`, which does not wait, called in the loop."""
        return _result(self._portal.start_task_soon(work, *args))

    def client(self, place: SparkLocation, *, maintenance: bool = False) -> Client:
        """The client of that place, opened when it is first asked for, and open as long as the process. What
        cannot be opened is tried anew at the next call."""
        with self._lock:
            self._lasting.add((place, maintenance))
        return self._opened((place, maintenance))

    def _opened(self, key: tuple[SparkLocation, bool]) -> Client:
        place, maintenance = key
        with self._lock:
            found = self._clients.get(key)
            if found is None or (found.done() and found.exception() is not None):
                opening = partial(place.open, maintenance=maintenance)
                found = self._clients[key] = self._portal.start_task_soon(opening)
        return found.result()

    def acquire(self, place: SparkLocation, *, maintenance: bool) -> Client:
        """The same, for one who releases it."""
        key = (place, maintenance)
        with self._lock:
            self._users[key] += 1
        try:
            return self._opened(key)
        except BaseException:
            with self._lock:
                self._users[key] -= 1
            raise

    def release(self, place: SparkLocation, *, maintenance: bool) -> None:
        """One user less; the last one closes it, unless others have it who never say so."""
        key = (place, maintenance)
        with self._lock:
            self._users[key] -= 1
            unused = not self._users[key] and key not in self._lasting
            found = self._clients.pop(key, None) if unused else None
        if found is not None:
            self.finish(found.result().aclose)

    def iterate(self, items: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """The items, one after the other; while one is used the next is computed."""
        opened = self.call(items)
        coming = self._portal.start_task_soon(_next, opened)
        try:
            while not isinstance(item := _result(coming), _Finished):
                coming = self._portal.start_task_soon(_next, opened)
                yield item
        finally:
            coming.cancel()
            if (close := getattr(opened, "aclose", None)) is not None:
                self.run(close)

    def close_all(self) -> None:
        """Close all clients; what does not end in time is left to its leases. Those of a worker are left to
        them in any case: what it has staged outlives it."""
        if self.is_worker:
            return
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        closing = [
            self._portal.start_task_soon(found.result().aclose)
            for found in clients
            if found.done() and found.exception() is None
        ]
        for future in closing:
            try:
                future.result(CLOSE_DEADLINE_S)
            except Exception:  # the process ends: leases do the rest
                future.cancel()


class Calls:
    """What a thread waits for in the loop, so that another can cancel it: all that runs `with` it."""

    def __init__(self) -> None:
        self._futures: dict[Future[Any], float] = {}
        """Before which time each is left alone."""

    def __enter__(self) -> None:
        self._before = _calls.set(self)

    def __exit__(self, *error: object) -> None:
        _calls.reset(self._before)

    @contextmanager
    def waiting(self, future: "Future[Any]", patience_s: float = 0.0) -> Iterator[None]:
        """`future` is waited for."""
        self._futures[future] = SYSTEM.monotonic() + patience_s
        try:
            yield
        finally:
            del self._futures[future]

    def cancel(self) -> None:
        """Cancel what is waited for now, but what has some time yet."""
        now = SYSTEM.monotonic()
        for future, until in list(self._futures.items()):
            if until <= now:
                future.cancel()


_calls: ContextVar[Calls | None] = ContextVar("calls", default=None)
_bridges: dict[int, Bridge] = {}
_beginning = Lock()


def bridge() -> Bridge:
    """That of this process."""
    pid = os.getpid()
    if (found := _bridges.get(pid)) is not None:
        return found
    with _beginning:
        if pid not in _bridges:
            # Those of the processes that this one is a fork of stay: finalized here, their loops would take
            # what they wait for out of the parent's epoll.
            _bridges[pid] = Bridge()
            atexit.register(_at_exit, pid)
    return _bridges[pid]


def _at_exit(pid: int) -> None:
    if os.getpid() == pid and (found := _bridges.pop(pid, None)) is not None:
        found.close_all()


os.register_at_fork(after_in_child=lambda: _renew_lock())


def _renew_lock() -> None:
    """A fork may happen while another thread holds it."""
    global _beginning
    _beginning = Lock()


def _result(future: "Future[T]") -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _loop(ready: "Future[BlockingPortal]") -> None:
    try:
        anyio.run(_serve, ready)
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)  # no loop could be had


async def _serve(ready: "Future[BlockingPortal]") -> None:
    async with BlockingPortal() as portal:
        ready.set_result(portal)
        await portal.sleep_until_stopped()


class _Finished:
    """There are no more items."""


_END = _Finished()


async def _next(items: AsyncIterator[T]) -> "T | _Finished":
    try:
        return await anext(items)
    except StopAsyncIteration:
        return _END
