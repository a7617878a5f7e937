"""From hollow parts to updates: what every reader does with a part, in this order.

1. Get the bytes: inline ones from the state, others from the blob store, checked against the state.
2. Advance times to the part's rewrite frontier, if its batch was rewritten.
3. Keep what lies in the batch's bounds, if the part was marked truncated at its append.
4. Keep what the read asks for (`Selection`), and advance to its time.

A blob that the state names and that is not there: the reader's lease ran out (`LeaseExpired`), or,
if it is still registered, the store lost it (`Corruption`).
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiopersist.data.assemble import concat
from aiopersist.data.codec import Schema
from aiopersist.data.evolve import adapt
from aiopersist.data.inline import decode_inline
from aiopersist.data.part import PartIndex, decode_part, plan_ranges, read_footer, read_row_groups
from aiopersist.data.times import advance, filter_times
from aiopersist.data.updates import Updates
from aiopersist.errors import Corruption, LeaseExpired
from aiopersist.frontier import Antichain, Time
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.model import HollowBatch, HollowPart

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

ON_THE_LOOP_BYTES = 32 * 1024  # smaller parts are decoded faster than a thread is reached

Named = tuple[HollowBatch, HollowPart]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which updates a read asks for; each bound where it is given."""

    lower: Antichain | None = None
    upper: Antichain | None = None
    as_of: Time | None = None
    not_as_of: Time | None = None
    advance_to: Antichain | None = None
    """Advance times to it *before* the bounds are applied."""

    def covers(self, batch: HollowBatch) -> bool:
        """Whether all updates of `batch` are asked for, by its description alone. Int times only."""
        least, end = _int(batch.lower), _int(batch.upper)
        if least is None or end is None or self.advance_to is not None or not batch.since <= batch.lower:
            return False
        return (
            (self.lower is None or self.lower <= batch.lower)
            and (self.upper is None or batch.upper <= self.upper)
            and (self.as_of is None or (isinstance(self.as_of, int) and end - 1 <= self.as_of))
            and (self.not_as_of is None or (isinstance(self.not_as_of, int) and self.not_as_of < least))
        )

    def apply(self, table: "pa.Table") -> "pa.Table":
        if self.advance_to is not None:
            table = advance(table, self.advance_to)
        return filter_times(
            table, lower=self.lower, upper=self.upper, as_of=self.as_of, not_as_of=self.not_as_of
        )


class Fetch:
    """Reads parts of one shard as updates of one schema."""

    def __init__(self, shard: Shard, schema: Schema[Any, Any, Any]) -> None:
        self.shard = shard
        self.stack: Stack = shard.stack
        self.schema = schema
        self.schema_id = shard.schema_id(schema)

    async def table(self, named: Sequence[Named], selection: Selection, reader: str) -> "pa.Table":
        """What `selection` asks for of these parts, side by side. One request per part that is not
        inline."""
        blobs = [part.inline if part.key is None else await self._blob(part, reader) for _, part in named]
        if sum(part.size for _, part in named) <= ON_THE_LOOP_BYTES:
            return self._decode(named, blobs, selection)
        return await self.stack.compute(self._decode, named, blobs, selection)

    async def updates(
        self, named: Sequence[Named], selection: Selection, reader: str
    ) -> Updates[Any, Any, Any]:
        """`table` as `Updates`."""
        return Updates(await self.table(named, selection, reader), self.schema)

    async def slabs(
        self, named: Named, selection: Selection, reader: str
    ) -> "AsyncGenerator[pa.Table, None]":
        """What `selection` asks for of this part, row group by row group: never more in memory than
        `settings.row_group_bytes`, encoded or decoded. One request for the index of a part that is
        larger, and one for each range of row groups."""
        batch, part = named
        slab = self.stack.settings.row_group_bytes
        if part.key is None or part.size <= slab:
            yield await self.table([named], selection, reader)
            return
        schema = self.shard.schema(part.schema_id)
        footer = await self._range(part, part.size - part.footer_bytes, part.footer_bytes, reader)
        index = await self.stack.compute(read_footer, footer, part)
        for numbers, (offset, length) in _ranges(index, slab):
            data = await self._range(part, offset, length, reader)
            for number in numbers:
                table = await self.stack.compute(read_row_groups, index, [(offset, data)], [number], schema)
                yield await self.stack.compute(self._selected, table, batch, part, selection)

    async def _blob(self, part: HollowPart, reader: str) -> bytes:
        assert part.key is not None
        data = await self.stack.blob.get(part.key)
        return data if data is not None else await self._missing(part, reader)

    async def _range(self, part: HollowPart, offset: int, length: int, reader: str) -> bytes:
        assert part.key is not None
        data = await self.stack.blob.get_range(part.key, offset, length)
        return data if data is not None else await self._missing(part, reader)

    async def _missing(self, part: HollowPart, reader: str) -> bytes:
        state = await self.shard.open()
        if reader not in state.readers:
            raise LeaseExpired(
                f"the lease of reader {reader} ran out, and part {part.key} is gone", shard_id=self.shard.id
            )
        raise Corruption(f"part {part.key} is named by the state and is not there", shard_id=self.shard.id)

    def _decode(
        self, named: Sequence[Named], blobs: Sequence[bytes | None], selection: Selection
    ) -> "pa.Table":
        tables = []
        for (batch, part), data in zip(named, blobs, strict=True):
            assert data is not None
            table = self._decoded(part, data)
            tables.append(self._selected(table, batch, part, selection))
        return concat(tables, self.schema)

    def _decoded(self, part: HollowPart, data: bytes) -> "pa.Table":
        """The updates of a part as they are stored, checked against what the state says of it."""
        schema = self.shard.schema(part.schema_id)
        try:
            if part.key is None:
                return decode_inline(data, schema, part.checksum)
            return decode_part(data, part, schema)
        except Corruption as error:
            error.shard_id = self.shard.id
            raise

    def _selected(
        self, table: "pa.Table", batch: HollowBatch, part: HollowPart, selection: Selection
    ) -> "pa.Table":
        if part.schema_id != self.schema_id:
            table = adapt(table, self.schema)
        if part.rewrite is not None:
            table = advance(table, part.rewrite)
        if part.truncated:
            table = filter_times(table, lower=batch.lower, upper=batch.upper)
        return table if selection.covers(batch) else selection.apply(table)


def _ranges(index: PartIndex, length_max: int) -> list[tuple[list[int], tuple[int, int]]]:
    """The row groups of a part, and the ranges of at most `length_max` bytes to fetch them in."""
    numbers = range(len(index.row_groups))
    plan = plan_ranges(index, numbers, gap_bytes=0, range_bytes_max=length_max)
    return [
        ([n for n in numbers if offset <= index.row_groups[n].offset < offset + length], (offset, length))
        for offset, length in plan
    ]


def _int(frontier: Antichain) -> int | None:
    elements = frontier.elements
    return elements[0] if len(elements) == 1 and isinstance(elements[0], int) else None
