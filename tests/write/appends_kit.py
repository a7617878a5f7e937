"""Helpers that the tests of appends share."""

from typing import Any

import aiopersist as ap
from tests.support.shards import parquet, shard_of


async def left_behind(client: ap.Client) -> tuple[Any, ...]:
    """What a refused call must not change."""
    state = await shard_of(client).open()
    return state.seqno, state.upper, await parquet(client)
