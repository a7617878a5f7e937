"""Copies of the parts that an append uploaded before the lease of its writer ran out.

No state may name a blob of a writer that is no longer registered. So the append registers a new writer, reads
each blob, checks it, and writes it again under the new id. The rows themselves may no longer be in memory.
The uploader deletes the old blobs, or leaves them to the sweep.
"""

import asyncio
from functools import partial

from aiopersist.base.resource import run_bounded
from aiopersist.parts.fetch import Fetch
from aiopersist.parts.put import NewBlobs, put_bytes
from aiopersist.shard.shard import Shard
from aiopersist.state.keys import writer_of
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart


class Copies(NewBlobs):
    """Copies of parts under `writer`, which is registered."""

    def __init__(self, shard: Shard, writer: str) -> None:
        super().__init__(shard, writer)
        self._fetch = Fetch(shard, shard.schema(shard.state.schema_id), cached=False)

    async def of(self, batch: HollowBatch) -> HollowBatch:
        """`batch` with copies of the parts whose writers are no longer registered. `LeaseExpired` if the
        sweep has deleted one of these parts. Two requests per copy; memory has at most
        `settings.batch_builder_max_outstanding_parts` parts."""
        jobs = [partial(self._of_part, part) for part in batch.parts]
        at_once = self._shard.stack.settings.batch_builder_max_outstanding_parts
        return batch.replace(parts=tuple(await run_bounded(at_once, jobs)))

    async def _of_part(self, part: HollowPart) -> HollowPart:
        if part.key is None or writer_of(part.key) in self._shard.state.writers:
            return part
        data = await self._fetch.whole(part, reader="")

        async def write(key: str) -> HollowPart:
            await put_bytes(self._shard.stack.blob, key, data)
            return part.replace(key=key)

        return await asyncio.shield(self.begin(write(self.key()), "copy a part"))
