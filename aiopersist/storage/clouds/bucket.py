"""The objects that consensus needs, in a store that obstore knows and that obeys conditions.

The driver shows neither headers nor bodies of successes. For Google it takes every document for a
list, and a page of a proxy for an empty one. So the end of a list counts there only if the list shows an
object that surely exists: a version of the key, or one behind the key's folder.
"""

import asyncio
from contextlib import aclosing, suppress
from typing import Self

from aiopersist.base.errors import StorageUnavailable
from aiopersist.base.runtime import Runtime
from aiopersist.storage.address import Address
from aiopersist.storage.clouds.client import PAGE, CloudClient
from aiopersist.storage.clouds.date import date_of
from aiopersist.storage.clouds.places import place_of
from aiopersist.storage.objects.answers import tag_of
from aiopersist.storage.objects.bucket import Object, Tagged
from aiopersist.storage.objects.clock import ServerClock
from aiopersist.storage.objects.names import PROBE
from aiopersist.storage.objects.served import ServedBucket

CLOCK_FRESH_S = 60.0  # an answer's clock; the clocks of a machine that slept stood still


class CloudBucket(ServedBucket[CloudClient]):
    """See the header."""

    def __init__(self, client: CloudClient, runtime: Runtime) -> None:
        super().__init__(client, ServerClock(runtime))
        self.seeks = client.place.scheme != "az"  # Azure begins each list at the first name
        self._runtime = runtime
        self._asking = asyncio.Lock()
        self._asked = 0.0

    @classmethod
    def at(cls, address: Address, runtime: Runtime) -> Self:
        """See `places`."""
        return cls(CloudClient(place_of(address), "consensus store"), runtime)

    async def get(self, name: str) -> Object | None:
        stored = await self._client.get(name)
        if stored is not None and not stored[1]:
            raise self._foreign("the answer has no ETag")
        return None if stored is None else Object(*stored)

    async def find(self, prefix: str, *, after: str = "", limit: int | None = None) -> list[Tagged]:
        objects, passed, last = list[Tagged](), 0, after
        folder = self._listed_folder(prefix)
        async with aclosing(self._client.names(folder, after)) as names:
            async for meta in names:
                passed, last = passed + 1, meta["path"]
                if not last.startswith(prefix) and last > max(prefix, after):
                    return objects  # the store shows what lies behind
                if meta["path"].startswith(prefix) and meta["path"] > after:  # some servers ignore `after`
                    objects.append(Tagged(meta["path"], tag_of(meta["e_tag"])))
                    if len(objects) == limit:
                        return objects
        if self._client.place.takes_any_list and passed % PAGE == 0:
            await self._check_end(folder, max(folder, last))
        return objects

    async def folders(self, prefix: str) -> list[str]:
        folder = prefix[: prefix.rfind("/") + 1]
        paths, beside = await self._client.folders(folder)
        if self._client.place.takes_any_list and PROBE not in beside and await self.get(PROBE):
            raise self._foreign("a list of all keys has no end")
        return [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]

    def _listed_folder(self, prefix: str) -> str:
        """The folder to list for what begins with `prefix`. Where the driver takes any document for a list,
        it is that of the key, which is not empty while the key has a version."""
        end = prefix.find("/") if self._client.place.takes_any_list else prefix.rfind("/")
        return prefix[: end + 1]

    async def _check_end(self, folder: str, after: str) -> None:
        """`StorageUnavailable` unless the store itself says that a folder has nothing after that name: by
        what lies behind the folder, at the end `PROBE`. Before there is one, an empty list is believed."""
        async with aclosing(self._client.names("", after)) as names:
            async for meta in names:
                if meta["path"] > after:
                    if meta["path"].startswith(folder):
                        raise self._foreign("two lists contradict each other")
                    return
        if await self.get(PROBE):
            raise self._foreign("a list has no end")

    def _foreign(self, why: str) -> StorageUnavailable:
        return StorageUnavailable(f"{self!r}: {why}, so it is not the store's")

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
        return await self._asked_clock(self._ask_clock)

    async def _ask_clock(self) -> None:
        place = self._client.place
        sent = self._asked = self._clock.sent()
        self._clock.answered(await date_of(place.server, place.scheme), sent)
