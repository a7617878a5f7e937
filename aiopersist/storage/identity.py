"""The two stores of a location carry the same id.

Without it a wrong URL could pair stores of two locations, and a sweep would delete the blobs as leaks, since
no state in the other store names them.

The id is *claimed* as version 0 of a key of the consensus store (a compare-and-set, so racing first users
agree), written to the blob store, and then declared *paired* by version 1. No client uses a location before
it is paired. So each pair of findings has one meaning:

| consensus | blob store    | meaning                                                              |
|-----------|---------------|----------------------------------------------------------------------|
| nothing   | empty         | a fresh location: claim it                                           |
| claimed   | empty         | a first user is between two steps, or crashed: do its next step      |
| claimed   | the same id   | the same, one step later                                             |
| paired    | the same id   | a location                                                           |
| anything  | another id    | two locations: refused                                               |
| paired    | no id         | the blobs are missing: refused                                       |
| nothing   | an id         | the consensus data is missing, or of another location: refused       |
| unpaired  | no id, blobs  | the files are not of this library: refused                           |

Both stores are read side by side, and once more, the consensus store first, before a refusal: another first
user may have taken a step between the reads.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from typing import Any

from aiopersist.base.ending import both
from aiopersist.base.errors import Indeterminate, InvalidLocation, StorageUnavailable
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.blob import Blob
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.consensus import Consensus, Versioned

BLOB_KEY = "location"
_ID = re.compile(rb"[0-9a-f-]{36}")  # a UUID
CONSENSUS_KEY = "location/id"
"""Its version 0 claims the id, its version 1 says that the blob store has it."""


async def check_identity(
    blob: Blob, consensus: Consensus, runtime: Runtime = SYSTEM, *, create: bool = True
) -> str:
    """Return the id of the location; a fresh location gets one if `create`. `InvalidLocation` if the stores
    are not of one location, if there is no location and `create` is false, or if the consensus store fails
    its `check`, which is made with `create`. Two requests for a location that exists, and those of the
    check."""
    pauses = chain(repeat(0.0, 4), runtime.delays())  # after a lost race, go on at once
    for pause in pauses:
        if pause:
            await runtime.sleep(pause)
        looks = partial(both, partial(consensus.likely_head, CONSENSUS_KEY, 1), partial(blob.get, BLOB_KEY))
        (head, stored_id), _ = await both(looks, consensus.check if create else _nothing)
        if head is not None and stored_id == head.data and head.seqno > 0:
            return _text(head.data)
        refusal = await _refusal(blob, head, stored_id)
        if refusal is None and not create:
            refusal = "there is no location yet: a client that may write makes it when it first opens"
        if refusal is None:
            await _next_step(blob, consensus, head, stored_id, runtime)
        elif head == await consensus.head(CONSENSUS_KEY) and stored_id == await blob.get(BLOB_KEY):
            raise InvalidLocation(refusal)
    raise AssertionError("delays do not end")


def _text(location_id: bytes) -> str:
    try:
        return location_id.decode()
    except UnicodeDecodeError as error:
        raise InvalidLocation("the id of the location is damaged, in both stores") from error


async def check_in_time(
    blob: Blob,
    consensus: Consensus,
    runtime: Runtime,
    *,
    create: bool,
    deadline_s: float,
    beside: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """`check_identity`, and `beside` at the same time, with stores that retry for `deadline_s`;
    `StorageUnavailable` after that."""
    try:
        async with asyncio.timeout(deadline_s * 1.5):  # stops a store that accepts requests and never answers
            await both(partial(check_identity, blob, consensus, runtime, create=create), beside)
    except TimeoutError as error:
        raise StorageUnavailable(f"the stores did not answer within {deadline_s} s") from error
    except Indeterminate as error:
        raise StorageUnavailable(f"the stores cannot be used: {error}") from error


async def location_key(blob: CacheBlob, purpose: str) -> bytes:
    """A secret of the location for that purpose, made of the id, which nothing shows. All clients agree on
    it, also readonly ones, and only those who can read the stores know it. One request at first. An answer
    that is no id comes from something in between, which must not choose the key; it may lie in the cache."""
    for store in (blob, blob.uncached):
        location_id = await store.get(BLOB_KEY)
        if location_id is None:
            raise InvalidLocation("the id of the location is missing in the blob store")
        if _ID.fullmatch(location_id):
            return hmac.digest(location_id, purpose.encode(), hashlib.sha256)
    raise StorageUnavailable("what the blob store answers is no id of a location")


async def _nothing() -> None:
    return


async def _refusal(blob: Blob, head: Versioned | None, stored_id: bytes | None) -> str | None:
    if head is not None and stored_id is not None:
        return None if head.data == stored_id else "blob and consensus are stores of different locations"
    if stored_id is not None:
        return "the blob store belongs to a location that the consensus store does not know"
    if head is not None and head.seqno > 0:
        return "the consensus store belongs to a location whose blobs are not in the blob store"
    async for key, _ in blob.list(""):
        if key != BLOB_KEY:
            return "the blob store holds data that is not of a location: choose an empty folder or prefix"
    return None


async def _next_step(
    blob: Blob, consensus: Consensus, head: Versioned | None, stored_id: bytes | None, runtime: Runtime
) -> None:
    with suppress(Indeterminate):  # the next read tells
        if head is None:
            await consensus.compare_and_set(CONSENSUS_KEY, None, str(runtime.uuid()).encode())
        elif stored_id is None:
            await blob.set(BLOB_KEY, head.data)
        else:
            await consensus.compare_and_set(CONSENSUS_KEY, head.seqno, head.data)
