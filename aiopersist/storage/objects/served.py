"""What the stores of objects behind a server have alike: a client of it, its clock, and whether it obeys
conditions."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from aiopersist.base.errors import StorageUnavailable
from aiopersist.base.runtime import SYSTEM
from aiopersist.storage.blob import Blob
from aiopersist.storage.objects.bucket import Bucket
from aiopersist.storage.objects.clock import AGREE, ServerClock


class ObjectClient(Protocol):
    """A connection to a place on a server. `get` returns an object and what else the answer says of it."""

    async def get(self, name: str) -> tuple[bytes, object] | None: ...
    async def create(self, name: str, data: bytes) -> str | None: ...
    async def delete(self, names: list[str]) -> None: ...
    def facts(self) -> dict[str, str]: ...
    async def aclose(self) -> None: ...


C = TypeVar("C", bound=ObjectClient)


class ServedBlob(Blob, Generic[C]):
    """Blobs on a server, an object each."""

    def __init__(self, client: C) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._client!r}>"

    @abstractmethod
    def _name(self, key: str) -> str:
        """The name of a blob's object."""

    async def get(self, key: str) -> bytes | None:
        answer = await self._client.get(self._name(key))
        return None if answer is None else answer[0]

    async def create(self, key: str, data: bytes) -> bool:
        return await self._client.create(self._name(key), data) is not None

    async def delete(self, keys: Sequence[str]) -> None:
        await self._client.delete([self._name(key) for key in keys])

    async def facts(self) -> dict[str, str]:
        return self._client.facts()

    async def probe(self) -> dict[str, str]:
        """Whether a put that must not replace a blob is refused where there is one. Servers that know no
        conditions write it again."""
        create, name = self._client.create, f"probe/{SYSTEM.uuid()}"
        try:
            obeyed = await create(name, b"") is not None and await create(name, b"") is None
        finally:
            await self._client.delete([name])
        return {"conditional puts": "yes" if obeyed else "no"}

    async def aclose(self) -> None:
        await self._client.aclose()


class ServedBucket(Bucket, Generic[C]):
    """Objects on a server, whose answers tell its clock."""

    def __init__(self, client: C, clock: ServerClock) -> None:
        self._client = client
        self._clock = clock

    def __repr__(self) -> str:
        return repr(self._client)

    async def create(self, name: str, data: bytes) -> str | None:
        return await self._client.create(name, data)

    async def delete(self, names: Sequence[str]) -> None:
        await self._client.delete(list(names))

    async def _asked_clock(self, ask: Callable[[], Awaitable[object]]) -> float:
        """The server's clock after `ask`, a request whose answer tells it; after some, where the first one
        contradicts what was told before."""
        for _ in range(AGREE):
            await ask()
            if not self._clock.is_in_doubt:
                break
        if not self._clock.is_known:
            raise StorageUnavailable(f"{self!r}: clock: the answers have no Date", retry=False)
        return self._clock.now()

    def limit_clock(self, ahead_max_s: float) -> None:
        self._clock.ahead_max_s = ahead_max_s

    @property
    def clock_error_s(self) -> float:
        return self._clock.error_s

    async def facts(self) -> dict[str, str]:
        return self._client.facts()

    async def aclose(self) -> None:
        await self._client.aclose()
