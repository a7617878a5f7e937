"""Counts the work of callbacks of the loop, alike on every machine: calls of functions, not time."""

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Steps:
    """Calls of functions in that callback of the loop which made most of them."""

    most = 0
    now = 0

    def count(self, frame: Any, event: str, arg: Any) -> None:
        self.now += event in ("call", "c_call")


@contextmanager
def steps() -> Iterator[Steps]:
    """Count until the end. What the caller does between two awaits is a callback, too; what the collector
    does with the garbage of others is none."""
    found, run = Steps(), asyncio.events.Handle._run

    def counted(handle: asyncio.Handle) -> None:
        found.now = 0
        run(handle)
        found.most = max(found.most, found.now)

    asyncio.events.Handle._run = counted  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    sys.setprofile(found.count)
    try:
        yield found
    finally:
        sys.setprofile(None)
        gc.enable()
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
