"""Counts the work of callbacks of the loop, alike on every machine: calls of functions, not time."""

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def calls(count: Callable[[], None]) -> Iterator[None]:
    """Call `count` for each call of a function in this thread, Python's and C's, but not for what the
    collector does with the garbage of others."""

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            count()

    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


class Steps:
    """Calls of functions in that callback of the loop which made most of them."""

    most = 0
    now = 0

    def count(self) -> None:
        self.now += 1


@contextmanager
def steps() -> Iterator[Steps]:
    """Count until the end. What the caller does between two awaits is a callback, too."""
    found, run = Steps(), asyncio.events.Handle._run

    def counted(handle: asyncio.Handle) -> None:
        found.now = 0
        run(handle)
        found.most = max(found.most, found.now)

    asyncio.events.Handle._run = counted  # type: ignore[method-assign]
    try:
        with calls(found.count):
            yield found
    finally:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
