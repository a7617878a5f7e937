"""Opens writers."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiopersist.data.types.schema import Schema, checked_schema
from aiopersist.resource import Opening
from aiopersist.shard.shards import Shards
from aiopersist.write.handle import WriteHandle

K = TypeVar("K")
V = TypeVar("V")


def open_writer(
    shards: Shards, name: str, schema: Schema[K, V, Any], ready: Callable[[], Awaitable[None]]
) -> Opening[WriteHandle[K, V]]:
    """See `Client.writer`; `ready` is awaited before the first request."""

    async def open_handle() -> WriteHandle[K, V]:
        checked_schema(schema)
        await ready()
        return await WriteHandle.open(await shards.named(name), schema, shards.scope)

    return shards.opening(open_handle, f"client.writer({name!r}, ...)")
