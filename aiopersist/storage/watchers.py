"""Those who wait for a key to move, in any thread and on any loop.

A waiter registers in the first step of `wait`, before anything is awaited: so whatever moves the key
after the call began wakes it. Waking removes the waiter: each hint is delivered once. The lock is
held for a few dictionary operations only, never across an await.

Who waits for many keys waits with one future for all of them (`WatchedTogether`).
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

from aiopersist.storage.watch import Watch


class Watchers:
    """Waiters by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._together: dict[str, set[WatchedTogether]] = {}

    async def wait(self, key: str) -> None:
        """Return when `key` is woken after this call began."""
        with self.watching(key) as woken:
            await woken

    @contextmanager
    def watching(self, key: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done when `key` is woken after this was entered."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.setdefault(key, set()).add(future)
        try:
            yield future
        finally:
            self._forget(key, future)

    @property
    def anybody(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def together(self, begin: Callable[[], Awaitable[bool]] | None = None) -> "WatchedTogether":
        """Many keys, for one who waits. `begin` is awaited before he waits at first, and says whether hints
        may have been lost before."""
        return WatchedTogether(self, begin)

    def wake(self, keys: Collection[str]) -> None:
        """Wake those who wait for `keys`, from any thread."""
        with self._lock:
            woken = [future for key in keys for future in self._waiting.pop(key, ())]
            told = {watch for key in keys for watch in self._together.pop(key, ()) if watch._tell(key)}
        for future in woken:
            _call(future.get_loop(), _finish, future)
        for watch in told:
            _call(watch.loop, watch.ring)

    def wake_all(self) -> None:
        """Wake everybody: hints may have been lost, or the handle closes."""
        with self._lock:
            keys = {*self._waiting, *self._together}
        self.wake(keys)

    def _forget(self, key: str, future: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self._waiting[key]


class WatchedTogether(Watch):
    """Keys of `watchers`. What others' threads change is changed under the lock of those."""

    def __init__(self, watchers: Watchers, begin: Callable[[], Awaitable[bool]] | None) -> None:
        self.loop = asyncio.get_running_loop()
        self._watchers = watchers
        self._begin = begin
        self._told: set[str] = set()
        self._any = asyncio.Event()

    def add(self, key: str) -> None:
        with self._watchers._lock:
            self._watchers._together.setdefault(key, set()).add(self)

    def discard(self, key: str) -> None:
        with self._watchers._lock:
            if (others := self._watchers._together.get(key)) is not None:
                others.discard(self)
                if not others:
                    del self._watchers._together[key]

    async def moved(self) -> set[str]:
        if self._begin is not None:
            if await self._begin():
                with self._watchers._lock:
                    mine = [key for key, watches in self._watchers._together.items() if self in watches]
                self._watchers.wake(mine)
            self._begin = None
        await self._any.wait()
        with self._watchers._lock:
            told, self._told = self._told, set()
            self._any.clear()
        return told

    async def aclose(self) -> None:
        with self._watchers._lock:
            mine = [key for key, watches in self._watchers._together.items() if self in watches]
        for key in mine:
            self.discard(key)

    def ring(self) -> None:
        """In its loop: something was told."""
        if self._told:
            self._any.set()

    def _tell(self, key: str) -> bool:
        """Under the lock; whether nothing had been told before."""
        self._told.add(key)
        return len(self._told) == 1


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
