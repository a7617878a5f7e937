"""Notices that the server is about to end, so that streams end and the server need not wait for them.

A server waits for its responses before it tells the application that it ends, but a stream has no end. So
this listens to the same signals as the server. It calls the existing handler (the server's) afterwards; for a
signal without a handler it installs none.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]
LAST_WORDS_S = 1.0  # to send the end of a response to a client that takes nothing


class Ending:
    """Whether the server is ending. It belongs to the loop that created it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def has_begun(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait until the server is ending."""
        await self._event.wait()

    def begin(self) -> None:
        """The server is ending now."""
        self._event.set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Within, signals that end the server also call `begin`. Only the main thread gets signals."""
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:
                    stack.enter_context(_before(number, self._begin_soon))
            yield

    def _begin_soon(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.begin)


@contextmanager
def _before(number: int, tell: Callable[[], None]) -> Iterator[None]:
    """Within, call `tell` before the handler of the signal."""
    handler: Any = signal.getsignal(number)
    if not callable(handler):
        yield
        return

    def tell_and_handle(number: int, frame: FrameType | None) -> None:
        tell()
        handler(number, frame)

    signal.signal(number, tell_and_handle)
    try:
        yield
    finally:
        if signal.getsignal(number) is tell_and_handle:
            signal.signal(number, handler)
