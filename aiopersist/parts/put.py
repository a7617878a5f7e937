"""From encoded parts to hollow ones: what every writer of parts does with them."""

import asyncio
from typing import TYPE_CHECKING, Protocol

from aiopersist.data.part.inline import checksum, encode_inline
from aiopersist.data.part.part import EncodedPart, StatsSpec
from aiopersist.errors import Indeterminate, StorageUnavailable
from aiopersist.settings import Settings
from aiopersist.state.record import HollowPart
from aiopersist.storage.blob import Blob

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


class Uploaded(Protocol):
    """Blobs under the id of one writer."""

    writer: str

    def discard(self) -> asyncio.Task[None] | None:
        """Begin to delete them: surely nothing names them. The task, if there is anything to delete.
        Idempotent."""


def stats_spec(settings: Settings) -> StatsSpec:
    """Which statistics parts carry."""
    untrimmable = settings.stats_untrimmable_columns
    return StatsSpec(settings.stats_collection_enabled, settings.stats_budget_bytes, untrimmable)


async def put(blob: Blob, key: str, part: EncodedPart, schema_id: int) -> HollowPart:
    """Write `part` under `key`; what the state keeps of it. `StorageUnavailable` also where its answer was
    lost: nothing names it, so as far as anybody can see it did not happen."""
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
    """The same of an encoded part."""
    try:
        await blob.set(key, data)
    except Indeterminate as error:
        raise StorageUnavailable(f"part {key} was perhaps not written: {error}") from error


def inline_part(columns: "pa.Table | pa.RecordBatch", schema_id: int) -> HollowPart:
    """Sorted, consolidated updates as a part that lives in the state."""
    data = encode_inline(columns)
    rows = columns.num_rows
    return HollowPart.of(inline=data, size=len(data), rows=rows, checksum=checksum(data), schema_id=schema_id)
