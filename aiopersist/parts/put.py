"""From encoded parts to hollow parts in the blob store: the last step of all writers of parts."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from aiopersist.base.errors import Error, Indeterminate, StorageUnavailable
from aiopersist.base.frontier import Description
from aiopersist.base.settings import Settings
from aiopersist.data.lazy import pa
from aiopersist.data.part.inline import checksum, encode_inline
from aiopersist.data.part.part import EncodedPart, PartWriter, StatsSpec
from aiopersist.shard.shard import Shard
from aiopersist.state.keys import BlobKey
from aiopersist.state.record import HollowPart, InlineBytes
from aiopersist.storage.blob import Blob

log = logging.getLogger("aiopersist").getChild("storage")

T = TypeVar("T")


class Uploaded(Protocol):
    """Blobs under the id of one writer."""

    writer: str

    def discard(self) -> asyncio.Task[None] | None:
        """Begin to delete the blobs, which surely no state names. Returns the task, if any. Idempotent."""


class NewBlobs:
    """Blobs of one writer that no state names yet. Their uploads begin here, and `discard` deletes them."""

    def __init__(self, shard: Shard, writer: str) -> None:
        self.writer = writer
        self.keys: list[str] = []
        self._shard = shard
        self._in_flight: set[asyncio.Task[Any]] = set()

    def key(self) -> str:
        """A new key."""
        self.keys.append(BlobKey.new(self._shard.id, self.writer, self._shard.stack.runtime.uuid()))
        return self.keys[-1]

    def begin(self, write: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `write`, which writes blobs, in the background. A cancelled caller does not stop it."""
        task = self._shard.stack.supervisor.spawn(write, name)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return task

    def discard(self) -> asyncio.Task[None] | None:
        """Delete the blobs in the background, after the uploads in flight: a cancelled upload could still
        arrive. See `Uploaded`."""
        keys, self.keys = self.keys, []
        if not keys:
            return None
        return self._shard.stack.supervisor.spawn(self._delete(keys), "delete blobs that no state names")

    async def _delete(self, keys: list[str]) -> None:
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        try:
            await self._shard.stack.blob.delete(keys)
        except Error as error:
            text = "%d blobs that no state names were not deleted; the sweep deletes them: %s"
            log.warning(text, len(keys), error, extra={"shard": self._shard.known_as, "blobs": len(keys)})


def stats_spec(settings: Settings) -> StatsSpec:
    """The statistics that parts carry."""
    untrimmable = settings.stats_untrimmable_columns
    return StatsSpec(settings.stats_collection_enabled, settings.stats_budget_bytes, untrimmable)


def part_writer(shard: Shard, schema_id: int, description: Description) -> PartWriter:
    """Writes a part of the shard in its schema of that id."""
    stats = stats_spec(shard.stack.settings)
    return PartWriter(shard.schema(schema_id), description, stats, shard.columns(schema_id))


async def put(blob: Blob, key: str, part: EncodedPart, schema_id: int) -> HollowPart:
    """Write `part` under `key`, and return the hollow part. One request. `StorageUnavailable` also if the
    answer is lost: no state names the blob, so for readers it does not exist."""
    await put_bytes(blob, key, part.data)
    return HollowPart(
        key=key,
        size=part.size,
        rows=part.rows,
        goodbytes=part.goodbytes,
        footer_bytes=part.footer_bytes,
        checksum=part.checksum,
        schema_id=schema_id,
        key_lower=part.key_lower,
        stats=part.stats,
    )


async def put_bytes(blob: Blob, key: str, data: bytes | memoryview) -> None:
    """As `put`, for bytes with a known hollow part."""
    try:
        await blob.set(key, data)
    except Indeterminate as error:
        raise StorageUnavailable(f"part {key} was perhaps not written: {error}") from error


def inline_part(columns: "pa.Table | pa.RecordBatch", schema_id: int) -> HollowPart:
    """Sorted, consolidated updates as a part in the state."""
    return inline_part_of(encode_inline(columns), columns.num_rows, schema_id)


def inline_part_of(data: bytes, rows: int, schema_id: int) -> HollowPart:
    """`inline_part` of so many rows, encoded."""
    inline = InlineBytes(data)
    return HollowPart(inline=inline, size=len(data), rows=rows, checksum=checksum(data), schema_id=schema_id)
