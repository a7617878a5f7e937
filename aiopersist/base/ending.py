"""The end of tasks: of two that go on side by side, and of all where an event loop ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

A = TypeVar("A")
B = TypeVar("B")

T = TypeVar("T")

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


CANCELLED_S = 0.5  # for tasks that are cancelled


async def ended(running: Callable[[], set[asyncio.Task[Any]]], deadline_s: float) -> None:
    """Give these tasks, and those that they begin, `deadline_s` to end by themselves, then cancel them."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    for limit_s in (deadline_s, CANCELLED_S):
        end = loop.time() + limit_s
        while (left := running() - {me}) and loop.time() < end:
            await asyncio.wait(left, timeout=end - loop.time())  # also for what these begin
        for task in left:
            task.cancel()


async def both(
    one: Callable[[], Coroutine[Any, Any, A]], two: Callable[[], Coroutine[Any, Any, B]]
) -> tuple[A, B]:
    """The results of both calls, which go on side by side. When one fails the other is cancelled, and its
    error is raised. Calls, not coroutines: a task that is cancelled before it begins would leave them, and
    Python warns of a coroutine that nobody awaits."""
    try:
        async with asyncio.TaskGroup() as group:
            first, second = group.create_task(one()), group.create_task(two())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return first.result(), second.result()


def spawn_with_result(
    work: Callable[[], Coroutine[Any, Any, T]], spawn: Callable[[Coroutine[Any, Any, T]], asyncio.Task[T]]
) -> tuple[asyncio.Task[T], asyncio.Future[T]]:
    """The task of `work` that `spawn` makes, and its result, told in the same turn of the loop: the end of a
    task is told one turn later, and by `asyncio.shield` another one. A caller that waits for the result and
    not for the task may be cancelled, and `work` goes on."""
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
