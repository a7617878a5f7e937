"""Opens writers."""

from typing import Any, TypeVar

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.resource import Opening
from aiopersist.data.types.schema import Schema, checked_schema
from aiopersist.shard.shards import Shards
from aiopersist.state.model import Clock
from aiopersist.write.handle import WriteHandle

K = TypeVar("K")
V = TypeVar("V")


def open_writer(
    shards: Shards, name: str, schema: Schema[K, V, Any], clock: str | None, *, tables: bool = False
) -> Opening[WriteHandle[K, V]]:
    """See `Client.writer`. `tables`: allow a table; the caller keeps one value per key."""

    async def open_handle() -> WriteHandle[K, V]:
        checked_schema(schema)
        chosen = _checked_clock(clock, schema)
        await shards.stack.ready_to_convert(schema)
        return await WriteHandle._open(await shards.named(name), schema, shards.scope, chosen, tables=tables)

    return shards.opening(open_handle, f"client.writer({name!r}, ...)")


def _checked_clock(clock: str | None, schema: Schema[Any, Any, Any]) -> Clock | None:
    if clock is None:
        return None
    if clock not in list(Clock):
        text = f"{shown(clock)} is not a clock: use 'logical' or 'wall'"
    elif clock == Clock.WALL and schema.time_length is not None:
        text = "a wall clock needs int times, and this schema has product times"
    else:
        return Clock(clock)
    raise InvalidUsage(UsageKind.INVALID_CLOCK, text, clock=clock)
