"""The queue of a group commit."""

import asyncio

import aiopersist as ap
from aiopersist.shard.queue import GroupQueue

TASKS, CALLS = 16, 10


async def test_who_missed_a_group_goes_with_all_others(quiet_mem: ap.Client) -> None:
    """Goal: calls that go on with the answers of a group share the next one with those that came too late for
    it. Else these would have every second group for themselves, for ever."""
    groups = list[int]()

    async def carry_out() -> None:
        group = queue.take()
        groups.append(len(group))
        await asyncio.sleep(0.001)
        for answer in group:
            answer.set_result(None)

    queue = GroupQueue[asyncio.Future[None]](quiet_mem._stack.supervisor, "carry out", carry_out)

    async def calls() -> None:
        for _ in range(CALLS):
            answer = asyncio.get_running_loop().create_future()
            queue.add(answer)
            await answer

    first = asyncio.ensure_future(calls())
    while not groups:
        await asyncio.sleep(0)
    await asyncio.gather(first, *[calls() for _ in range(1, TASKS)])
    assert groups[0] == 1
    assert groups.count(TASKS) >= CALLS - 1
