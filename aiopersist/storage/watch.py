"""Many keys that are watched together: by one task, however many they are.

*Each key is told once.* `add` it again, and then look at it: so what moves it after `add` began is told by
the next `moved`, and no version slips in between. Hints may be early and may be lost, as those of
`Consensus.watch`.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

log = logging.getLogger("aiopersist")


class Watch(ABC):
    """See the header. It belongs to one event loop."""

    @abstractmethod
    def add(self, key: str) -> None:
        """Tell when `key` may have moved since this call began."""

    @abstractmethod
    def discard(self, key: str) -> None:
        """Tell nothing of `key` any more."""

    @abstractmethod
    async def moved(self) -> set[str]:
        """Wait until some keys may have moved; these, which are told no more until they are added again.
        An error loses nothing: call again."""

    @abstractmethod
    async def aclose(self) -> None:
        """Watch nothing any more."""


class EachWatched(Watch):
    """Keys of a store that can only `watch` one at a time: a task for each. A call that fails, whatever it
    raises, counts as a hint, since nothing is known then; the log says so once."""

    def __init__(self, watch: Callable[[str], Awaitable[None]]) -> None:
        self._watch = watch
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._told: set[str] = set()
        self._any = asyncio.Event()
        self._has_failed = False

    def add(self, key: str) -> None:
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._wait(key), name="watch a key")

    def discard(self, key: str) -> None:
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    async def moved(self) -> set[str]:
        await self._any.wait()
        self._any.clear()
        told, self._told = self._told, set()
        return told

    async def aclose(self) -> None:
        tasks, self._tasks = set(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _wait(self, key: str) -> None:
        try:
            await self._watch(key)
            self._has_failed = False
        except Exception as error:  # a store of an application may raise anything
            if not self._has_failed:
                self._has_failed = True
                log.warning("no hints of commits, which are noticed late, by looking: %r", error)
        self._tasks.pop(key, None)
        self._told.add(key)
        self._any.set()
