"""The objects that consensus needs, in a store that obstore knows and that obeys conditions."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Self

from aiopersist.errors import StorageUnavailable
from aiopersist.runtime import Runtime
from aiopersist.storage.address import Address
from aiopersist.storage.clouds.client import CloudClient, tag_of
from aiopersist.storage.clouds.date import date_of
from aiopersist.storage.clouds.places import place_of
from aiopersist.storage.objects.bucket import Object, Tagged
from aiopersist.storage.objects.clock import ServerClock
from aiopersist.storage.objects.served import ServedBucket

CLOCK_FRESH_S = 60.0  # what an answer has told of the clock; the clocks of a machine that slept stood still


class CloudBucket(ServedBucket[CloudClient]):
    """See the header."""

    def __init__(self, client: CloudClient, runtime: Runtime) -> None:
        super().__init__(client, ServerClock(runtime))
        self._runtime = runtime
        self._asking = asyncio.Lock()
        self._asked = 0.0

    @classmethod
    def at(cls, address: Address, runtime: Runtime) -> Self:
        """See `places`."""
        return cls(CloudClient(place_of(address), "consensus store"), runtime)

    async def create(self, name: str, data: bytes) -> str | None:
        return await self._client.create(name, data)

    async def get(self, name: str) -> Object | None:
        found = await self._client.get(name)
        return None if found is None else Object(*found)

    async def find(self, prefix: str, *, after: str = "", limit: int | None = None) -> list[Tagged]:
        found = list[Tagged]()
        folder = prefix[: prefix.rfind("/") + 1]
        async with aclosing(self._client.names(folder, after)) as names:
            async for meta in names:
                if meta["path"].startswith(prefix) and meta["path"] > after:  # some servers ignore `after`
                    found.append(Tagged(meta["path"], tag_of(meta)))
                    if len(found) == limit:
                        break
        return found

    async def folders(self, prefix: str) -> list[str]:
        folder = prefix[: prefix.rfind("/") + 1]
        found = await self._client.folders(folder)
        return [path.removeprefix(prefix) for path in found if path.startswith(prefix)]

    async def delete(self, names: Sequence[str]) -> None:
        await self._client.delete(names)

    async def now(self) -> float:
        """The store's clock. One request a minute."""
        if not self._clock.is_known:
            async with self._asking:
                if not self._clock.is_known:
                    return await self.clock()
        elif self._runtime.monotonic() - self._asked > CLOCK_FRESH_S:
            with suppress(StorageUnavailable):  # what was told before is still right as a rule
                return await self.clock()
        return self._clock.now()

    async def clock(self) -> float:
        self._client.check_open()
        sent = self._asked = self._clock.sent()
        self._clock.answered(await date_of(self._client.place.server, self._client.place.scheme), sent)
        return self._told(f"{self._client.place.scheme}: clock: the Date is none")
