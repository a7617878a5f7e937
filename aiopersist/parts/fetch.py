"""From hollow parts to updates: the steps of every reader.

1. Get the bytes, of an inline part from the state, else from the blob store. Check them against the state.
2. Advance times to the part's rewrite frontier, if its batch was rewritten.
3. Keep the updates within the bounds of the append, if the append truncated the part.
4. Keep the selected updates (`Selection`), and advance them to the time of the read.

If a blob that the state names is missing, there are two causes. If the reader's lease ran out, or a readonly
client has none, the blob was deleted (`LeaseExpired`). If the reader is still registered, or the newest state
of a readonly client still names the blob, the store has lost it (`MissingPart`).
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from math import inf
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from aiopersist.base.errors import Corruption, Error, LeaseExpired, MissingPart
from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.settings import MIB
from aiopersist.data.lazy import pa
from aiopersist.data.part.inline import decode_inline, decode_inline_parts
from aiopersist.data.part.part import (
    PartIndex,
    checked,
    decode_part,
    iter_row_groups,
    plan_ranges,
    read_footer,
    read_index,
    read_row_groups,
    read_rows,
)
from aiopersist.data.part.select import apply_where, prune
from aiopersist.data.part.wanted_keys import WantedKeys
from aiopersist.data.types.evolve import adapt
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import JOINED_BYTES_MAX, concat
from aiopersist.data.updates.times import advance, filter_times
from aiopersist.data.updates.updates import Updates
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.model import HollowBatch
from aiopersist.state.names import live_parts
from aiopersist.state.record import HollowPart, goodbytes_at_most
from aiopersist.storage.blob import Blob

T = TypeVar("T")
Slabs: TypeAlias = "Iterator[pa.Table]"
"""Tables that are decoded on a thread, one by one."""
Named = tuple[HollowBatch, HollowPart]
"""A part, and the batch that names it."""

GAP_BYTES = 256 * 1024  # a smaller gap between two ranges is fetched: another request costs more
BOUNDS_BYTES = 128  # of updates whose conversion takes as long as a look at the bounds of a row group
INDEXES_BYTES = 2 * MIB  # of encoded indexes that stay parsed, for frequent reads of a few rows


@dataclass(frozen=True, slots=True)
class Selection:
    """The updates that a read asks for. `None` is no bound."""

    lower: Antichain | None = None
    upper: Antichain | None = None
    as_of: Time | None = None
    not_as_of: Time | None = None
    advance_to: Antichain | None = None
    """Times are advanced to this frontier *before* the bounds are applied."""
    where: Any = None
    """A condition on key and val (`data/part/select.py`). Statistics exclude row groups from the fetch."""
    keys: WantedKeys | None = None
    """Some keys. Rows of other keys may come, too. Row groups are skipped as for `where`."""

    @property
    def chooses(self) -> bool:
        """Whether it selects rows by their key or value."""
        return self.where is not None or self.keys is not None

    def covers(self, batch: HollowBatch) -> bool:
        """Whether the read asks for all updates of `batch`, by its description alone. Int times only."""
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
        """The updates within the bounds, their times advanced. `where` is not applied."""
        if self.advance_to is not None:
            table = advance(table, self.advance_to)
        return filter_times(
            table, lower=self.lower, upper=self.upper, as_of=self.as_of, not_as_of=self.not_as_of
        )


class Fetch:
    """Reads parts of one shard as updates of one schema."""

    def __init__(
        self,
        shard: Shard,
        schema: Schema[Any, Any, Any],
        *,
        cached: bool = True,
        range_bytes: int | None = None,
        stack: Stack | None = None,
    ) -> None:
        """`cached=False`: background work, which must not displace the blobs of readers in the cache. A large
        part is fetched in ranges of `range_bytes`. `stack` replaces the shard's."""
        self.shard = shard
        self.stack = stack or shard.stack
        self.range_bytes = range_bytes or self.stack.settings.row_group_bytes
        self._blob: Blob = self.stack.blob if cached else self.stack.blob.uncached
        self._compute = self.stack.compute_few if cached else self.stack.compute_slice
        self.schema = schema
        self.schema_id = shard.schema_id(schema)
        self._held: WeakValueDictionary[Hashable, pa.Table] = WeakValueDictionary()
        self._indexes: OrderedDict[str, PartIndex] = OrderedDict()
        """The recently used indexes of large parts."""
        self._indexes_bytes = 0

    async def table(self, named: Sequence[Named], selection: Selection, reader: str) -> "pa.Table":
        """The selected updates of these parts, part after part. One request per blob, one after the other;
        for a condition on a large blob one for its index and one per range."""
        tables = []
        for is_inline, group in groupby(named, key=lambda named: named[1].key is None):
            parts = list(group)
            if is_inline:
                # a filter waits for Arrow's threads, which may be busy
                size = inf if selection.chooses else sum(part.size for _, part in parts)
                tables.append(await self._compute(size, self._inline, parts, selection))
            else:
                tables += [await self._in_blob(*named, selection, reader) for named in parts]
        return tables[0] if len(tables) == 1 else concat(tables, self.schema)

    async def updates(
        self, named: Sequence[Named], selection: Selection, reader: str
    ) -> Updates[Any, Any, Any]:
        """`table` as `Updates`. A table that another caller still has is not fetched again: many listens of a
        shard take the same step."""
        if selection.chooses:  # it has no hash
            return Updates(await self.table(named, selection, reader), self.schema)
        key = (selection, tuple(_content(batch, part) for batch, part in named))
        table = self._held.get(key)
        if table is None:
            table = self._held[key] = await self.table(named, selection, reader)
        return Updates(table, self.schema)

    async def slabs(
        self, named: Named, selection: Selection, reader: str, slab_bytes: int
    ) -> AsyncGenerator[Slabs, None]:
        """The selected updates of a blob, range by range, in slabs of about `slab_bytes` goodbytes, which are
        decoded one by one. A range has at most `range_bytes`, or is one row group. One request for a part of
        at most `range_bytes`; else one for its index, and one per range."""
        batch, part = named
        schema = self.shard.schema(part.schema_id)
        async with aclosing(self.row_groups(part, reader, selection)) as ranges:
            async for index, offset, data, numbers in ranges:
                rows_max = _slab_rows(part, index, slab_bytes)
                tables = iter_row_groups(index, (offset, data), numbers, schema, rows_max)
                yield (self._selected(table, [batch], part, selection) for table in tables)

    async def index(self, part: HollowPart, reader: str) -> PartIndex:
        """The index in the footer of a blob. One request."""
        at = part.size - part.footer_bytes
        return await self._read(part, at, part.footer_bytes, reader, lambda data: read_footer(data, part))

    async def _cached_index(self, part: HollowPart, reader: str) -> PartIndex:
        """As `index`; no request if it was read recently."""
        assert part.key is not None
        cached = self._indexes.get(part.key)
        if cached is not None:
            self._indexes.move_to_end(part.key)
            return cached
        index = await self.index(part, reader)
        if part.key not in self._indexes:
            self._indexes[part.key] = index
            self._indexes_bytes += len(index.footer)
        while self._indexes_bytes > INDEXES_BYTES:
            self._indexes_bytes -= len(self._indexes.popitem(last=False)[1].footer)
        return index

    async def raw_slabs(
        self, part: HollowPart, reader: str = "", rows: range | None = None
    ) -> "AsyncGenerator[pa.Table, None]":
        """The part as it was written, row group by row group; or only its `rows`. Row groups without any of
        these are not fetched from a large part."""
        schema = self.shard.schema(part.schema_id)
        if part.inline is not None:
            yield _rows_of(decode_inline(part.inline, schema, part.checksum), 0, rows)
            return
        async with aclosing(self.row_groups(part, reader, Selection(), rows)) as ranges:
            async for index, offset, data, numbers in ranges:
                for number in _holding(index, numbers, rows):
                    table = await self.stack.compute(
                        read_row_groups, index, [(offset, data)], [number], schema
                    )
                    yield _rows_of(table, sum(g.rows for g in index.row_groups[:number]), rows)

    async def row_groups(
        self, part: HollowPart, reader: str, selection: Selection, rows: range | None = None
    ) -> AsyncGenerator[tuple[PartIndex, int, bytes, list[int]], None]:
        """The row groups of a part that may match, range by range: the index, the offset of the range, its
        bytes, checked, and the numbers of its row groups. A part of at most `range_bytes` is one range."""
        if part.size <= self.range_bytes:
            index, data = await self._read(part, None, part.size, reader, lambda d: (_index(d, part), d))
            yield index, 0, data, await self.matching(index, selection)
            return
        index = await self.index(part, reader)
        chosen = _holding(index, await self.matching(index, selection), rows)
        for numbers, (offset, length) in _ranges(index, chosen, 0, self.range_bytes):
            check = partial(checked, index, offset, row_groups=numbers)
            yield index, offset, await self._read(part, offset, length, reader, check), numbers

    async def _in_blob(
        self, batch: HollowBatch, part: HollowPart, selection: Selection, reader: str
    ) -> "pa.Table":
        schema = self.shard.schema(part.schema_id)
        if selection.chooses and part.size > self.range_bytes:
            return await self._matches_in_blob(batch, part, selection, reader)

        def decode(data: bytes) -> "pa.Table":
            return self._selected(decode_part(data, part, schema), [batch], part, selection)

        return await self._read(part, None, part.size, reader, decode)

    async def _matches_in_blob(
        self, batch: HollowBatch, part: HollowPart, selection: Selection, reader: str
    ) -> "pa.Table":
        """As `_in_blob` for a large part: one request for its index, and one per range that may match. Two
        neighbouring row groups are one range, since both may have rows of a key."""
        schema = self.shard.schema(part.schema_id)
        index = await self._cached_index(part, reader)
        chosen = await self.matching(index, selection)
        by_keys = selection.keys if part.schema_id == self.schema_id else None
        tables = []
        for numbers, (offset, length) in _ranges(index, chosen, GAP_BYTES, 2 * self.range_bytes):

            def decode(data: bytes, offset: int = offset, numbers: list[int] = numbers) -> "pa.Table":
                if by_keys is None:
                    table = read_row_groups(index, [(offset, data)], numbers, schema)
                else:
                    table = read_rows(index, (offset, data), numbers, schema, by_keys)
                return self._selected(table, [batch], part, selection)

            tables.append(await self._read(part, offset, length, reader, decode))
        return concat(tables, self.schema)

    async def whole(self, part: HollowPart, reader: str) -> bytes:
        """The bytes of a blob, checked. One request."""

        def checked_whole(data: bytes) -> bytes:
            _index(data, part)
            return data

        return await self._read(part, None, part.size, reader, checked_whole)

    async def matching(self, index: PartIndex, selection: Selection) -> list[int]:
        """The row groups that may have matching rows."""
        groups, keys = index.row_groups, selection.keys
        numbers = list(range(len(groups)))
        if keys is not None:
            size = len(groups) * BOUNDS_BYTES
            matches = await self.stack.compute_few(size, lambda: [keys.may_be_in(g.stats) for g in groups])
            numbers = [number for number in numbers if matches[number]]
        if selection.where is not None:
            matches = await self.stack.compute(prune, selection.where, [g.stats for g in groups], self.schema)
            numbers = [number for number in numbers if matches[number]]
        return numbers

    async def _read(
        self, part: HollowPart, offset: int | None, length: int, reader: str, decode: Callable[[bytes], T]
    ) -> T:
        """Get the bytes of a part, or a range of them, and decode them. After a `Corruption` they are read
        again, at most twice, without the cache: they may have been damaged on the way."""
        assert part.key is not None
        blob, uncached = self._blob, self.stack.blob.uncached
        for last, store in ((False, blob), (False, uncached), (True, uncached)):
            get = store.get(part.key) if offset is None else store.get_range(part.key, offset, length)
            data = await get
            if data is None:
                raise await self._missing(part, reader)
            try:
                size = goodbytes_at_most(part) if offset is None else inf
                return await self._compute(size, decode, data)
            except Corruption as error:
                if last:
                    error.shard_id = self.shard.id
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _missing(self, part: HollowPart, reader: str) -> Error:
        """The error for a missing blob that the state names."""
        state = await self.shard.open()
        if self.stack.readonly:
            if part.key not in live_parts(state):
                text = f"part {part.key} was replaced, and a readonly client has no lease that keeps it"
                return LeaseExpired(text, shard_id=self.shard.id)
        elif reader not in state.readers:
            text = f"the lease of reader {reader} ran out, and part {part.key} is gone"
            return LeaseExpired(text, shard_id=self.shard.id)
        text = f"the state names part {part.key}, and the blob store does not have it"
        return MissingPart(text, shard_id=self.shard.id)

    def _inline(self, named: Sequence[Named], selection: Selection) -> "pa.Table":
        tables = []
        for _, group in groupby(named, key=lambda named: _read_alike(named[1])):
            alike = list(group)
            first, parts = alike[0][1], [(part.inline or b"", part.checksum) for _, part in alike]
            try:
                table = decode_inline_parts(parts, self.shard.schema(first.schema_id))
            except Corruption as error:
                error.shard_id = self.shard.id
                raise
            if sum(part.size for _, part in alike) <= JOINED_BYTES_MAX:
                table = table.combine_chunks()
            tables.append(self._selected(table, [batch for batch, _ in alike], first, selection))
        return concat(tables, self.schema)

    def _selected(
        self, table: "pa.Table", batches: Sequence[HollowBatch], part: HollowPart, selection: Selection
    ) -> "pa.Table":
        """The selected updates of a table of `part`, or of parts of `batches` that are read alike."""
        if part.schema_id != self.schema_id:
            table = adapt(table, self.schema)
        if part.rewrite is not None:
            table = advance(table, part.rewrite)
        if part.truncated is not None:
            lower, upper = part.truncated
            table = filter_times(table, lower=lower, upper=upper)
        table = table if all(map(selection.covers, batches)) else selection.apply(table)
        if selection.keys is not None and table.num_rows:
            table = selection.keys.of(table)
        return table if selection.where is None else apply_where(table, selection.where, self.schema)


