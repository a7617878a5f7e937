"""How far a consumer may stay behind: `settings.listen_queue_max` commits.

A consumer that takes its time keeps little memory: a feed is asked for no more than was sent, and what it has
read ahead is let go. But it keeps history. So the commits are counted that come while it takes what it was
sent, and beyond the limit its feed is closed, which ends its hold. What comes of that is for the stream to
say.
"""

import asyncio
from typing import Any

from aiopersist.base.errors import Error
from aiopersist.table.feed import Feed, updates_of

SLOW_S = 0.1  # most consumers have taken all by then: nothing is watched for them


class Patience:
    """The patience with the consumer of one feed, which is open."""

    def __init__(self, feed: Feed[Any, Any]) -> None:
        self._feed = feed
        self._updates = updates_of(feed)
        self.commits_max: int = self._updates.stack.settings.listen_queue_max
        self.is_over = False
        """Whether the feed was closed."""
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """From now on commits are counted."""
        self.end()
        last = self._updates.version + self.commits_max
        self._timer = asyncio.get_running_loop().call_later(SLOW_S, self._watch, last)

    def end(self) -> None:
        """Everything was taken."""
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
            return  # the next step of the feed says the same
        self.is_over = True
        await self._feed.aclose()
