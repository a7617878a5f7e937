"""How far a consumer may fall behind: `settings.listen_queue_max` commits.

A slow consumer takes little memory: a feed reads no more than was sent, and drops what it read ahead. But it
holds history. So commits are counted while it takes the sent events. Beyond the limit its feed is closed,
which ends the hold, and the stream reports it.
"""

import asyncio
from typing import Any

from aiopersist.base.errors import Error
from aiopersist.table.feed import Feed, updates_of

SLOW_S = 0.1  # most consumers are done by then and need no watch


class Patience:
    """Watches the consumer of an open feed."""

    def __init__(self, feed: Feed[Any, Any]) -> None:
        self._feed = feed
        self._updates = updates_of(feed)
        self.commits_max: int = self._updates.stack.settings.listen_queue_max
        self.is_over = False
        """Whether the feed was closed."""
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Count commits from now on."""
        self.end()
        last = self._updates.version + self.commits_max
        self._timer = asyncio.get_running_loop().call_later(SLOW_S, self._watch, last)

    def end(self) -> None:
        """The consumer has taken everything."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watching is not None and not self.is_over:
            self._watching.cancel()
        self._timer = self._watching = None

    def _watch(self, last: int) -> None:
        supervisor = self._updates.stack.supervisor
        self._updates.let_go()
        self._watching = supervisor.spawn(self._close_beyond(last), "watch a slow consumer", abandon=True)

    async def _close_beyond(self, last: int) -> None:
        try:
            await self._updates.left_behind(last)
        except Error:
            return  # the next step of the feed raises the same
        self.is_over = True
        await self._feed.aclose()
