"""Stores that may only be read: what a readonly client is given, whatever its code asks for.

They stand directly before the backends, below retries and counts. Every write is `Unsupported`, which is
determinate and is not repeated: nothing was sent.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NoReturn

from aiopersist.errors import Unsupported
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.watch import Watch


def refuse(what: str) -> NoReturn:
    """Say that `what` writes, and that the client was opened not to."""
    raise Unsupported(f"{what} writes, and the client was opened with readonly=True")


class ReadonlyBlob(Blob):
    """Reads of `inner`."""

    def __init__(self, inner: Blob) -> None:
        self.inner = inner

    async def get(self, key: str) -> bytes | None:
        return await self.inner.get(key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return await self.inner.get_range(key, offset, length)

    async def set(self, key: str, data: bytes | memoryview) -> None:
        refuse("this call")

    async def delete(self, keys: Sequence[str]) -> None:
        refuse("this call")

    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        return self.inner.list(prefix)

    async def aclose(self) -> None:
        await self.inner.aclose()


class ReadonlyConsensus(Consensus):
    """Reads of `inner`."""

    def __init__(self, inner: Consensus) -> None:
        self.inner = inner

    async def head(self, key: str) -> Versioned | None:
        return await self.inner.head(key)

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        return await self.inner.heads(known)

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        refuse("this call")

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        refuse("this call")

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        return await self.inner.scan(key, from_seqno, limit)

    async def truncate(self, key: str, seqno: int) -> int:
        refuse("this call")

    async def remove(self, key: str, expected: Versioned) -> bool:
        refuse("this call")

    async def list_keys(self, prefix: str) -> list[str]:
        return await self.inner.list_keys(prefix)

    async def watch(self, key: str) -> None:
        await self.inner.watch(key)

    def watch_together(self) -> Watch:
        return self.inner.watch_together()

    async def now(self) -> float:
        return await self.inner.now()

    async def aclose(self) -> None:
        await self.inner.aclose()
