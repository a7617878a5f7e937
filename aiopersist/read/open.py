"""Opens readers."""

from typing import Any

from aiopersist.base.frontier import Antichain, Time, frontier
from aiopersist.base.resource import Opening
from aiopersist.data.types.schema import Schema, checked_schema
from aiopersist.read.handle import ReadHandle
from aiopersist.shard.catalog import check_name
from aiopersist.shard.lease import check_lease_s
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards


def open_reader(
    shards: Shards,
    name: str,
    schema: Schema[Any, Any, Any] | None,
    *,
    hold: Antichain | Time | None,
    hold_name: str | None,
    lease_s: float | None,
    create: bool,
) -> Opening[ReadHandle[Any, Any]]:
    """See `Client.reader`."""

    async def open_handle() -> ReadHandle[Any, Any]:
        if schema is not None:
            checked_schema(schema)
        if lease_s is not None:
            check_lease_s(lease_s)
        shard = await _created(shards, name, schema) if create and schema else await shards.existing(name)
        chosen = shard.schema(shard.state.schema_id) if schema is None else shard.as_stored(schema)
        return await ReadHandle._open(
            shard,
            chosen,
            shards.scope,
            hold=None if hold is None else frontier(hold),
            hold_name=None if hold_name is None else check_name(hold_name),
            lease_s=lease_s,
        )

    return shards.opening(open_handle, f"client.reader({name!r})")


async def _created(shards: Shards, name: str, schema: Schema[Any, Any, Any]) -> Shard:
    shard = await shards.named(name)
    await shard.open_or_create(schema)
    return shard
