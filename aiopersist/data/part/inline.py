"""Inline parts: one Arrow IPC record batch message in the state. The shard has the schema, so the message
holds only the columns: a small Parquet file would take a hundred times longer to write and read.

The state keeps the checksum of the bytes next to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from aiopersist.base.errors import Corruption
from aiopersist.data.lazy import ipc, pa
from aiopersist.data.types.schema import Schema

STREAM_MIN = 8  # messages: the entry into a stream takes as long as to read four


def checksum(data: bytes | memoryview) -> str:
    """128 bits of the SHA-256 of the bytes, in hex: proves that bytes are the written ones."""
    return sha256(data).hexdigest()[:32]


def encode_inline(table: pa.Table | pa.RecordBatch) -> bytes:
    """The rows as one record batch message. `ValueError` if they have more text than one array holds."""
    if isinstance(table, pa.Table):
        (table,) = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
    data: bytes = table.serialize().to_pybytes()
    return data


def decode_inline(data: bytes, schema: Schema[Any, Any, Any], expected: str | None) -> pa.Table:
    """The rows of an inline part. `Corruption` unless the bytes have the `expected` checksum (`None`:
    unknown) and hold a batch of the schema."""
    return decode_inline_parts([(data, expected)], schema)


def decode_inline_parts(parts: Iterable[tuple[bytes, str | None]], schema: Schema[Any, Any, Any]) -> pa.Table:
    """`decode_inline` of several parts, a chunk for each. They are validated together: for hundreds of small
    parts a call for each costs more than the work."""
    messages = [_sound(*part) for part in parts]
    try:
        table = _read(messages, schema.arrow_schema)
        table.validate(full=True)
    except (pa.ArrowException, EOFError, OSError, ValueError) as e:
        raise Corruption(f"an inline part cannot be read: {e}") from e
    return table


def _read(messages: list[bytes], schema: pa.Schema) -> pa.Table:
    """The batches of the messages. One call reads many of them as a stream, because each call of Arrow gives
    up the interpreter's lock, and a thread may wait for it longer than it works."""
    if len(messages) < STREAM_MIN:
        batches = [ipc.read_record_batch(pa.py_buffer(message), schema) for message in messages]
        return pa.Table.from_batches(batches, schema)
    with ipc.open_stream(b"".join([schema.serialize(), *messages])) as stream:
        table = stream.read_all()
    if any(column.num_chunks != len(messages) for column in table.columns):
        raise ValueError(f"{len(messages)} messages do not hold a batch each")
    return table


def _sound(data: bytes, expected: str | None) -> bytes:
    if expected is not None and checksum(data) != expected:
        raise Corruption("an inline part does not have its checksum")
    return data
