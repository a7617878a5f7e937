"""Blobs in a store that obstore knows.

All of these stores promise what the contract demands: a put is atomic and durable when it returns, and reads
and lists see every completed write. A value above 8 MiB goes in parts, and appears as a whole with the last
request. The layer above repeats requests.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote

from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.address import Address
from aiopersist.storage.clouds.client import PAGE, CloudClient
from aiopersist.storage.clouds.places import place_of
from aiopersist.storage.identity import BLOB_KEY
from aiopersist.storage.keys import check_blob_key
from aiopersist.storage.objects.served import ServedBlob

if TYPE_CHECKING:
    from obstore import ObjectMeta


class CloudBlob(ServedBlob[CloudClient]):
    """Blobs at the place of a client. One request per read and per small write; a large write takes one per 8
    MiB and two more, in Azure one more; lists take one per 1000 keys (Azure: 5000), and look through all
    keys of the prefix's last whole component; deletes take one per 1000 keys (Azure: 256, and three times as
    many if a key is absent; Google: 1)."""

    def __init__(self, client: CloudClient) -> None:
        super().__init__(client)
        self._quotes = client.place.scheme == "az"  # which takes a backslash for a slash

    @classmethod
    def at(cls, address: Address) -> Self:
        """See `places`."""
        return cls(CloudClient(place_of(address), "blob store"))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        data = await self._client.get_range(self._name(key), offset, max(length, 1))
        return None if data is None else data[:length]

    async def set(self, key: str, data: bytes | memoryview) -> None:
        # a cancelled call leaves the driver with the data for a while: it gets bytes of its own
        await self._client.put(self._name(key), data if isinstance(data, bytes) else bytes(data))

    @property
    def uri(self) -> str:
        return self._client.place.uri

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        self._client.check_open()
        folder = self._quoted(prefix[: prefix.rfind("/") + 1])
        if any(part in ("", ".", "..") for part in folder.split("/")[:-1]):  # no key begins with it
            return
        objects = self._client.names(folder) if not self._client.place.takes_any_list else self._all(folder)
        async with aclosing(objects) as names:
            async for meta in names:
                key = unquote(meta["path"]) if self._quotes else meta["path"]
                if key.startswith(prefix) and not key.endswith("/"):
                    yield key, meta["size"]

    async def _all(self, folder: str) -> AsyncGenerator["ObjectMeta", None]:
        """The objects below a folder, where the driver takes any document for a list, and a page of a proxy
        for its end. So an end behind whole pages counts once another list, which is not empty, shows that the
        store answers, and the same end comes again."""
        last, is_checked = "", False
        while True:
            passed = 0
            async with aclosing(self._client.names(folder, last)) as names:
                async for meta in names:
                    if meta["path"] > last:  # some servers ignore it
                        passed, last = passed + 1, meta["path"]
                        yield meta
            if passed % PAGE or (is_checked and not passed):
                return
            await self._check_lists()
            is_checked = True

    async def _check_lists(self) -> None:
        """`StorageUnavailable` if something between answers lists: each location has `BLOB_KEY`."""
        async with aclosing(self._client.names("", BLOB_KEY[:-1])) as names:
            async for _ in names:
                return
        if await self._client.get(BLOB_KEY) is not None:
            raise StorageUnavailable(f"{self!r}: list: the answers are not the store's")

    def _name(self, key: str) -> str:
        self._client.check_open()
        check_blob_key(key)
        return self._quoted(key)

    def _quoted(self, key: str) -> str:
        if not self._quotes:
            return key
        return key.replace("%", "%25").replace("\\", "%5C")
