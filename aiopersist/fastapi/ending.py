"""Notices that the server is about to end, so that streams end and it need not wait for them.

A server waits for its responses before it tells the application of its end. A stream has no end, so this
listens to what the server listens to: the signals. A handler that is there already (the server's) is called
as before; where there is none, none is made.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]
LAST_WORDS_S = 1.0  # for the end of a response to a client that takes nothing


class Ending:
    """Whether the server is ending. It belongs to the loop in which it was made."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def has_begun(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when it begins."""
        await self._event.wait()

    def begin(self) -> None:
        """It begins now."""
        self._event.set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """It begins with a signal that ends the server, too. Signals reach the main thread alone."""
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
    """Call `tell` before the handler of that signal."""
    handler: Any = signal.getsignal(number)
    if not callable(handler):
        yield
        return

    def told(number: int, frame: FrameType | None) -> None:
        tell()
        handler(number, frame)

    signal.signal(number, told)
    try:
        yield
    finally:
        if signal.getsignal(number) is told:
            signal.signal(number, handler)
