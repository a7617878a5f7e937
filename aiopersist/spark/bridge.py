"""The bridge between threads and the event loop: Spark's drivers and workers are blocking threads.

Each process has one event loop on its own thread; the loop owns the clients. A thread enters the loop once
per job: it hands over a coroutine (`Bridge.run`) and waits. While it waits, it makes the blocking calls that
the coroutine awaits (`on_caller`), like Spark actions. So these run on the thread that Spark knows, with its
tags and local properties.

A worker process of Spark is a fork that lives for one task or a minute, so its open clients are only a cache.
A bridge belongs to a process id: a fork gets a new one.
"""

import asyncio
import atexit
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from aiopersist.base.resource import Closeable
from aiopersist.client.client import Client
from aiopersist.spark.location import SparkLocation

T = TypeVar("T")
R = TypeVar("R", bound=Closeable)

CLOSE_DEADLINE_S = 10.0


class Bridge:
    """See the header. Any thread except the loop's own may call its methods."""

    def __init__(self) -> None:
        ready: Future[BlockingPortal] = Future()
        # A daemon without a context manager: neither the end of the process nor a fork may wait for the loop.
        Thread(target=_loop, args=(ready,), name="aiopersist", daemon=True).start()
        self._portal = ready.result()
        self._clients: dict[tuple[SparkLocation, bool], Future[Client]] = {}
        self._users: Counter[tuple[SparkLocation, bool]] = Counter()
        self._lasting: set[tuple[SparkLocation, bool]] = set()
        self._lock = Lock()
        self.is_worker = False
        """Whether this process runs Spark's tasks."""

    def run(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of `work(*args)`, run in the loop. If this thread is interrupted, or its wait cancelled
        (`Waits.cancel`), the work is cancelled, and this returns when the work has ended."""
        caller = _Caller()
        future: Future[T] = self._portal.start_task_soon(caller.run, work, *args)
        with _cancellable(future):
            caller.serve(future)
            return _result(future)

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """The result of `work(*args)`, a function called in the loop."""
        return _result(self._portal.start_task_soon(work, *args))

    def client(self, location: SparkLocation, *, maintenance: bool = False) -> Client:
        """The client of the location. The first call opens it, for the rest of the process; after a failure
        the next call opens it again."""
        with self._lock:
            self._lasting.add((location, maintenance))
        return self._opened((location, maintenance))

    def _opened(self, key: tuple[SparkLocation, bool]) -> Client:
        location, maintenance = key
        with self._lock:
            future = self._clients.get(key)
            if future is None or (future.done() and future.exception() is not None):
                opening = partial(location.open, maintenance=maintenance)
                future = self._clients[key] = self._portal.start_task_soon(opening)
        return future.result()

    def acquire(self, location: SparkLocation, *, maintenance: bool) -> Client:
        """The client, for a caller that will `release` it."""
        key = (location, maintenance)
        with self._lock:
            self._users[key] += 1
        try:
            return self._opened(key)
        except BaseException:
            with self._lock:
                self._users[key] -= 1
            raise

    def release(self, location: SparkLocation, *, maintenance: bool) -> None:
        """End one use. The last one closes the client, unless `client` has returned it."""
        key = (location, maintenance)
        with self._lock:
            self._users[key] -= 1
            unused = not self._users[key] and key not in self._lasting
            client = self._clients.pop(key, None) if unused else None
        if client is not None:
            self.run(to_its_end, client.result().aclose)

    def iterate(self, items: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """The items in order. While the caller uses one, the loop computes the next."""
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
        """Close all clients, each within `CLOSE_DEADLINE_S`; the rest end with their leases. A worker's
        clients stay open: their staged batches outlive the process until the leases end."""
        if self.is_worker:
            return
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        closings = [
            self._portal.start_task_soon(client.result().aclose)
            for client in clients
            if client.done() and client.exception() is None
        ]
        for future in closings:
            try:
                future.result(CLOSE_DEADLINE_S)
            except Exception:  # the process ends; leases end the rest
                future.cancel()


# --- for coroutines that a thread waits for ----------------------------------------------------------


async def on_caller(call: Callable[..., T], *args: Any) -> T:
    """The result of the blocking `call(*args)`, made by the thread that waits for this coroutine. A cancelled
    coroutine continues only when the call has returned, since the thread cannot leave it earlier."""
    return await _caller.get().call(call, *args)


async def to_its_end(work: Callable[..., Awaitable[object]], *args: Any) -> None:
    """Await `work(*args)`, a release. After a cancellation it still has `CLOSE_DEADLINE_S`."""
    ending = asyncio.ensure_future(work(*args))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        with anyio.move_on_after(CLOSE_DEADLINE_S, shield=True):  # a scope cancels again and again
            await asyncio.wait([ending])
        if not ending.cancel() and not ending.cancelled():
            ending.exception()  # marks it as seen
        raise


@asynccontextmanager
async def closing(opening: Awaitable[R]) -> AsyncIterator[R]:
    """The resource of `opening`; at the end it is closed with `to_its_end`."""
    opened = await opening
    try:
        yield opened
    finally:
        await to_its_end(opened.aclose)


class _Caller:
    """A thread that waits for one coroutine, and makes its blocking calls."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        """`None`: the coroutine has ended."""

    async def run(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """In the loop: the coroutine."""
        _caller.set(self)
        try:
            return await work(*args)
        finally:
            self._calls.put(None)

    async def call(self, call: Callable[..., T], *args: Any) -> T:
        """In the loop: let the thread make a call."""
        done: Future[T] = Future()
        self._calls.put((done, partial(call, *args)))
        answer = asyncio.wrap_future(done)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([answer])
        return await answer

    def serve(self, future: "Future[Any]") -> None:
        """In the thread: make the calls until the coroutine, whose result `future` gets, has ended."""
        try:
            while (request := self._calls.get()) is not None:
                _answer(*request)
        except BaseException:
            future.cancel()
            while (request := self._calls.get()) is not None:
                request[0].cancel()
            raise


def _answer(done: "Future[Any]", call: Callable[[], Any]) -> None:
    try:
        done.set_result(call())
    except Exception as error:
        done.set_exception(error)
    except BaseException:  # an interrupt of this thread; in the loop it would end the loop
        done.cancel()
        raise


_caller: ContextVar[_Caller] = ContextVar("caller")


# --- cancelling the wait of another thread -----------------------------------------------------------


class Waits:
    """Within, another thread can cancel this thread's waits for the loop."""

    def __init__(self) -> None:
        self._futures: set[Future[Any]] = set()

    def __enter__(self) -> None:
        self._before = _waits.set(self)

    def __exit__(self, *error: object) -> None:
        _waits.reset(self._before)

    def cancel(self) -> None:
        """Cancel the work that the thread now waits for. The work releases its resources `to_its_end`."""
        for future in list(self._futures):
            future.cancel()


_waits: ContextVar[Waits | None] = ContextVar("waits", default=None)


@contextmanager
def _cancellable(future: "Future[Any]") -> Iterator[None]:
    """Within, this thread waits for `future`."""
    waits = _waits.get()
    futures: set[Future[Any]] = set() if waits is None else waits._futures
    futures.add(future)
    try:
        yield
    finally:
        futures.remove(future)


# --- the bridge of a process -------------------------------------------------------------------------

_bridges: dict[int, Bridge] = {}
_beginning = Lock()


def bridge() -> Bridge:
    """The bridge of this process."""
    pid = os.getpid()
    if (existing := _bridges.get(pid)) is not None:
        return existing
    with _beginning:
        if pid not in _bridges:
            # Parents' bridges stay: finalizing them here would remove entries from the parents' epolls.
            _bridges[pid] = Bridge()
            atexit.register(_at_exit, pid)
    return _bridges[pid]


def _at_exit(pid: int) -> None:
    if os.getpid() == pid and (ended := _bridges.pop(pid, None)) is not None:
        ended.close_all()


os.register_at_fork(after_in_child=lambda: _renew_lock())


def _renew_lock() -> None:
    """After a fork: another thread of the parent may hold the lock."""
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
        ready.set_exception(error)  # the loop could not start


async def _serve(ready: "Future[BlockingPortal]") -> None:
    async with BlockingPortal() as portal:
        ready.set_result(portal)
        await portal.sleep_until_stopped()


class _Finished:
    """The end of the items."""


_END = _Finished()


async def _next(items: AsyncIterator[T]) -> "T | _Finished":
    return await anext(items, _END)