def _read_alike(part: HollowPart) -> Hashable:
    """A value that is equal for parts that are read in the same way."""
    return part.schema_id, part.rewrite, part.truncated


def _content(batch: HollowBatch, part: HollowPart) -> Hashable:
    """A value that decides the updates of the part."""
    read = (part.key, part.checksum, _read_alike(part))
    return (*read, batch.lower, batch.upper, batch.since)


def _slab_rows(part: HollowPart, index: PartIndex, slab_bytes: int) -> int:
    if part.goodbytes is None:
        return max(group.rows for group in index.row_groups)
    return min(max(index.rows * slab_bytes // part.goodbytes, 1), index.rows)


def _index(data: bytes, part: HollowPart) -> PartIndex:
    """The index of a whole part, whose bytes are all checked."""
    index = read_index(data, part)
    checked(index, 0, data, range(len(index.row_groups)))
    return index


def _ranges(
    index: PartIndex, numbers: Sequence[int], gap_bytes: int, length_max: int
) -> list[tuple[list[int], tuple[int, int]]]:
    """These row groups of a part, and ranges of at most `length_max` bytes with them."""
    plan = plan_ranges(index, numbers, gap_bytes=gap_bytes, range_bytes_max=length_max)
    return [
        ([n for n in numbers if offset <= index.row_groups[n].offset < offset + length], (offset, length))
        for offset, length in plan
    ]


def _holding(index: PartIndex, numbers: Sequence[int], rows: range | None) -> list[int]:
    """The row groups of `numbers` that have some of `rows`."""
    if rows is None:
        return list(numbers)
    starts = list(accumulate((group.rows for group in index.row_groups), initial=0))
    return [n for n in numbers if starts[n] < rows.stop and rows.start < starts[n + 1]]


def _rows_of(table: "pa.Table", first: int, rows: range | None) -> "pa.Table":
    """The rows of `table` with numbers in `rows`; its first row has the number `first`."""
    if rows is None:
        return table
    start = max(rows.start - first, 0)
    return table.slice(start, max(rows.stop - first - start, 0))


def _int(frontier: Antichain) -> int | None:
    elements = frontier.elements
    return elements[0] if len(elements) == 1 and isinstance(elements[0], int) else None
