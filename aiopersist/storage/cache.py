"""Blobs kept in memory: values never change, so bytes that were read once are right for ever.

The least recently used ranges go first when the bytes exceed the limit. One range takes at most an eighth,
so that a large one does not push out all others. Callers that read the same range at the same moment share
one request; if the caller that made it is cancelled, another makes it again. The cache never
remembers a missing blob: it may be set a moment later.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from aiopersist.storage.blob import Blob
from aiopersist.storage.wrapper import WrappedBlob

_SHARE = 8  # one range may take an eighth of the cache

Wanted = tuple[str, int, int | None]
"""Key, offset, length; a whole value is `(key, 0, None)`."""


class CacheBlob(WrappedBlob):
    """`inner` behind a cache of `capacity_bytes`. Use `uncached` for reads that should not fill it; it may be
    given, where `inner` is a cache, too."""

    def __init__(self, inner: Blob, capacity_bytes: int, uncached: Blob | None = None) -> None:
        super().__init__(inner)
        self._uncached = inner if uncached is None else uncached
        self._capacity = capacity_bytes
        self._held: OrderedDict[Wanted, bytes] = OrderedDict()
        self._by_key: dict[str, set[Wanted]] = {}
        self._size = 0
        self._coming: dict[Wanted, asyncio.Future[bytes | None]] = {}
        self._hits = self._misses = 0

    @property
    def uncached(self) -> Blob:
        """The store behind all caches."""
        return self._uncached

    def counts(self) -> dict[str, int]:
        """How often it helped, and what it holds: the fields of `CacheView`."""
        held = {"bytes": self._size, "bytes_max": self._capacity}
        return {"hits": self._hits, "misses": self._misses, **held}

    async def get(self, key: str) -> bytes | None:
        return await self._read((key, 0, None), lambda: self.inner.get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        whole = self._found((key, 0, None))
        if whole is not None:
            self._hits += 1
            return whole[offset : offset + length]
        return await self._read((key, offset, length), lambda: self.inner.get_range(key, offset, length))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            for wanted in list(self._by_key.get(key, ())):
                self._drop(wanted)
        await self.inner.delete(keys)

    async def aclose(self) -> None:
        for wanted in list(self._held):
            self._drop(wanted)
        await self.inner.aclose()

    async def _read(self, wanted: Wanted, fetch: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        while True:
            held = self._found(wanted)
            if held is not None:
                self._hits += 1
                return held
            coming = self._coming.get(wanted)
            if coming is None:
                self._misses += 1
                return await self._fetch(wanted, fetch)
            await asyncio.wait([coming])  # not awaited: our cancellation would cancel it
            if not coming.cancelled():
                self._hits += 1
                return coming.result()

    async def _fetch(self, wanted: Wanted, fetch: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        coming = self._coming[wanted] = asyncio.get_running_loop().create_future()
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
            del self._coming[wanted]
        if data is not None:
            self._hold(wanted, data)
        return data

    def _found(self, wanted: Wanted) -> bytes | None:
        data = self._held.get(wanted)
        if data is not None:
            self._held.move_to_end(wanted)
        return data

    def _hold(self, wanted: Wanted, data: bytes) -> None:
        if len(data) > self._capacity // _SHARE:
            return
        self._held[wanted] = data
        self._by_key.setdefault(wanted[0], set()).add(wanted)
        self._size += len(data)
        while self._size > self._capacity:
            self._drop(next(iter(self._held)))

    def _drop(self, wanted: Wanted) -> None:
        self._size -= len(self._held.pop(wanted))
        ranges = self._by_key[wanted[0]]
        ranges.discard(wanted)
        if not ranges:
            del self._by_key[wanted[0]]
