"""A table with a secret in it, and a look for it that shares nothing with `erase`."""

import gzip
import os
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import NamedTuple

import aiopersist as ap
from aiopersist.storage.objects.consensus import ObjectsConsensus
from aiopersist.storage.wrapper import WrappedConsensus
from tests.support.internals import stack_of

NOW = timedelta(0)
SECRET = os.urandom(300)  # no compression hides it from a search


class Pair(NamedTuple):
    name: str
    number: int


def forms(secret: bytes) -> list[bytes]:
    """A piece of it as it is, and in base64 at any offset."""
    return [secret[100:140], *(urlsafe_b64encode(secret[100 + n : 142 + n]) for n in range(3))]


async def stored(client: ap.Client) -> AsyncIterator[tuple[str, bytes]]:
    """All that lies in the stores, below the library."""
    blob, consensus = stack_of(client).blob.uncached, stack_of(client).consensus
    async for key, _ in blob.list(""):
        yield key, _unpacked(await blob.get(key) or b"")
    for key in await consensus.list_keys(""):
        for version in await consensus.scan(key, 0, 10**9):
            yield f"{key} {version.seqno}", version.data
    while isinstance(consensus, WrappedConsensus):
        consensus = consensus.inner
    if isinstance(consensus, ObjectsConsensus):
        for listed in await consensus._bucket.find(""):
            found = await consensus._bucket.get(listed.name)
            yield listed.name, b"" if found is None else found.data


def _unpacked(data: bytes) -> bytes:
    """Rollups are compressed: what is in base64 lies at other bits."""
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


async def places(client: ap.Client, secret: bytes = SECRET) -> list[str]:
    """Where the stores have it."""
    return [name async for name, data in stored(client) if any(form in data for form in forms(secret))]


async def with_history(client: ap.Client, name: str = "people") -> ap.Table[str, bytes]:
    """A table that has the secret under a key, in versions, and before as another val."""
    people = client.table(name, key=str, val=bytes)
    await people.put_many({f"other {n}": b"%d" % n for n in range(20)})
    await people.put("ada", SECRET + b"before")
    await people.put("ada", SECRET)
    await people.put("bob", b"stays")
    return people


async def stays(people: ap.Table[str, bytes]) -> None:
    """What was not to be erased is there."""
    assert await people.get("bob") == b"stays" and await people.count() == 21
    assert (await people._tables.shards.existing(people.name)).state.retention[0].seconds == 86400
