"""Goal: a caller is told how a task ends, and goes on when it is cancelled itself."""

import asyncio

import pytest

from aiopersist.base.ending import spawn_with_result


@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_a_task_that_is_cancelled_tells_its_caller(steps: int) -> None:
    """Goal: also before it begins."""

    async def work() -> None:
        await asyncio.sleep(1000)

    task, answer = spawn_with_result(work, asyncio.ensure_future)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer


@pytest.mark.parametrize("fails", [False, True])
async def test_a_caller_that_is_cancelled_leaves_the_work(fails: bool) -> None:
    go = asyncio.Event()

    async def work() -> int:
        await go.wait()
        if fails:
            raise ValueError("no")
        return 1

    task, answer = spawn_with_result(work, asyncio.ensure_future)
    await asyncio.sleep(0)
    answer.cancel()  # as a caller that waits for it and is cancelled does
    go.set()
    await asyncio.wait([task])
    assert answer.cancelled()
    if fails:
        with pytest.raises(ValueError, match="no"):
            task.result()
    else:
        assert task.result() == 1
