"""Writers that build elsewhere: one process registers a writer and appends, others stage batches under it.

`w.to_transmittable()` names the writer; `client.builder_from_transmittable` gives a builder under it, in any
process; its batch goes back as bytes (`Batch.to_transmittable`), to be appended, by that writer or another.
So a job of a thousand tasks is one registration, and what its tasks leave behind is the sweep's as soon as
that ends.
"""

from typing import Any

from aiopersist.data.types.schema import Schema
from aiopersist.errors import BatchExpired, InvalidUpdate, InvalidUsage
from aiopersist.frontier import Antichain, Time
from aiopersist.resource import Opening
from aiopersist.shard.attempt import Slot
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.commit import commit
from aiopersist.shard.lease import check_lease_s
from aiopersist.shard.registration import Registration
from aiopersist.shard.shards import Shards
from aiopersist.state.writing import ExpireWriter
from aiopersist.write.batch import Origin
from aiopersist.write.builder import BatchBuilder
from aiopersist.write.checks import check_frontier
from aiopersist.write.session import Staging
from aiopersist.write.transmit import WRITER, TransmittedWriter


async def register_writer(shards: Shards, name: str, schema: Schema[Any, Any, Any], lease_s: float) -> bytes:
    """See `Client.register_writer`."""
    check_lease_s(lease_s)
    shard = await shards.named(name)
    await shard.open_or_create(schema)
    told = TransmittedWriter.of(
        shard=shard.id,
        writer=(await Registration.fresh(shard, lease_s)).writer,
        schema_id=shard.schema_id(schema),
    )
    return WRITER.encode(told)


async def release_writer(shards: Shards, data: bytes) -> None:
    """See `Client.release_writer`."""
    told = WRITER.decode(data, TransmittedWriter)
    shard = await shards.existing(_shard_of(told))
    await commit(shard.register, ExpireWriter(told.writer), Slot())


def open_builder(
    shards: Shards, data: bytes, lower: Antichain | Time, schema: Schema[Any, Any, Any] | None
) -> Opening[BatchBuilder]:
    """See `Client.builder_from_transmittable`."""

    async def open_handle() -> BatchBuilder:
        told = WRITER.decode(data, TransmittedWriter)
        shard = await shards.of_a_piece(_shard_of(told))
        if told.schema_id not in shard.state.schemas:
            raise InvalidUpdate("a transmitted writer has a schema that the shard does not know")
        chosen = shard.schema(told.schema_id) if schema is None else schema
        origin = Origin(shard, chosen, shard.schema_id(chosen), shards.scope)
        least = check_frontier(lower, chosen)
        registration = Registration.of_another(shard, told.writer)
        registration.hold()
        try:
            await registration.renew()
            if registration.is_full:
                text = f"as many batches as may be were built under writer {told.writer}: lend it anew"
                raise BatchExpired(text, shard_id=shard.id)
            return BatchBuilder(Staging(origin, shards.scope), registration, least)
        except BaseException:
            registration.release()
            raise

    return shards.opening(open_handle, "client.builder(...)")


def _shard_of(told: TransmittedWriter) -> str:
    try:
        ShardId.parse(told.shard)
    except InvalidUsage as error:
        raise InvalidUpdate(f"a transmitted writer cannot be read: {error}") from error
    return told.shard
