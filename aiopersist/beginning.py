"""The beginning of tasks that take their first step at once."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def begun(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A task whose first step, up to where it waits, was taken: a turn of the loop less. On Python 3.11, and
    where the loop makes tasks in a way of its own, it is taken in the next turn, as usual."""
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12) and loop.get_task_factory() is None:
        return asyncio.Task(work, loop=loop, name=name, eager_start=True)
    return loop.create_task(work, name=name)
