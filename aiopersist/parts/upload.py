"""From updates to a hollow batch: checked, cut at the target size, encoded, uploaded.

1. `take` converts the input piece by piece and checks it: data, then times against the lower. When
   the buffer reaches `settings.blob_target_size` it becomes a part: sorted, summed and encoded on a
   worker thread and uploaded in the background, at most
   `settings.batch_builder_max_outstanding_parts` at once; past that `take` waits for the oldest.
   So memory is bounded by the settings, whatever the size of the input.
2. `check_upper` holds all times against the upper, which may be decided last.
3. `finish` makes the rest a part. If it is the only one and small, it is inline: no blob at all.
4. `discard` deletes what was uploaded, in the background: only for what surely is not referenced.

The writer whose id the blob keys carry is registered before the first upload.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio.to_thread

from aiopersist.data.part.part import EncodedPart, encode_part
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.buffer import Buffer, Row
from aiopersist.data.updates.consolidate import diff_sum, sort_and_consolidate
from aiopersist.data.updates.convert import RowBuffer, is_arrow, pieces_of, rough_bytes, to_table
from aiopersist.data.updates.order import row_key
from aiopersist.data.updates.sizes import check_update_size, goodbytes
from aiopersist.data.updates.times import Greatest, Seen, first_row_not_beyond
from aiopersist.data.updates.tiny import PlainRows, Tiny, tiny
from aiopersist.errors import Error, InvalidUsage, UsageKind
from aiopersist.frontier import Antichain, Description, Time, minimum
from aiopersist.parts.columns import columns_of
from aiopersist.parts.put import inline_part, put, stats_spec
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import Total
from aiopersist.state.keys import BlobKey
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart

log = logging.getLogger("aiopersist")

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

ON_THE_LOOP_ROWS = 256  # fewer rows are converted and sorted faster than a thread is reached
ON_THE_LOOP_BYTES = 64 * 1024
SORTING = 1  # parts of a batch sorted at once: it takes twice the memory of a part, and all cores
TIME_AND_DIFF_BYTES = 16


class Upload:
    """One batch in the making. Not for several tasks at once. `gathered`: what was inline becomes one blob,
    whatever its size. `raw`: updates at any times stay as they come, neither sorted nor summed; `pieces` is
    instead of `finish`."""

    def __init__(
        self,
        shard: Shard,
        schema: Schema[Any, Any, Any],
        schema_id: int,
        writer: str,
        lower: Antichain,
        *,
        gathered: bool = False,
        since: Antichain | None = None,
        raw: bool = False,
    ) -> None:
        self.writer = writer
        self.lower = lower
        self.write_stalls = 0
        """How often a part waited for the oldest one in flight."""
        self.rows_taken = 0
        self._stack: Stack = shard.stack
        self._shard = shard
        self._schema = schema
        self._schema_id = schema_id
        self._since = minimum(schema.time_length) if since is None else since
        self._buffer = Buffer(schema)
        self._plain: PlainRows | None = None  # only builders add single rows
        self._tiny: Tiny | None = None
        self._gathered = gathered
        self._greatest = Greatest()
        self._raw = raw
        self.seen = Seen()
        """The times, if it is raw."""
        self._in_flight: deque[asyncio.Task[_PendingPart | None]] = deque()
        self._parts: list[_PendingPart] = []
        self._finished = 0
        self._keys: list[str] = []
        self._sorting = asyncio.Semaphore(SORTING)

    @property
    def parts_in_flight(self) -> int:
        """Parts that were started and not collected yet."""
        return len(self._in_flight)

    @property
    def parts_finished(self) -> int:
        return self._finished

    async def take_whole(self, updates: Any) -> None:
        """`take` for the only input of a batch: a handful of plain rows is sorted and summed at once."""
        rows = tiny(updates, self._schema)
        settings = self._stack.settings
        if rows is None or rows.goodbytes > min(settings.update_size_max, settings.blob_target_size - 1):
            await self.take(updates)
            return
        if not self.lower.less_equal(rows.least_time):
            raise _not_beyond(rows.least_time, self.lower)
        self._greatest.add_int(rows.greatest_time)
        self._tiny = rows

    async def take(self, updates: Any) -> None:
        """Convert and check `updates`: rows, Arrow data, or an iterator or async iterator of either; and
        start the parts that are full. A sequence of rows is taken or refused as a whole; of anything
        else what came before a refused piece was taken (`rows_taken`)."""
        if isinstance(updates, Sequence) and not isinstance(updates, str | bytes):
            await self._push(updates, 0)
            return
        many = pieces_as_they_come(updates) if isinstance(updates, AsyncIterable) else self._pieces(updates)
        async with aclosing(many) as pieces:
            before = self.rows_taken
            async for piece in pieces:
                await self._push(piece, self.rows_taken - before)

    def take_row(self, row: Row) -> bool:
        """Take one update at once if it is plain; whether it was. `start_full` is to follow."""
        if self._plain is None:
            self._plain = PlainRows(self._schema)
        size = self._plain.size(row)
        if size is None or size - TIME_AND_DIFF_BYTES > self._stack.settings.update_size_max:
            return False
        if not self.lower.less_equal(row[2]):
            raise _not_beyond(row[2], self.lower)
        self._greatest.add_int(row[2])
        self._buffer.add_row(row, size)
        self.rows_taken += 1
        return True

    async def add(self, table: "pa.Table") -> None:
        """Take a table that was converted and checked before."""
        self._greatest.add(table)
        await self._add(table)

    async def _add(self, table: "pa.Table") -> None:
        self._buffer.add(table)
        self.rows_taken += table.num_rows
        await self.start_full()

    async def start_full(self) -> None:
        """Start the parts that are full. Cut off in its waiting it has lost nothing: what was not started
        is in the buffer."""
        target = max(self._stack.settings.blob_target_size, 1)
        while not self._gathered and self._buffer.goodbytes >= target:
            await self._make_room()
            self._start(self._buffer.take_reaching(target))

    def check_upper(self, upper: Antichain) -> None:
        """`InvalidUsage` if a time that was taken lies at or beyond `upper`, also of updates that cancelled
        out."""
        time = self._greatest.beyond(upper)
        if time is not None:
            message = f"time {time} is at or beyond upper {upper}"
            raise InvalidUsage(UsageKind.UPDATE_BEYOND_UPPER, message, time=time, upper=upper)

    async def finish(self, upper: Antichain) -> HollowBatch:
        """The batch, with all parts uploaded."""
        if self._tiny is not None:
            await self._take_tiny(self._tiny)
        rest = self._buffer.take() if self._buffer.rows else None
        if rest is not None and not self._keys and self._fits_inline(goodbytes(rest)):
            part = await self._inline(rest)
            self._parts += [part] if part else []
        elif rest is not None:
            await self._make_room()
            self._start(rest)
        while self._in_flight:
            await self._collect()
        runs = tuple(i for i in range(1, len(self._parts)) if self._parts[i].first < self._parts[i - 1].last)
        parts = tuple(part.hollow for part in self._parts)
        return HollowBatch.of(lower=self.lower, upper=upper, since=self._since, parts=parts, runs=runs)

    async def pieces(self) -> "list[tuple[HollowPart | pa.Table, int]]":
        """What came, in its order, and the goodbytes of each piece: parts, all uploaded, and what is left,
        which is less than a part."""
        size = self._buffer.goodbytes
        rest = [(self._buffer.take(), size)] if self._buffer.rows else []
        while self._in_flight:
            await self._collect()
        return [*((part.hollow, part.hollow.goodbytes or 0) for part in self._parts), *rest]

    @property
    def wrote(self) -> Total:
        """What is in the parts. Not known of inline ones."""
        diffs = sum(part.diffs for part in self._parts)
        return Total(sum(part.hollow.rows for part in self._parts), diffs % 2**64)

    def check_parts(self) -> None:
        """Raise the error of a part in flight that has failed."""
        for task in self._in_flight:
            if task.done() and (error := task.exception()) is not None:
                raise error

    def discard(self) -> asyncio.Task[None] | None:
        """Delete what was uploaded, in the background, once uploads in flight have ended: cut off, they
        could still arrive. Idempotent; the task, if there is anything to delete."""
        keys, self._keys = self._keys, []
        self._buffer, self._tiny = Buffer(self._schema), None
        if not keys:
            return None
        return self._stack.supervisor.spawn(
            delete_blobs(self._stack, list(self._in_flight), keys), "delete blobs of a failed append"
        )

    # --- the steps -------------------------------------------------------------------------------

    async def _take_tiny(self, rows: Tiny) -> None:
        """A handful of rows that are sorted and summed already."""
        if not rows.batch.num_rows:
            return
        if self._fits_inline(rows.goodbytes):
            self._parts.append(self._inline_part(rows.batch))
        else:
            self._buffer.add(to_table(rows.batch, self._schema))

    async def _pieces(self, updates: Any) -> AsyncGenerator[Any, None]:
        """Computed on a thread of their own: an iterator may be large, and may wait for something."""
        pieces, thread = pieces_of(updates), anyio.CapacityLimiter(1)
        while (piece := await anyio.to_thread.run_sync(next, pieces, None, limiter=thread)) is not None:
            yield piece

    async def _push(self, piece: Any, row_base: int) -> None:
        convert = partial(self._columns, row_base)
        if is_small(piece):
            table = convert(piece)
            times = self._times(table)
        else:
            table = await columns_of(self._stack, piece, convert, self._schema)
            times = await self._stack.compute(self._times, table)
        if isinstance(times, Seen):
            self.seen.merge(times)
        else:
            self._greatest.merge(times)
        await self._add(table)

    def _columns(self, row_base: int, piece: Any, start: int = 0) -> "pa.Table":
        """The piece, or a slice of it, checked but for its times."""
        table = to_table(piece, self._schema, row_base=row_base + start)
        check_update_size(table, self._stack.settings.update_size_max, row_base=row_base + start)
        return table

    def _times(self, table: "pa.Table") -> Greatest | Seen:
        """The times, checked."""
        if self._raw:
            seen = Seen()
            seen.add(table)
            return seen
        row = first_row_not_beyond(table, self.lower) if table.num_rows else None
        if row is not None:
            raise _not_beyond(_time(table.column("time")[row].as_py()), self.lower)
        greatest = Greatest()
        greatest.add(table)
        return greatest

    def _fits_inline(self, size: int) -> bool:
        settings = self._stack.settings
        single, total = settings.inline_writes_single_max_bytes, settings.inline_writes_total_max_bytes
        return not self._gathered and size < min(single, total)

    async def _inline(self, table: "pa.Table") -> "_PendingPart | None":
        if table.num_rows > ON_THE_LOOP_ROWS:
            table = await self._stack.compute(sort_and_consolidate, table)
        else:
            table = sort_and_consolidate(table)
        return self._inline_part(table) if table.num_rows else None

    def _inline_part(self, columns: "pa.Table | pa.RecordBatch") -> "_PendingPart":
        return _PendingPart(inline_part(columns, self._schema_id), None, None)

    async def _make_room(self) -> None:
        """Wait for the oldest parts until one more may be in flight."""
        while len(self._in_flight) >= self._stack.settings.batch_builder_max_outstanding_parts:
            self.write_stalls += 1
            await self._collect()

    def _start(self, table: "pa.Table") -> None:
        """Encode and upload `table` in the background."""
        key = BlobKey.new(self._shard.id, self.writer, self._stack.runtime.uuid())
        self._keys.append(key)
        self._in_flight.append(self._stack.supervisor.spawn(self._upload(key, [table]), "upload a part"))

    async def _collect(self) -> None:
        """Wait for the oldest part in flight."""
        part = await asyncio.shield(self._in_flight[0])
        self._in_flight.popleft()
        self._finished += 1
        if part is not None:
            self._parts.append(part)

    async def _upload(self, key: str, only: list["pa.Table"]) -> "_PendingPart | None":
        """`only` holds the table, and nobody else does: it is gone as soon as it is not needed."""
        if not self._raw:
            async with self._sorting:
                await self._stack.compute(_sort, only)
        encoded = await self._stack.compute(self._encode, only)
        if encoded is None:
            return None
        part, first, last, diffs = encoded
        hollow = await put(self._stack.blob, key, part, self._schema_id)
        return _PendingPart(hollow.replace(key_lower=None) if self._raw else hollow, first, last, diffs)

    def _encode(self, only: list["pa.Table"]) -> "tuple[EncodedPart, Any, Any, int] | None":
        if not only[0].num_rows:
            return None
        first, last, diffs = row_key(only[0], 0), row_key(only[0], -1), diff_sum(only[0])
        description = Description(self.lower, Antichain(), self._since)
        settings = self._stack.settings
        stats = stats_spec(settings)
        size = settings.row_group_bytes
        encoded = encode_part(only.pop(), self._schema, description, row_group_bytes=size, stats=stats)
        return encoded, first, last, diffs


def _sort(only: list["pa.Table"]) -> None:
    only.append(sort_and_consolidate(only.pop()))


class _PendingPart(NamedTuple):
    """A part, its least and greatest (key, val, time), which tell whether it continues a run, and the sum
    of its diffs."""

    hollow: HollowPart
    first: Any
    last: Any
    diffs: int = 0


def _not_beyond(time: Time, lower: Antichain) -> InvalidUsage:
    message = f"time {time} is not at or beyond lower {lower}"
    return InvalidUsage(UsageKind.UPDATE_NOT_BEYOND_LOWER, message, time=time, lower=lower)


def _time(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


async def pieces_as_they_come(updates: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    """The input in pieces that `to_table` takes."""
    gathered = RowBuffer()
    async for item in updates:
        if is_arrow(item):
            if gathered.rows:
                yield gathered.take()
            yield item
        elif gathered.add(item):
            yield gathered.take()
    if gathered.rows:
        yield gathered.take()


def is_small(rows: Any) -> bool:
    """Whether a thread would cost more than converting the rows here."""
    return (
        isinstance(rows, Sequence)
        and len(rows) <= ON_THE_LOOP_ROWS
        and sum(map(rough_bytes, rows)) <= ON_THE_LOOP_BYTES
    )


async def delete_blobs(stack: Stack, in_flight: list[asyncio.Task[Any]], keys: list[str]) -> None:
    """Delete `keys` once nothing can write them any more. What fails is left to the sweep."""
    if in_flight:
        await asyncio.wait(in_flight)
    try:
        await stack.blob.delete(keys)
    except Error as error:
        log.warning("%d blobs of a failed append are left to the sweep: %s", len(keys), error)
