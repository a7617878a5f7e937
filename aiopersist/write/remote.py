"""Writers that build elsewhere: one process registers a writer and appends, others stage batches under it.

`w.to_transmittable()` names the writer; `client.builder_from_transmittable` gives a builder under it, in any
process; its batch goes back as bytes (`Batch.to_transmittable`), to be appended, by that writer or another.
So a job of a thousand tasks is one registration, and what its tasks leave behind is the sweep's as soon as
that ends.
"""

from typing import Any

from aiopersist.data.codec import Schema
from aiopersist.errors import InvalidUpdate, InvalidUsage
from aiopersist.frontier import Antichain, Time
from aiopersist.resource import Opening
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.client_part import ClientPart
from aiopersist.shard.registration import Registration
from aiopersist.write.batch import Origin
from aiopersist.write.builder import BatchBuilder
from aiopersist.write.checks import check_frontier
from aiopersist.write.session import Staging
from aiopersist.write.transmit import WRITER, TransmittedWriter


class BuildsElsewhere(ClientPart):
    """A part of the client."""

    def builder_from_transmittable(
        self, data: bytes, lower: Antichain | Time, schema: Schema[Any, Any, Any] | None = None
    ) -> Opening[BatchBuilder]:
        """A builder under the writer that `WriteHandle.to_transmittable` named, whose registration it keeps
        alive. By the writer's schema, as it is stored, or one that is the same. `BatchExpired` if that
        writer is gone, `InvalidUpdate` for what names none. One request, a commit if a heartbeat is due."""

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
                return BatchBuilder(Staging(origin, self._scope), registration, least)
            except BaseException:
                registration.release()
                raise

        return Opening(lambda: self._opened(open_builder))


def _shard_of(told: TransmittedWriter) -> str:
    try:
        ShardId.parse(told.shard)
    except InvalidUsage as error:
        raise InvalidUpdate(f"a transmitted writer cannot be read: {error}") from error
    return told.shard
