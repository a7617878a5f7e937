"""A second client on the stores of a client, for threads that block: its *twin*.

Polars, DuckDB and readers of Arrow streams call from threads that wait for each batch. One of these may be
the thread of the client's own event loop. So the twin has a loop of its own, on the thread of a portal. It
opens at the first read, and ends before its client. It writes nothing but heartbeats of leases that the
client has.

All threads of polars may wait for the twin. So its threads never call polars (`avoid_polars`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.runtime import OwnProcess

if TYPE_CHECKING:
    from aiopersist.base.portal import Portal

T = TypeVar("T")

WHAT = "the client"


class OpenTwin(Protocol):
    """The inside of an open client."""

    @property
    def shards(self) -> Any: ...

    async def close(self) -> None: ...


class Twin:
    """See the header. Threads share it."""

    open: Callable[[], Awaitable[OpenTwin]]
    """Opens the second client, in the loop of the portal."""
    check: Callable[[], object]
    """`Unsupported` if the stores cannot be opened again."""

    def __init__(self) -> None:
        self._process = OwnProcess(WHAT)
        self._lock = Lock()
        self._portal: Portal | None = None
        self._opened: OpenTwin | None = None
        self._ended = False

    def iterate(self, items: Callable[[Any], AsyncIterator[T]]) -> Iterator[T]:
        """`items(shards)`, of the shards of the second client, for a thread that blocks. `InvalidUsage` once
        the client is closed, and in a fork."""
        self._process.check()
        with self._lock:
            self._check_open()
            if self._portal is None:
                from aiopersist.base.portal import Portal

                self._portal = Portal(WHAT)
            portal = self._portal
            if self._opened is None:
                self._opened = portal.run(self.open)
                self._check_open()
            shards = self._opened.shards
        return portal.iterate(partial(items, shards))

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidUsage(UsageKind.CLOSED, f"{WHAT} is closed")

    async def aclose(self, on_a_thread: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """End the reads, the second client and its thread, which takes a thread that waits. Idempotent."""
        if self._process.is_here:
            self._ended = True  # a read that begins now is refused
            if self._portal is not None:
                await on_a_thread(self._end)

    def _end(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        assert self._portal is not None
        if opened is not None:
            self._portal.run(opened.close)
        self._portal.end()
