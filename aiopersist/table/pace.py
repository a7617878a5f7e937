"""Bounds the bytes of keys and values that one turn of the event loop converts, in the order of the calls.

A thousand calls that begin at once have their first step in the same turn. Those with large values would keep
the loop busy with the conversion of all. So a call waits for a later turn once this one has had its share;
what comes after it waits behind it, so that operations keep their order.
"""

import asyncio
from collections import deque

from aiopersist.data.updates.convert import rough_bytes
from aiopersist.shard.stack import SLICE_BYTES

FREE_BYTES = 1024  # of each call: many small ones make one group


class ConversionPace:
    """See the header. One per client."""

    def __init__(self) -> None:
        self._spent = 0
        """In this turn."""
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._queues = False
        """Whether calls wait, or are about to go on."""

    async def turn(self, *given: object) -> None:
        """Return in a turn of the loop that has room for the conversion of these."""
        size = max(rough_bytes(given) - FREE_BYTES, 0)
        if not self._queues and self._spent < SLICE_BYTES:
            if size and not self._spent:
                asyncio.get_running_loop().call_soon(self._next)
            self._spent += size
            return
        self._queues = True
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((room, size))
        await room

    def _next(self) -> None:
        """A turn begins. Those that it lets go on do so before the next one."""
        self._spent, self._queues = 0, bool(self._waiting)
        if self._queues:
            asyncio.get_running_loop().call_soon(self._next)
        while self._waiting and self._spent < SLICE_BYTES:
            room, size = self._waiting.popleft()
            if not room.done():  # not cancelled
                room.set_result(None)
                self._spent += size
