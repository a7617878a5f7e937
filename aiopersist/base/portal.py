"""The portal between blocking threads and an event loop, which runs on a thread of its own.

A thread enters the loop once per job: it hands over a coroutine (`Portal.run`) and waits. While it waits, it
makes the blocking calls that the coroutine awaits (`on_caller`). So these run on the caller's thread, with
its interrupts and its thread-local values. Several threads may use a portal at once.

A portal belongs to the process that made it. A fork has no such thread: there each call is refused
(`OwnProcess`). `PerProcess` gives each process a portal of its own.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.resource import Closeable
from aiopersist.base.runtime import OwnProcess

T = TypeVar("T")
R = TypeVar("R", bound=Closeable)
P = TypeVar("P", bound="Portal")

CLOSE_DEADLINE_S = 10.0


class Portal:
    """See the header. The calls of the loop's own thread are refused: they would wait for themselves."""

    def __init__(self, what: str = "the portal") -> None:
        """`what` names the portal in errors."""
        self._what = what
        self._process = OwnProcess(what)
        ready: Future[BlockingPortal] = Future()
        # A daemon without a context manager: neither the end of the process nor a fork may wait for the loop.
        self._thread = Thread(target=_loop, args=(ready,), name="aiopersist", daemon=True)
        self._thread.start()
        self._portal = ready.result()
        self._turn = Lock()
        self._ended = False

    def run(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of `work(*args)`, run in the loop. If this thread is interrupted, or its wait cancelled
        (`Waits.cancel`), the work is cancelled, and this returns when the work has ended."""
        caller = _Caller()
        future: Future[T] = self.start(caller.run, work, *args)
        with _cancellable(future):
            caller.serve(future)
            return self._result(future)

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """The result of `work(*args)`, a function called in the loop."""
        future: Future[T] = self.start(work, *args)
        return self._result(future)

    def start(self, work: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call `work(*args)` in the loop, await the result if it is awaitable, and do not wait for that."""
        self._process.check()
        if self._is_in_loop:
            text = f"{self._what} was called in its own loop, which would wait for itself"
            raise InvalidUsage(UsageKind.WRONG_LOOP, text)
        with self._turn:  # what begins before the end is also ended
            if self._ended:
                raise self._closed()
            return self._portal.start_task_soon(work, *args)

    def iterate(self, items: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """The items in order. While the caller uses one, the loop computes the next."""
        reading: _ReadAhead[T] = self.call(lambda: _ReadAhead(items()))
        try:
            while not isinstance(item := self.run(reading.take), _Finished):
                yield item
        finally:
            self._finish(reading.aclose)

    def _finish(self, close: Callable[[], Awaitable[None]]) -> None:
        """Wait for `close`; in the loop's own thread, where the collector of garbage may drop an iterator,
        only begin it."""
        if self._ended or not self._process.is_here:
            return  # the loop has ended its tasks
        if self._is_in_loop:
            _closings.add(closing := asyncio.ensure_future(close()))
            closing.add_done_callback(_closings.discard)
        else:
            self.run(close)

    def end(self) -> None:
        """Cancel what runs in the loop, end the loop, and wait for the end of its thread. Idempotent. Threads
        that wait get `InvalidUsage` of kind `CLOSED`, and so does a later call."""
        if not self._process.is_here:
            return
        with self._turn:
            if not self._ended:
                self._ended = True
                self._portal.start_task_soon(self._portal.stop, True)
        self._thread.join()

    @property
    def _is_in_loop(self) -> bool:
        return threading.current_thread() is self._thread

    def _closed(self) -> InvalidUsage:
        return InvalidUsage(UsageKind.CLOSED, f"{self._what} is closed")

    def _result(self, future: "Future[T]") -> T:
        try:
            return future.result()
        except CancelledError:
            if self._ended:
                raise self._closed() from None
            raise
        except BaseException:
            future.cancel()
            raise


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


# --- one portal per process ----------------------------------------------------------------------------


class PerProcess(Generic[P]):
    """A function that returns the portal of this process; the first call makes it. At the exit of the process
    `end` gets it."""

    def __init__(self, make: Callable[[], P], end: Callable[[P], None]) -> None:
        self._make, self._end = make, end
        self._portals: dict[int, P] = {}
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def __call__(self) -> P:
        pid = os.getpid()
        if (existing := self._portals.get(pid)) is not None:
            return existing
        with self._lock:
            if pid not in self._portals:
                # Parents' portals stay: finalizing them here would remove entries from the parents' epolls.
                self._portals[pid] = self._make()
                atexit.register(self._at_exit, pid)
        return self._portals[pid]

    def _renew_lock(self) -> None:
        """Also after a fork: another thread of the parent may hold the lock."""
        self._lock = Lock()

    def _at_exit(self, pid: int) -> None:
        if os.getpid() == pid and (portal := self._portals.pop(pid, None)) is not None:
            self._end(portal)


_closings: "set[asyncio.Future[None]]" = set()  # the loop itself keeps no task alive


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


class _ReadAhead(Generic[T]):
    """In the loop: items, of which the next one is being computed."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items = items
        self._coming = self._begun()

    def _begun(self) -> "asyncio.Task[T | _Finished]":
        return asyncio.ensure_future(_next(self._items))

    async def take(self) -> "T | _Finished":
        """The next item, or that there is none."""
        item = await self._coming
        if not isinstance(item, _Finished):
            self._coming = self._begun()
        return item

    async def aclose(self) -> None:
        """Close the items, once none is being computed: a generator that runs cannot be closed."""
        self._coming.cancel()
        await asyncio.wait([self._coming])
        if not self._coming.cancelled():
            self._coming.exception()  # marks it as seen
        if (close := getattr(self._items, "aclose", None)) is not None:
            await close()


async def _next(items: AsyncIterator[T]) -> "T | _Finished":
    return await anext(items, _END)
