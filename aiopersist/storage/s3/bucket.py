"""The objects that consensus needs, in an S3 bucket or in any store that speaks its protocol and obeys
`If-None-Match: *`."""

from contextlib import aclosing
from functools import partial
from typing import Self

from aiopersist.base.errors import StorageUnavailable
from aiopersist.base.runtime import Runtime
from aiopersist.storage.address import Address
from aiopersist.storage.objects.answers import tag_of
from aiopersist.storage.objects.bucket import Object, Tagged
from aiopersist.storage.objects.clock import ServerClock
from aiopersist.storage.objects.served import ServedBucket
from aiopersist.storage.s3.client import S3Client

PAGE = 1000  # names in an answer, S3's limit
ABSENT = "absent"  # nobody creates it


class S3Bucket(ServedBucket[S3Client]):
    """See the header."""

    @classmethod
    def at(cls, address: Address, runtime: Runtime) -> Self:
        """See `S3Client.at`."""
        clock = ServerClock(runtime)
        return cls(S3Client.at(address, "consensus store", clock), clock)

    async def get(self, name: str) -> Object | None:
        answer = await self._client.get(name)
        if answer is None:
            return None
        tag = tag_of(answer[1].get("ETag"))
        if not tag:
            raise StorageUnavailable(f"{self!r}: get: the answer has no ETag, so it is not the store's")
        return Object(answer[0], tag)

    async def find(self, prefix: str, *, after: str = "", limit: int | None = None) -> list[Tagged]:
        client, objects = self._client, list[Tagged]()
        start = {"StartAfter": client.prefix + after} if after else {}
        size = PAGE if limit is None else min(PAGE, limit)
        async with aclosing(client.pages(prefix, MaxKeys=size, **start)) as pages:
            async for page in pages:
                objects += [
                    Tagged(item["Key"].removeprefix(client.prefix), tag_of(item.get("ETag")))
                    for item in page.get("Contents", ())
                ]
                if limit is not None and len(objects) >= limit:
                    return objects[:limit]
        return objects

    async def folders(self, prefix: str) -> list[str]:
        begin, names = self._client.prefix + prefix, list[str]()
        async for page in self._client.pages(prefix, Delimiter="/"):
            folders = page.get("CommonPrefixes", ())
            names += [folder["Prefix"].removeprefix(begin).removesuffix("/") for folder in folders]
        return names

    async def now(self) -> float:
        return self._clock.now() if self._clock.is_known else await self.clock()

    async def clock(self) -> float:
        return await self._asked_clock(partial(self.get, ABSENT))
