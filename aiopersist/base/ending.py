"""The end of tasks: of two that run side by side, and of all tasks at the end of an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

A = TypeVar("A")
B = TypeVar("B")

T = TypeVar("T")

_waiting: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive


def when_cancelled(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> "asyncio.Task[None]":
    """A task that does `work` when it is cancelled. `asyncio.run` cancels all tasks at its end, and waits for
    them. It does not wait for tasks that these begin then, but destroys them."""

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await work()

    task = asyncio.create_task(wait(), name=name)
    _waiting.add(task)
    task.add_done_callback(_waiting.discard)
    return task


CANCELLED_S = 0.5  # seconds for cancelled tasks


async def ended(running: Callable[[], set[asyncio.Task[Any]]], deadline_s: float) -> None:
    """Give these tasks, and the tasks that they begin, `deadline_s` to end, then cancel them."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    for limit_s in (deadline_s, CANCELLED_S):
        end = loop.time() + limit_s
        while (left := running() - {me}) and loop.time() < end:
            await asyncio.wait(left, timeout=end - loop.time())  # also for the tasks that these begin
        for task in left:
            task.cancel()


async def both(
    one: Callable[[], Coroutine[Any, Any, A]], two: Callable[[], Coroutine[Any, Any, B]]
) -> tuple[A, B]:
    """The results of both calls, which run side by side. If one fails, the other is cancelled, and the error
    is raised. Takes functions, not coroutines: a task that is cancelled before it begins would never await a
    coroutine, and Python warns of that."""
    try:
        async with asyncio.TaskGroup() as group:
            first, second = group.create_task(one()), group.create_task(two())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return first.result(), second.result()


def spawn_with_result(
    work: Callable[[], Coroutine[Any, Any, T]], spawn: Callable[[Coroutine[Any, Any, T]], asyncio.Task[T]]
) -> tuple[asyncio.Task[T], asyncio.Future[T]]:
    """The task of `work` that `spawn` makes, and a future that gets the result in the same turn of the loop
    (a task's own waiters run one turn later, those of `asyncio.shield` two). A caller that waits for the
    future may be cancelled, and `work` continues."""
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    task = spawn(running := _run(work, answer))
    if not running.cr_suspended:  # type: ignore[attr-defined]  # else it has begun, and will tell
        task.add_done_callback(lambda _: None if answer.done() else answer.cancel())
    return task, answer


async def _run(work: Callable[[], Coroutine[Any, Any, T]], answer: asyncio.Future[T]) -> T:
    try:
        result = await work()
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except BaseException as error:
        if not answer.done():
            answer.set_exception(error)
        raise
    if not answer.done():
        answer.set_result(result)
    return result
