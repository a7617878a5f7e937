"""Writes sorted, consolidated updates as the parts of one run."""

import asyncio
from bisect import bisect_right
from typing import Any

from aiopersist.base.errors import Corruption
from aiopersist.base.frontier import Antichain, Description
from aiopersist.data.lazy import pa
from aiopersist.data.part.part import EncodedPart, PartWriter
from aiopersist.data.types.schema import Schema, plain_types
from aiopersist.data.updates.buffer import Buffer
from aiopersist.data.updates.consolidate import diff_sum, sort_and_consolidate
from aiopersist.data.updates.order import row_key
from aiopersist.data.updates.sizes import goodbytes
from aiopersist.data.updates.times import rows_after
from aiopersist.parts.put import NewBlobs, inline_part, part_writer, put
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import Total
from aiopersist.state.record import HollowPart


class SortedParts:
    """`add` tables in order, then `finish`. Memory has a row group and two encoded parts: one is being
    written, one is being uploaded. The updates of a key are in one part, unless they fill row groups, so a
    look-up of a key reads one part."""

    def __init__(
        self,
        shard: Shard,
        schema: Schema[Any, Any, Any],
        writer: str,
        lower: Antichain,
        since: Antichain,
        *,
        part_bytes: int,
        inline_max_bytes: int,
        stack: Stack,
    ) -> None:
        """Parts are cut at `part_bytes`; less than `inline_max_bytes` goodbytes are one inline part."""
        self.uncompacted: int | None = 0
        """The number of updates at times beyond since; `None` if they are not counted (product times)."""
        self._rows = 0
        self._diffs = 0
        self._last: Any = None
        self._shard = shard
        self._stack = stack
        self._blobs = NewBlobs(shard, writer)
        self._schema = schema
        self._schema_id = shard.schema_id(schema)
        self._description = Description(lower, Antichain(), since)
        self._part_bytes = part_bytes
        self._inline_max_bytes = inline_max_bytes
        self._buffer = Buffer(schema)
        self._part: PartWriter | None = None
        self._part_key: Any = None
        """The last key of the part."""
        self._uploading: asyncio.Task[HollowPart] | None = None
        self._parts: list[HollowPart] = []

    @property
    def wrote(self) -> Total:
        """The total so far."""
        return Total(self._rows, self._diffs % 2**64)

    async def add(self, table: "pa.Table") -> None:
        """Add updates above all before; `Corruption` if they are not, and then no part may be used."""
        if not table.num_rows:
            return
        if self._last is not None and row_key(table, 0) <= self._last:
            raise Corruption("runs of the shard are not in order", shard_id=self._shard.id)
        self._last = row_key(table, -1)
        self._count(table)
        self._buffer.add(table)
        while self._buffer.goodbytes >= self._stack.settings.row_group_bytes:
            await self._write(self._buffer.take_reaching(self._stack.settings.row_group_bytes))

    async def add_all(self, table: "pa.Table") -> Total:
        """Add all updates at once, in any order, as one part. Returns the total before consolidation."""
        is_plain = plain_types(self._schema) is not None  # others take several times as long for each byte
        compute = self._stack.compute_slice if is_plain else self._stack.compute_few
        whole, encoded = await compute(table.nbytes, sort_and_consolidate, table), None
        size = goodbytes(whole)
        if whole.num_rows and size >= self._inline_max_bytes:
            await self._stack.ready_to_encode(self._schema)
            encoded = await self._stack.compute_few(size, self._encode, whole)
        self._count(whole)
        if encoded is not None:
            self._begin_upload(encoded)
        elif whole.num_rows:
            self._parts.append(inline_part(whole, self._schema_id))
        return Total(table.num_rows, diff_sum(table) % 2**64)

    def _count(self, table: "pa.Table") -> None:
        self._rows += table.num_rows
        self._diffs += diff_sum(table)
        if self.uncompacted is not None:
            later = rows_after(table, self._description.since)
            self.uncompacted = None if later is None else self.uncompacted + later

    def _encode(self, whole: "pa.Table") -> EncodedPart:
        return self._new_part().whole(whole, self._stack.settings.row_group_bytes)

    def _new_part(self) -> PartWriter:
        return part_writer(self._shard, self._schema_id, self._description)

    async def finish(self) -> tuple[HollowPart, ...]:
        """The uploaded parts; none if nothing was added."""
        has_blobs = self._part is not None or self._blobs.keys
        if self._buffer.rows and not has_blobs and self._buffer.goodbytes < self._inline_max_bytes:
            return (inline_part(self._buffer.take(), self._schema_id),)
        if self._buffer.rows:
            await self._write(self._buffer.take(), is_last=True)
        if self._part is not None:
            await self._cut()
        await self._collect()
        return tuple(self._parts)

    async def discard(self) -> None:
        """Delete the blobs, which surely no state names."""
        if (deletion := self._blobs.discard()) is not None:
            await deletion

    async def _write(self, table: "pa.Table", *, is_last: bool = False) -> None:
        """Write a row group. A full part ends after the last row of its last key."""
        if self._part is not None and self._part.size >= self._part_bytes:
            rows = _rows_of(table, self._part_key)
            if rows and (is_last or rows < table.num_rows):
                await self._stack.compute(self._part.write, table.slice(0, rows))
                table = table.slice(rows)
            await self._cut()
        if not table.num_rows:
            return
        if self._part is None:
            self._part = self._new_part()
        await self._stack.compute(self._part.write, table)
        self._part_key = row_key(table, -1, ("key",))

    async def _cut(self) -> None:
        """End the part; its upload continues while the next part is written."""
        assert self._part is not None
        encoded = await self._stack.compute(self._part.finish)
        self._part = None
        await self._collect()
        self._begin_upload(encoded)

    def _begin_upload(self, encoded: EncodedPart) -> None:
        write = put(self._stack.blob, self._blobs.key(), encoded, self._schema_id)
        self._uploading = self._blobs.begin(write, "upload a compacted part")

    async def _collect(self) -> None:
        if self._uploading is not None:
            self._parts.append(await asyncio.shield(self._uploading))
            self._uploading = None


def _rows_of(table: "pa.Table", key: Any) -> int:
    """The number of first rows with that key, which is at or before the keys of the table."""
    return bisect_right(range(table.num_rows), key, key=lambda row: row_key(table, row, ("key",)))
