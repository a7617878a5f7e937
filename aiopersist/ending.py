"""Work at the end of an event loop, for what its user has not closed."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

_waiting: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive


def when_cancelled(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> "asyncio.Task[None]":
    """A task that does `work` when it is cancelled. `asyncio.run` cancels all tasks in the end, and waits for
    them, but not for the tasks that these begin then: they would be destroyed half done."""

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await work()

    task = asyncio.create_task(wait(), name=name)
    _waiting.add(task)
    task.add_done_callback(_waiting.discard)
    return task
