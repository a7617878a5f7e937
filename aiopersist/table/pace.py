"""Bounds the bytes of keys and values that one turn of the event loop converts.

A thousand calls that begin at once run their first step in the same turn. To convert all their values would
block the loop. So a call waits for a later turn once this one has had its share, and later calls wait behind
it: operations keep their order.
"""

import asyncio
from collections import deque

from aiopersist.data.updates.convert import rough_bytes
from aiopersist.shard.stack import SLICE_BYTES

FREE_BYTES = 1024  # of each call are not counted, so that many small calls make one group


class ConversionPace:
    """See the header. One per client."""

    def __init__(self) -> None:
        self._bytes = 0
        """Converted in this turn."""
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._has_queue = False
        """Whether calls wait, or go on in this turn."""

    async def turn(self, *values: object) -> None:
        """Return in a turn of the loop that may convert these values."""
        size = max(rough_bytes(values) - FREE_BYTES, 0)
        if not self._has_queue and self._bytes < SLICE_BYTES:
            if size and not self._bytes:
                asyncio.get_running_loop().call_soon(self._next)
            self._bytes += size
            return
        self._has_queue = True
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((room, size))
        await room

    def _next(self) -> None:
        """Begin a turn, and resume the calls that fit into it."""
        self._bytes, self._has_queue = 0, bool(self._waiting)
        if self._has_queue:
            asyncio.get_running_loop().call_soon(self._next)
        while self._waiting and self._bytes < SLICE_BYTES:
            room, size = self._waiting.popleft()
            if not room.done():  # not cancelled
                room.set_result(None)
                self._bytes += size
