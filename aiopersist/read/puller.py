"""Async iterators whose waits may be cancelled and repeated without losing items."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.resource import Scope
from aiopersist.base.supervisor import Supervisor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Interruption:
    """In place of an item: a store did not answer, so the wait failed. The next call waits again."""

    error: Exception


class Puller(Generic[T]):
    """An async iterator that survives a cancelled wait: a task of the supervisor computes the next item, and
    keeps it for the next call if the caller is cancelled."""

    def __init__(
        self, items: AsyncGenerator[T | Interruption, None], supervisor: Supervisor, name: str
    ) -> None:
        self._items = items
        self._supervisor = supervisor
        self._name = name
        self._task: asyncio.Task[T | Interruption] | None = None

    async def pull(self) -> T:
        """The next item; `StopAsyncIteration` at the end, and at every later call.

        An error is raised at every later call, too: a failed iteration must not look like one that ended. The
        error of an `Interruption` is raised once. Has no await after it took the item. Several calls that
        wait at once get one item each. A waiting call gets `CLOSED` if the iteration is closed."""
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
                if task.cancelled() and me.cancelling() <= cancelling:  # the caller was not cancelled
                    raise InvalidUsage(UsageKind.CLOSED, "the iteration was closed") from None
                raise
            except _Exhausted:
                raise StopAsyncIteration from None
            if self._task is task:
                self._task = None
                if isinstance(item, Interruption):
                    raise item.error
                return item

    async def _advance(self) -> T | Interruption:
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
    """There are no more items."""


class Items(Generic[T]):
    """An async iterator whose waits may be cancelled and repeated."""

    def __init__(self, scope: Scope, items: AsyncGenerator[T, None], supervisor: Supervisor) -> None:
        self._scope = scope
        self._puller = Puller(items, supervisor, "compute the next batch of a snapshot")

    def __aiter__(self) -> "Items[T]":
        return self

    async def __anext__(self) -> T:
        with self._scope.call():
            return await self._puller.pull()

    async def aclose(self) -> None:
        """Stop computing."""
        await self._puller.aclose()


class RowItems(Generic[T]):
    """The items of an iteration of lists, one by one. A wait may be cancelled and repeated; an item in memory
    needs neither a wait nor a task."""

    def __init__(self, scope: Scope, lists: Items[list[T]]) -> None:
        self._scope = scope
        self._lists = lists
        self._ready: deque[T] = deque()

    def __aiter__(self) -> "RowItems[T]":
        return self

    async def __anext__(self) -> T:
        self._scope.check()
        while not self._ready:
            self._ready.extend(await anext(self._lists))  # several waits append their lists in turn
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Stop computing."""
        self._ready.clear()
        await self._lists.aclose()
