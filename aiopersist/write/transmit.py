"""Batches as bytes: how a batch that was built here is appended somewhere else.

One line says what follows, in which format, and the checksum of the rest, which is JSON: shard, writer,
id, the hollow batch with inline data, and how far it was rewritten. The blobs stay where they are.
"""

import re
from typing import Any

from pydantic import ValidationError

from aiopersist.data.inline import checksum
from aiopersist.errors import InvalidUpdate, InvalidUsage, UsageKind
from aiopersist.frontier import Antichain
from aiopersist.shard.catalog import ShardId
from aiopersist.state.model import HollowBatch, Record

FORMAT = 1
MAGIC = b"aiopersist-batch"


class Transmittable(Record):
    """What travels."""

    library: str
    """The version of the library that wrote it: for people."""
    shard: str
    writer: str
    id: str
    batch: HollowBatch
    rewrite: Antichain | None = None


def encode(value: Transmittable) -> bytes:
    """The bytes of it."""
    body = value.model_dump_json().encode()
    return b"%s %d %s\n%s" % (MAGIC, FORMAT, checksum(body).encode(), body)


def decode(data: Any, shard: ShardId) -> Transmittable:
    """`InvalidUpdate` for what is no batch, is damaged, or of a later format;
    `BATCH_NOT_FROM_THIS_SHARD` for one of another shard than `shard`."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidUpdate(f"a transmitted batch is bytes, not {type(data).__name__}", shard_id=shard)
    head, _, body = bytes(data).partition(b"\n")
    fields = head.split(b" ")
    if len(fields) != 3 or fields[0] != MAGIC or not re.fullmatch(rb"[0-9]+", fields[1]):
        raise InvalidUpdate(f"{bytes(data)[:40]!r}... is no transmitted batch", shard_id=shard)
    if fields[1] != b"%d" % FORMAT:
        text = f"a batch of format {fields[1].decode():.20}; this version reads {FORMAT}: upgrade aiopersist"
        raise InvalidUpdate(text, shard_id=shard)
    if checksum(body).encode() != fields[2]:
        raise InvalidUpdate("a transmitted batch is damaged: it does not have its checksum", shard_id=shard)
    try:
        value = Transmittable.model_validate_json(body)
    except ValidationError as error:
        raise InvalidUpdate(f"a transmitted batch cannot be read: {error}", shard_id=shard) from error
    if value.shard != shard:
        text = f"batch {value.id} is of shard {value.shard}, not of {shard}"
        raise InvalidUsage(UsageKind.BATCH_NOT_FROM_THIS_SHARD, text, shard_id=shard)
    return value
