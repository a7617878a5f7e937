"""Reads for many slow clients: few of them read at once, and few keep what they have read ahead.

A reader in bounded memory decodes a whole row group, hands out a part of it, and keeps the rest for its next
step. So readers take turns. If too many keep a rest, the one that read longest ago drops its rest, and reads
it again when it continues. So all readers together need the memory of a few, and of the steps that they
handed out.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TURNS = 4  # the number of threads that decode


class ReadTurns:
    """See the header. One per client."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(TURNS)
        self._ahead: dict[Callable[[], None], None] = {}
        """Functions by which readers drop what they have, in the order in which they read."""

    @asynccontextmanager
    async def turn(self, let_go: Callable[[], None]) -> AsyncIterator[None]:
        """The scope of a read. Later `let_go` may be called, to drop what was read ahead."""
        async with self._turns:
            yield
        self.forget(let_go)
        self._ahead[let_go] = None
        if len(self._ahead) > TURNS:
            oldest = next(iter(self._ahead))
            del self._ahead[oldest]
            oldest()

    def forget(self, let_go: Callable[[], None]) -> None:
        """The reader has dropped what it had."""
        self._ahead.pop(let_go, None)
