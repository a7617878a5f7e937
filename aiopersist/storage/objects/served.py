"""What the buckets behind a server have alike: a client of it, its clock, and whether it obeys conditions."""

from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from aiopersist.errors import StorageUnavailable
from aiopersist.runtime import SYSTEM
from aiopersist.storage.objects.bucket import Bucket
from aiopersist.storage.objects.clock import AGREE, ServerClock


class BucketClient(Protocol):
    """A connection to the place of a bucket."""

    def facts(self) -> dict[str, str]:
        """See `Consensus.facts`."""
        ...

    async def aclose(self) -> None:
        """Release connections; idempotent."""
        ...


C = TypeVar("C", bound=BucketClient)


class ServedBucket(Bucket, Generic[C]):
    """Objects on a server, whose answers tell its clock."""

    def __init__(self, client: C, clock: ServerClock) -> None:
        self._client = client
        self._clock = clock

    def __repr__(self) -> str:
        return repr(self._client)

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


async def conditional_puts(
    create: Callable[[str, bytes], Awaitable[str | None]], delete: Callable[[str], Awaitable[object]]
) -> dict[str, str]:
    """For `Blob.probe`: whether a put that must not replace a blob is refused where there is one. Servers
    that know no conditions write it again. `create` returns `None` if it has not written the blob."""
    name = f"probe/{SYSTEM.uuid()}"
    try:
        obeyed = await create(name, b"") is not None and await create(name, b"") is None
    finally:
        await delete(name)
    return {"conditional puts": "yes" if obeyed else "no"}
