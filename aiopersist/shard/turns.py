"""Reads for clients that may be many, and slow: few read at once, and few keep what they have read ahead.

A reader in bounded memory still decodes a row group to hand out a part of it, and keeps the rest for its next
step. So readers take turns, and beyond so many the one that read longest ago lets go of what it has; it reads
that again when it goes on. So the memory of all of them is that of a few, and of the steps that they handed
out.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TURNS = 4  # as many as threads that decode


class ReadTurns:
    """See the header. One per client."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(TURNS)
        self._ahead: dict[Callable[[], None], None] = {}
        """How readers let go, in the order in which they read."""

    @asynccontextmanager
    async def turn(self, let_go: Callable[[], None]) -> AsyncIterator[None]:
        """A reader reads within. Later it may be told to let go of what it has read ahead."""
        async with self._turns:
            yield
        self.forget(let_go)
        self._ahead[let_go] = None
        if len(self._ahead) > TURNS:
            oldest = next(iter(self._ahead))
            del self._ahead[oldest]
            oldest()

    def forget(self, let_go: Callable[[], None]) -> None:
        """That reader has let go."""
        self._ahead.pop(let_go, None)
