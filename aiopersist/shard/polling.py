"""Frequent looks at the shards of waiting consumers.

A consumer learns of its take-over from the news of its shard, usually at once, by a hint. A hint may be lost;
then the follower looks only after `watch_timeout_s`. A consumer must hear sooner. So while it waits, its
shard is looked at every `every_s`, all these shards of a client by one request.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from aiopersist.base.supervisor import Supervisor

F = TypeVar("F")


class Polling(Generic[F]):
    """See the header. One per client. `look` brings the states of shards up to date."""

    def __init__(
        self, look: Callable[[Collection[F]], Awaitable[dict[str, Exception]]], supervisor: Supervisor
    ) -> None:
        self._look = look
        self._supervisor = supervisor
        self._waits: Counter[F] = Counter()
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def over(self, followed: F, every_s: float) -> Iterator[None]:
        """A scope in which the shard is looked at every `every_s`."""
        self._waits[followed] += 1
        if self._looking is None or self._looking.done():
            self._looking = self._supervisor.background(self._look_on(every_s), "look at shards of consumers")
        try:
            yield
        finally:
            self._waits[followed] -= 1
            if not self._waits[followed]:
                del self._waits[followed]

    async def _look_on(self, every_s: float) -> None:
        runtime = self._supervisor.failures.runtime
        while True:
            await runtime.sleep(every_s)
            if not self._waits:
                return
            await self._look(list(self._waits))  # the follower reports errors to the waiters
