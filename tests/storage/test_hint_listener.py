"""Goal: a listener for hints closes, also if a hint comes at that moment."""

import socket
import time
from typing import Any

from aiopersist.storage.sqlite.hints import HintListener
from aiopersist.storage.waiters import Waiters

GUARD_S = 30.0


class Hinted(HintListener):
    """As soon as it is told to close, a hint wakes its thread, which ends."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = getattr(self, "_socket", None)
        address = None if before is None else before.getsockname()
        super().__setattr__(name, value)
        if name == "_socket" and before is not None and value is None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(b"a key", address)
            end = time.monotonic() + GUARD_S
            while before.fileno() != -1 and time.monotonic() < end:
                time.sleep(0.001)


def test_it_closes_at_the_moment_of_a_hint() -> None:
    listener = Hinted(Waiters())
    listener.listen()
    listener.close()
    listener.close()
