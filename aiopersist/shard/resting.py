"""Keys that are no longer in use, for a store that removes none: a bucket.

There, freed names and tombstones stay for ever, and a list of a location would read each of them. So
maintenance keeps a record: by key, the seqno of the version that freed it. Versions never change, and in such
a store no seqno comes again. So a reader of many heads asks only for heads with other seqnos than in the
record. If the record is old, or lacks keys, more heads are read.
"""

import json
from collections.abc import Mapping
from contextlib import suppress

from aiopersist.base.errors import Error
from aiopersist.shard.stack import Stack

KEY = "resting"
NEW_MIN = 8  # new keys, and a twentieth of the known ones: for fewer the record is not written
KEYS_MAX = 50_000  # some MB


async def read_resting(stack: Stack) -> dict[str, int]:
    """The seqnos of keys that are not in use. One request; none if the store removes keys."""
    if not stack.consensus.keeps_keys:
        return {}
    head = await stack.consensus.head(KEY)
    return {} if head is None else _decoded(head.data)


async def add_resting(stack: Stack, seqnos: Mapping[str, int]) -> None:
    """Add these keys to the record, if many of them are new. After an error, or a lost race, a later call
    adds them. Up to three requests."""
    with suppress(Error):
        head = await stack.consensus.head(KEY)
        before = {} if head is None else _decoded(head.data)
        after = {**before, **seqnos}
        new = sum(before.get(key) != seqno for key, seqno in seqnos.items())
        if new < max(NEW_MIN, len(before) // 20) or len(after) > KEYS_MAX:
            return
        data = json.dumps({"format": 1, "keys": after}).encode()
        expected = None if head is None else head.seqno
        if await stack.consensus.compare_and_set(KEY, expected, data) and head is not None:
            await stack.consensus.truncate(KEY, head.seqno + 1)


def _decoded(data: bytes) -> dict[str, int]:
    """The record; empty if the bytes are no record, since everything can be read without it."""
    try:
        keys = json.loads(data)["keys"]
        return {str(key): int(seqno) for key, seqno in keys.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
