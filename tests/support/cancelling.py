"""Cancels calls at chosen moments."""

import asyncio
from collections.abc import Awaitable
from typing import Any


async def cancelled_after(work: Awaitable[Any], steps: int) -> bool:
    """Cancel `work` after that many turns of the loop; whether it was cancelled."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        return True
    task.result()
    return False
