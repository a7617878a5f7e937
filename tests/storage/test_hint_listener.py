"""Goal: a listener for hints closes, also if a hint comes at that moment."""

import socket
import threading
import time
from typing import Any

from aiopersist.storage.sqlite.hints import HintListener
from aiopersist.storage.waiters import Waiters

GUARD_S = 30.0


class WatchedLock:
    """Tells whether somebody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wanted = threading.Event()

    def __enter__(self) -> None:
        if self._lock.locked():
            self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Hinted(HintListener):
    """As it is told to close, a hint wakes its thread, which ends, or waits for whoever closes."""

    def __init__(self) -> None:
        super().__init__(Waiters())
        self._lock: Any = WatchedLock()

    def __setattr__(self, name: str, value: Any) -> None:
        before = getattr(self, "_socket", None)
        super().__setattr__(name, value)
        if name == "_socket" and before is not None and value is None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(b"a key", before.getsockname())
            until(lambda: before.fileno() == -1 or self._lock.wanted.is_set())


def until(reached: Any) -> None:
    end = time.monotonic() + GUARD_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_it_closes_at_the_moment_of_a_hint() -> None:
    listener, others = Hinted(), set(threading.enumerate())
    listener.listen()
    (thread,) = set(threading.enumerate()) - others
    listener.close()
    listener.close()
    thread.join(GUARD_S)
    assert not thread.is_alive()
