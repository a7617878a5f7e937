"""Batches and writers as bytes, so that one process builds a batch and another appends it.

The bytes are JSON in an `Envelope`: shard, writer, id, the hollow batch with inline data, and its rewrite
frontier. Its blobs stay in the store.
"""

from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.frontier import Antichain
from aiopersist.parts.envelope import Envelope
from aiopersist.shard.catalog import ShardId
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import Record

ENVELOPE = Envelope("batch", format=1)
WRITER = Envelope("writer", format=1)


class Transmittable(Record, frozen=True, kw_only=True):
    """A staged batch, without its blobs."""

    library: str
    """The version of the library that wrote it, for people."""
    shard: str
    writer: str
    id: str
    batch: HollowBatch
    rewrite: Antichain | None = None


class TransmittedWriter(Record, frozen=True, kw_only=True):
    """A writer, so that other processes build batches under its registration."""

    shard: str
    writer: str
    schema_id: int


def encode(value: Transmittable) -> bytes:
    """The batch as bytes."""
    return ENVELOPE.encode(value)


def decode(data: Any, shard: ShardId) -> Transmittable:
    """The batch of these bytes. `InvalidUpdate` for bytes that are no batch, damaged, or of a later format;
    `BATCH_NOT_FROM_THIS_SHARD` unless it is of `shard`."""
    value = ENVELOPE.decode(data, Transmittable, shard)
    if value.shard != shard:
        text = f"batch {value.id} is of shard {value.shard}, not of {shard}"
        raise InvalidUsage(UsageKind.BATCH_NOT_FROM_THIS_SHARD, text, shard_id=shard)
    return value
