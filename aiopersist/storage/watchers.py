"""Those who wait for a key to move, in any thread and on any loop.

A waiter registers in the first step of `wait`, before anything is awaited: so whatever moves the key
after the call began wakes it. Waking removes the waiter: each hint is delivered once. The lock is
held for a few dictionary operations only, never across an await.
"""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Watchers:
    """Waiters by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

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

    def wake(self, keys: Iterable[str]) -> None:
        """Wake those who wait for `keys`, from any thread."""
        with self._lock:
            woken = [future for key in keys for future in self._waiting.pop(key, ())]
        for future in woken:
            try:
                future.get_loop().call_soon_threadsafe(_finish, future)
            except RuntimeError:  # its loop is closed: nobody waits any more
                pass

    def wake_all(self) -> None:
        """Wake everybody: hints may have been lost, or the handle closes."""
        with self._lock:
            keys = list(self._waiting)
        self.wake(keys)

    def _forget(self, key: str, future: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self._waiting[key]


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
