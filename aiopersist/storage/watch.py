"""A watch: one task waits for many keys.

A *hint* says that a key may have moved. It may come early, and it may be lost: only a read is reliable. A
watch gives one hint for each `add`. So call `add` again, and then read the key: the next `moved` tells of any
move after `add` began, and no version slips in between.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from aiopersist.base.errors import Error

log = logging.getLogger("aiopersist").getChild("storage")


class Watch(ABC):
    """See the header. A watch belongs to one event loop."""

    @abstractmethod
    def add(self, key: str) -> None:
        """Ask for a hint when `key` may have moved since this call began."""

    @abstractmethod
    def discard(self, key: str) -> None:
        """Ask for no hint of `key` any more."""

    def expect(self, key: str, seqno: int) -> None:  # noqa: B027  # a store may give hints that nobody needs
        """Say that a move of `key` to version `seqno` needs no hint: the caller is about to make it, and
        looks by itself if that fails."""

    @abstractmethod
    async def moved(self) -> set[str]:
        """Wait for hints and return their keys; add a key again for its next hint. An error loses no hint."""

    @abstractmethod
    async def aclose(self) -> None:
        """Discard all keys."""


class TaskWatch(Watch):
    """The watch of a store that defines only `Consensus.watch`: one task per key. A call that fails counts
    as a hint, since the key may have moved; the log says so once."""

    def __init__(self, watch: Callable[[str], Awaitable[None]]) -> None:
        self._watch = watch
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._hinted: set[str] = set()
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
        hinted, self._hinted = self._hinted, set()
        return hinted

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
                why = str(error) if isinstance(error, Error) else type(error).__name__  # no foreign text
                text, extra = "no hints of commits, which are noticed late, by polling: %s", {"op": "watch"}
                log.warning(text, why, extra=extra | {"error": type(error).__name__})
        self._tasks.pop(key, None)
        self._hinted.add(key)
        self._any.set()
