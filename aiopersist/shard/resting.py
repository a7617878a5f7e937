"""Keys that name nothing any more, where the store removes none: in a bucket.

Freed names and tombstones stay there for ever, and who lists a location would read each. So maintenance keeps
a record of them: by key, the seqno of the version that says so. Versions never change, and in such a store no
seqno comes again. So whoever reads many heads asks only for those that are not at their seqno in the record.
The record may be old, or lack keys: then more is read.
"""

import json
from collections.abc import Mapping
from contextlib import suppress

from aiopersist.base.errors import Error
from aiopersist.shard.stack import Stack

KEY = "resting"
NEW_MIN = 8  # keys, and a twentieth of those that are there: for fewer no record is written
KEYS_MAX = 50_000  # some MB


async def read_resting(stack: Stack) -> dict[str, int]:
    """The seqnos of keys that name nothing. One request; none where keys are removed."""
    if not stack.consensus.keeps_keys:
        return {}
    head = await stack.consensus.head(KEY)
    return {} if head is None else _decoded(head.data)


async def add_resting(stack: Stack, found: Mapping[str, int]) -> None:
    """Add these keys to the record, if many of them are new. If it fails, or another process is faster, a
    later call does it. Up to three requests."""
    with suppress(Error):
        head = await stack.consensus.head(KEY)
        before = {} if head is None else _decoded(head.data)
        after = {**before, **found}
        new = sum(before.get(key) != seqno for key, seqno in found.items())
        if new < max(NEW_MIN, len(before) // 20) or len(after) > KEYS_MAX:
            return
        data = json.dumps({"format": 1, "keys": after}).encode()
        expected = None if head is None else head.seqno
        if await stack.consensus.compare_and_set(KEY, expected, data) and head is not None:
            await stack.consensus.truncate(KEY, head.seqno + 1)


def _decoded(data: bytes) -> dict[str, int]:
    """The record; an empty one for what is none, since all can be read without it."""
    try:
        keys = json.loads(data)["keys"]
        return {str(key): int(seqno) for key, seqno in keys.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
