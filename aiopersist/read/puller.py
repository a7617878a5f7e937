"""An async iterator whose waits may be cancelled and repeated: nothing is lost between two of them."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from aiopersist.errors import InvalidUsage, UsageKind
from aiopersist.resource import Supervisor

T = TypeVar("T")


class Puller(Generic[T]):
    """An async iterator that survives a cancelled wait: the next item is computed in a task of the
    supervisor, and is kept for the next call when the caller went away meanwhile."""

    def __init__(self, items: AsyncGenerator[T, None], supervisor: Supervisor, name: str) -> None:
        self._items = items
        self._supervisor = supervisor
        self._name = name
        self._task: asyncio.Task[T] | None = None

    async def pull(self) -> T:
        """The next item; `StopAsyncIteration` at the end, and so at every further call. An error stays,
        too: an iteration that failed must not look like one that ended. After the item is taken
        there is no await; of several who wait at once each gets an item of its own. Who waits as it is
        closed is told `CLOSED`."""
        me = asyncio.current_task()
        assert me is not None
        cancelling = me.cancelling()
        while True:
            if self._task is None:
                self._task = self._supervisor.spawn(self._advance(), self._name, abandon=True)
            task = self._task
            try:
                item = await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled() and self._task is task:  # closed meanwhile, or the client is
                    self._task = None
                if task.cancelled() and me.cancelling() <= cancelling:  # nobody cancelled the caller
                    raise InvalidUsage(UsageKind.CLOSED, "the iteration was closed") from None
                raise
            except _Exhausted:
                raise StopAsyncIteration from None
            if self._task is task:
                self._task = None
                return item

    async def _advance(self) -> T:
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            raise _Exhausted from None  # a task cannot raise StopAsyncIteration through a future's result

    async def aclose(self) -> None:
        """Stop computing; idempotent."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
            self._task = None
        await self._items.aclose()


class _Exhausted(Exception):
    """The items are over."""
