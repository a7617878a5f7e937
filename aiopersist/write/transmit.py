"""Batches as bytes: how a batch that was built here is appended somewhere else.

What travels is JSON in an `Envelope`: shard, writer, id, the hollow batch with inline data, and how far it
was rewritten. The blobs stay where they are.
"""

from typing import Any

from aiopersist.errors import InvalidUsage, UsageKind
from aiopersist.frontier import Antichain
from aiopersist.parts.envelope import Envelope
from aiopersist.shard.catalog import ShardId
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import Record

ENVELOPE = Envelope("batch", format=1)
WRITER = Envelope("writer", format=1)


class Transmittable(Record):
    """What travels."""

    library: str
    """The version of the library that wrote it: for people."""
    shard: str
    writer: str
    id: str
    batch: HollowBatch
    rewrite: Antichain | None = None


class TransmittedWriter(Record):
    """A writer, for others to build batches under its registration."""

    shard: str
    writer: str
    schema_id: int


def encode(value: Transmittable) -> bytes:
    """The bytes of it."""
    return ENVELOPE.encode(value)


def decode(data: Any, shard: ShardId) -> Transmittable:
    """`InvalidUpdate` for what is no batch, is damaged, or of a later format;
    `BATCH_NOT_FROM_THIS_SHARD` for one of another shard than `shard`."""
    value = ENVELOPE.decode(data, Transmittable, shard)
    if value.shard != shard:
        text = f"batch {value.id} is of shard {value.shard}, not of {shard}"
        raise InvalidUsage(UsageKind.BATCH_NOT_FROM_THIS_SHARD, text, shard_id=shard)
    return value
