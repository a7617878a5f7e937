"""Writers that build elsewhere: one process registers a writer and appends, others stage batches under it.

`w.to_transmittable()` names the writer; `client.builder_from_transmittable` gives a builder under it, in any
process; its batch goes back as bytes (`Batch.to_transmittable`), to be appended, by that writer or another.
So a job of a thousand tasks is one registration, and what its tasks leave behind is the sweep's as soon as
that ends.
"""

from typing import Any

from aiopersist.data.codec import Schema
from aiopersist.errors import BatchExpired, InvalidUpdate, InvalidUsage
from aiopersist.frontier import Antichain, Time
from aiopersist.resource import Opening
from aiopersist.shard.attempt import Slot
from aiopersist.shard.catalog import ShardId, resolve_or_create
from aiopersist.shard.client_part import ClientPart
from aiopersist.shard.commit import commit
from aiopersist.shard.lease import check_lease_s
from aiopersist.shard.registration import Registration
from aiopersist.state.writing import ExpireWriter
from aiopersist.write.batch import Origin
from aiopersist.write.builder import BatchBuilder
from aiopersist.write.checks import check_frontier
from aiopersist.write.session import Staging
from aiopersist.write.transmit import WRITER, TransmittedWriter


class BuildsElsewhere(ClientPart):
    """A part of the client."""

    async def register_writer(self, shard: str, schema: Schema[Any, Any, Any], lease_s: float) -> bytes:
        """A writer for others alone, as `WriteHandle.to_transmittable` names it: no handle keeps it, its
        lease lasts `lease_s` from the last heartbeat of those who build under it. The shard is made if it is
        not there. One commit, two for a new shard."""
        with self._calls.call():
            check_lease_s(lease_s)
            found = self._shard(await resolve_or_create(self._stack, shard, ShardId), shard)
            await found.open_or_create(schema)
            told = TransmittedWriter.of(
                shard=found.id,
                writer=(await Registration.fresh(found, lease_s)).writer,
                schema_id=found.schema_id(schema),
            )
            return WRITER.seal(told)

    async def release_writer(self, data: bytes) -> None:
        """End that registration: what is staged under it can no longer be appended, and is the sweep's. One
        commit; none if it has ended."""
        with self._calls.call():
            told = WRITER.open(data, TransmittedWriter)
            found = await self._existing(_shard_of(told))
            await commit(found.register, ExpireWriter(told.writer), Slot())

    def builder_from_transmittable(
        self, data: bytes, lower: Antichain | Time, schema: Schema[Any, Any, Any] | None = None
    ) -> Opening[BatchBuilder]:
        """A builder under the writer that `WriteHandle.to_transmittable` named, whose registration it keeps
        alive. By the writer's schema, as it is stored, or one that is the same. `BatchExpired` if that
        writer is gone, or 65,536 batches of it were appended or deleted: then a new one is to be named.
        `InvalidUpdate` for what names none. One request, a commit if a heartbeat is due."""

        async def open_builder() -> BatchBuilder:
            told = WRITER.open(data, TransmittedWriter)
            shard = await self._for_a_piece(_shard_of(told))
            if told.schema_id not in shard.state.schemas:
                raise InvalidUpdate("a transmitted writer has a schema that the shard does not know")
            chosen = shard.schema(told.schema_id) if schema is None else schema
            origin = Origin(shard, chosen, shard.schema_id(chosen), self._scope)
            least = check_frontier(lower, chosen)
            registration = Registration.of_another(shard, told.writer)
            registration.hold()
            try:
                await registration.renew()
                if registration.is_full:
                    text = f"as many batches as may be were built under writer {told.writer}: lend it anew"
                    raise BatchExpired(text, shard_id=shard.id)
                return BatchBuilder(Staging(origin, self._scope), registration, least)
            except BaseException:
                registration.release()
                raise

        return Opening(lambda: self._opened(open_builder), "client.builder(...)")


def _shard_of(told: TransmittedWriter) -> str:
    try:
        ShardId.parse(told.shard)
    except InvalidUsage as error:
        raise InvalidUpdate(f"a transmitted writer cannot be read: {error}") from error
    return told.shard
