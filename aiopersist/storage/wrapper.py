"""A store around a store: every request passes one method, so a wrapper is a class of one method.

`layers` retries and counts, `readonly` refuses writes, `aiopersist.testing.faults` makes requests fail.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.watch import Watch

T = TypeVar("T")
Request = Callable[[], Awaitable[T]]

READS = frozenset({"head", "heads", "scan", "list_keys", "watch", "now", "clock", "get", "get_range", "list"})


class WrappedBlob(Blob):
    """Passes every request to `inner`. Closing it closes `inner`."""

    def __init__(self, inner: Blob) -> None:
        self.inner = inner

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        """Make the request, which calls the method `op` of `inner` and sends values of `sent` bytes."""
        return request()

    async def get(self, key: str) -> bytes | None:
        return await self._request("get", lambda: self.inner.get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return await self._request("get_range", lambda: self.inner.get_range(key, offset, length))

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await self._request("set", lambda: self.inner.set(key, data), memoryview(data).nbytes)

    async def create(self, key: str, data: bytes) -> bool:
        return await self._request("create", lambda: self.inner.create(key, data), len(data))

    @property
    def uri(self) -> str:
        return self.inner.uri

    async def delete(self, keys: Sequence[str]) -> None:
        await self._request("delete", lambda: self.inner.delete(keys))

    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        return self.inner.list(prefix)  # many requests, which a wrapper must treat by itself

    async def aclose(self) -> None:
        await self.inner.aclose()


class CachedBlob(WrappedBlob):
    """A store that was opened with a cache before it, which is to stand above the retries."""

    def before(self, store: Blob) -> Blob:
        """The same cache before `store`, another handle on `inner`."""
        raise NotImplementedError


class WrappedConsensus(Consensus):
    """Passes every request to `inner`. Closing it closes `inner`."""

    def __init__(self, inner: Consensus) -> None:
        self.inner = inner
        if type(self).stand_back_s is WrappedConsensus.stand_back_s:  # each commit asks: it passes no layer
            self.stand_back_s = inner.stand_back_s  # type: ignore[method-assign]
        if type(self).newer is WrappedConsensus.newer:
            self.newer = inner.newer  # type: ignore[method-assign]

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        """Make the request, which calls the method `op` of `inner`, or one that answers like it, and sends
        values of `sent` bytes."""
        return request()

    async def head(self, key: str) -> Versioned | None:
        return await self._request("head", lambda: self.inner.head(key))

    async def likely_head(self, key: str, seqno: int) -> Versioned | None:
        if type(self).head is not WrappedConsensus.head:  # a subclass changes what it answers
            return await self.head(key)
        return await self._request("head", lambda: self.inner.likely_head(key, seqno))

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        return await self._request("heads", lambda: self.inner.heads(known))

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        request = partial(self.inner.compare_and_set, key, expected, data)
        return await self._request("compare_and_set", request, len(data))

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        request = partial(self.inner.compare_and_set_many, entries)
        return await self._request("compare_and_set_many", request, sum([len(e.data) for e in entries]))

    async def wish(self, keys: Sequence[str], who: str, for_s: float, waited_s: float) -> None:
        await self._request("wish", lambda: self.inner.wish(keys, who, for_s, waited_s))

    def stand_back_s(self, key: str, who: str, waited_s: float) -> float:
        return self.inner.stand_back_s(key, who, waited_s)

    def newer(self, key: str) -> Versioned | None:
        return self.inner.newer(key)

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        return await self._request("scan", lambda: self.inner.scan(key, from_seqno, limit))

    async def versions(self, key: str, first: int, last: int) -> list[Versioned]:
        if type(self).scan is not WrappedConsensus.scan:
            return await super().versions(key, first, last)
        return await self._request("scan", lambda: self.inner.versions(key, first, last))

    async def truncate(self, key: str, seqno: int) -> int:
        return await self._request("truncate", lambda: self.inner.truncate(key, seqno))

    async def leftovers(self, key: str) -> list[Versioned]:
        return await self._request("scan", lambda: self.inner.leftovers(key))

    async def remove(self, key: str, expected: Versioned) -> bool:
        return await self._request("remove", lambda: self.inner.remove(key, expected))

    async def list_keys(self, prefix: str) -> list[str]:
        return await self._request("list_keys", lambda: self.inner.list_keys(prefix))

    async def watch(self, key: str) -> None:
        await self._request("watch", lambda: self.inner.watch(key))

    def watch_together(self) -> Watch:
        return self.inner.watch_together()

    async def now(self) -> float:
        return await self._request("now", self.inner.now)

    async def clock(self) -> float:
        return await self._request("clock", self.inner.clock)

    @property
    def clock_error_s(self) -> float:
        return self.inner.clock_error_s

    @property
    def keeps_keys(self) -> bool:
        return self.inner.keeps_keys

    def limit_clock(self, ahead_max_s: float) -> None:
        self.inner.limit_clock(ahead_max_s)

    async def check(self) -> None:
        await self._request("check", self.inner.check)

    async def aclose(self) -> None:
        await self.inner.aclose()
