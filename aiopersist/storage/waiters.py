"""The tasks of this process that wait for hints, in any thread and on any event loop.

A store tells `Waiters` which keys moved; `Waiters` wakes the tasks that wait for them. A task either waits
for one key (`wait`, with a future of its own) or for many (`watch`, see `storage/watch.py`).

Waiting begins in the first step of a call, before any await, so each move of the key after the call began
wakes the task. Waking removes the waiter: each hint is delivered once. The lock is held for a few dictionary
operations only, never across an await.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from aiopersist.storage.watch import Watch

W = TypeVar("W")


class Waiters:
    """Waiting tasks by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, dict[asyncio.Future[None], None]] = {}
        self._watches: dict[str, dict[WaitersWatch, None]] = {}

    async def wait(self, key: str) -> None:
        """Return when `key` is woken after this call began."""
        with self.waiting(key) as woken:
            await woken

    @contextmanager
    def waiting(self, key: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done when `key` is woken after this context was entered."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._futures.setdefault(key, {})[future] = None
        try:
            yield future
        finally:
            with self._lock:
                _forget(self._futures, key, future)

    @property
    def any_waits(self) -> bool:
        """Whether a task waits for one key."""
        return bool(self._futures)

    def watch(self, begin: Callable[[], Awaitable[bool]] | None = None) -> "WaitersWatch":
        """A watch. Its first `moved` awaits `begin`, which says whether hints may have been lost before."""
        return WaitersWatch(self, begin)

    def wake(self, keys: Collection[str], seqnos: Mapping[str, int] = {}) -> None:
        """Wake the tasks that wait for `keys`; from any thread. `seqnos`: the versions that they moved to, as
        far as they are known."""
        with self._lock:
            woken = [future for key in keys for future in self._futures.pop(key, ())]
            rung = [watch for key in keys for watch in self._hinted(key, seqnos.get(key)) if watch._hint(key)]
        for future in woken:
            _call(future.get_loop(), _finish, future)
        for watch in rung:
            _call(watch.loop, watch.ring)

    def _hinted(self, key: str, seqno: int | None) -> "list[WaitersWatch]":
        """The watches that wait for `key`, and wait no more; those that expect this version go on."""
        waiting = self._watches.get(key, ())
        hinted = [watch for watch in waiting if seqno is None or seqno > watch._expected.get(key, -1)]
        for watch in hinted:
            _forget(self._watches, key, watch)
        return hinted

    def wake_all(self) -> None:
        """Wake all tasks: hints may have been lost, or the store closes."""
        self.wake(self.keys())

    def keys(self) -> list[str]:
        """The keys that some task waits for."""
        with self._lock:
            return list({**self._futures, **self._watches})


class WaitersWatch(Watch):
    """A watch on `waiters`, under whose lock it changes what other threads change too."""

    def __init__(self, waiters: Waiters, begin: Callable[[], Awaitable[bool]] | None) -> None:
        self.loop = asyncio.get_running_loop()
        self._waiters = waiters
        self._begin = begin
        self._hinted: set[str] = set()
        self._expected: dict[str, int] = {}
        self._any = asyncio.Event()

    def add(self, key: str) -> None:
        with self._waiters._lock:
            self._waiters._watches.setdefault(key, {})[self] = None

    def discard(self, key: str) -> None:
        with self._waiters._lock:
            _forget(self._waiters._watches, key, self)
            self._expected.pop(key, None)

    def expect(self, key: str, seqno: int) -> None:
        with self._waiters._lock:
            self._expected[key] = seqno

    async def moved(self) -> set[str]:
        if self._begin is not None:
            if await self._begin():
                self._waiters.wake(self._keys())
            self._begin = None
        await self._any.wait()
        with self._waiters._lock:
            hinted, self._hinted = self._hinted, set()
            self._any.clear()
        return hinted

    async def aclose(self) -> None:
        for key in self._keys():
            self.discard(key)

    def ring(self) -> None:
        """Wake `moved`, in its event loop, if a hint is there."""
        if self._hinted:
            self._any.set()

    def _keys(self) -> list[str]:
        with self._waiters._lock:
            return [key for key, watches in self._waiters._watches.items() if self in watches]

    def _hint(self, key: str) -> bool:
        """Note a hint, under the lock; return whether it is the first since `moved` took the others."""
        self._hinted.add(key)
        return len(self._hinted) == 1


def _forget(by_key: dict[str, dict[W, None]], key: str, waiter: W) -> None:
    others = by_key.get(key, {})
    others.pop(waiter, None)
    if not others:
        by_key.pop(key, None)


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    with suppress(RuntimeError):  # the loop is closed: its tasks wait no more
        loop.call_soon_threadsafe(callback, *args)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
