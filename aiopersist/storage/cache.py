"""Blobs kept in memory: values never change, so bytes that were read once stay right.

Above the limit the least recently used ranges are dropped. One range takes at most an eighth, so that a large
one does not push out all others. Callers that read the same range at the same moment share
one request; if the caller that made it is cancelled, another makes it again. The cache never
remembers a missing blob: it may be set a moment later.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from aiopersist.storage.blob import Blob
from aiopersist.storage.wrapper import WrappedBlob

_SHARE = 8  # one range may take an eighth of the cache

Span = tuple[str, int, int | None]
"""Key, offset, length; a whole value is `(key, 0, None)`."""


class CacheBlob(WrappedBlob):
    """`inner` behind a cache of `capacity_bytes`. Use `uncached` for reads that should not fill it; give it
    where `inner` is a cache, too."""

    def __init__(self, inner: Blob, capacity_bytes: int, uncached: Blob | None = None) -> None:
        super().__init__(inner)
        self._uncached = inner if uncached is None else uncached
        self._capacity = capacity_bytes
        self._data: OrderedDict[Span, bytes] = OrderedDict()
        self._by_key: dict[str, set[Span]] = {}
        self._size = 0
        self._coming: dict[Span, asyncio.Future[bytes | None]] = {}
        self._hits = self._misses = 0

    @property
    def uncached(self) -> Blob:
        """The store behind all caches."""
        return self._uncached

    def counts(self) -> dict[str, int]:
        """How often it helped, and what it holds: the fields of `CacheView`."""
        sizes = {"bytes": self._size, "bytes_max": self._capacity}
        return {"hits": self._hits, "misses": self._misses, **sizes}

    async def get(self, key: str) -> bytes | None:
        return await self._read((key, 0, None), lambda: self.inner.get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        whole = self._look_up((key, 0, None))
        if whole is not None:
            self._hits += 1
            return whole[offset : offset + length]
        return await self._read((key, offset, length), lambda: self.inner.get_range(key, offset, length))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            for span in list(self._by_key.get(key, ())):
                self._drop(span)
        await self.inner.delete(keys)

    async def aclose(self) -> None:
        for span in list(self._data):
            self._drop(span)
        await self.inner.aclose()

    async def _read(self, span: Span, fetch: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        while True:
            data = self._look_up(span)
            if data is not None:
                self._hits += 1
                return data
            coming = self._coming.get(span)
            if coming is None:
                self._misses += 1
                return await self._fetch(span, fetch)
            await asyncio.wait([coming])  # not awaited: our cancellation would cancel it
            if not coming.cancelled():
                self._hits += 1
                return coming.result()

    async def _fetch(self, span: Span, fetch: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        coming = self._coming[span] = asyncio.get_running_loop().create_future()
        try:
            data = await fetch()
        except Exception as error:
            coming.set_exception(error)
            coming.exception()  # retrieved, though no other caller may wait
            raise
        except BaseException:
            coming.cancel()  # another caller makes the request
            raise
        else:
            coming.set_result(data)
        finally:
            del self._coming[span]
        if data is not None:
            self._hold(span, data)
        return data

    def _look_up(self, span: Span) -> bytes | None:
        data = self._data.get(span)
        if data is not None:
            self._data.move_to_end(span)
        return data

    def _hold(self, span: Span, data: bytes) -> None:
        if len(data) > self._capacity // _SHARE:
            return
        self._data[span] = data
        self._by_key.setdefault(span[0], set()).add(span)
        self._size += len(data)
        while self._size > self._capacity:
            self._drop(next(iter(self._data)))

    def _drop(self, span: Span) -> None:
        self._size -= len(self._data.pop(span))
        ranges = self._by_key[span[0]]
        ranges.discard(span)
        if not ranges:
            del self._by_key[span[0]]
