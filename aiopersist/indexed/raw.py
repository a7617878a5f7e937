"""Writes the parts of unsealed batches: updates in the order of their writes, not sorted or summed."""

import asyncio
from collections.abc import Sequence
from typing import Any

from aiopersist.base.frontier import Antichain, Description
from aiopersist.data.lazy import pa
from aiopersist.data.part.part import EncodedPart, PartWriter
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import concat
from aiopersist.parts.put import NewBlobs, inline_part, put, stats_spec
from aiopersist.shard.shard import Shard
from aiopersist.state.record import HollowPart

DESCRIPTION = Description(0, Antichain(), 0)


class InlineRoom:
    """How many bytes all writers that share it may still store inline."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining


class RawParts:
    """Writes parts under `writer`, inline while there is room."""

    def __init__(self, shard: Shard, writer: str, room: InlineRoom) -> None:
        self._stack = shard.stack
        self._blobs = NewBlobs(shard, writer)
        self._room = room

    async def write(
        self,
        pieces: "Sequence[tuple[HollowPart | pa.Table, int]]",
        schema: Schema[Any, Any, Any],
        schema_id: int,
    ) -> tuple[HollowPart, ...]:
        """The parts of these pieces, in order; each piece has its goodbytes. Neighbouring tables become one
        part, up to `blob_target_size`."""
        parts: list[HollowPart] = []
        pending: list[pa.Table] = []
        size, target = 0, max(self._stack.settings.blob_target_size, 1)
        for piece, piece_size in pieces:
            if isinstance(piece, HollowPart):
                parts += await self._part(pending, size, schema, schema_id)
                pending, size = [], 0
                parts.append(piece.replace(schema_id=schema_id))  # a new stream gets its id only now
                continue
            pending.append(piece)
            size += piece_size
            if size >= target:
                parts += await self._part(pending, size, schema, schema_id)
                pending, size = [], 0
        return (*parts, *await self._part(pending, size, schema, schema_id))

    def discard(self) -> None:
        """Delete the uploaded blobs: surely no version names them."""
        self._blobs.discard()

    async def _part(
        self, tables: "list[pa.Table]", size: int, schema: Schema[Any, Any, Any], schema_id: int
    ) -> list[HollowPart]:
        if not tables or not (table := concat(tables, schema)).num_rows:
            return []
        if size < min(self._stack.settings.inline_writes_single_max_bytes, self._room.remaining):
            part = inline_part(table, schema_id)
            if part.size <= self._room.remaining:
                self._room.remaining -= part.size
                return [part]
        encoded = await self._stack.compute(self._encoded, table, schema)
        write = put(self._stack.blob, self._blobs.key(), encoded, schema_id)
        upload = self._blobs.begin(write, "upload a part of a commit")
        return [(await asyncio.shield(upload)).replace(key_lower=None)]

    def _encoded(self, table: "pa.Table", schema: Schema[Any, Any, Any]) -> EncodedPart:
        settings = self._stack.settings
        size, stats = settings.row_group_bytes, stats_spec(settings)
        return PartWriter(schema, DESCRIPTION, stats).whole(table, size)
