"""Parts again, under another writer: what an append has uploaded itself when its writer's lease ran out.

No state may name a blob of a writer that is gone, so the append registers anew, and its parts are written
once more under that id: each is read, checked and set again. By then the rows that it was given may be gone.
What the copies were made of is deleted by whoever uploaded it, or left to the sweep.
"""

import asyncio
from functools import partial

from aiopersist.parts.fetch import Fetch
from aiopersist.parts.put import put_bytes
from aiopersist.parts.upload import delete_blobs
from aiopersist.resource import run_bounded
from aiopersist.shard.shard import Shard
from aiopersist.state.keys import BlobKey, writer_of
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart


class Copies:
    """Copies of parts under `writer`, which is registered."""

    def __init__(self, shard: Shard, writer: str) -> None:
        self.writer = writer
        self._shard = shard
        self._stack = shard.stack
        self._fetch = Fetch(shard, shard.schema(shard.state.schema_id), cached=False)
        self._keys: list[str] = []
        self._in_flight: set[asyncio.Task[None]] = set()

    async def of(self, batch: HollowBatch) -> HollowBatch:
        """`batch` with copies in the place of those parts whose writers are gone. `LeaseExpired` if the sweep
        has deleted one of these. Two requests for each; in memory are as many as a builder may upload."""
        jobs = [partial(self._of_part, part) for part in batch.parts]
        at_once = self._stack.settings.batch_builder_max_outstanding_parts
        return batch.replace(parts=tuple(await run_bounded(at_once, jobs)))

    async def _of_part(self, part: HollowPart) -> HollowPart:
        if part.key is None or writer_of(part.key) in self._shard.state.writers:
            return part
        data = await self._fetch.whole(part, reader="")
        key = BlobKey.new(self._shard.id, self.writer, self._stack.runtime.uuid())
        self._keys.append(key)
        upload = self._stack.supervisor.spawn(put_bytes(self._stack.blob, key, data), "copy a part")
        self._in_flight.add(upload)
        upload.add_done_callback(self._in_flight.discard)
        await asyncio.shield(upload)
        return part.replace(key=key)

    def discard(self) -> asyncio.Task[None] | None:
        """See `Uploaded`."""
        keys, self._keys = self._keys, []
        if not keys:
            return None
        work = delete_blobs(self._stack, list(self._in_flight), keys)
        return self._stack.supervisor.spawn(work, "delete copies of a failed append")
