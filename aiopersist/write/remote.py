"""Batches that other processes build: one registers a writer and appends, others stage batches under it.

`w.to_transmittable()` names the writer. `builder_from_transmittable` opens a builder under it in any
process. Its batch comes back as bytes (`Batch.to_transmittable`), and that writer or another appends it. So a
job of a thousand tasks needs one registration. Once that ends, the sweep deletes the parts that were not
appended.
"""

from typing import Any

from aiopersist.base.errors import BatchExpired, InvalidUpdate, InvalidUsage
from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.resource import Opening
from aiopersist.data.types.schema import Schema
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.commit import commit
from aiopersist.shard.lease import check_lease_s
from aiopersist.shard.registration import Registration
from aiopersist.shard.shards import Shards
from aiopersist.state.writing import ExpireWriter
from aiopersist.write.builder import BatchBuilder
from aiopersist.write.checks import check_frontier, check_no_table
from aiopersist.write.staged import StagingContext
from aiopersist.write.transmit import WRITER, TransmittedWriter


async def register_writer(
    shards: Shards, name: str, schema: Schema[Any, Any, Any], lease_s: float, *, tables: bool = False
) -> bytes:
    """See `Workers.register_writer`. `tables`: allow a table; the caller keeps one value per key."""
    check_lease_s(lease_s)
    shard = await shards.named(name)
    await shard.open_or_create(schema)
    if not tables:
        check_no_table(shard)
    schema_id = shard.schema_id(shard.as_stored(schema))
    writer = (await Registration.fresh(shard, lease_s)).writer
    transmitted = TransmittedWriter(shard=shard.id, writer=writer, schema_id=schema_id)
    return WRITER.encode(transmitted)


async def release_writer(shards: Shards, data: bytes) -> None:
    """See `Workers.release_writer`."""
    transmitted = WRITER.decode(data, TransmittedWriter)
    shard = await shards.existing(_shard_of(transmitted))
    await commit(shard.register, ExpireWriter(transmitted.writer))


def open_builder(
    shards: Shards, data: bytes, lower: Antichain | Time, schema: Schema[Any, Any, Any] | None
) -> Opening[BatchBuilder]:
    """See `Workers.builder_from_transmittable`."""

    async def open_handle() -> BatchBuilder:
        transmitted = WRITER.decode(data, TransmittedWriter)
        shard = await shards.of_a_piece(_shard_of(transmitted))
        if transmitted.schema_id not in shard.state.schemas:
            raise InvalidUpdate("a transmitted writer has a schema that the shard does not have")
        chosen = shard.schema(transmitted.schema_id) if schema is None else shard.as_stored(schema)
        context = StagingContext(shard, chosen, shard.schema_id(chosen), shards.scope)
        least = check_frontier(lower, chosen)
        registration = Registration.of_another(shard, transmitted.writer)
        registration.hold()
        try:
            await registration.renew()
            if registration.is_full:
                text = f"too many batches were built under writer {transmitted.writer}: transmit a new one"
                raise BatchExpired(text, shard_id=shard.id)
            builder = BatchBuilder(context, shards.scope, registration, least)
            builder._trace = WRITER.trace(data)
            return builder
        except BaseException:
            registration.release()
            raise

    return shards.opening(open_handle, "client.builder(...)")


def _shard_of(transmitted: TransmittedWriter) -> str:
    try:
        ShardId.parse(transmitted.shard)
    except InvalidUsage as error:
        raise InvalidUpdate(f"a transmitted writer cannot be read: {error}") from error
    return transmitted.shard
